"""What the host's CPUs did for each step: how long this process ran, and how long it was ready and another one ran.

From /proc/self/task/*/schedstat (Linux: nanoseconds on a CPU, nanoseconds on the run queue; Documentation/scheduler/
sched-stats.rst of the kernel) of the threads that have worked most by the start of training, at most three; one read of
about a microsecond a thread and step, parsed after training.  Elsewhere only the main thread's CPU time is known.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from bench.training.instruments.base import Context, Instrument

MAX_THREADS = 3
MAX_BETWEEN_NS = 500_000  # else an instrument worked between two steps, and the end of one is not the start of the next


class Host(Instrument):
    in_timed_region = (
        "reads a file of /proc for each of at most three threads at the end of each step: some microseconds"
    )

    def __init__(self, context: Context):
        super().__init__(context)
        self._fds: list[int] = []  # of the main thread first
        self._before: Any = None
        self._read_ns = 0
        self._samples: list[tuple[int, Any, Any]] = []  # (row, what was read at the step's start, and at its end)

    def on_run_start(self) -> None:
        self._fds = [os.open(path, os.O_RDONLY) for path in _busiest_threads()]

    def on_step_start(self, step: int) -> None:
        if self._before is None or time.perf_counter_ns() - self._read_ns > MAX_BETWEEN_NS:
            self._before = self._read()

    def on_step_end(self, step: int) -> None:
        now, self._read_ns = self._read(), time.perf_counter_ns()
        self._samples.append((step + 1, self._before, now))
        self._before = now  # of the next step too, unless something comes between them

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        self._before = None

    def on_run_end(self) -> None:
        self.close()

    def _read(self):
        if self._fds:
            return [os.pread(fd, 64, 0) for fd in self._fds]
        return time.thread_time_ns()

    def columns(self) -> dict[str, dict[int, float]]:
        """cpu_ms: the main thread's CPU time; runqueue_ms: waiting for a CPU, the threads added up.

        Threads of one step wait for each other, so that a delay of any of them delays all; two at once count twice.
        """
        columns: dict[str, dict[int, float]] = {"cpu_ms": {}, "runqueue_ms": {}}
        for row, before, after in self._samples:
            if isinstance(before, int):
                columns["cpu_ms"][row] = (after - before) / 1e6
                continue
            spent = [_spent_ms(*pair) for pair in zip(before, after)]
            columns["cpu_ms"][row] = spent[0][0]
            columns["runqueue_ms"][row] = sum(runqueue_ms for _, runqueue_ms in spent)
        return columns

    def summary(self) -> dict:
        """Sums over the steps of this rank that nothing disturbed; None: nothing was read."""
        kept = {
            name: [ms for row, ms in rows.items() if row not in self.context.flagged]
            for name, rows in self.columns().items()
        }
        return {name: sum(found_ms) if found_ms else None for name, found_ms in kept.items()}

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _spent_ms(before, after):
    """Two lines "cpu_ns runqueue_ns slices" -> (milliseconds on a CPU, milliseconds ready but not running)."""
    first, second = before.split(), after.split()
    return tuple((int(second[num]) - int(first[num])) / 1e6 for num in (0, 1))


def _busiest_threads():
    """schedstat files of the main thread and of those that have run longest; [] where the system has none."""
    result = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            is_main = path.parent.name == str(threading.main_thread().native_id)
            result.append((is_main, int(path.read_text().split()[0]), path))
        except (OSError, ValueError, IndexError):  # it has just ended, or the kernel keeps no such statistics
            continue
    result.sort(reverse=True)  # the main thread first
    return [path for _, _, path in result[:MAX_THREADS]] if result and result[0][0] else []


INSTRUMENT = Host
