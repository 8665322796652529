"""What a run's record knows of its steps and its trace does not: collections and recompilations, as ranges."""

from collections.abc import Sequence
from pathlib import Path

from bench.analysis.explain.host import COLLECTION, COMPILATION, main_track
from bench.analysis.trace import events
from bench.analysis.trace.load import Rank
from bench.record import step_files


def add(ranks: Sequence[Rank], folder: Path | str) -> None:
    """ranks: of the run in folder, traces of its steps; its events become ranges of their main threads.

    The run's clock and the trace's are matched at the beginning of each step, which both know.  Collections under the
    instrument's min_event_ms are not in the record and stay where they are.
    """
    began_ns = {row["step"]: row["t_ns"] for row in step_files.read(folder) if row.get("t_ns") is not None}
    seen = [event for event in step_files.read_events(folder) if event.get("ms") and _name(event)]
    for rank in ranks:
        steps, ranges = {number: start for number, start, _ in rank.steps()}, []
        for event in seen:
            number = event.get("step")
            if event.get("rank", 0) == rank.rank and number in steps and number in began_ns:
                start = steps[number] + event["t_ns"] - began_ns[number]
                ranges.append((_name(event), start, start + round(event["ms"] * 1e6)))
        if ranges:
            rank.add_ranges(events.PYTHON, main_track(rank), ranges)


def _name(event):
    if event["event"] == "gc":
        return f"{COLLECTION} of generation {event.get('generation')}"
    return f"{COMPILATION} of {event.get('function')}" if event["event"] == "recompile" else None
