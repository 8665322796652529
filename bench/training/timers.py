"""Time between two marks on a device, without waiting for it in between.

marks_for(device) gives the backend: CUDA events from a pool, read when the device has passed them, or host stamps.
CUDATimer and CUDATimerCollection are the public classes, with KempnerForge's API (kempnerforge/profiling/cuda_timer.py)
but without its faults: they add up over micro-steps, forget what is not repeated, and work without CUDA.
"""

import time


class HostMarks:
    """Marks on a device that computes as it is told to (a CPU): stamps of time.perf_counter_ns."""

    def __init__(self, now_ns=time.perf_counter_ns):
        self.mark = now_ns

    def ready(self, mark):
        return True

    def wait(self, mark):
        pass

    def ms_between(self, start, end):
        return (end - start) / 1e6

    def free(self, *marks):
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

    def ready(self, mark):
        return mark.query()

    def wait(self, mark):
        mark.synchronize()

    def ms_between(self, start, end):
        return start.elapsed_time(end)

    def free(self, *marks):
        self._pool.extend(marks)


def marks_for(device_type):
    return CudaMarks() if device_type == "cuda" else HostMarks()


def _default_marks():
    import torch

    return marks_for("cuda" if torch.cuda.is_available() else "cpu")


class CUDATimer:
    """Milliseconds between start() and stop(), added up over repetitions until reset().

    elapsed_ms() waits for the last stop on the device; never stopped is 0.0.  Also a context manager.  Raises
    RuntimeError for a start without a stop, or a stop without a start.
    """

    def __init__(self, marks=None):
        self._marks = marks or _default_marks()
        self._pairs = []  # recorded, not yet read
        self._started = None
        self._total_ms = 0.0
        self._count = 0

    def start(self):
        if self._started is not None:
            raise RuntimeError("CUDATimer.start() twice: call stop() first")
        self._started = self._marks.mark()

    def stop(self):
        if self._started is None:
            raise RuntimeError("CUDATimer.stop() without start()")
        self._pairs.append((self._started, self._marks.mark()))
        self._started = None

    def elapsed_ms(self):
        for start, end in self._pairs:
            self._marks.wait(end)
            self._total_ms += self._marks.ms_between(start, end)
            self._count += 1
            self._marks.free(start, end)
        self._pairs = []
        return self._total_ms

    @property
    def count(self):
        """Finished repetitions since the last reset."""
        return self._count + len(self._pairs)

    def reset(self):
        self.elapsed_ms()  # gives the marks back
        self._total_ms, self._count = 0.0, 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.stop()


class CUDATimerCollection:
    """One CUDATimer per named region.  enabled=False makes every call free and every time 0.0.

    elapsed_ms(region) and elapsed_all() wait for the device; reset() begins the next step.  An undeclared region raises
    KeyError with the declared ones.
    """

    def __init__(self, regions, enabled=True, marks=None):
        self.enabled = enabled
        marks = marks or (_default_marks() if enabled else None)
        self._timers = {region: CUDATimer(marks) if enabled else None for region in regions}

    def _timer(self, region):
        if region not in self._timers:
            raise KeyError(f"{region!r} is no declared region: {', '.join(self._timers)}")
        return self._timers[region]

    def start(self, region):
        if self.enabled:
            self._timer(region).start()

    def stop(self, region):
        if self.enabled:
            self._timer(region).stop()

    def elapsed_ms(self, region):
        return self._timer(region).elapsed_ms() if self.enabled else 0.0

    def elapsed_all(self):
        return {region: self.elapsed_ms(region) for region in self._timers}

    def reset(self):
        if self.enabled:
            for timer in self._timers.values():
                timer.reset()
