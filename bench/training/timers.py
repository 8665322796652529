"""Time between two marks on a device, without waiting for it in between.

marks_for(device_type) gives the backend: CUDA events from a pool, read when the device has passed them, or host stamps.
"""

import time
from collections.abc import Callable


class HostMarks:
    """Marks on a device that computes at once (a CPU): stamps of time.perf_counter_ns."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns):
        self.mark = now_ns

    def ready(self, mark: int) -> bool:
        return True

    def wait(self, mark: int) -> None:
        pass

    def ms_between(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def free(self, *marks: int) -> None:
        pass


class CudaMarks:
    """CUDA events on the current stream, used again and again: an event costs more to make than to record."""

    def __init__(self):
        self._pool = []

    def mark(self):
        import torch

        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ready(self, mark) -> bool:
        return mark.query()

    def wait(self, mark) -> None:
        mark.synchronize()

    def ms_between(self, start, end) -> float:
        return start.elapsed_time(end)

    def free(self, *marks) -> None:
        self._pool.extend(marks)


def marks_for(device_type: str) -> HostMarks | CudaMarks:
    """ "cuda" or "cpu" -> HostMarks or CudaMarks."""
    return CudaMarks() if device_type == "cuda" else HostMarks()
