"""Makes a race's plan: checks each arm by its own code, draws seeds and an order, enters a hash into the ledger."""

import itertools
import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic, private, utc
from bench.base.metric import VAL_LOSS
from bench.base.paths import REPO, user_path
from bench.base.reading import json_file
from bench.base.reading.damage import reading_record
from bench.compare import eligibility, target
from bench.launch import ready
from bench.launch.console import say
from bench.machine import git, leases, surroundings
from bench.machine.preflight import Check
from bench.plans.race import arm_process, plan, state, worktrees
from bench.record import ledger, race_folder
from bench.record.rows import COLUMNS, metric_of

OF_SOME = ("own", "python", "num_gpus", "num_nodes")  # facts that only some arms have
# facts of an arm that the plan keeps
KEPT = ("name", "config_id", "effective", "source_sha256", "commit", "dirty", "deviations", *OF_SOME)
Facts = dict[str, dict[str, Any]]  # {arm: arm_process.facts()}
MAX_SEED = 2**30
MEASURED = {"target": 0.0, "score": 0.0}  # a target that all reach; its value does not matter here


def begin(
    request: dict[str, Any],
    results: Path,
    anyway: bool = False,
    facts: Facts | None = None,
    may_be_identical: bool | None = None,
) -> Path:
    """Writes a plan() and enters its hash into the ledger. Returns the race's folder; no run has started.

    anyway: also on a busy machine and without hope of a verdict; the others as in planned(). Raises ValueError.
    """
    draft, facts = planned(request, results, anyway, facts, may_be_identical)
    agree_on_machine(facts, anyway, draft["on"])
    draft["python_sha256"] = surroundings.python_sha256(arm_process.pythons_of(draft["arms"]))
    typed = {name: {key: arm[key] for key in state.PRIVATE if key in arm} for name, arm in draft["arms"].items()}
    whole = draft["arms"]
    draft["arms"] = {name: arm | private.redact_all(typed[name], REPO) for name, arm in whole.items()}
    draft["typed"] = private.secret_hash(json.dumps(typed)) if draft["arms"] != whole else None
    folder = race_folder.of(results, draft["race_id"])
    try:
        folder.mkdir(parents=True)
        if draft["typed"]:
            atomic.write_for_owner(folder / race_folder.LOCAL, typed)
        atomic.write_json(folder / "plan.json", draft)
        ledger.append(results, "plan", **_facts_of(draft))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        remedy = "free space, make it writable, or name another folder with SPEEDRUN_RESULTS=/path"
        raise ValueError(f"{results}: no race can be written there ({error.strerror}): {remedy}") from None
    return folder


def planned(
    request: dict[str, Any],
    results: Path,
    anyway: bool = False,
    facts: Facts | None = None,
    may_be_identical: bool | None = None,
) -> tuple[dict[str, Any], Facts]:
    """Checks every arm by its own code. Returns (the plan, {arm: arm_process.facts()}), and writes nothing.

    request is plan.parse_request()'s; "arms" is removed from it. anyway: also without hope of a verdict. facts: of
    the same arms, by an earlier call; None: ask their code. may_be_identical: whether arms may have the same config and
    code; None: if anyway. Raises Identical, or ValueError for what cannot be raced or planned.
    """
    commits = check(request)
    wanted = {name: arm | {"overrides": _pinned(arm["overrides"])} for name, arm in request.pop("arms").items()}
    settings = {"n": plan.N, "seed_given": "first_seed" in request, **request}
    if facts is None:
        with worktrees.checked_out(REPO, commits, f"facts-{secrets.token_hex(4)}-") as paths:
            code_and_overrides = {name: (paths.get(name, REPO), arm["overrides"]) for name, arm in wanted.items()}
            facts = arm_process.facts_of_arms(code_and_overrides, results)
    first = next(iter(facts.values()))
    check_tracks(facts)
    settings["metric"] = metric_of(own["row"] for own in facts.values() if "row" in own)
    refuse_laxer(first["track"], settings)
    facts = _without_repeats(facts, wanted)
    if not (anyway if may_be_identical is None else may_be_identical):
        refuse_identical({name: wanted[name] | own for name, own in facts.items()})
    arms = {name: wanted[name] | {key: own[key] for key in KEPT if key in own} for name, own in facts.items()}
    if not anyway:
        refuse_incomparable(facts, MEASURED if "ladder" in settings else {})
    if "ladder" not in settings:
        plan.refuse_unequal_ends(facts)
    if "on" in settings:
        settings["why_on"] = None
        if "ladder" not in settings:
            plan.refuse_unanswerable(settings["on"], facts)
    settings = _as_the_arms_suggest(facts, settings) | settings
    return plan.make(arms, made_at=utc.now(), **settings), facts


def _pinned(overrides: list[str]) -> list[str]:
    """Returns an arm's overrides with the commit that script.rev names now, which a later commit does not change."""
    root, key = plan.root_of_script(overrides), "script.rev="
    revs = [override.removeprefix(key).strip("'\"") for override in overrides if override.startswith(key)]
    commit = git.commit_of(user_path(root), revs[-1]) if root and revs else None
    if commit is None:
        return overrides  # an arm's own code refuses a revision that is unknown
    return [*(override for override in overrides if not override.startswith(key)), f"{key}{commit}"]


def _as_the_arms_suggest(facts: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns defaults of the request's settings: from the arms, their track and the given settings, or random."""
    first = next(iter(facts.values()))
    rules = target.rules_of(first["track"])
    on, why_on = plan.question_of(facts, rules.judged)
    on_gpu = any(arm.get("device") == "cuda" for arm in facts.values())
    fewest = plan.fewest_compilations(settings["n"], settings.get("sequential") is not None)
    return {key: getattr(rules, key) for key in target.LIMITS} | {
        "margin": rules.loss_margin_nats if settings["metric"] == VAL_LOSS else None,
        "compilations": fewest if on_gpu else 1,
        "on": on,
        "why_on": why_on,
        "first_seed": secrets.randbelow(MAX_SEED),  # which nobody can have tried
        "order_seed": secrets.randbits(32),
        "session_id": first["session_id"],
        "track": first["track"],
    }


def enter(folder: Path, results: Path) -> None:
    """Enters a plan into the ledger if a kill came between writing the two. None of its runs has been started then.

    Raises ValueError if the plan cannot be read, OSError if it cannot be entered.
    """
    with reading_record(folder / "plan.json"):
        draft = json_file.read(folder / "plan.json", state.Plan)
        if (folder / "race.json").exists() or ledger.read(results).race_lines(draft["race_id"]):
            return
        facts = _facts_of(draft)
    ledger.append(results, "plan", **facts)


def _facts_of(draft: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a plan's line in the ledger."""
    ids = {name: [arm["config_id"], arm["source_sha256"]] for name, arm in draft["arms"].items()}
    return {"race_id": draft["race_id"], "plan_sha256": plan.sha256(draft), "baseline": draft["baseline"], "arms": ids}


def check(request: Mapping[str, Any]) -> dict[str, str]:
    """Returns the commits of the arms with a revision. Raises ValueError for what can be refused before any work."""
    settings = {"n": plan.N, **request}
    arms = settings.pop("arms")
    plan.make(dict.fromkeys(arms, {}), made_at=utc.now(), **settings)
    return {name: worktrees.commit_of(REPO, arm["rev"]) for name, arm in arms.items() if arm["rev"] is not None}


def check_tracks(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the track of the arms. Raises ValueError if they have several."""
    track, *others = dict.fromkeys(own["track"] for own in facts.values())
    if others:
        raise ValueError(f"track={' and '.join([track, *others])}: all arms run on one track")
    return str(track)


def refuse_laxer(track: str, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for an alpha or a margin beyond the track's, because a claim is judged by the track's numbers.

    settings: of a plan; its "metric" is the goal's, val_loss by default.
    """
    setting_of = {name: setting for setting, (name, *_) in plan.SETTINGS.items()}
    for key, value, limit in target.laxer_than_track(track, settings):
        setting = setting_of[key]
        remedy = f"give {setting}={limit:g} or less" if limit else f"leave {setting} out"
        remedy += ", or race on a track that fixes nothing (track=free)"
        raise ValueError(f"{setting}={value:g}: track {track} allows at most {limit:g}: {remedy}")


class Identical(ValueError):
    """Raised if two arms differ only by noise.  same: the sentence without what to do about it."""

    def __init__(self, same: str, remedy: str) -> None:
        super().__init__(f"{same}: {remedy}")
        self.same = same


def _trained(arm: Mapping[str, Any]) -> list[Any]:
    """Returns the config and code of an arm; of a revision of a script, without the revision."""
    return [*arm.get("without_rev", [arm.get("config_id")]), arm.get("source_sha256")]


def _without_repeats(facts: Facts, wanted: Mapping[str, Any]) -> Facts:
    """Omits revisions with the config and code of an earlier arm, as of the documentation, if two arms remain."""
    kept: Facts = {}
    same_as: dict[str, str] = {}
    for name, arm in facts.items():
        is_revision = wanted[name]["rev"] is not None or "without_rev" in arm
        same = next((other for other in kept if is_revision and _trained(kept[other]) == _trained(arm)), None)
        if same is None:
            kept[name] = arm
        else:
            same_as[name] = same
    if len(kept) < 2:
        return facts
    for name, same in same_as.items():
        say("race", f"{name} is omitted: it trains the same program as {same}")
    return kept


def refuse_identical(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises Identical if two arms have the same config and, as far as it is known, the same code.

    facts: {arm: arm_process.facts()}, with its "overrides" to name those without effect.
    """
    for (name, arm), (other_name, other) in itertools.combinations(facts.items(), 2):
        given = sorted({*arm.get("overrides", ())} ^ {*other.get("overrides", ())})
        of_timeouts = given and all(text.partition("=")[0].endswith("_timeout_s") for text in given)
        if _trained(arm) == _trained(other) or (of_timeouts and _trained(arm)[-1] == _trained(other)[-1]):
            effect = f"; {', '.join(given)}: the default anyway, or changes no training" if given else ""
            same = f"have the same config ({_trained(arm)[0]}{effect}) and code, so they differ only by noise"
            if "without_rev" in arm:
                same = "train the same program: their files differ at most in documentation and comments"
            remedy = "./run.sh calibrate measures it, and --anyway races them"
            if arm.get("commit") != other.get("commit"):
                remedy += "; without script=FILE, revisions are the harness's own and not those of your repository"
            raise Identical(f"{name} and {other_name} {same}", remedy)


def refuse_incomparable(facts: Mapping[str, Mapping[str, Any]], measured: Mapping[str, float]) -> None:
    """Applies the verdict's rules to the rows that the arms' runs would have at best. Raises ValueError for a refusal.

    facts: {arm: arm_process.facts()}, the baseline first. measured: row values of arms without a target, compared on
    the way to a target that the race itself measures (a ladder's).
    """
    rows: dict[str, Any] = {}
    for name, arm in facts.items():
        if "row" in arm:  # an older revision's code reports none
            rows[name] = dict.fromkeys(COLUMNS) | arm["row"] | {"run_id": name}
            rows[name] |= measured if rows[name]["target"] is None else {}
    baseline = next(iter(facts))
    for name in [name for name in rows if name != baseline and baseline in rows]:
        judged = eligibility.judge([rows[baseline]], [rows[name]], (baseline, name))
        refusals = judged.loss_refusals if rows[name].get("budget") else judged.refusals  # a budget asks for the loss
        if refusals:
            why = f"the times of {baseline} and {name} could not be compared: {'; '.join(refusals)}: give all arms"
            raise ValueError(f"{why} the same, written beside them; --anyway races them without a verdict on time")


def agree_on_machine(facts: Mapping[str, Mapping[str, Any]], anyway: bool, on: str | None) -> None:
    """Checks the machine as each arm's own code sees it. Raises ValueError if the race must not go on.

    on: its question. A loss after given steps is the same beside other programs, whose CPU load is then only shown.
    """
    checks = [Check(**check) for arm in facts.values() for check in arm.get("preflight", ())]
    is_timed = any("time_s" in ((arm.get("row") or {}).get("budget") or "") for arm in facts.values())
    with leases.held(gpus_and_nodes(facts)[0]):
        odd = ready.show_odd(checks)
        if on in ("loss", "steps_to_target") and not is_timed:
            odd = [check for check in odd if check.status == "fail" or check.name != "cpu load"]
        ready.agree(odd, anyway, "the verdict", are_shown=True)


def gpus_and_nodes(arms: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """Returns the most GPUs of a node, 0 on a CPU, and the most nodes of any of these arms, by their facts or plan."""
    return max(arm.get("num_gpus", 0) for arm in arms.values()), max(arm.get("num_nodes", 1) for arm in arms.values())
