"""The sampling process: python -m bench.telemetry.sampler '{"path", "interval_ms", "uuids", "num_devices", "root_pid"}'.

Started by rank 0's instrument.  Lines on its standard input steer it: "start" and "stop" are each answered by a line of
JSON with the energy counters read at that moment; the end of the pipe, which is also what a killed parent leaves, ends
it.  No torch, no CUDA context, no lock shared with the training process.
"""

import contextlib
import json
import os
import select
import sys
import time

from bench.telemetry import host, nvml
from bench.telemetry.fields import FIELDS, line

FOREIGN_EVERY_S = 1.0
MAX_LATE_TICKS = 1  # a slow call loses ticks; it is not made up for by a burst


class Sampler:
    def __init__(self, path, interval_ms, uuids, num_devices, root_pid):
        self.interval_s = interval_ms / 1e3
        self.root_pid = root_pid
        self.gpus, self.warnings = nvml.open_gpus(uuids, num_devices) if num_devices else ([], [])
        self.devices = self.gpus or [host.Host(root_pid)]
        self.num_samples = {device.name: 0 for device in self.devices}
        self.foreign = {}  # device: the most foreign processes seen at once
        self.max_tick_ms = 0.0
        self._cpu_before_s = 0.0
        self._warned = set()
        self._looked_s = 0.0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(self._file, (",".join(FIELDS) + "\n").encode())

    def tick(self):
        """One row for each device, written at once: a kill cuts no line."""
        began_ns = time.perf_counter_ns()
        text = ""
        for device in self.devices:
            row = device.sample(time.perf_counter_ns())
            if row is not None:
                self.num_samples[device.name] += 1
                text += line(row)
        os.write(self._file, text.encode())
        if self.gpus and time.monotonic() - self._looked_s >= FOREIGN_EVERY_S:
            self._looked_s = time.monotonic()
            self._look_for_foreign()
        self.max_tick_ms = max(self.max_tick_ms, (time.perf_counter_ns() - began_ns) / 1e6)

    def _look_for_foreign(self):
        ours = {process.pid for process in host.run_processes(self.root_pid)}
        for gpu in self.gpus:
            pids = gpu.process_ids()
            if pids:
                self.foreign[gpu.name] = max(self.foreign.get(gpu.name, 0), num_foreign(pids, ours))

    def energy(self):
        """{"t_ns", "energy_j": {device: joules or None}}: the counters now."""
        return {"t_ns": time.perf_counter_ns(), "energy_j": {gpu.name: gpu.energy_j() for gpu in self.gpus}}

    def report(self):
        """What the file does not say."""
        for gpu in self.gpus:
            if gpu.lost:
                self._warn(f"{gpu.name} was lost: {gpu.lost}")
            if gpu.denied:
                self._warn(f"{gpu.name}: no permission to read {', '.join(gpu.denied)}")
            if gpu.num_failed_calls:
                self._warn(f"{gpu.name}: {gpu.num_failed_calls} calls of NVML failed")
        return {
            "source": "nvml" if self.gpus else "host",
            "num_samples": self.num_samples,
            "unsupported": {gpu.name: gpu.unsupported for gpu in self.gpus if gpu.unsupported},
            "foreign_processes": {name: num for name, num in self.foreign.items() if num},
            "max_tick_ms": self.max_tick_ms,
            "sampler_cpu_s": time.process_time() - self._cpu_before_s,  # without its start
            "warnings": self.warnings,
        }

    def _warn(self, text):
        if text not in self._warned:
            self._warned.add(text)
            self.warnings.append(text)

    def run(self):
        """Serve until "stop" or the end of standard input."""
        _say({"ready": True})
        due_s, sampling, rest = 0.0, False, b""
        while True:
            wait_s = max(0.0, due_s - time.monotonic()) if sampling else None
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
                continue
            self.tick()
            now_s = time.monotonic()
            due_s += self.interval_s
            if due_s < now_s - MAX_LATE_TICKS * self.interval_s:
                due_s = now_s + self.interval_s


def num_foreign(pids, ours):
    """How many of the processes on one GPU are not the run's.

    Where none of them is known here, NVML counts in another namespace (a container): then one is the run's own.
    """
    known = ours.intersection(pids)
    return len(set(pids) - known) if known else max(0, len(set(pids)) - 1)


def _say(answer):
    os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # an interrupt is the parent's to handle
        Sampler(**json.loads(sys.argv[1])).run()
