"""The sampling process: python -m bench.machine.telemetry.sampler JOB

JOB is JSON: path, interval_ms (of GPUs), host_interval_ms (of the host, where there is no GPU), uuids, num_devices,
root_pid.  Started by rank 0's instrument.  Lines on its standard input steer it: "start" and "stop" are each answered
by a line of JSON with the energy counters read at that moment.  The end of the pipe ends it, and so does the end of its
parent, which is checked besides because another process may hold the pipe open.  No torch, no CUDA context, no lock
shared with the training process.  It is nice and not pinned: the scheduler gives it an idle core, and where there is
none training goes first; a sample that comes late is stamped late.
"""

import contextlib
import gc
import json
import os
import select
import sys
import time

from bench.machine import processes
from bench.machine.telemetry import host, nvml
from bench.machine.telemetry.fields import FIELDS, line

NICE = 10
FOREIGN_EVERY_S = 1.0
PARENT_EVERY_S = 1.0


class Sampler:
    def __init__(self, path, interval_ms, host_interval_ms, uuids, num_devices, root_pid):
        self.family = host.Family(root_pid)
        self.gpus, self.warnings = nvml.open_gpus(uuids, num_devices) if num_devices else ([], [])
        self.devices = self.gpus or [host.Host(self.family)]
        self.interval_ms = interval_ms if self.gpus else host_interval_ms
        self.limits = {gpu.name: gpu.limits() for gpu in self.gpus}
        self.num_samples = {device.name: 0 for device in self.devices}
        self.foreign = {}  # device: the most foreign processes seen at once
        self.max_tick_ms, self.num_missed = 0.0, 0
        self._strangers = set()  # pids that are known not to be of the run
        self._cpu_before_s = self._foreign_at_s = 0.0
        self._file = None
        self._write(",".join(FIELDS) + "\n", path)

    def tick(self):
        """One row for each device, written at once: a kill cuts no line."""
        t_ns, text = time.perf_counter_ns(), ""
        for device in self.devices:
            row = device.sample(t_ns, time.perf_counter_ns())
            if row is not None:
                self.num_samples[device.name] += 1
                text += line(row)
        self._write(text)
        if self.gpus and time.monotonic() - self._foreign_at_s >= FOREIGN_EVERY_S:
            self._foreign_at_s = time.monotonic()
            self._count_foreign()
        self.max_tick_ms = max(self.max_tick_ms, (time.perf_counter_ns() - t_ns) / 1e6)

    def _write(self, text, path=None):
        """path: of the file, which is not open yet."""
        try:
            if path is not None:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            if self._file is not None:
                os.write(self._file, text.encode())
        except OSError as error:  # a full disk: the counters at both ends are still read
            self.warnings.append(f"telemetry.csv ends early: {error.strerror}")
            self._file = None

    def _count_foreign(self):
        for gpu in self.gpus:
            if gpu.pids and not gpu.lost:
                ours = self.family.pids()
                if set(gpu.pids) - ours - self._strangers:  # a new one: perhaps a child of the run's
                    ours = self.family.pids(since_s=0.0)
                    self._strangers |= set(gpu.pids) - ours
                self.foreign[gpu.name] = max(self.foreign.get(gpu.name, 0), num_foreign(gpu.pids, ours))

    def energy(self):
        """{"t_ns", "energy_j": {device: joules or None}}: the counters now."""
        return {"t_ns": time.perf_counter_ns(), "energy_j": {gpu.name: gpu.energy_j() for gpu in self.gpus}}

    def report(self):
        """What telemetry.csv does not say, for the record."""
        for gpu in self.gpus:
            if gpu.lost:
                self.warnings.append(f"{gpu.name} was lost: {gpu.lost}")
            if gpu.denied:
                self.warnings.append(f"{gpu.name}: no permission to read {', '.join(gpu.denied)}")
            if gpu.num_failed_calls:
                self.warnings.append(f"{gpu.name}: {gpu.num_failed_calls} calls of NVML failed")
        return {
            "source": "nvml" if self.gpus else "host",
            "interval_ms": self.interval_ms,
            "num_samples": self.num_samples,
            "num_missed_ticks": self.num_missed,
            "unsupported": {gpu.name: gpu.unsupported for gpu in self.gpus if gpu.unsupported},
            "limits": self.limits,
            "foreign_processes": {name: num for name, num in self.foreign.items() if num},
            "max_tick_ms": self.max_tick_ms,
            "sampler_cpu_s": time.process_time() - self._cpu_before_s,  # without its start
            "warnings": self.warnings,
        }

    def run(self, parent_pid):
        """Serve until "stop", the end of standard input or the end of the parent."""
        _say({"ready": True})
        due_s, sampling, rest, interval_s = 0.0, False, b"", self.interval_ms / 1e3
        while os.getppid() == parent_pid:
            wait_s = min(PARENT_EVERY_S, max(0.0, due_s - time.monotonic())) if sampling else PARENT_EVERY_S
            if select.select([0], [], [], wait_s)[0]:
                data = os.read(0, 4096)
                if not data:
                    return
                *words, rest = (rest + data).split(b"\n")
                for word in words:
                    if word == b"start":
                        _say(self.energy())
                        sampling, due_s = True, time.monotonic()
                        self._cpu_before_s = time.process_time()
                    elif word == b"stop":
                        ended = self.energy()
                        self.tick()
                        _say(ended | {"report": self.report()})
                        return
            elif sampling and time.monotonic() >= due_s:
                self.tick()
                due_s += interval_s
                while due_s < time.monotonic() - interval_s:  # a slow call loses ticks: no burst makes up for them
                    due_s += interval_s
                    self.num_missed += 1


def num_foreign(pids, ours):
    """How many of the processes on one GPU are not the run's.

    Where none of them is known here, NVML counts in another namespace (a container): then one is the run's own.
    """
    known = ours.intersection(pids)
    return len(set(pids) - known) if known else max(0, len(set(pids)) - 1)


def _say(answer):
    os.write(1, (json.dumps(answer) + "\n").encode())


def main(job, parent_pid):
    processes.die_with_parent()  # also out of a driver that hangs
    with contextlib.suppress(OSError):
        os.nice(NICE)
    sampler = Sampler(**job)
    gc.collect()
    gc.freeze()  # what follows makes no cycles
    sampler.run(parent_pid)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # an interrupt is the parent's to handle
        main(json.loads(sys.argv[1]), os.getppid())
