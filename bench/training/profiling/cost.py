"""What profiling costs a step: milliseconds of those that were recorded, of those that were not, and the ratio."""

import statistics
from collections.abc import Iterable

READ_LATE_STEPS = 2  # marks of a GPU are read when it has passed them


class StepTimes:
    """start() and end() around every step; of(rows) after read_all().  marks: a backend of bench.training.timers."""

    def __init__(self, marks):
        self._marks = marks
        self._unread = []  # [(row, start, end)]
        self._start = None
        self._ms = {}

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
        result = [self._ms[row] for row in rows if row in self._ms]
        return statistics.median(result) if result else None

    def cost(self, profiled_rows: Iterable[int], disturbed_rows: Iterable[int]) -> dict[str, float | None]:
        """{"profiled_step_ms", "other_step_ms", "cost_pct"}: medians, and by how much the first is above the second."""
        profiled_ms = self.median_ms(profiled_rows)
        other_ms = self.median_ms(set(self._ms).difference(disturbed_rows))
        cost_pct = None if None in (profiled_ms, other_ms) or not other_ms else 100 * (profiled_ms / other_ms - 1)
        return {"profiled_step_ms": profiled_ms, "other_step_ms": other_ms, "cost_pct": cost_pct}
