"""Milliseconds of data wait, forward, backward and optimizer in every step.

Each phase edge is marked by a pooled CUDA event or a host timestamp, which is read after the device has passed it: no
sync.  A step's region is the sum over its micro-steps.  A captured CUDA graph has no edges: its regions are empty.
"""

from bench.training.instruments.base import PHASES, Context, Instrument
from bench.training.timing.clock import StepMarks


class Regions(Instrument):
    in_timed_region = (
        "At each edge of a phase it records a CUDA event or, on a CPU, reads the clock. It never synchronizes."
    )

    def __init__(self, context: Context):
        super().__init__(context)
        self._times = StepMarks(context.marks, PHASES)

    def on_step_start(self, step: int) -> None:
        self._times.start()

    def on_phase(self, name: str) -> None:
        self._times.mark(name)

    def on_step_end(self, step: int) -> None:
        self._times.end(step + 1)

    def on_run_end(self) -> None:
        self._times.read_all()

    def columns(self) -> dict[str, dict[int, float]]:
        return {f"{phase}_ms": ms for phase, ms in self._times.ms.items()}

    def summary(self) -> dict[str, float]:
        """Returns each region's mean milliseconds over the undisturbed steps of this rank."""
        kept_ms = {name: self.context.undisturbed(ms) for name, ms in self.columns().items()}
        return {name: sum(ms) / len(ms) for name, ms in kept_ms.items() if ms}


INSTRUMENT = Regions
