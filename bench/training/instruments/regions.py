"""Milliseconds of data wait, forward, backward and optimizer in every step.

One mark per phase edge (a CUDA event from the pool, or a host stamp), read after the device has passed it: no sync.
A step's region is the sum over its micro-steps.  Inside a captured CUDA graph there are no edges: its regions
are empty.
"""

from bench.training.instruments.base import PHASES, Context, Instrument

READ_LATE_STEPS = 2  # a GPU is seldom further behind its host; what is not ready yet is read later still


class Regions(Instrument):
    in_timed_region = "a CUDA event, or a clock read on a CPU, at each edge of a phase: no sync"

    def __init__(self, context: Context):
        super().__init__(context)
        self._marks = context.marks
        self._edges: list[tuple] | None = None  # [(phase, mark)] of the running step
        self._unread: list[tuple[int, list[tuple]]] = []  # [(row, edges)]
        self._ms: dict[str, dict[int, float]] = {f"{phase}_ms": {} for phase in PHASES}

    def on_step_start(self, step: int) -> None:
        self._edges = []

    def on_phase(self, name: str) -> None:
        if self._edges is not None:
            self._edges.append((name, self._marks.mark()))

    def on_step_end(self, step: int) -> None:
        assert self._edges is not None  # the step has begun
        self._edges.append(("", self._marks.mark()))
        self._unread.append((step + 1, self._edges))
        self._edges = None
        if len(self._unread) > READ_LATE_STEPS and self._marks.ready(self._unread[0][1][-1][1]):
            self._read(*self._unread.pop(0))

    def _read(self, row, edges):
        for (phase, start), (_, end) in zip(edges, edges[1:]):
            column = self._ms[f"{phase}_ms"]
            column[row] = column.get(row, 0.0) + self._marks.ms_between(start, end)
        self._marks.free(*(mark for _, mark in edges))

    def on_run_end(self) -> None:
        while self._unread:
            self._marks.wait(self._unread[0][1][-1][1])
            self._read(*self._unread.pop(0))

    def columns(self) -> dict[str, dict[int, float]]:
        return self._ms

    def summary(self) -> dict:
        """Mean milliseconds of each region over the steps of this rank that nothing disturbed."""
        kept = {
            name: [ms for row, ms in rows.items() if row not in self.context.flagged] for name, rows in self._ms.items()
        }
        return {name: sum(found_ms) / len(found_ms) for name, found_ms in kept.items() if found_ms}


INSTRUMENT = Regions
