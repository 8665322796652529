"""Measures as one rank: its device's figures, then those of all ranks together.

The question is {"device", "num_threads", "precisions", "limit_s", "until_s"} (bench/launch/probe.py): limit_s of
measuring, until time.monotonic() is until_s. All GPUs are measured at once, as they are used. On a CPU the first rank
measures, and the second only takes part in collectives. The first writes its progress to FOLDER/progress.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.launch import probe
from bench.machine import environment, processes
from bench.machine.passports import CANNOT, NO_TIME
from bench.machine.telemetry import nvml
from bench.plans.passport import works
from bench.plans.passport.works import Case
from bench.training import distributed

LOAD_S, EVERY_S = 1.5, 0.1
RISE_S = 0.4  # until an idle clock has risen
NUM_ROUNDS = 3  # over all cases, so that a short disturbance does not fall on all samples of a case
COLLECTIVE_TIMEOUT_S = 240.0  # on a CPU the second rank waits for the first one's figures
FLOAT8_CAPABILITY = (8, 9)  # NVIDIA Ada and later have tensor cores for float8
LOAD_PRODUCT = {"cuda": ("bfloat16", (8192, 8192, 8192), 50), "cpu": ("float32", (512, 512, 512), 20)}


def under(
    work: Callable[[], object], read: Callable[[], dict[str, Any]], load_s: float = LOAD_S, every_s: float = EVERY_S
) -> list[dict[str, Any]]:
    """Calls work, a second or less of load, for load_s. Returns the facts that read() gave every every_s after
    RISE_S."""
    rows, over = list[dict[str, Any]](), threading.Event()

    def sample() -> None:
        over.wait(min(RISE_S, load_s / 2))
        while not over.is_set():
            rows.append(read())
            over.wait(every_s)

    thread = threading.Thread(target=sample)
    thread.start()
    until_s = time.perf_counter() + load_s
    try:
        while time.perf_counter() < until_s or not rows and thread.is_alive():
            work()
    finally:
        over.set()
        thread.join()
    return rows


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Returns {"clock_mhz"}: the fastest core's by the kernel, None if it reports none. Under a hypervisor this may be
    the nominal clock of the host."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    clocks_mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"clock_mhz": max(clocks_mhz, default=None)}


def gpu_facts(gpu: Any) -> dict[str, Any]:
    """Returns {"clock_mhz", "temp_c", "power_w", "throttle_reasons"} of a GPU of bench.machine.telemetry.nvml, or of
    None if no driver answers."""
    now_ns = time.perf_counter_ns()
    row = (gpu.sample(now_ns, now_ns) if gpu is not None else None) or {}
    names = ("temp_c", "power_w", "throttle_reasons")
    return {"clock_mhz": row.get("sm_clock_mhz")} | {name: row.get(name) for name in names}


class Measurement:
    """answer() returns {"rank", "figures", "collectives", "under_load", "omitted", "torch_facts"}."""

    def __init__(self, folder: Path, question: dict[str, Any]) -> None:
        self._until_s = min(time.monotonic() + question["limit_s"], question["until_s"])
        self._folder, self._device_type, self._num_threads = folder, question["device"], question["num_threads"]
        self._precisions: list[str] | None = question["precisions"]
        self._ranks = distributed.start(self._device_type, COLLECTIVE_TIMEOUT_S)
        self._timer = works.Timer(self._device_type)
        self._under_load: dict[str, Any] = {}

    def answer(self) -> dict[str, Any]:
        is_cuda = self._device_type == "cuda"
        has_float8 = is_cuda and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
        alone = works.cases_of_device(self._device_type, self._num_threads, has_float8)
        together = works.cases_of_ranks(self._device_type, self._ranks.world_size)
        if self._precisions is not None:
            alone, together = works.few(alone, self._precisions), works.few(together, self._precisions)
        values = self._rounds(alone, together, measures=is_cuda or self._ranks.is_first)
        facts = environment.torch_facts()
        distributed.stop()
        missing = [case for case in [*alone, *together] if not values.get(case)]
        return {
            "rank": self._ranks.rank,
            "figures": [works.figure(case, rounds) for case in alone if (rounds := values.get(case))],
            "collectives": [works.figure(case, rounds) for case in together if (rounds := values.get(case))],
            "under_load": self._under_load,
            "omitted": [f"{case.label}: {CANNOT if case in values else NO_TIME}" for case in missing],
            "torch_facts": facts,
        }

    def _rounds(
        self, alone: Sequence[Case], together: Sequence[Case], measures: bool
    ) -> dict[Case, list[float] | None]:
        """Returns {case: values of all rounds, or None}. measures: False on a rank that only waits for the first."""
        values: dict[Case, list[float] | None] = {}
        cases = [*alone, *together]
        for number, case in enumerate(cases * NUM_ROUNDS, 1):
            # the first rank decides whether time is left, so that all ranks measure the same cases
            has_time = torch.tensor(float(time.monotonic() < self._until_s), device=self._ranks.device)
            if not (distributed.from_first(has_time) if self._ranks.world_size > 1 else has_time).item():
                return values
            before = values.get(case, [])
            if before is not None:
                if case.kind == "collective":
                    new_values: list[float] | None = works.collective(case, self._ranks, self._timer)
                else:
                    new_values = self._alone(case) if measures else None
                values[case] = None if new_values is None else before + new_values
            if self._ranks.is_first:
                with open(self._folder / "progress", "a") as file:
                    file.write(f"{number}/{NUM_ROUNDS * len(cases)} {case.label}\n")
        return values

    def _alone(self, case: Case) -> list[float] | None:
        if case.kind != "clock":
            return works.values(case, self._ranks.device, self._timer)
        precision, shape, num_calls = LOAD_PRODUCT[self._device_type]
        with works.product(Case("gemm", precision=precision, shape=shape), self._ranks.device) as multiply:
            rows = under(lambda: self._timer.seconds(multiply, num_calls), self._reader())
        self._under_load = rows[-1] if rows else {}
        return [row["clock_mhz"] for row in rows if row["clock_mhz"]]

    def _reader(self) -> Callable[[], dict[str, Any]]:
        if self._device_type == "cpu":
            return cpu_facts
        local_rank = self._ranks.local_rank
        gpus, _ = nvml.open_gpus([], local_rank + 1)
        gpu = gpus[local_rank] if local_rank < len(gpus) else None
        return lambda: gpu_facts(gpu)


if __name__ == "__main__":
    processes.call_and_exit(probe.answer, sys.argv[1], lambda path, question: Measurement(path, question).answer())
