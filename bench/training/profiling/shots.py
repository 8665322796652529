"""Windows of steps under the profiler: what became of each, on one rank and on all, and what recording costs a step."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.config.windows import ProfilerWindow
from bench.training.profiling import files

READ_LATE_STEPS = 2  # marks of a GPU are read when it has passed them


@dataclass
class Shot:
    """One window, and what became of it on this rank."""

    window: ProfilerWindow
    status: str = "not reached"  # then "recorded", or "cut short" if the run ended within it
    rows: list[int] = field(default_factory=list)  # recorded, finished
    recording: Any = None  # a Recording (bench/training/profiling/recording.py), which needs torch
    saved: files.Saved | None = None
    flush_ms: float | None = None


def merged(summaries: Sequence[dict[str, dict]]) -> dict[str, dict]:
    """Trace.summary() of every rank -> one: of each window its first recording rank's, with all files."""
    merged_windows = {}
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        of_ranks = [summary[name] for summary in summaries if name in summary]
        written = [one for one in of_ranks if one.get("files")] or of_ranks[:1]
        merged_windows[name] = window = dict(written[0])
        if len(written) > 1:
            window["files"] = [file for one in written for file in one["files"]]
            window["flush_ms"] = max(one["flush_ms"] for one in written)
            window |= {key: sum(one[key] for one in written) for key in ("num_events", "num_bytes")}
            window["dropped"] = dict(sum((Counter(one["dropped"]) for one in written), Counter()))
    return merged_windows


class StepTimes:
    """start() and end() around every step; of(rows) after read_all().  marks: a backend of bench.training.clock."""

    def __init__(self, marks: Any):
        self._marks = marks
        self._unread: list[tuple[int, Any, Any]] = []  # [(row, start, end)]
        self._start = None
        self._ms: dict[int, float] = {}

    def start(self) -> None:
        self._start = self._marks.mark()

    def end(self, row: int) -> None:
        self._unread.append((row, self._start, self._marks.mark()))
        if len(self._unread) > READ_LATE_STEPS and self._marks.ready(self._unread[0][2]):
            self._read()

    def _read(self):
        row, start, end = self._unread.pop(0)
        self._ms[row] = self._marks.ms_between(start, end)
        self._marks.free(start, end)

    def read_all(self) -> None:
        while self._unread:
            self._marks.wait(self._unread[0][2])
            self._read()

    def median_ms(self, rows: Iterable[int]) -> float | None:
        """Of those rows that were measured; None if none was."""
        known_ms = [self._ms[row] for row in rows if row in self._ms]
        return statistics.median(known_ms) if known_ms else None

    def cost(self, profiled_rows: Iterable[int], disturbed_rows: Iterable[int]) -> dict[str, float | None]:
        """{"profiled_step_ms", "other_step_ms", "cost_pct"}: medians, and by how much the first is above the second."""
        profiled_ms = self.median_ms(profiled_rows)
        other_ms = self.median_ms(set(self._ms).difference(disturbed_rows))
        cost_pct = 100 * (profiled_ms / other_ms - 1) if profiled_ms is not None and other_ms else None
        return {"profiled_step_ms": profiled_ms, "other_step_ms": other_ms, "cost_pct": cost_pct}
