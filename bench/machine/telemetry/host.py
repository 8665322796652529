"""The host, where NVML has no device: CPU utilisation, frequency, temperature, the run's resident set, load.

Reading a frequency can wake every core, and a temperature many files: both are asked once a second only.
"""

import contextlib
import os
import time

import psutil

from bench.base.units import gib_from_bytes

SLOW_S = 1.0
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
FAMILY_S = 10.0  # a search for processes reads a file of each one on the machine: some 10 ms on a large one


class Family:
    """The processes of the run: root_pid and its descendants, but for the sampler that asks."""

    def __init__(self, root_pid, now_s=time.monotonic):
        self._root_pid, self._now_s = root_pid, now_s
        self._processes, self._searched_s = [], None

    def processes(self, since_s=FAMILY_S):
        """As they were at most so many seconds ago; [] when the first of them is gone."""
        if self._searched_s is None or self._now_s() - self._searched_s >= since_s:
            self._processes, self._searched_s = _descendants(self._root_pid), self._now_s()
        return self._processes

    def pids(self, since_s=FAMILY_S):
        return {process.pid for process in self.processes(since_s)}


def _descendants(root_pid):
    try:
        root = psutil.Process(root_pid)
        return [process for process in (root, *root.children(recursive=True)) if process.pid != os.getpid()]
    except psutil.Error:
        return []


class Host:
    """sample(t_ns, now_ns) -> a row of device "cpu"."""

    name = "cpu"

    def __init__(self, family):
        self._family = family
        self._slow, self._slow_ns = {}, None
        psutil.cpu_percent(None)  # the first call has nothing to compare with

    def sample(self, t_ns, now_ns):
        if self._slow_ns is None or now_ns - self._slow_ns >= SLOW_S * 1e9:
            self._slow_ns = now_ns
            self._slow = {"cpu_freq_mhz": _frequency_mhz(), "temp_c": _temperature_c(), "load": os.getloadavg()[0]}
        return {
            "t_ns": t_ns,
            "device": self.name,
            "late_ms": round((now_ns - t_ns) / 1e6, 3),
            "cpu_util_pct": psutil.cpu_percent(None),  # of all CPUs since the call before, 0 to 100
            "rss_gib": self._rss_gib(),
            **self._slow,
        }

    def _rss_gib(self):
        """Resident sets added up: pages shared by several processes count in each."""
        rss_bytes = 0
        for process in self._family.processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                rss_bytes += process.memory_info().rss
        return gib_from_bytes(rss_bytes) if rss_bytes else None


def _frequency_mhz():
    """Mean over the CPUs; None where the system does not say (many virtual machines)."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, AttributeError, NotImplementedError, RuntimeError):
        return None
    return frequency.current or None if frequency else None


def _temperature_c():
    """The hottest sensor of the CPU; None where there is none."""
    try:
        sensors = psutil.sensors_temperatures()
    except (OSError, AttributeError):
        return None
    return max((one.current for name in CPU_SENSORS for one in sensors.get(name, ())), default=None)
