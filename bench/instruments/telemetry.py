"""Power, energy, clocks and throttling of the run's GPUs, or the host's CPUs without one: telemetry.csv.

Sampled by a process of its own (bench/telemetry/sampler.py) that rank 0 starts before the warm-up; in the timed region
this instrument does nothing but note when the clock stands still.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time

from bench.config import windows
from bench.instruments.base import Instrument
from bench.paths import REPO
from bench.telemetry import join, samples, throttling

READY_S = 20.0  # for an interpreter to start on a busy machine, while the graphs are compiled
ANSWER_S = 5.0  # NVML answers in milliseconds; a driver that hangs must not delay the run
MIN_INTERVAL_MS = 10  # drivers refresh no faster
# Without a GPU: of one core.  Ten samples a second were 0.005, and took 0.4 to 0.7 % of a run's time on two cores.
MAX_SAMPLER_CPU_FRAC = 0.01
NOTHING = {"source": None, "num_samples": {}, "foreign_processes": {}, "unsupported": {}, "warnings": []}


class Telemetry(Instrument):
    in_timed_region = (
        "compares the name of each phase; a process of its own takes the samples, see MAX_SAMPLER_CPU_FRAC"
    )

    @staticmethod
    def check(settings):
        for name, value in settings.items():
            windows.check_whole(f"instruments.telemetry.{name}", value, MIN_INTERVAL_MS)

    def __init__(self, context, **intervals):
        super().__init__(context)
        self._intervals = intervals
        self._path = context.folder / "telemetry.csv"
        self._process = None
        self._started = self._stopped = None  # {"t_ns", "energy_j"} at the ends of the run
        self._spans, self._ends, self._since_ns = [], [], None  # spans of the clock, and the last row of each
        self._rest = b""
        self._summary = None

    def on_warmup_start(self):
        if self.context.rank == 0:
            job = {
                "path": str(self._path.absolute()),
                **self._intervals,
                "uuids": self._uuids(),
                "num_devices": self.context.world_size if self.context.device_type == "cuda" else 0,
                "root_pid": os.getppid(),  # the agent: the ranks are its children
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.telemetry.sampler", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=REPO,
            )

    def _uuids(self):
        """Of the run's GPUs in CUDA's order, as NVML writes them; [] where torch does not report them."""
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

    def on_phase(self, name):
        if name == "validation" and self._since_ns is not None:
            self._spans.append((self._since_ns, time.perf_counter_ns()))
            self._since_ns = None

    def on_validation(self, steps_done, val_loss, train_s):
        """Steps begin after the first validation; a span's last row is known at the validation that ended it."""
        if self._started is not None:
            if len(self._ends) < len(self._spans):
                self._ends.append(steps_done)
            self._since_ns = time.perf_counter_ns()

    def on_run_end(self):
        if self._started is not None:
            self._sync()
            try:
                self._stopped = self._ask("stop")
            except (OSError, RuntimeError, TimeoutError) as error:  # what the file has is still worth something
                self._stopped = {
                    "t_ns": time.perf_counter_ns(),
                    "energy_j": {},
                    "report": NOTHING | {"warnings": [str(error)]},
                }
            self.close()

    def _sync(self):
        """Training has waited for the device already; this makes the counters' edges independent of that."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
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

    def columns(self):
        """energy_j and sm_clock_mhz of every step, or cpu_freq_mhz; steps lie where their device had them."""
        if self._stopped is None:
            return {}
        steps = join.step_spans(self.context.rows, self._spans, self._ends)
        return join.columns(samples.read(self._path), steps, self._joined())

    def _joined(self):
        if self._summary is None:
            self._summary = join.summary(samples.read(self._path), self._spans, self._started, self._stopped)
        return self._summary

    def summary(self):
        """{} on other ranks; energies of all the run's GPUs together."""
        if self._stopped is None:
            return {}
        report = self._stopped["report"]
        run_s = (self._stopped["t_ns"] - self._started["t_ns"]) / 1e9
        cpu_s = report.get("sampler_cpu_s")
        return {
            **self._joined(),
            **{name: value for name, value in report.items() if name != "warnings"},
            "sampler_cpu_frac": cpu_s / run_s if cpu_s is not None and run_s > 0 else None,
        }

    def doubts(self):
        if self._stopped is None:
            return []
        summary = self.summary()
        found, cpu_frac = throttling.doubts(summary), summary["sampler_cpu_frac"] or 0.0
        if self.context.device_type == "cpu" and cpu_frac > MAX_SAMPLER_CPU_FRAC:
            took = f"telemetry itself took {100 * cpu_frac:.1f} % of a core (limit {100 * MAX_SAMPLER_CPU_FRAC:g} %)"
            found.append(f"{took}: a longer instruments.telemetry.host_interval_ms")
        return found

    def warnings(self):
        if self._stopped is None:
            return []
        summary, found = self._joined(), list(self._stopped["report"]["warnings"])
        if summary["energy_agrees"] is False:
            apart = f"{summary['energy_disagreement_pct']:.1f} % apart (limit {join.MAX_DISAGREEMENT_PCT:g} %)"
            found.append(f"the energy counter and integrated power are {apart}")
        for name, device in summary["by_device"].items():
            for column in ("ecc_uncorrected", "remapped_rows"):
                if device.get(f"new_{column}"):
                    found.append(f"{name}: {device[f'new_{column}']} new {column} during training: its memory fails")
        return found

    def pause(self):
        """Stop the sampler where it stands, until resume(): bench-self compares steps with and without it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

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
