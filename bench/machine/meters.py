"""Meters of a run: the CPU use of other programs, peak memory, and its duration by clocks that nobody can set.

time.monotonic() and the time of day are slewed together (clock_gettime(2)), so they differ only if the time is set or
the machine sleeps.  /proc/uptime is the kernel's own, which a preloaded library does not change.
"""

import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.base.units import GIB, KIB, gib_from_bytes, s_from_ns

if TYPE_CHECKING:
    from bench.config.schema import HardwareConfig

# CPU cores that a rank's loader and instruments may use beside the threads that compute, and with gloo's two threads,
# which add gradients where there are several ranks (assumed)
OTHER_CORES, OTHER_CORES_OF_RANKS = 0.5, 2.5


def usable_cpus() -> list[int]:
    """Returns the numbers of the logical CPUs that this process may use: all if the system has no affinity, or refuses
    to tell it."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return list(range(os.cpu_count() or 1))


USABLE_CPUS = usable_cpus()  # as it began: a contestant that moves it to another core would hide a helper on this one


class CpuMeter:
    """Measures how much other programs use the cores that this process may use.

    foreign = busy time of those cores in /proc/stat, minus our own CPU time, over wall time.  /proc/stat counts in
    ticks of 10 ms per core, so it is coarse below about a second.  Time stolen by a hypervisor counts as foreign.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        read_busy_s: Callable[[], float | None] | None = None,
        own_s: Callable[[], float] = time.process_time,
    ):
        self._now_ns, self._read_busy_s, self._own_s = now_ns, read_busy_s or _busy_cpu_s, own_s
        self._start = (now_ns(), self._read_busy_s(), own_s())

    def own_cpu_s(self) -> float:
        """Returns CPU seconds of this process, all threads, since the meter was created."""
        return self._own_s() - self._start[2]

    def doubts_about_threads(self, hardware: "HardwareConfig") -> list[str]:
        """Returns a sentence if this rank on a CPU used more CPU time than its number of computing threads can."""
        cores = self.own_cpu_s() / max(s_from_ns(self._now_ns() - self._start[0]), 1e-9)
        num_threads, is_alone = hardware.num_threads, hardware.num_processes in (None, 1)
        most = (num_threads or 0) + (OTHER_CORES if is_alone else OTHER_CORES_OF_RANKS)
        if hardware.device != "cpu" or num_threads is None or cores <= most:
            return []
        return [f"its process kept {cores:.2f} CPU cores busy, but hardware.num_threads is {num_threads}"]

    def foreign_cpu_cores(self, own_cpu_s: float | None = None) -> float | None:
        """Returns mean cores since the meter was created, None without /proc.  own_cpu_s: of all our processes."""
        wall_s, busy_s = s_from_ns(self._now_ns() - self._start[0]), self._read_busy_s()
        if busy_s is None or self._start[1] is None or wall_s <= 0:
            return None
        own_cpu_s = self.own_cpu_s() if own_cpu_s is None else own_cpu_s
        return max(0.0, busy_s - self._start[1] - own_cpu_s) / wall_s


def _busy_cpu_s() -> float | None:
    """Returns the usable cores' busy seconds since boot: user, nice, system, irq, softirq and steal (man proc_stat)."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in USABLE_CPUS}
    lines = [line.split() for line in text.splitlines()]
    ticks = sum(int(line[column]) for line in lines if line[0] in usable for column in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK")


MAX_DIFFERENCE_S = 1.0


class RunClock:
    """Measures a run's duration from its creation; doubts() reports where the machine's clocks disagree."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.began_s, self._uptime_s = time.time(), _uptime_s()

    def lasted_s(self) -> float:
        """Returns the seconds since the clock was created."""
        return time.monotonic() - self.started_s

    def doubts(self) -> list[str]:
        """Returns a sentence for each other clock that differs by more than a second."""
        doubts, lasted_s, uptime_s = [], self.lasted_s(), _uptime_s()
        if abs(jump_s := time.time() - self.began_s - lasted_s) > MAX_DIFFERENCE_S:
            why = "it was set, or the machine slept; durations are by the monotonic clock, dates may be wrong"
            doubts.append(f"the time of day moved by {jump_s:+.1f} s against the monotonic clock during the run: {why}")
        if uptime_s is not None and self._uptime_s is not None:
            passed_s = uptime_s - self._uptime_s
            if abs(passed_s - lasted_s) > MAX_DIFFERENCE_S:
                both = f"{lasted_s:.1f} s of the run, the kernel's /proc/uptime {passed_s:.1f} s"
                why = "the machine slept, or this program sees a wrong time"
                doubts.append(f"the monotonic clock counted {both}: {why}")
        return doubts


def _uptime_s() -> float | None:
    """Returns seconds since boot, sleep included, to the hundredth; None if the system is not Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/uptime") as file:
        return float(file.read().split()[0])
    return None


def peak_rss_gib() -> float:
    """Returns the largest resident set of this process since it started its program, imports included.

    Uses VmHWM if there is one: getrusage's ru_maxrss also counts the process from which this one was forked.
    """
    if (peak_gib := largest_rss_gib(["self"])) is not None:
        return peak_gib
    unit_bytes = 1 if sys.platform == "darwin" else KIB  # getrusage(2)
    return gib_from_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)


def largest_rss_gib(pids: Iterable[int | str]) -> float | None:
    """Returns the largest VmHWM of these processes, None without /proc.  A process may reset its own (proc(5))."""
    peaks_kib: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
            peaks_kib += map(int, re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.M))
    return max(peaks_kib) * KIB / GIB if peaks_kib else None
