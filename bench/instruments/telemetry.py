"""Power, energy, clocks and throttling of the run's GPUs, or the host's CPUs without one: telemetry.csv.

Sampled by a process of its own (bench/telemetry/sampler.py) that rank 0 starts before the warm-up; in the timed region
this instrument does nothing but note when the clock stands still.
"""

import json
import os
import select
import subprocess
import sys
import time

from bench.instruments.base import Instrument
from bench.telemetry import join

READY_S = 20.0  # for an interpreter to start on a busy machine, while the graphs are compiled
ANSWER_S = 5.0  # NVML answers in milliseconds; a driver that hangs must not hold the race up


class Telemetry(Instrument):
    def __init__(self, context, interval_ms):
        super().__init__(context)
        if interval_ms < 10:
            raise ValueError(f"instruments.telemetry.interval_ms={interval_ms}: at least 10, drivers refresh no faster")
        self._interval_ms = interval_ms
        self._path = context.folder / "telemetry.csv"
        self._process = None
        self._started = self._stopped = None  # {"t_ns", "energy_j"} at the ends of the run
        self._spans, self._since_ns = [], None
        self._rest = b""

    def on_warmup_start(self):
        if self.context.rank == 0:
            job = {
                "path": str(self._path),
                "interval_ms": self._interval_ms,
                "uuids": self._uuids(),
                "num_devices": self.context.world_size if self.context.device_type == "cuda" else 0,
                "root_pid": int(os.environ.get("SPEEDRUN_AGENT_PID", os.getpid())),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.telemetry.sampler", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )

    def _uuids(self):
        """Of the run's GPUs in CUDA's order, as NVML writes them; [] where torch does not tell."""
        if self.context.device_type != "cuda":
            return []
        import torch

        try:
            return [f"GPU-{torch.cuda.get_device_properties(num).uuid}" for num in range(self.context.world_size)]
        except (AttributeError, AssertionError, RuntimeError):
            return []

    def on_run_start(self):
        if self.context.rank == 0:
            if self._process is None:  # without a warm-up
                self.on_warmup_start()
            self._answer(READY_S)
            self._sync()
            self._started = self._ask("start")
            self._since_ns = time.perf_counter_ns()

    def on_phase(self, name):
        if name == "validation" and self._since_ns is not None:
            self._spans.append((self._since_ns, time.perf_counter_ns()))
            self._since_ns = None

    def on_validation(self, steps_done, val_loss, train_s):
        if self._started is not None:
            self._since_ns = time.perf_counter_ns()

    def on_run_end(self):
        if self._started is not None:
            self._sync()
            self._stopped = self._ask("stop")
            for text in self._stopped["report"]["warnings"]:
                self.context.emit("telemetry_warning", message=text)
            self.close()

    def _sync(self):
        if self.context.device_type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _ask(self, word):
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def _answer(self, timeout_s):
        """The next line of the sampler.  Raises TimeoutError, or RuntimeError when it has ended."""
        until_s, out = time.monotonic() + timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([out], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError(f"the sampler of telemetry.csv gave no answer in {timeout_s:g} s")
            data = os.read(out, 1 << 16)
            if not data:
                raise RuntimeError("the sampler of telemetry.csv has ended; the log of rank 0 may say why")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def summary(self):
        """{} on other ranks; energies of all the run's GPUs together."""
        if self._stopped is None:
            return {}
        report = self._stopped["report"]
        run_s = (self._stopped["t_ns"] - self._started["t_ns"]) / 1e9
        return {
            **join.summary(join.read(self._path), self._spans, self._started, self._stopped),
            **report,
            "interval_ms": self._interval_ms,
            "sampler_cpu_frac": report["sampler_cpu_s"] / run_s if run_s > 0 else None,
        }

    def doubts(self):
        return join.doubts(self.summary()) if self._stopped else []

    def close(self):
        """Its standard input is closed, which ends it; one that hangs in the driver is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(2.0)


INSTRUMENT = Telemetry
