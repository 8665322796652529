"""A search begun and calibrated, and each submission taken from its checks to its decision, over any interruption."""

import ast
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.base import stats
from bench.base.metric import named
from bench.compare import eligibility, searching, target
from bench.compare.searching import Finding, Stop
from bench.launch.console import say
from bench.machine.signals import Interrupted
from bench.plans.race import arm_process, planning, question, runner, state
from bench.plans.referee import search as searches
from bench.plans.referee import submission as submissions
from bench.plans.referee.search import Arm, Decided, Search, Submission
from bench.record import ledger, race_folder, run_folder
from bench.record.rows import row_of

CALIBRATION_ROUNDS = 6
SIGHT = 5 / 3  # sds of a run that the effect is where none is asked for: a confirmation takes about ten rounds
CHECK_STEPS = 20
QUESTIONS = ("time", "time_to_target", "loss")
MAX_SEED = 2**30
RACE, CONFIRMATION = "race", "confirmation"


class Refused(ValueError):
    """A submission that is not raced; the message says what to mend."""


# ---- the search


def begin(results: Path, champion: Arm, settings: Mapping[str, Any]) -> Search:
    """settings: of search.Settings, but for search and champion.  The calibration is still to be made.

    ValueError: the champion cannot be raced, or another search is open.
    """
    for folder in sorted((results / searches.FOLDER).glob(f"*/{ledger.NAME}")):
        if not (other := searches.read(folder.parent)).has_ended:
            raise ValueError(f"{other.name}: this search is open: ./run.sh referee end, then begin another")
    made, _ = planning.planned({"arms": {"A": champion, "B": champion}}, results, anyway=True)
    on = settings["on"] or question.OF_TRACK[target.rules_of(made["track"]).judged][0]
    if on not in QUESTIONS:
        raise ValueError(f"on={on}: a search asks for {', '.join(QUESTIONS)}")
    name = f"{made['race_id'][:16]}-{made['track']}-{secrets.token_hex(2)}"
    folder = results / searches.FOLDER / name
    folder.mkdir(parents=True)
    champion = submissions.frozen(champion, folder / "champion")
    ledger.append(folder, "search", **{**settings, "search": name, "champion": champion, "on": on})
    return searches.read(folder)


def calibrate(search: Search) -> Search:
    """Race the champion against itself -> the search with its noise.  ValueError: it could not see anything."""
    if search.calibration is not None:
        return search
    settings, champion = search.settings, search.settings["champion"]
    n = CALIBRATION_ROUNDS
    folder, raced = _race(search, "calibration", champion, champion, {"n": n, "looks": [n]})
    if raced["result"] is None:
        raise ValueError(f"the champion cannot be calibrated: {raced['why']}")
    rounds = _runs(state.read(folder, search.results))
    rows = [[row_of(run_folder.read(path)) for path in arm] for arm in rounds]
    if settings["on"] == "loss":
        sd = stats.sd([row["score"] for row in rows[0] if row["score"] is not None])
    else:
        pairs = [pair for pair in zip(*rows, strict=True) if all(map(eligibility.is_timed, pair))]
        clocks = searching.gains(pairs, settings["on"], named("val_loss"))
        sd = max((math.sqrt(stats.mean(gain * gain for gain in gains) / 2) for gains in clocks), default=None)
    if not sd:
        raise ValueError("the champion's runs do not differ at all: a search needs seeds that change what is asked")
    effect, is_loss = settings["effect"], settings["on"] == "loss"
    effect = SIGHT * sd if effect is None else effect if is_loss else -math.log1p(-effect / 100)
    spent_s = _spent_s(search.results, [folder])
    run_s = stats.mean(row["wall_s"] or 0.0 for row in rows[0])
    facts = {"race_id": folder.name, "sd": sd, "effect": effect, "run_s": run_s, "spent_s": spent_s}
    devices = run_folder.read(rounds[0][0])["world_size"]
    search = searches.append(search, "calibrated", **facts, devices=devices)
    _refuse_blind(search)
    return search


def cost_s(search: Search, effect: float) -> float:
    """Wall time that a keep of a candidate with this effect is expected to take, at the first level."""
    assert search.calibration is not None
    sd, levels = search.calibration["sd"], (None, searching.level(search.settings["alpha"], []))
    stops: list[Stop] = [{"sd": sd, "effect": effect, "level": level} for level in levels]
    return (2 * sum(map(searching.expected_rounds, stops)) + 1) * search.calibration["run_s"]


def sight(search: Search, seconds: float) -> float:
    """The least effect whose keep is expected to take no longer than this; inf: none is."""
    if cost_s(search, 10.0) > seconds:
        return math.inf
    low, high = 1e-6, 10.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost_s(search, middle) <= seconds else (middle, high)
    return high


def _refuse_blind(search: Search) -> None:
    """ValueError where the budget is too short for one keep."""
    assert search.calibration is not None
    effect, budget_s = search.calibration["effect"], search.settings["budget_s"]
    left_s = budget_s - search.spent_s
    if cost_s(search, effect) > left_s:
        seen = sight(search, left_s)
        what = "nothing at all" if math.isinf(seen) else search.shown(seen)
        why = f"{search.shown(effect)} takes {cost_s(search, effect):.0f} s to be shown"
        searches.append(search, "search_end", why=why)
        remedy = "give a longer budget, a larger effect, shorter runs or a quieter machine"
        raise ValueError(f"{why}, and {left_s:.0f} s are left, in which this machine can show {what}: {remedy}")


def submit(search: Search, words: Sequence[str], author: str, note: str) -> tuple[Search, int]:
    """Take a submission in; what is returned is on disk.  ValueError: it is refused, which costs nothing."""
    if search.has_ended:
        raise ValueError(f"{search.name}: this search has ended: ./run.sh referee start begins another")
    folder = _new_folder(search.folder / "submissions")
    number = int(folder.name)
    if not search.settings["trust"] and any("=" not in word or word.startswith("script") for word in words):
        why = "it is code, and nothing holds it here: read it, and begin the search with --trust"
        raise ValueError(f"{' '.join(words)}: {why}")
    arm = submissions.stored(words, search.champion, folder, f"{search.name}/{number}")
    about = " ".join(words)
    facts = {"submission": number, "author": author, "note": note, "about": about, "arm": arm}
    return searches.append(search, "submitted", **facts), number


def _new_folder(folder: Path) -> Path:
    """A numbered folder that no other process has: mkdir is atomic."""
    folder.mkdir(exist_ok=True)
    number = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
    while True:
        number += 1
        try:
            (folder / str(number)).mkdir()
            return folder / str(number)
        except FileExistsError:
            continue


def work(search: Search) -> Search:
    """Decide all that is open, in order.  Interrupted: the next call goes on where this one stopped."""
    with searches.working(search):
        search = searches.read(search.folder)
        while search.open:
            search = _decide(search, search.open[0])
    return search


# ---- one submission


def _decide(search: Search, submission: Submission) -> Search:
    number = submission.number
    try:
        _refuse(search, submission)
        _screen(search, submission)
        derived = derive(search, submission)
        if derived.needs_confirmation:
            if submission.level is None:
                search = searches.append(search, "confirming", submission=number, level=search.next_level())
                submission = search.submissions[number]
            _confirm(search, submission)
            derived = derive(search, submission)
        decided = derived.decided
    except Refused as error:
        decided = {"submission": number, "decision": "refused", "why": str(error), "spent_s": 0.0}
    event = "refused" if decided["decision"] == "refused" else "decided"
    search = searches.append(search, event, **decided)
    say("referee", sentence(search, search.submissions[number]), always=True)
    return search


def _screen(search: Search, submission: Submission) -> None:
    stop = search.stop(None)
    _sequential_race(search, submission, RACE, stop, ["B"])


def _confirm(search: Search, submission: Submission) -> None:
    assert submission.level is not None
    _sequential_race(search, submission, CONFIRMATION, search.stop(submission.level), [])


def _sequential_race(search: Search, submission: Submission, stage: str, stop: Stop, warm_ups: list[str]) -> None:
    """warm_ups: the arms whose compile cache is not known to be warm."""
    last = searching.most_rounds(stop)
    settings = {"n": last, "sequential": {"first": 1, "last": last, "stop": stop, "warm_ups": warm_ups}}
    name = f"{submission.number}-{stage}"
    if search.spent_s > search.settings["budget_s"] and not _folder_of(search, name):
        return
    try:
        _race(search, name, search.champion, submission.arm, settings)
    except Interrupted:
        raise
    except ValueError as error:
        folder = _folder_of(search, name)
        if folder is None:
            raise
        if not (folder / "race.json").exists():
            runner.finish(folder, search.results, "abandoned", str(error))


def _race(search: Search, name: str, a: Arm, b: Arm, settings: dict[str, Any]) -> tuple[Path, race_folder.Race]:
    """The race of this name, to its end: planned unless it has been, gone on with unless it has ended."""
    folder, is_new = _folder_of(search, name), False
    if folder is None:
        request: dict[str, Any] = {"arms": {"A": dict(a), "B": dict(b)}, "name": f"{search.name}-{name}"}
        request |= {"on": search.settings["on"], "first_seed": secrets.randbelow(MAX_SEED), **settings}
        folder, is_new = planning.begin(request, search.results, anyway=True), True
    if (folder / "race.json").exists():
        return folder, race_folder.read(folder)
    planning.enter(folder, search.results)
    raced = runner.go(folder, search.results, anyway=True, is_new=is_new)
    if raced["status"] == "interrupted":
        raise Interrupted(str(raced["why"]))
    return folder, raced


def _folder_of(search: Search, name: str) -> Path | None:
    """Of the race of this name, planned or ended."""
    paths = (search.results / race_folder.FOLDER).glob(f"*-{search.name}-{name}-*/plan.json")
    return next((path.parent for path in sorted(paths)), None)


def _refuse(search: Search, submission: Submission) -> None:
    """The checks before any cost.  Refused: what to mend."""
    if _folder_of(search, f"{submission.number}-{RACE}"):
        return  # it has passed them
    program = submissions.program_of(submission.arm)
    for path in sorted(program.root.rglob("*.py")) if program else ():
        try:
            if not path.is_symlink():
                ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            raise Refused(f"{path.name}: is no Python: {error}") from None
    request = {"arms": {"A": dict(search.champion), "B": dict(submission.arm)}, "on": search.settings["on"]}
    try:
        made, _ = planning.planned(request, search.results)
    except ValueError as error:
        raise Refused(str(error)) from None
    deviations = [set(made["arms"][name]["deviations"]) for name in "AB"]
    if more := sorted(deviations[1] - deviations[0]):
        raise Refused(f"the track does not allow it: {more[0]}")


# ---- decisions, by the records alone


class Derived(NamedTuple):
    """What the races of a submission lead to."""

    decided: Decided
    needs_confirmation: bool  # and it has none yet


def derive(search: Search, submission: Submission) -> Derived:
    """By the plans, the ledger and the run folders: the same whenever it is asked."""
    folders = {stage: _folder_of(search, f"{submission.number}-{stage}") for stage in (RACE, CONFIRMATION)}
    found = [folder for folder in folders.values() if folder]
    decided: Decided = {
        "submission": submission.number,
        "decision": "undecided",
        "why": "the budget was spent before it could be raced",
        "races": [folder.name for folder in found],
        "spent_s": _spent_s(search.results, found),
    }
    race = folders[RACE]
    if race is None:
        return Derived(decided, False)
    finding = _finding(search, race)
    decided = cast(Decided, {**decided, **_numbers(search, race, finding), "stage": RACE})
    if finding["outcome"] != searching.PROMISING:
        return Derived(cast(Decided, {**decided, **_without_keep(search, race, finding)}), False)
    confirmation = folders[CONFIRMATION]
    if confirmation is None or not (confirmation / "race.json").exists():
        why = f"promising, {_said(search, finding)}, but the budget was spent before it could be confirmed"
        is_to_run = confirmation is not None or search.spent_s <= search.settings["budget_s"]
        return Derived({**decided, "why": why}, is_to_run)
    earlier = decided
    finding = _finding(search, confirmation)
    decided = cast(Decided, {**decided, **_numbers(search, confirmation, finding), "stage": CONFIRMATION})
    if finding["outcome"] != searching.KEEP:
        decided = cast(Decided, {**decided, **_without_keep(search, confirmation, finding)})
        decided["why"] = f"{search.shown(earlier.get('gain') or 0.0)} in its race was luck; confirmed: {decided['why']}"
        return Derived(decided, False)
    if doubt := _doubt(search, confirmation):
        return Derived({**decided, "why": f"{_said(search, finding)}, but {doubt}"}, False)
    assert submission.level is not None and finding["log_e"] is not None
    e, needed = math.exp(finding["log_e"]), 1 / submission.level
    why = f"{_said(search, finding)} on fresh seeds, e-value {e:.0f} of {needed:.0f} needed"
    return Derived({**decided, "decision": "keep", "why": why, "arm": submission.arm}, False)


def _finding(search: Search, folder: Path) -> Finding:
    return runner.searched(state.read(folder, search.results))


def _numbers(search: Search, folder: Path, finding: Finding) -> dict[str, Any]:
    """Gain and interval, in the unit of the question."""
    interval = None
    against = _against(folder)
    if search.settings["on"] == "loss":
        interval = (against.get("val_loss") or {}).get("ci95")
    elif found := (against.get("time") or {}).get("ci95_pct"):
        interval = [-found[1], -found[0]]
    return {"gain": finding["gain"], "ci95": interval}


def _against(folder: Path) -> dict[str, Any]:
    """The Comparison of a race that has ended; {}: it has none."""
    if not (folder / "race.json").exists():
        return {}
    return race_folder.verdicts_of(race_folder.read(folder)).get("B") or {}


def _without_keep(search: Search, folder: Path, finding: Finding) -> dict[str, Any]:
    if finding["outcome"] == searching.DROP:
        effect = search.shown(search.stop(None)["effect"])
        return {"decision": "drop", "why": finding["why"] or f"{_said(search, finding)}: {effect} is unlikely"}
    raced = race_folder.read(folder) if (folder / "race.json").exists() else None
    why = raced["why"] if raced and raced["status"] == "abandoned" else None
    blamed = why is not None and " of B " in f" {why} "
    if blamed:
        return {"decision": "drop", "why": why}
    return {
        "decision": "undecided",
        "why": why or finding["why"] or f"{_said(search, finding)}: the rounds are used up",
    }


def _doubt(search: Search, folder: Path) -> str | None:
    """What keeps a candidate from being kept although its numbers would do."""
    against = _against(folder)
    if not against:
        return "its race was abandoned"
    loss = against["val_loss"]
    if search.settings["on"] == "loss":
        return loss["reasons"][0] if loss["reasons"] else None
    if not against["comparable"]:
        return f"its times are not comparable: {against['reasons'][0]}"
    if loss["verdict"] in ("waived", "not_worse") or (loss["below_target"] or [None, None])[1]:
        return None
    return "its loss is not shown to be no worse"


def _said(search: Search, finding: Finding) -> str:
    gain = "no gain known" if finding["gain"] is None else search.shown(finding["gain"])
    return f"{gain} in {finding['num_rounds']} rounds"


def _runs(race: state.State) -> tuple[list[Path], list[Path]]:
    a, b = ([race.results / run for run in race.runs(arm)] for arm in race.plan["arms"])
    return a, b


def _spent_s(results: Path, folders: Sequence[Path]) -> float:
    """Wall time of all runs that were started for these races."""
    spent_s = 0.0
    for folder in folders:
        for slot in state.read(folder, results).slots:
            for run, _ in slot.attempts:
                record = arm_process.record_of(results, run)
                spent_s += (row_of(record)["wall_s"] or 0.0) if record else 0.0
    return spent_s


def sentence(search: Search, submission: Submission) -> str:
    """What became of a submission."""
    decided = submission.decided
    if decided is None:
        return f"{submission.number} open: {submission.about}"
    return f"{submission.number} {decided['decision']}: {decided['why']} ({search.cost(decided['spent_s'])})"


def answer(search: Search, submission: Submission) -> dict[str, Any]:
    """What who submitted it is told: nothing of seeds, of the held-out slice or of the champion's own numbers."""
    decided = submission.decided
    if decided is None:
        return {"submission": submission.number, "decision": None}
    gain, price = decided.get("gain"), search.settings["price"]
    devices = search.calibration["devices"] if search.calibration else 1
    device_s = decided["spent_s"] * devices
    is_loss = search.settings["on"] == "loss"
    return {
        "submission": submission.number,
        "decision": decided["decision"],
        "gain_of_metric" if is_loss else "gain_pct": gain if gain is None or is_loss else 100 * -math.expm1(-gain),
        "ci95": decided.get("ci95"),
        "device_s": device_s,
        "dollars": None if price is None else device_s / 3600 * price,
        "why": decided["why"],
    }


# ---- the decisions again


def replay(search: Search) -> Iterator[str]:
    """Sentences: where the records do not lead to what the journal says."""
    yield from (f"journal: {fault}" for fault in search.faults)
    book = ledger.read(search.results)
    yield from (f"ledger: {fault}" for fault in book.faults)
    kept: list[bool] = []
    as_it_was = searches.Search(search.folder, search.settings, search.calibration)
    known = {search.calibration["race_id"]} if search.calibration else set()
    for submission in search.submissions.values():
        decided = submission.decided
        if submission.level is not None:
            level = searching.level(search.settings["alpha"], kept)
            if not math.isclose(level, submission.level):
                yield f"submission {submission.number}: its level is {submission.level:g}, and was to be {level:g}"
        if decided is None:
            continue
        races = decided.get("races") or []
        known |= set(races)
        if decided["decision"] != "refused":
            for fault in _faults(search, submission, races, book):
                yield f"submission {submission.number}: {fault}"
            derived = derive(as_it_was, submission).decided
            if any(derived.get(key) != decided.get(key) for key in ("decision", "gain", "arm")):
                both = f"{decided['decision']} in the journal, {derived['decision']} by its records"
                yield f"submission {submission.number}: {both}"
        if submission.level is not None:
            kept.append(decided["decision"] == "keep")
        as_it_was.submissions[submission.number] = submission
    planned = [line.get("race_id") or "" for line in book.lines if line["event"] == "plan"]
    for race_id in planned if not search.open else ():
        if f"-{search.name}-" in race_id and race_id not in known:
            yield f"{race_id}: a race of this search that the journal does not have"


def _faults(search: Search, submission: Submission, races: Sequence[str], book: ledger.Ledger) -> Iterator[str]:
    """What is wrong with the records that a decision stands on."""
    for name in races:
        race = state.read(race_folder.of(search.results, name), search.results, book)
        level = submission.level if f"-{CONFIRMATION}-" in name else None
        if race.plan["sequential"]["stop"] != search.stop(level):
            yield f"{name} stopped by other rules than the search's"
        for slot in race.slots:
            for run, _ in slot.attempts:
                end = book.runs[run]["end"]
                path = search.results / run / "run.json"
                if end and path.is_file() and end.get("run_json_sha256") != ledger.sha256_of(path):
                    yield f"{run} is not the record that the ledger has"
