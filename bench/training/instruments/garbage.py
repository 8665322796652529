"""Python's garbage collections in the timed region: when, in which step, of which generation, how many milliseconds.

gc.callbacks reports every collection, whichever thread set it off; all threads of the process wait for it.  The
setting hardware.gc chooses the collector's policy (bench/training/timing/clock.py).
"""

import gc
import time
from typing import Any

from bench.training.instruments.base import Context, Instrument


class Garbage(Instrument):
    """Emits an event for each collection of min_event_ms or longer, and counts the shorter ones."""

    in_timed_region = (
        "It remembers the running step, reads the clock before and after each collection, and logs a long one at "
        "the end of its step."
    )

    def __init__(self, context: Context, min_event_ms: float):
        super().__init__(context)
        self._min_event_ns = min_event_ms * 1e6
        self._row: int | None = None  # row of the running step; None between steps, where the clock may be paused
        self._began_ns: int | None = None
        self._pauses: list[tuple[int, int]] = []  # (generation, ns) of the collections within steps
        self._between_ns: list[int] = []
        self._long: list[tuple[int, int, int, int, int]] = []  # long collections whose event is not emitted yet

    def on_run_start(self) -> None:
        gc.callbacks.append(self._seen)

    def on_step_start(self, step: int) -> None:
        self._row = step + 1

    def on_step_end(self, step: int) -> None:
        self._row = None
        if self._long:
            self._emit()

    def on_run_end(self) -> None:
        self.close()
        self._emit()
        self.context.emit("gc_total", count=len(self._pauses), ms=sum(ns for _, ns in self._pauses) / 1e6)

    def _seen(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
            return
        if self._began_ns is None:  # the collection began before this callback was registered
            return
        ns = time.perf_counter_ns() - self._began_ns
        if self._row is None:
            self._between_ns.append(ns)
            return
        self._pauses.append((info["generation"], ns))
        if ns >= self._min_event_ns:
            self._long.append((self._began_ns, ns, self._row, info["generation"], info["collected"]))

    def _emit(self) -> None:
        for began_ns, ns, row, generation, num_collected in self._long:
            facts = {"ms": ns / 1e6, "generation": generation, "num_collected": num_collected}
            self.context.emit("gc", t_ns=began_ns, step=row, **facts)
        self._long = []

    def summary(self) -> dict[str, Any]:
        """Returns this rank's counts and times; between_steps_ms is outside the timed region or at its edge."""
        by_generation = {str(generation): 0 for generation in range(3)}
        for generation, _ in self._pauses:
            by_generation[str(generation)] += 1
        return {
            "num_collections": len(self._pauses),
            "num_by_generation": by_generation,
            "pause_ms": sum(ns for _, ns in self._pauses) / 1e6,
            "max_pause_ms": max((ns for _, ns in self._pauses), default=0) / 1e6,
            "between_steps_ms": sum(self._between_ns) / 1e6,
        }

    def close(self) -> None:
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)


INSTRUMENT = Garbage
