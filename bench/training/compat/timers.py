"""KempnerForge's CUDATimer and CUDATimerCollection on this harness's marks."""

from collections.abc import Iterable

from bench.training.memory import recording
from bench.training.timers import CudaMarks, HostMarks, marks_for


def device_type() -> str:
    """ "cuda" where memory of a GPU can be recorded, else "cpu"."""
    return "cuda" if recording.is_available() else "cpu"


class CUDATimer:
    """Milliseconds between start() and stop(), added up until reset(); also a context manager.

    elapsed_ms() waits for the last stop on the device; 0.0 before the first.  RuntimeError for a second start
    without a stop, or a stop without a start.
    """

    def __init__(self, marks: HostMarks | CudaMarks | None = None):
        self._marks = marks or marks_for(device_type())
        self._pairs, self._started, self._total_ms = [], None, 0.0  # pairs: recorded, not yet read

    def start(self) -> None:
        if self._started is not None:
            raise RuntimeError("CUDATimer.start() twice: call stop() first")
        self._started = self._marks.mark()

    def stop(self) -> None:
        if self._started is None:
            raise RuntimeError("CUDATimer.stop() without start()")
        self._pairs.append((self._started, self._marks.mark()))
        self._started = None

    def elapsed_ms(self) -> float:
        for start, end in self._pairs:
            self._marks.wait(end)
            self._total_ms += self._marks.ms_between(start, end)
            self._marks.free(start, end)
        self._pairs = []
        return self._total_ms

    def reset(self) -> None:
        self.elapsed_ms()  # gives the marks back
        self._total_ms = 0.0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.stop()


class CUDATimerCollection:
    """One CUDATimer per named region; reset() begins the next step.  KeyError for a region that was not declared.

    enabled=False makes every call free and every time 0.0.
    """

    def __init__(self, regions: Iterable[str], enabled: bool = True, marks: HostMarks | CudaMarks | None = None):
        self.enabled = enabled
        marks = marks or (marks_for(device_type()) if enabled else None)
        self._timers = {region: CUDATimer(marks) if enabled else None for region in regions}

    def start(self, region: str) -> None:
        if self.enabled:
            self._timers[region].start()

    def stop(self, region: str) -> None:
        if self.enabled:
            self._timers[region].stop()

    def elapsed_ms(self, region: str) -> float:
        return self._timers[region].elapsed_ms() if self.enabled else 0.0

    def elapsed_all(self) -> dict[str, float]:
        """Milliseconds of each region."""
        return {region: self.elapsed_ms(region) for region in self._timers}

    def reset(self) -> None:
        for timer in self._timers.values() if self.enabled else ():
            timer.reset()
