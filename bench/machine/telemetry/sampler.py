"""The sampling process:  python -m bench.machine.telemetry.sampler JOB

JOB is JSON: path, interval_ms (of GPUs), host_interval_ms (of the host, if there is no GPU), uuids, num_devices,
root_pid.  Rank 0's instrument starts it, and steers it by lines on its standard input: "start" and "stop" are each
answered by a line of JSON with the energy counters read at that moment.  It ends with the pipe, and with its parent,
which it checks too, because another process may hold the pipe open.  It uses no torch, no CUDA context and no lock
shared with the training process.  It is nice and not pinned: the scheduler gives it an idle core, and if there is none,
training goes first; a late sample is stamped as late.
"""

import contextlib
import gc
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.base.units import gib_from_bytes
from bench.machine import processes
from bench.machine.telemetry import nvml

NICE = 10
FOREIGN_EVERY_S = 1.0
PARENT_EVERY_S = 1.0
NOT_REPORTED = (OSError, AttributeError, NotImplementedError, RuntimeError)  # what psutil raises then, by system
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
FAULTS = "logs/gpus.log"  # in the folder of telemetry.csv; bench/record/failures.py reads it
FAMILY_S = 10.0  # interval of searches, which read a file of each process: some 10 ms on a large machine


class Family:
    """The processes of the run: root_pid and its descendants, except this sampler."""

    def __init__(self, root_pid: int, now_s: Callable[[], float] = time.monotonic):
        self._root_pid, self._now_s = root_pid, now_s
        self._processes: list[psutil.Process] = []
        self._searched_s: float | None = None

    def processes(self, since_s: float = FAMILY_S) -> list[psutil.Process]:
        """Returns the processes as of at most since_s seconds ago; [] if the first of them is gone."""
        if self._searched_s is None or self._now_s() - self._searched_s >= since_s:
            self._processes, self._searched_s = [], self._now_s()
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(self._root_pid)
                family = (root, *root.children(recursive=True))
                self._processes = [process for process in family if process.pid != os.getpid()]
        return self._processes

    def pids(self, since_s: float = FAMILY_S) -> set[int]:
        return {process.pid for process in self.processes(since_s)}


class Host:
    """Samples the host.  sample(t_ns, now_ns) returns a row of device "cpu"."""

    name = "cpu"

    def __init__(self, family: Family):
        self._family = family
        self._slow: nvml.Row = {}
        self._slow_ns: int | None = None
        psutil.cpu_percent(None)  # the first call returns nothing useful

    def sample(self, t_ns: int, now_ns: int) -> nvml.Row:
        if self._slow_ns is None or now_ns - self._slow_ns >= nvml.SLOW_S * 1e9:
            self._slow_ns = now_ns
            self._slow = {"cpu_freq_mhz": _frequency_mhz(), "temp_c": _temperature_c(), "load": os.getloadavg()[0]}
        return {
            "t_ns": t_ns,
            "device": self.name,
            "late_ms": round((now_ns - t_ns) / 1e6, 3),
            "cpu_util_pct": psutil.cpu_percent(None),  # of all CPUs since the last call, 0 to 100
            "rss_gib": self._rss_gib(),
            **self._slow,
        }

    def _rss_gib(self) -> float | None:
        """Returns the sum of resident sets: pages shared by several processes count once for each."""
        rss_bytes = 0
        for process in self._family.processes():
            with contextlib.suppress(psutil.Error):  # the process has just ended
                rss_bytes += process.memory_info().rss
        return gib_from_bytes(rss_bytes) if rss_bytes else None


def _frequency_mhz() -> float | None:
    """Returns the mean over the CPUs, or None if the system does not report it (many virtual machines)."""
    with contextlib.suppress(*NOT_REPORTED):
        return psutil.cpu_freq().current or None
    return None


def _temperature_c() -> float | None:
    """Returns the hottest sensor of the CPU, or None if there is none."""
    with contextlib.suppress(*NOT_REPORTED):
        sensors = psutil.sensors_temperatures()
        return max((sensor.current for name in CPU_SENSORS for sensor in sensors.get(name, ())), default=None)
    return None


# The columns of telemetry.csv; a cell is empty if the device has no such figure.  All rows of one tick share its
# t_ns (time.perf_counter_ns, as the steps have it), so that devices can be overlaid; late_ms is how long after it this
# device was read.
FIELDS = (
    "t_ns", "device", "late_ms",
    # for GPUs; power_w: instantaneous if the board measures that, else its usage (from Ampere on a mean over a second)
    "power_w", "energy_j", "sm_clock_mhz", "mem_clock_mhz", "temp_c", "throttle_reasons", "util_pct", "mem_gib",
    # for GPUs, read once a second and repeated in between
    "power_limit_w", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "num_processes",
    # for the host, device "cpu", which has temp_c too
    "cpu_util_pct", "cpu_freq_mhz", "rss_gib", "load",
)  # fmt: skip


def line(row: nvml.Row) -> str:
    """Formats {column: value} as a line of the file; reasons are joined by "|" and contain no comma."""
    values = ("" if row.get(field) is None else row[field] for field in FIELDS)
    return ",".join(f"{value:.12g}" if isinstance(value, float) else str(value) for value in values) + "\n"


class Sampler:
    def __init__(
        self, path: str, interval_ms: float, host_interval_ms: float, uuids: list[str], num_devices: int, root_pid: int
    ):
        self.family = Family(root_pid)
        self.gpus, self.warnings = nvml.open_gpus(uuids, num_devices) if num_devices else ([], [])
        self.sees_all = len(self.gpus) >= num_devices
        self.devices: Sequence[nvml.Gpu | Host] = self.gpus or [Host(self.family)]
        self.interval_ms = interval_ms if self.gpus else host_interval_ms
        self.num_samples = {device.name: 0 for device in self.devices}
        self.foreign: dict[str, int] = {}  # {device: most foreign processes seen at once}
        self.max_tick_ms, self.num_missed = 0.0, 0
        self._strangers: set[int] = set()  # pids known not to belong to the run
        self._cpu_before_s = self._foreign_at_s = 0.0
        self._file: int | None = None
        self._xids, self._faults = nvml.Xids(self.gpus), Path(path).parent / FAULTS
        self.faults: dict[str, None] = {}  # sentences, in order of appearance
        self._write(",".join(FIELDS) + "\n", path)

    def tick(self) -> None:
        """Writes one row per device, all at once, so that a kill cuts no line."""
        t_ns, text = time.perf_counter_ns(), ""
        for device in self.devices:
            row = device.sample(t_ns, time.perf_counter_ns())
            if row is not None:
                self.num_samples[device.name] += 1
                text += line(row)
        self._write(text)
        self._note_faults()
        if self.gpus and time.monotonic() - self._foreign_at_s >= FOREIGN_EVERY_S:
            self._foreign_at_s = time.monotonic()
            for gpu in self.gpus:
                if gpu.pids and not gpu.lost:
                    own_pids = self.family.pids()
                    if set(gpu.pids) - own_pids - self._strangers:  # a new one, perhaps a new child of the run
                        own_pids = self.family.pids(since_s=0.0)
                        self._strangers |= set(gpu.pids) - own_pids
                    self.foreign[gpu.name] = max(self.foreign.get(gpu.name, 0), num_foreign(gpu.pids, own_pids))
        self.max_tick_ms = max(self.max_tick_ms, (time.perf_counter_ns() - t_ns) / 1e6)

    def _write(self, text: str, path: str | None = None) -> None:
        """Appends text; path: of the file, if it is to be opened first."""
        try:
            if path is not None:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            if self._file is not None:
                os.write(self._file, text.encode())
        except OSError as error:  # a full disk: the counters at start and stop are still read
            self.warnings.append(f"telemetry.csv ends early: {error.strerror}")
            self._file = None

    def _note_faults(self) -> None:
        """Logs lost GPUs and Xids at once, because a rank whose GPU fails may end this process with it."""
        seen = [f"{gpu.name} was lost: {gpu.lost}" for gpu in self.gpus if gpu.lost] + self._xids.new()
        for sentence in seen:
            if sentence not in self.faults:
                self.faults[sentence] = None
                with contextlib.suppress(OSError), open(self._faults, "a") as file:
                    file.write(sentence + "\n")

    def energy(self) -> dict[str, Any]:
        """Returns the counters now: {"t_ns", "energy_j": {device: joules or None}}."""
        return {"t_ns": time.perf_counter_ns(), "energy_j": {gpu.name: gpu.energy_j() for gpu in self.gpus}}

    def report(self) -> dict[str, Any]:
        """Returns what the record needs besides telemetry.csv."""
        self._note_faults()
        self.warnings += self.faults
        for gpu in self.gpus:
            if gpu.denied:
                self.warnings.append(f"{gpu.name}: no permission to read {', '.join(gpu.denied)}")
            if gpu.num_failed_calls:
                self.warnings.append(f"{gpu.name}: {gpu.num_failed_calls} calls of NVML failed")
        return {
            "source": "nvml" if self.gpus else "host",
            "sees_all": self.sees_all,  # whether the rows are of all GPUs of the node's ranks
            "interval_ms": self.interval_ms,
            "num_samples": self.num_samples,
            "num_missed_ticks": self.num_missed,
            "unsupported": {gpu.name: gpu.unsupported for gpu in self.gpus if gpu.unsupported},
            "foreign_processes": {name: num for name, num in self.foreign.items() if num},
            "max_tick_ms": self.max_tick_ms,
            "sampler_cpu_s": time.process_time() - self._cpu_before_s,  # excluding its start
            "warnings": self.warnings,
        }

    def run(self, parent_pid: int) -> None:
        """Serves until "stop", the end of standard input or the end of the parent."""
        _say({"ready": True})
        due_s, sampling, rest, interval_s = 0.0, False, b"", self.interval_ms / 1e3
        while os.getppid() == parent_pid:
            wait_s = min(PARENT_EVERY_S, max(0.0, due_s - time.monotonic())) if sampling else PARENT_EVERY_S
            if select.select([0], [], [], wait_s)[0]:
                data = os.read(0, 4096)
                if not data:
                    return
                *orders, rest = (rest + data).split(b"\n")
                for order in orders:
                    if order == b"start":
                        _say(self.energy())
                        sampling, due_s = True, time.monotonic()
                        self._cpu_before_s = time.process_time()
                    elif order == b"stop":
                        ended = self.energy()
                        self.tick()
                        _say(ended | {"report": self.report()})
                        return
            elif sampling and time.monotonic() >= due_s:
                self.tick()
                due_s += interval_s
                while due_s < time.monotonic() - interval_s:  # ticks lost in a slow call are not made up for
                    due_s += interval_s
                    self.num_missed += 1


def num_foreign(pids: Iterable[int], own_pids: set[int]) -> int:
    """Returns how many of the processes on one GPU are not the run's.

    If none of them is known here, NVML counts in another namespace (a container), and one of them is the run's.
    """
    seen = own_pids.intersection(pids)
    return len(set(pids) - seen) if seen else max(0, len(set(pids)) - 1)


def _say(reply: dict[str, Any]) -> None:
    os.write(1, (json.dumps(reply) + "\n").encode())


def main(job: dict[str, Any], parent_pid: int) -> None:
    processes.die_with_parent()  # even while a driver hangs
    with contextlib.suppress(OSError):
        os.nice(NICE)
    sampler = Sampler(**job)
    gc.collect()
    gc.freeze()  # no cycles are created from here on
    sampler.run(parent_pid)


if __name__ == "__main__":
    try:
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the parent handles interrupts
            main(json.loads(sys.argv[1]), os.getppid())
    except OSError as error:  # a container without /proc; the parent warns that the sampler has ended
        sys.exit(f"telemetry: {error}")
