"""CPU time and run-queue time (ready, while another thread ran) of this process in each step.

Linux reports both in nanoseconds in /proc/self/task/*/schedstat (Documentation/scheduler/sched-stats.rst).  They are
read for up to three threads, the busiest when training began, which takes about a microsecond per thread and step, and
parsed after training.  On other systems only the main thread's CPU time is known.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from bench.training.instruments.base import Context, Instrument

MAX_THREADS = 3
MAX_BETWEEN_NS = 500_000  # after a longer gap (an instrument worked there), a step's start is read again


class Host(Instrument):
    in_timed_region = (
        "At the end of each step it reads one file of /proc for each of up to three threads, which takes a few "
        "microseconds."
    )

    def __init__(self, context: Context):
        super().__init__(context)
        self._fds: list[int] = []  # schedstat files, the main thread's first
        self._before: Any = None
        self._read_ns = 0
        self._samples: list[tuple[int, Any, Any]] = []  # (row, readings at the step's start, readings at its end)

    def on_run_start(self) -> None:
        self._fds = [os.open(path, os.O_RDONLY) for path in _busiest_threads()]

    def on_step_start(self, step: int) -> None:
        if self._before is None or time.perf_counter_ns() - self._read_ns > MAX_BETWEEN_NS:
            self._before = self._read()

    def on_step_end(self, step: int) -> None:
        now, self._read_ns = self._read(), time.perf_counter_ns()
        self._samples.append((step + 1, self._before, now))
        self._before = now  # also the start of the next step, unless something comes between them

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        self._before = None

    def on_run_end(self) -> None:
        self.close()

    def _read(self) -> list[bytes] | int:
        if self._fds:
            return [_schedstat(fd) for fd in self._fds]
        return time.thread_time_ns()

    def columns(self) -> dict[str, dict[int, float]]:
        """Returns cpu_ms, the main thread's CPU time, and runqueue_ms, time waiting for a CPU summed over the threads.

        Threads of a step wait for each other, so a delay of one delays all; simultaneous delays of two count twice.
        """
        columns: dict[str, dict[int, float]] = {"cpu_ms": {}, "runqueue_ms": {}}
        for row, before, after in self._samples:
            if isinstance(before, int):
                columns["cpu_ms"][row] = (after - before) / 1e6
                continue
            # each file is "ns_on_a_cpu ns_on_the_run_queue slices"
            start, end = ([[int(ns) for ns in line.split()[:2]] for line in lines] for lines in (before, after))
            columns["cpu_ms"][row] = (end[0][0] - start[0][0]) / 1e6
            columns["runqueue_ms"][row] = sum((last[1] - first[1]) / 1e6 for first, last in zip(start, end) if last)
        return columns

    def summary(self) -> dict[str, float | None]:
        """Returns each column's sum over the undisturbed steps of this rank; None if nothing was read."""
        kept_ms = {name: self.context.undisturbed(ms) for name, ms in self.columns().items()}
        return {name: sum(ms) if ms else None for name, ms in kept_ms.items()}

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _schedstat(fd: int) -> bytes:
    """Returns the content of a thread's schedstat, empty if the thread has ended; the main thread never has."""
    try:
        return os.pread(fd, 64, 0)
    except ProcessLookupError:
        return b""


def _busiest_threads() -> list[Path]:
    """Returns the schedstat files of the main thread and of those that ran longest; [] if the system has none."""
    threads = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            is_main = path.parent.name == str(threading.main_thread().native_id)
            threads.append((is_main, int(path.read_text().split()[0]), path))
        except (OSError, ValueError, IndexError):  # the thread has just ended, or the kernel keeps no such statistics
            continue
    threads.sort(reverse=True)  # the main thread first
    return [path for _, _, path in threads[:MAX_THREADS]] if threads and threads[0][0] else []


INSTRUMENT = Host
