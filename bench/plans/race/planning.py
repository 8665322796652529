"""A request -> the race's plan: every arm checked by its own code, fresh seeds, random order, a hash in the ledger."""

import itertools
import secrets
import shutil
from pathlib import Path

from bench.base import atomic, utc
from bench.base.paths import REPO
from bench.base.reading import json_file
from bench.base.reading.damage import of_record
from bench.compare import eligibility, target
from bench.launch import ready
from bench.machine.preflight import Check
from bench.plans.race import arm_process, plan, state, worktrees
from bench.record import ledger, race_folder
from bench.record.rows import COLUMNS

# of an arm's facts, in the plan: own if it has any
KEPT = ("name", "config_id", "source_sha256", "commit", "dirty", "deviations", "own")
MEASURED = {"target_val_loss": 0.0, "val_loss": 0.0}  # which all reach; how much it is does not matter here


def begin(request: dict, results: Path, anyway: bool = False) -> Path:
    """Check every arm, write the plan, put its hash into the ledger.  Returns the race's folder; no run has started.

    request: of plan.parse_request(); "arms" is taken out of it.  anyway: even without hope of a verdict.
    ValueError: what cannot be raced, planned or written.
    """
    commits = check(request)
    asked = request.pop("arms")
    settings = {"n": plan.N, **request}
    prefix = f"facts-{secrets.token_hex(4)}-"
    with worktrees.of(REPO, {f"{prefix}{name}": commit for name, commit in commits.items()}) as paths:
        folders = {name: paths.get(f"{prefix}{name}", REPO) for name in asked}
        result = arm_process.facts_of_arms({name: (folders[name], asked[name]["overrides"]) for name in asked}, results)
    arms = {name: asked[name] | {key: one[key] for key in KEPT if key in one} for name, one in result.items()}
    first = next(iter(result.values()))
    others = {one["track"] for one in result.values()} - {first["track"]}
    if others:
        raise ValueError(f"track={first['track']} and {', '.join(others)}: the arms of a race run on one track")
    refuse_laxer(first["track"], settings)
    _refuse_hopeless(result, anyway, measures_target="ladder" in settings)
    settings.setdefault("first_seed", _fresh_seed(arms, results))
    rules = target.rules_of(first["track"])
    settings = {"alpha": rules.alpha, "loss_margin_nats": rules.loss_margin_nats, **settings}
    settings |= {"equivalence_margin_pct": rules.equivalence_margin_pct, "judged": rules.judged}
    settings |= {"order_seed": secrets.randbits(32), "session_id": first["session_id"], "track": first["track"]}
    made = plan.make(arms, made_at=utc.now(), **settings)
    folder = race_folder.of(results, made["race_id"])
    try:
        folder.mkdir(parents=True)
        atomic.write_json(folder / "plan.json", made)
        ledger.append(results, "plan", **_facts_of(made))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        words = f"no race can be written there ({error.strerror}): free space, or set SPEEDRUN_RESULTS=/path"
        raise ValueError(f"{results}: {words}") from None
    return folder


def enter(folder: Path, results: Path) -> None:
    """Into the ledger with a plan of which it has nothing, as a kill came between: no run of it has been started.

    ValueError: the plan cannot be read.  OSError: nothing is entered.
    """
    with of_record(folder / "plan.json"):
        made = json_file.read(folder / "plan.json", state.Plan)
        if (folder / "race.json").exists() or ledger.read(results).of_race(made["race_id"]):
            return
        facts = _facts_of(made)
    ledger.append(results, "plan", **facts)


def _facts_of(made):
    """Of a plan what its line in the ledger has."""
    ids = {name: [arm["config_id"], arm["source_sha256"]] for name, arm in made["arms"].items()}
    return {"race_id": made["race_id"], "plan_sha256": plan.sha256(made), "baseline": made["baseline"], "arms": ids}


def check(request: dict) -> dict[str, str]:
    """What is refused before any work -> the commits of the arms that have a revision.  ValueError."""
    asked = request["arms"]
    settings = {key: value for key, value in request.items() if key != "arms"}
    plan.make({name: {} for name in asked}, made_at=utc.now(), **{"n": plan.N, **settings})
    return {name: worktrees.commit_of(REPO, arm["rev"]) for name, arm in asked.items() if arm["rev"] is not None}


def refuse_laxer(track: str, settings: dict) -> None:
    """ValueError for an alpha or a margin beyond the track's: a claim is judged by the track's numbers."""
    words = {name: word for word, (name, *_) in plan.SETTINGS.items()}
    for key, value, limit in target.laxer_than_track(track, settings):
        word = words[key]
        remedy = f"give {word}={limit:g} or less, or race on a track that fixes nothing (track=free)"
        raise ValueError(f"{word}={value:g}: track {track} allows at most {limit:g}: {remedy}")


def _fresh_seed(arms, results):
    """The first seed that no started run of these configs has had."""
    ids = {arm["config_id"] for arm in arms.values()}
    starts = (run["start"] for run in ledger.read(results).runs.values())
    return max((start["seed"] for start in starts if start["config_id"] in ids), default=-1) + 1


def _refuse_hopeless(facts: dict[str, dict], anyway: bool, measures_target: bool = False) -> None:
    """Raises ValueError, unless anyway, for arms that can never be compared, for one arm twice, and for a busy machine.

    facts: {arm: arm_process.facts()}, the baseline first.
    measures_target: arms without a target are compared on their way to one that is measured in the race (a ladder's).
    """
    if not anyway:
        _refuse_identical(facts)
        _refuse_incomparable(facts, MEASURED if measures_target else {})
    agree_on_machine(facts, anyway)


def _refuse_identical(facts):
    for (name, one), (other_name, other) in itertools.combinations(facts.items(), 2):
        if all(one[key] == other[key] for key in ("config_id", "source_sha256")):
            same = f"are the same config ({one['config_id']}) and code and differ by noise alone"
            raise ValueError(f"{name} and {other_name} {same}: ./run.sh calibrate measures that, --anyway races them")


def _refuse_incomparable(facts, measured):
    """By the rules of the verdict, on the rows that the arms' runs would have at best."""
    said = {name: one["row"] for name, one in facts.items() if "row" in one}  # an older revision's code does not say
    rows = {name: dict.fromkeys(COLUMNS) | row | {"run_id": name} for name, row in said.items()}
    rows = {name: row | (measured if row["target_val_loss"] is None else {}) for name, row in rows.items()}
    baseline = next(iter(facts))
    for name in [name for name in rows if name != baseline and baseline in rows]:
        refusals = eligibility.judge([rows[baseline]], [rows[name]], (baseline, name)).refusals
        if refusals:
            raise ValueError(
                f"the times of {baseline} and {name} could not be compared: {'; '.join(refusals)}: give all arms the "
                "same (what is written beside the arms holds for all); --anyway races them without a verdict on time"
            )


def agree_on_machine(facts: dict[str, dict], anyway: bool) -> None:
    """As each arm's own code sees it.  Raises ValueError where the race is not to go on."""
    checks = [Check(**check) for one in facts.values() for check in one.get("preflight", ())]
    ready.agree(checks, anyway, "the verdict")
