"""What counts as training time.  Written here and nowhere else.

The clock runs from start() to stop() and stands still inside paused(reason).  Every edge waits for the device first,
so that work queued before an edge is paid for before it.  Host time, time.perf_counter_ns; a run's time is the
maximum over ranks, which bench/training/run.py gathers.

Each edge is also reported, off the clock, to the launcher, who has a clock of its own (bench/record/outside_clock.py).
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from bench.record.outside_clock import GO, PAUSE, START, STOP

TIMING_PROTOCOL = {
    "id": "tp-1",  # a change of anything below needs a new id: runs timed differently are not comparable
    "clock": "host time.perf_counter_ns between barrier + device sync and device sync + barrier, maximum over ranks",
    "excluded": ["launch", "imports", "building", "compilation", "warm-up", "validation", "writing the record"],
    "in_timed_region": ["next batch", "forward", "backward", "optimizer", "gradient and Muon communication"],
    "step_ms": "CUDA events on the compute stream read late, or host time on a CPU; maximum over ranks",
    "step_lines": "train_time and step_avg of step lines come from the same marks; lines are written by another thread",
    "warm_up": "every graph of the race on real batches, then weights, optimizer, RNG and loader restored bit for bit",
    "garbage_collection": "collected and frozen before the start, left on",
}


def reporter(path: str | None) -> Callable[[str], None]:
    """path: the launcher's pipe, None: there is none -> a function that writes a word into it, in about 2 microseconds.

    What cannot be written is lost, and the launcher says so: no rank waits for it.
    """
    try:
        fd = None if path is None else os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        fd = None

    def report(word):
        if fd is not None:
            with contextlib.suppress(OSError):
                os.write(fd, f"{word}\n".encode())

    return report


class Clock:
    """clock.start(); ...; with clock.paused("validation"): ...; clock.stop().  sync() waits for the device.

    report(word): called at each edge, while the clock stands still.
    """

    def __init__(
        self,
        sync: Callable[[], None],
        barrier: Callable[[], None],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        report: Callable[[str], None] = lambda word: None,
    ):
        self._sync, self._barrier, self._now_ns, self._report = sync, barrier, now_ns, report
        self._running_since_ns = None
        self._train_ns, self._has_stopped = 0, False
        self.paused_ns = {}  # reason -> ns
        self.num_pauses = {}  # reason -> count

    def start(self) -> None:
        assert self._running_since_ns is None and self._train_ns == 0, "a clock is started once"
        self._barrier()
        self._sync()
        self._report(START)
        self._running_since_ns = self._now_ns()

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        self._sync()
        stopped_ns = self._now_ns()
        self._train_ns += stopped_ns - self._running_since_ns
        self._running_since_ns = None
        self._report(PAUSE)
        yield
        if not self._has_stopped:
            self._barrier()  # what one rank did longer than the others in its pause is not training time
            self._sync()
            self._report(GO)
        started_ns = self._now_ns()
        self.paused_ns[reason] = self.paused_ns.get(reason, 0) + started_ns - stopped_ns
        self.num_pauses[reason] = self.num_pauses.get(reason, 0) + 1
        self._running_since_ns = None if self._has_stopped else started_ns

    def stop(self) -> None:
        """Also inside a pause: train_s is then what it was when that began, as the last step line says."""
        if self._running_since_ns is not None:
            self._sync()
            self._train_ns += self._now_ns() - self._running_since_ns
            self._running_since_ns = None
        self._report(STOP)
        self._has_stopped = True
        self._barrier()

    @property
    def train_s(self) -> float:
        """Seconds of training up to the last edge: exact after stop() and inside paused()."""
        return self._train_ns / 1e9
