"""Begins and calibrates a search, and takes each submission from its checks to its decision, across interruptions."""

import ast
import contextlib
import json
import math
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base import private, stats
from bench.base.metric import named
from bench.base.paths import CODE, REPO
from bench.compare import eligibility, searching, target
from bench.compare.searching import Stop
from bench.launch.console import say
from bench.machine import preflight
from bench.machine.signals import Interrupted
from bench.plans import locks
from bench.plans.audit import short
from bench.plans.race import arm_process, plan, planning, runner, state, worktrees
from bench.plans.race.planning import Facts
from bench.plans.referee import deciding
from bench.plans.referee import search as searches
from bench.plans.referee import submission as submissions
from bench.plans.referee.deciding import CONFIRMATION, RACE, Raced
from bench.plans.referee.search import Arm, Search, Submission
from bench.record import certificates, ledger, race_folder, run_folder
from bench.record.rows import metric_of, row_of

CALIBRATION_ROUNDS = 6
SIGHT = 5 / 3  # default effect in standard deviations of a run: a confirmation takes about ten rounds
CHECKED_FRAC = 0.1  # part of a script's training that a submission does before it is raced
CHECK_TIMES, CHECK_S = 2.0, 60.0  # a check is ended after so many times a run's time, and so many seconds more
AUDITS = ("random_tokens", "held_out", certificates.WEIGHTS)  # audits that a keep must pass (bench/plans/audit/)
SAVE = "checkpoint.save=true"  # of runs that may be audited: the last of a confirmation, or of the calibration
GOAL = ("data", "target", "budget", "stop_at_target", "metric", "val_tokens", "num_steps", "world_size")  # of a row
QUESTIONS = ("time", "time_to_target", "loss")


class Refused(ValueError):
    """Raised for a submission that is not raced; the message says what to mend."""


# ---- the search


def begin(results: Path, champion: Arm, settings: Mapping[str, Any]) -> Search:
    """Begins a search, which has still to be calibrated. settings: search.Settings without search and champion.

    Raises ValueError if the champion cannot be raced, or another search is open.
    """
    folder = results / searches.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with searches.locked(folder):  # if two begin at once, one finds the other's search
        for journal in sorted(folder.glob(f"*/{ledger.NAME}")):
            if not (other := searches.read(journal.parent)).has_ended:
                raise ValueError(f"{other.name}: is still open: end it first, ./run.sh referee end")
        return _begin(results, champion, settings)


def _begin(results: Path, champion: Arm, settings: Mapping[str, Any]) -> Search:
    if submissions.program_of(champion) and not settings["trust"]:
        champion = {**champion, "overrides": [*champion["overrides"], submissions.SANDBOX]}
    draft, _ = planning.planned({"arms": {"A": champion, "B": champion}}, results, anyway=True)
    on = settings["on"] or plan.QUESTIONS_OF_TRACK[target.rules_of(draft["track"]).judged][0]
    if on not in QUESTIONS:
        raise ValueError(f"on={on}: a search asks for {', '.join(QUESTIONS)}")
    if settings.get("is_effect_pct") and on == "loss":
        problem = f"effect={settings['effect']:g}%"
        raise ValueError(f"{problem}: a search for a lower loss looks for a difference: effect=0.02 is 0.02 nats")
    name = f"{draft['race_id'][:16]}-{draft['track']}-{secrets.token_hex(2)}"
    folder = results / searches.FOLDER / name
    folder.mkdir(parents=True)
    champion = submissions.frozen(champion, folder / "champion")
    ledger.append(folder, "search", **{**settings, "search": name, "champion": champion, "on": on})
    return searches.read(folder)


def calibrate(search: Search) -> Search:
    """Races the champion against itself. Returns the search with its noise. Raises ValueError if it sees nothing."""
    if search.calibration is not None:
        return search
    settings, champion = search.settings, search.settings["champion"]
    n = CALIBRATION_ROUNDS
    try:
        folder, raced = _race(search, "calibration", champion, champion, {"n": n, "looks": [n]})
    except ValueError as error:  # for example, it was cut off in another session
        raise ValueError(f"{error}; ./run.sh referee end ends this search, which has tried nothing yet") from None
    if raced["result"] is None:
        raise ValueError(f"the champion cannot be calibrated: {raced['why']}")
    rounds = Raced(search, folder).runs
    rows = [[row_of(run_folder.read(path)) for path in arm] for arm in rounds]
    if settings["on"] == "loss":
        sd = stats.sd([row["score"] for row in rows[0] if row["score"] is not None])
    else:
        pairs = [pair for pair in zip(*rows, strict=True) if all(map(eligibility.is_timed, pair))]
        clocks = searching.gains(pairs, settings["on"], named("val_loss"))
        sd = max((math.sqrt(stats.mean(gain * gain for gain in gains) / 2) for gains in clocks), default=None)
    if not sd:
        raise ValueError("the champion's runs are all alike: a search needs runs that depend on their seed")
    effect, is_loss = settings["effect"], settings["on"] == "loss"
    effect = SIGHT * sd if effect is None else effect if is_loss else -math.log1p(-effect / 100)
    spent_s = deciding.spent_s(search.results, [folder])
    run_s = stats.mean(row["wall_s"] or 0.0 for row in rows[0])
    last = rows[0][-1]
    check_s = (last["train_s"] or run_s) * min(1.0, max(CHECKED_FRAC, short.NUM_STEPS / (last["num_steps"] or 1)))
    facts = {"race_id": folder.name, "sd": sd, "effect": effect, "run_s": run_s, "spent_s": spent_s}
    why = _short_run(search, "champion", champion, check_s, run_s)
    facts["check_s"] = check_s if why is None else None
    devices = run_folder.read(rounds[0][0])["world_size"]
    _audit_run(search, rounds[0][-1], champion)
    _remove_weights(folder, search.results)
    audit = certificates.read_audit(rounds[0][-1])
    if audit is not None and audit["outcome"] == certificates.FAILED:
        raise ValueError(f"the champion fails its audit: ./run.sh audit {rounds[0][-1].name} says why")
    facts["is_audited"] = audit is not None and audit["outcome"] == certificates.PASSED
    kinds = audit["audits"] if audit else []
    facts["audits"] = [kind["kind"] for kind in kinds if kind["outcome"] == certificates.PASSED]
    search = searches.append(search, "calibrated", **facts, devices=devices, unit=metric_of(rows[0]).unit)
    _refuse_blind(search)
    return search


def cost_s(search: Search, effect: float) -> float:
    """Returns the expected wall time to keep a candidate with this effect, at the first level."""
    assert search.calibration is not None
    sd, levels = search.calibration["sd"], (None, searching.level(search.settings["alpha"], []))
    stops: list[Stop] = [{"sd": sd, "effect": effect, "level": level} for level in levels]
    return (2 * sum(map(searching.expected_rounds, stops)) + 1) * search.calibration["run_s"]


def sight(search: Search, seconds: float) -> float:
    """Returns the smallest effect whose keep is expected to take at most this time; inf if there is none."""
    if cost_s(search, 10.0) > seconds:
        return math.inf
    low, high = 1e-6, 10.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost_s(search, middle) <= seconds else (middle, high)
    return high


def _refuse_blind(search: Search) -> None:
    """Ends the search and raises ValueError if the budget is too short for one keep."""
    assert search.calibration is not None
    effect, budget_s = search.calibration["effect"], search.settings["budget_s"]
    left_s = budget_s - search.spent_s
    if cost_s(search, effect) > left_s:
        seen = sight(search, left_s)
        least = "nothing" if math.isinf(seen) else search.shown(seen)
        why = f"this search has ended: to show {search.shown(effect)} takes {cost_s(search, effect):.0f} s"
        searches.append(search, "search_end", why=why)
        remedy = "give a longer budget, a larger effect, shorter runs or a quieter machine"
        raise ValueError(f"{why}, but {left_s:.0f} s are left, in which this machine can show {least}: {remedy}")


def _refuse_ended(search: Search, how: str) -> None:
    if search.has_ended:
        raise ValueError(f"{search.name}: {how}: ./run.sh referee start begins another")
    if search.doubt:  # the champion or the levels may be others than were decided
        raise ValueError(search.doubt)


def submit(search: Search, arguments: Sequence[str], author: str, note: str) -> tuple[Search, int]:
    """Accepts a submission, which is on disk on return. Raises ValueError if it is refused, which costs nothing."""
    _refuse_ended(search, "this search has ended")
    submitted = search.folder / "submissions"
    submitted.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in submitted.iterdir() if path.name.isdecimal()), default=0)
    while True:  # until this process alone has a folder: mkdir is atomic
        with contextlib.suppress(FileExistsError):
            (folder := submitted / str(number)).mkdir()
            break
        number += 1
    ref = f"{search.name}/{number}"
    try:
        arm = submissions.stored(arguments, search.champion, folder, ref, search.settings["trust"])
    except ValueError:  # which leaves no gap in the numbers
        shutil.rmtree(folder, ignore_errors=True)
        raise
    about, note = private.redact(" ".join(arguments), REPO), private.redact(note, REPO, is_prose=True)
    facts = {"submission": number, "author": author, "note": note, "about": about, "arm": arm}
    return searches.append(search, "submitted", **facts), number


def work(search: Search, number: int | None = None) -> Search:
    """Decides open submissions in order, up to this number; None: all. Raises ValueError if the search has ended.

    After Interrupted the next call continues where this one stopped.
    """

    def is_left(search: Search) -> bool:
        return bool(search.open) and (number is None or search.submissions[number].decided is None)

    accepted = "" if number is None else f"submission {number} is accepted; "
    while is_left(search := searches.read(search.folder)):
        with searches.locked(search.folder, accepted + "waiting for {}, which works on this search"):
            if not is_left(search := searches.read(search.folder)):  # the other process decided it
                break
            _refuse_ended(search, f"this search ended before submission {number or search.open[0].number} was decided")
            if search.calibration is None:
                raise ValueError(f"{search.name}: its calibration has not succeeded: ./run.sh referee start repeats it")
            search = _decide(search, search.open[0])
        time.sleep(2 * locks.LOOK_S)  # others that wait for the lock get it
    return search


# ---- one submission


def _decide(search: Search, submission: Submission) -> Search:
    number = submission.number
    try:
        facts = _refuse(search, submission)
        _run_stage(search, submission, RACE, search.stop(None), facts)
        derived = deciding.derive(search, submission)
        if derived.needs_confirmation:
            if submission.level is None:
                search = searches.append(search, "confirming", submission=number, level=search.next_level())
                submission = search.submissions[number]
            _run_stage(search, submission, CONFIRMATION, search.stop(submission.level))
        if submission.level is not None:  # also if a kill came between a confirmation's end and its audit
            folder = deciding.folder_of(search, f"{number}-{CONFIRMATION}")
            if folder and (raced := Raced(search, folder)).finding["outcome"] == searching.KEEP:
                _audit_run(search, raced.runs[1][-1], submission.arm)
            if folder:
                _remove_weights(folder, search.results)
            derived = deciding.derive(search, submission)
        decided = derived.decided
    except Refused as error:
        spent_s = deciding.checked_s(search, number)
        decided = {"submission": number, "decision": "refused", "why": str(error), "spent_s": spent_s}
    event = "refused" if decided["decision"] == "refused" else "decided"
    search = searches.append(search, event, **decided)
    say("referee", deciding.sentence(search, search.submissions[number]), always=True)
    return search


def _audit_run(search: Search, run: Path, arm: Arm) -> None:
    """Runs the counterfactual audits of a run by the code of its arm, unless audit.json has their outcome."""
    if certificates.read_audit(run) is not None:
        return
    has_weights = (run / run_folder.WEIGHTS).is_file()  # a script's are its own
    kinds = [option for kind in AUDITS if has_weights or kind != certificates.WEIGHTS for option in ("--only", kind)]
    tail = _by_its_code(search, arm, ("bench", "audit"), [str(run), "--quiet", *kinds], search.results)
    if certificates.read_audit(run) is None:
        why = tail.strip().removeprefix("audit").strip().removeprefix(f"{run.name}: ")  # the last line of its output
        say("audit", f"{run.name} was not audited: {why}", always=True)


def _remove_weights(folder: Path, results: Path) -> None:
    """Removes the weights of a race's runs, which are needed only to audit one of them and take much space."""
    for slot in state.read(folder, results).slots:
        for run, _ in slot.attempts:
            (results / run / run_folder.WEIGHTS).unlink(missing_ok=True)


def _short_run(search: Search, name: str, arm: Arm, seconds: float, run_s: float) -> str | None:
    """Returns why this arm cannot win a race, by training it for some seconds; None if nothing speaks against it."""
    arguments = [str(seconds), str(CHECK_TIMES * run_s + CHECK_S), *arm["overrides"]]
    folder = deciding.checks_of(search, name)
    try:
        why = json.loads(_by_its_code(search, arm, (short.__name__,), arguments, folder))["why"]
    except (ValueError, KeyError):  # it could not be checked: the race will show
        return None
    return None if why is None else str(why)


def _by_its_code(search: Search, arm: Arm, program: Sequence[str], arguments: Sequence[str], results: Path) -> str:
    """Returns the last line that python -m PROGRAM ARGUMENTS prints, by the code of an arm. Raises Interrupted."""
    commits = {} if arm["rev"] is None else {"B": arm["rev"]}
    with worktrees.checked_out(REPO, commits, f"{search.name}-") as paths:
        env = arm_process.environment(results)
        tail = arm_process.run_to_end(paths.get("B", CODE), arguments, env, program=program)
    return tail.rpartition("\n")[2]


def _run_stage(search: Search, submission: Submission, stage: str, stop: Stop, facts: Facts | None = None) -> None:
    """Runs the race of a stage, unless the budget is spent. Raises runner.DiskError."""
    last = searching.most_rounds(stop)
    warm_ups = ["B"] * (stage == RACE and search.settings["on"] != "loss")  # its compile cache is cold
    settings = {"n": last, "sequential": {"first": 1, "last": last, "stop": stop, "warm_ups": warm_ups}}
    name = f"{submission.number}-{stage}"
    if search.spent_s > search.settings["budget_s"] and not deciding.folder_of(search, name):
        return
    try:
        _race(search, name, search.champion, submission.arm, settings, facts)
    except ValueError as error:
        is_full = preflight.disk_space(search.results).status == "fail"  # a contestant may only say that it is
        folder = deciding.folder_of(search, name)
        if folder is None or (is_full and isinstance(error, runner.DiskError)):  # the next call goes on with its race
            raise
        if not state.read(folder, search.results).has_ended:
            runner.finish(folder, search.results, "abandoned", str(error))


def _race(
    search: Search, name: str, a: Arm, b: Arm, settings: dict[str, Any], facts: Facts | None = None
) -> tuple[Path, race_folder.Race]:
    """Runs the race of this name to its end: plans it (facts: of planned()), or resumes it unless it has ended."""
    folder, is_new = deciding.folder_of(search, name), False
    if folder is None:
        saves = [SAVE] if not name.endswith(RACE) and submissions.program_of(a) is None else []
        request: dict[str, Any] = {"arms": _arms(a, b, saves), "name": f"{search.name}-{name}"}
        request |= {"on": search.settings["on"], **settings}
        folder, is_new = planning.begin(request, search.results, True, facts), True
    planning.enter(folder, search.results)
    if state.read(folder, search.results).has_ended:  # race.json alone may be that of a process that was killed then
        return folder, race_folder.read(folder)
    raced = runner.go(folder, search.results, anyway=True, is_new=is_new)
    if raced["status"] == "interrupted":
        raise Interrupted(str(raced["why"]))
    return folder, raced


def _arms(a: Arm, b: Arm, also: Sequence[str] = ()) -> dict[str, Arm]:
    """Returns the arms of a race, with these settings too; both are in a sandbox if the code of one has to be."""
    held = [submissions.CONFINED] * any(submissions.CONFINED in arm["overrides"] for arm in (a, b))
    overrides = [list(dict.fromkeys([*arm["overrides"], *held, *also])) for arm in (a, b)]
    return {"A": {**a, "overrides": overrides[0]}, "B": {**b, "overrides": overrides[1]}}


def _refuse(search: Search, submission: Submission) -> Facts | None:
    """Runs the checks before any race. Returns facts for its plan, None if it has one. Raises Refused: what to mend."""
    if deciding.folder_of(search, f"{submission.number}-{RACE}"):
        return None
    program = submissions.program_of(submission.arm)
    for path in sorted(program.root.rglob("*.py")) if program else ():
        try:
            if not path.is_symlink():
                ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            raise Refused(f"{path.name}: is not valid Python: {error}") from None
    request = {"arms": _arms(search.champion, submission.arm), "on": search.settings["on"]}
    try:
        draft, facts = planning.planned(request, search.results)
    except planning.Identical:
        raise Refused("it has the same config and code as the champion: there is nothing to race") from None
    except ValueError as error:
        raise Refused(str(error).removeprefix("B: ")) from None  # the name of the candidate in its race
    goals = [facts[name].get("row", {}) for name in "AB"]
    for name in GOAL:  # a yaml of a diff can set anything (# @package _global_)
        if (was := goals[0].get(name)) != (now := goals[1].get(name)):
            raise Refused(f"{name} is {now}, and {was} of the champion: a submission does not change the goal")
    deviations = [set(draft["arms"][name]["deviations"]) for name in "AB"]
    if new_deviations := sorted(deviations[1] - deviations[0]):
        raise Refused(f"the track does not allow it: {new_deviations[0]}")
    assert search.calibration is not None
    check_s, run_s = search.calibration.get("check_s"), search.calibration["run_s"]
    if check_s and (why := _short_run(search, str(submission.number), submission.arm, check_s, run_s)):
        raise Refused(why)
    return facts
