"""The host, where NVML has no device: CPU utilisation, frequency, temperature, the run's resident set, load."""

import os

import psutil

from bench.units import gib_from_bytes

SLOW_EVERY = 10  # samples: frequency, temperature and the list of processes cost a file for each CPU or process


class Host:
    """sample(t_ns) -> a row of device "cpu"."""

    name = "cpu"

    def __init__(self, root_pid):
        """root_pid: the process whose descendants, itself included, are the run."""
        self._root_pid = root_pid
        self._slow = {}
        self._processes = []
        self._num_samples = 0
        self._util_pct()  # the first call of psutil's has nothing to compare with

    def sample(self, t_ns):
        if self._num_samples % SLOW_EVERY == 0:
            self._processes = run_processes(self._root_pid)
            self._slow = {"cpu_freq_mhz": _frequency_mhz(), "temp_c": _temperature_c()}
        self._num_samples += 1
        return {
            "t_ns": t_ns,
            "device": self.name,
            "cpu_util_pct": self._util_pct(),
            "rss_gib": self._rss_gib(),
            "load": os.getloadavg()[0],
            **self._slow,
        }

    @staticmethod
    def _util_pct():
        """Of all CPUs of the machine since the call before, 0 to 100."""
        return psutil.cpu_percent(None)

    def _rss_gib(self):
        """Resident sets added up: pages shared by several processes count in each."""
        rss_bytes = 0
        for process in self._processes:
            try:
                rss_bytes += process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        return gib_from_bytes(rss_bytes) if rss_bytes else None


def run_processes(root_pid):
    """The process and its descendants, but for the sampler that asks; [] when it is gone."""
    try:
        root = psutil.Process(root_pid)
        found = [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
    return [process for process in found if process.pid != os.getpid()]


def _frequency_mhz():
    """Mean over the CPUs; None where the system does not tell (many virtual machines)."""
    try:
        found = psutil.cpu_freq()
    except (OSError, AttributeError, NotImplementedError, RuntimeError):
        return None
    return found.current if found and found.current else None


def _temperature_c():
    """The hottest sensor of the CPU; None where there is none."""
    try:
        found = psutil.sensors_temperatures()
    except (OSError, AttributeError):
        return None
    of_cpu = [one.current for name in ("coretemp", "k10temp", "zenpower", "cpu_thermal") for one in found.get(name, ())]
    return max(of_cpu, default=None)
