"""Explains what a user names, by its traces or else its record, with the passport of the machine that made them.

A run without a trace has a coarser account from its record, which adds up all the same.  It uses steps.csv (rank 0's
steps that no instrument disturbed), steps_by_rank.csv, events.jsonl and run.json:
    measured events  collections and recompilations, each in its step
    regions          data_ms, optimizer_ms, and the time of the step in none of the four regions
    a late rank      own milliseconds of the latest rank above rank 0's
    stalls           what bench/analysis/diagnosis found above a step's usual time, as far as nothing above explains it
    the limit        a step's FLOPs, as the model counts them, at the device's peak by its passport or data sheet
The rest is forward and backward, of which nothing more is known.  Events and waiting lie somewhere within these.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.analysis.diagnosis import stalls
from bench.analysis.explain import account, parts, perfetto
from bench.analysis.explain.ceilings import Ceilings
from bench.analysis.explain.host import COLLECTION, COMPILATION, main_track
from bench.analysis.trace import categories, events, load
from bench.analysis.trace.rank import Rank
from bench.analysis.trace.source import NoTrace
from bench.base.units import NS_PER_MS, NS_PER_S, format_ms
from bench.machine import passports
from bench.record import metrics, run_folder, step_files

PART_OF_EVENT = {"gc": parts.GARBAGE, "recompile": parts.COMPILATION}
REGIONS = stalls.REGIONS
MAX_PROFILED_CHANGE = 0.2  # by which profiled steps may differ from the run's own before an account says so (assumed)


class Options(NamedTuple):
    """How traces are explained.  passport: a file to use instead of the one that fits the run; captured: files or
    folders of traces in which CUDA graphs were captured."""

    rules: tuple[categories.Rule, ...] = categories.RULES
    include_last_step: bool = False
    passport: Path | None = None
    captured: tuple[Path, ...] = ()


def explain_paths(
    title: str, paths: Sequence[Path], options: Options | None = None, annotated: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Returns {title: answer of account.accounts_of()} for each window in the traces of one job.

    A run without a trace is explained by its record.  annotated: a folder in which to write each trace with its account
    as tracks.  Raises NoTrace, a ValueError, if nothing was recorded.
    """
    options = options or Options()
    run = paths[0] if len(paths) == 1 and (paths[0] / "run.json").is_file() else None
    try:
        files = [file for path in paths for file in load.find(path)]
    except NoTrace:
        if run is None or annotated is not None:
            raise
        return {title: explain_record(run, options.passport)}
    windows, explanations = load.by_window(files), {}
    facts = run_folder.read(run) if run else None
    captured = [load.load(file) for path in options.captured for file in load.find(path)]

    def measured_of(rank: int, device: str | None) -> passports.Ceilings | None:
        if options.passport is not None:
            return passports.ceilings_of_file(options.passport, device)
        return passports.ceilings_of_run(facts, rank) if facts else None

    for name, ranks in windows.items():
        if run:
            add_recorded_events(ranks, run)
        label = title + (f", window {name}" if len(windows) > 1 else "")
        with load.uncollected():
            accounts, explanations[label] = account.accounts_of(
                ranks, options.rules, options.include_last_step, measured_of, captured
            )
        if run and facts:
            explanations[label]["outside"] = outside(run, explanations[label])
            own_ms, step_ms = (facts.get("metrics") or {}).get("step_avg_ms"), explanations[label]["step_ms"]
            if own_ms and abs(step_ms / own_ms - 1) > MAX_PROFILED_CHANGE:
                own = f"the run's own steps took {format_ms(own_ms)} on average, unlike the profiled ones"
                explanations[label]["doubts"].append(f"{own}: read gains as shares of a step, not as ms")
        for rank_account in accounts.values():
            if annotated is not None and rank_account.rank is not None:
                perfetto.write(annotated, rank_account.rank, rank_account.pieces, explanations[label]["next"])
    return explanations


def difference_of_runs(a_folders: Sequence[Path | str], b_folders: Sequence[Path | str]) -> dict[str, Any] | None:
    """Returns account.difference() of the first run with traces of each arm, as ./run.sh explain A B compares them.

    It has "files": [RUN/traces of each].  None without traces, or if they cannot be compared.
    """
    a, b = first_traced(a_folders), first_traced(b_folders)
    if a is None or b is None:
        return None
    try:
        difference = account.difference(*(next(iter(explain_paths("", [run]).values())) for run in (a, b)))
    except ValueError:  # a file is no trace or holds nothing that took time, or the two are of different kinds
        return None
    return difference | {"files": [f"{run.name}/traces" for run in (a, b)]}


def first_traced(folders: Iterable[Path | str]) -> Path | None:
    """Returns the first of these run folders that holds a trace, or None."""
    return next((path for path in map(Path, folders) if has_trace([path / "traces"])), None)


def has_trace(paths: Sequence[Path]) -> bool:
    """Returns whether each of these paths holds a trace."""
    try:
        return all(load.find(path) for path in paths)
    except NoTrace:
        return False


def add_recorded_events(ranks: Sequence[Rank], folder: Path | str) -> None:
    """Adds the recorded events of the run in folder to the main threads of its traces, as ranges.

    The clocks of run and trace are matched at the beginning of each step, which both record.  Collections shorter than
    the instrument's min_event_ms are not in the record; their time stays where the trace has it.
    """
    began_ns = {row["step"]: row["t_ns"] for row in step_files.read(folder) if row.get("t_ns") is not None}
    seen = [
        (event, name) for event in step_files.read_events(folder) if event.get("ms") and (name := _range_name(event))
    ]
    for rank in ranks:
        steps, ranges = {number: start for number, start, _ in rank.steps()}, []
        for event, name in seen:
            number = event.get("step")
            if event.get("rank", 0) == rank.rank and number in steps and number in began_ns:
                start = steps[number] + event["t_ns"] - began_ns[number]
                ranges.append((name, start, start + round(event["ms"] * 1e6)))
        track = main_track(rank)
        if ranges and track is not None:
            rank.add_ranges(events.PYTHON, track, ranges)


def outside(folder: Path | str, explanation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the recorded collections and compilations in steps outside the account, the longest first.

    Lines are {"what", "part", "count", "ms", "first_step", "last_step"}.  explanation: account.answer() of that run.
    """
    counted = {step["step"] for rank in explanation["ranks"].values() for step in rank["steps"]}
    lines: dict[str, dict[str, Any]] = {}
    for event in step_files.read_events(folder):
        name, step, ms = _range_name(event), event.get("step"), event.get("ms")
        if name is None or step is None or not ms or step in counted:
            continue
        new = {"what": name, "part": PART_OF_EVENT[event["event"]], "count": 0, "ms": 0.0, "first_step": step}
        line = lines.setdefault(name, new)
        line |= {"count": line["count"] + 1, "ms": line["ms"] + ms, "last_step": step}
    return sorted(lines.values(), key=lambda line: -line["ms"])


def _range_name(event: dict[str, Any]) -> str | None:
    if event["event"] == "gc":
        return f"{COLLECTION} of generation {event.get('generation')}"
    return f"{COMPILATION} of {event.get('function')}" if event["event"] == "recompile" else None


def explain_record(folder: Path | str, passport: Path | None = None) -> dict[str, Any]:
    """Returns the answer of account.accounts_of() for a record.  Raises ValueError if it has no undisturbed step.

    passport: a file to use instead of the one that fits the run.
    """
    run = run_folder.read(folder)
    rows = [row for row in step_files.read(folder) if row.get("step_ms") is not None and not row.get("flags")]
    if not rows:
        raise ValueError(f"{folder}: it has no step that was timed undisturbed: run it longer, or record a trace")
    events_by_step: dict[int | None, list[Any]] = {}
    for event in step_files.read_events(folder):
        events_by_step.setdefault(event.get("step"), []).append(event)
    own = step_files.read_by_rank(folder).get("own_ms", [])
    late = stalls.lateness(own)
    ends_ns = [0, *itertools.accumulate(round(row["step_ms"] * NS_PER_MS) for row in rows)]
    pieces = parts.Pieces(list(zip((row["step"] for row in rows), ends_ns, ends_ns[1:])))
    gpus = run["environment"].get("gpus") or [{}]
    name = gpus[0].get("name")
    ceilings = Ceilings(
        name, passports.ceilings_of_run(run) if passport is None else passports.ceilings_of_file(passport, name)
    )
    for index, (row, (_, begin_ns, end_ns)) in enumerate(zip(rows, pieces.steps)):
        number = row["step"]
        rank = late[number][1] if number in late else None
        waited = (0.0, None) if rank is None else (own[rank][number] - own[0][number], rank)
        seen, arithmetic_ns = events_by_step.get(number, ()), _arithmetic_ns(run, number, ceilings)
        for piece, ns in _pieces_of_step(row, end_ns - begin_ns, seen, waited, arithmetic_ns):
            pieces.add(index, piece, ns)
    explanation = account.answer({0: account.Account(None, pieces, ceilings)}, "record")
    if run["status"] != "complete":
        explanation["doubts"].append(f"the run's status is {run['status']}: these are the steps that it has recorded")
    return explanation | {"outside": outside(folder, explanation)}


def _pieces_of_step(
    row: dict[str, Any],
    step_ns: int,
    events: Sequence[dict[str, Any]],
    waited: tuple[float, int | None],
    arithmetic_ns: int,
) -> list[tuple[parts.Piece, int]]:
    """Returns [(Piece, ns)] of one step, which add up to step_ns.  waited: (ms, late rank or None)."""
    pieces, left_ns = [], step_ns

    def take(part: str, what: str, ns: int, late_rank: int | None = None) -> None:
        nonlocal left_ns
        ns = min(left_ns, max(0, ns))
        left_ns -= ns
        pieces.append((parts.Piece(part, what, None, late_rank), ns))

    regions_ns = {name: round((row.get(name) or 0.0) * NS_PER_MS) for name in REGIONS}
    take(parts.LOADER, "data_ms", regions_ns["data_ms"])
    if any(regions_ns.values()):
        take(parts.HOST, "between the regions", step_ns - sum(regions_ns.values()))
    explained_ns = regions_ns["data_ms"]
    for event in events:
        if event["event"] in PART_OF_EVENT:
            ns = round((event.get("ms") or 0.0) * NS_PER_MS)
            take(PART_OF_EVENT[event["event"]], event["event"], ns)
            explained_ns += ns
    take(parts.WAITING, "own_ms of the ranks", round(waited[0] * NS_PER_MS), waited[1])
    explained_ns += max(0, round(waited[0] * NS_PER_MS))
    for event in events:
        if event["event"] == "stall":
            what = f"stalled steps: {event.get('what', 'unknown')}"
            take(parts.UNKNOWN, what, round((event.get("ms") or 0.0) * NS_PER_MS) - explained_ns)
    take(parts.OPTIMIZER, "optimizer_ms", regions_ns["optimizer_ms"])
    take(parts.ARITHMETIC, "the model's FLOPs", arithmetic_ns)
    has_regions = bool(regions_ns["forward_ms"] or regions_ns["backward_ms"])
    what = "forward_ms and backward_ms" if has_regions else "the step: a trace divides it (look=on)"
    take(parts.UNBOUND if has_regions else parts.UNKNOWN, what, left_ns)
    return pieces


def _arithmetic_ns(run: Mapping[str, Any], step: int, ceilings: Ceilings) -> int:
    """Returns the ns that a step's FLOPs need at the peak of rank 0's device; 0 if FLOPs or peak are not known."""
    flop = []
    for last in (step - 1, step):
        tokens, per_token = metrics.tokens_in_steps(run["measured"], last), metrics.flops_per_token(run, last)
        if tokens is None or per_token["flops_per_token"] is None:
            return 0
        flop.append(tokens * per_token["flops_per_token"])
    if flop[1] <= flop[0]:
        return 0
    precision = run["measured"].get("dtype")
    if precision == "float32" and run["hardware"].get("tf32"):
        precision = "tf32"
    facts = {"name": "the model's FLOPs", "shapes": None, "moved_bytes": None, "precision": precision}
    bound = ceilings.bound(facts | {"flop": (flop[1] - flop[0]) / run["world_size"]}, float("inf"))
    return 0 if bound is None else round(bound.limit_s * NS_PER_S)
