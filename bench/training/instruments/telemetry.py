"""Power, energy, clocks and throttling of the run's GPUs, or of the host's CPUs without a GPU, in telemetry.csv.

A separate process (bench/machine/telemetry/sampler.py) takes the samples; the first rank of each node starts it before
the warm-up.  In the timed region this instrument only notes when the clock is paused.  Other nodes' samples are in
telemetry.node1.csv and so on, by their own clocks, whose offsets from node 0's are in run.json["nodes"].
"""

import contextlib
import os
import sys
import time
from typing import Annotated, Any

from bench.config import typed
from bench.machine.telemetry import samples as join
from bench.machine.telemetry.sampling import Sampling
from bench.training.instruments.base import Context, Instrument

MIN_INTERVAL_MS = 10  # drivers refresh no faster
# Share of one core, without a GPU.  Ten samples a second took 0.005, and 0.4 to 0.7 % of a run's time on two cores.
MAX_SAMPLER_CPU_FRAC = 0.01
MIN_SAMPLER_CPU_S = 0.01  # the first and the last sample of a run of 0.2 s take 3 ms, whatever the interval


class Telemetry(Instrument):
    in_timed_region = (
        "It checks the name of each phase. The samples are taken by a process of its own, whose CPU time is limited."
    )

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            typed.checked(f"instruments.telemetry.{name}", value, Annotated[int, typed.at_least(MIN_INTERVAL_MS)])

    def __init__(self, context: Context, **intervals: int):
        super().__init__(context)
        self._intervals = intervals
        self._path = context.folder / (f"telemetry.node{context.node}.csv" if context.node else "telemetry.csv")
        self._sampling: Sampling | None = None
        self._started: dict[str, Any] | None = None  # {"t_ns", "energy_j"} at the start of the run
        self._stopped: dict[str, Any] | None = None  # the same at its end
        self._spans: list[tuple[int, int]] = []  # (start, end) in ns of the intervals in which the clock ran
        self._ends: list[int] = []  # last row of each span
        self._since_ns: int | None = None
        self._summary: dict[str, Any] | None = None

    def on_warmup_start(self) -> None:
        if not self.context.is_first_of_node:
            return
        num_devices = self.context.ranks_of_node if self.context.device_type == "cuda" else 0
        uuids = []  # the run's GPUs in CUDA's order, as NVML writes them; [] if torch does not report them
        if num_devices:
            import torch

            with contextlib.suppress(AttributeError, AssertionError, RuntimeError):
                uuids = [f"GPU-{torch.cuda.get_device_properties(num).uuid}" for num in range(num_devices)]
        agent_pid = os.getppid()  # the parent of all ranks
        self._sampling = Sampling(self._path, self._intervals, uuids, num_devices, agent_pid)

    def on_run_start(self) -> None:
        if self.context.is_first_of_node:
            if self._sampling is None:  # without a warm-up
                self.on_warmup_start()
            assert self._sampling is not None
            self._sampling.wait()
            self._sync()
            self._started = self._sampling.start()

    def on_phase(self, name: str) -> None:
        if name == "validation" and self._since_ns is not None:
            self._spans.append((self._since_ns, time.perf_counter_ns()))
            self._since_ns = None

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        """Begins a span (steps begin after the first validation) and notes the last row of the one before it."""
        if self._started is not None:
            if len(self._ends) < len(self._spans):
                self._ends.append(steps_done)
            self._since_ns = time.perf_counter_ns()

    def on_run_end(self) -> None:
        if self._started is not None:
            assert self._sampling is not None
            self._sync()
            self._stopped = self._sampling.stop()
            self.close()

    def _sync(self) -> None:
        """Waits for the device.  Training has done so already; the energy readings should not rely on it."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def columns(self) -> dict[str, dict[int, float]]:
        """Returns each step's energy_j and sm_clock_mhz, or cpu_freq_mhz, by the device's times of the steps.

        Returns {} with several nodes: columns keep the maximum over ranks, but energy is a sum, which summary() has.
        """
        if self._stopped is None or self.context.ranks_of_node < self.context.world_size:
            return {}
        steps = join.step_spans(self.context.rows, self._spans, self._ends)
        return join.columns(join.read(self._path), steps, self._joined())

    def _joined(self) -> dict[str, Any]:
        if self._summary is None:
            assert self._started is not None and self._stopped is not None
            self._summary = join.summary(join.read(self._path), self._spans, self._started, self._stopped)
        return self._summary

    def summary(self) -> dict[str, Any]:
        """Returns the node's summary, with energies summed over its GPUs; {} unless this is the node's first rank."""
        return {} if self._stopped is None else self._joined()

    def merge(self, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns rank 0's summary; with several nodes, the energies of all and each node's summary too."""
        by_node = [summary for summary in summaries if summary]
        if len(by_node) < 2:
            return summaries[0]
        return join.total_of_nodes(by_node)

    def doubts(self) -> list[str]:
        if self._stopped is None:
            return []
        summary = self.summary()
        doubts, cpu_frac = join.doubts(summary), summary["sampler_cpu_frac"] or 0.0
        cpu_s = summary.get("sampler_cpu_s") or 0.0
        if self.context.device_type == "cpu" and cpu_frac > MAX_SAMPLER_CPU_FRAC and cpu_s > MIN_SAMPLER_CPU_S:
            took = f"telemetry itself took {100 * cpu_frac:.1f} % of a core (limit {100 * MAX_SAMPLER_CPU_FRAC:g} %)"
            doubts.append(f"{took}: set a longer instruments.telemetry.host_interval_ms")
        return doubts

    def warnings(self) -> list[str]:
        return [] if self._stopped is None else join.warnings(self._joined(), self._stopped["report"])

    def pause(self) -> None:
        """Stops the sampler until resume(); tests/benchmarks compares steps with and without it."""
        if self._sampling is not None:
            self._sampling.pause()

    def resume(self) -> None:
        if self._sampling is not None:
            self._sampling.resume()

    def close(self) -> None:
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            sampling.close()


INSTRUMENT = Telemetry
