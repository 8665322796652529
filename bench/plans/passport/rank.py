"""One rank of the measurement: its device's figures, then those of all ranks together.

It is asked {"device", "num_threads", "limit_s", "until_s"} (bench/launch/probe.py): seconds of measuring, and the
time.monotonic() at which it ends.  GPUs are measured all at once, as they are used.  On a CPU the first rank measures
and the second is only there to be talked to.  The first says in FOLDER/progress how far it is.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.launch import probe
from bench.machine import processes
from bench.machine.passport.kept import CANNOT, NO_TIME
from bench.plans.passport import works

LOAD_S, EVERY_S = 1.5, 0.1
RISE_S = 0.4  # until a clock that rested is up


def under(
    work: Callable[[], object], read: Callable[[], dict], load_s: float = LOAD_S, every_s: float = EVERY_S
) -> list[dict]:
    """work: a second or less of load, called for load_s and until read(), facts now, has been called after RISE_S."""
    result, over = [], threading.Event()

    def sample():
        over.wait(min(RISE_S, load_s / 2))
        while not over.is_set():
            result.append(read())
            over.wait(every_s)

    thread = threading.Thread(target=sample)
    thread.start()
    until_s = time.perf_counter() + load_s
    try:
        while time.perf_counter() < until_s or not result and thread.is_alive():
            work()
    finally:
        over.set()
        thread.join()
    return result


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict:
    """{"clock_mhz"}: of the fastest core as the kernel says it, which under a hypervisor may be what the host was sold
    as; None where it says nothing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = ()
    clocks_mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"clock_mhz": max(clocks_mhz, default=None)}


def gpu_facts(gpu) -> dict:
    """gpu: of bench.machine.telemetry.nvml, None without a driver that answers -> {"clock_mhz", "temp_c", "power_w",
    "throttle_reasons"}."""
    now_ns = time.perf_counter_ns()
    row = (gpu.sample(now_ns, now_ns) if gpu is not None else None) or {}
    names = ("temp_c", "power_w", "throttle_reasons")
    return {"clock_mhz": row.get("sm_clock_mhz")} | {name: row.get(name) for name in names}


NUM_ROUNDS = 3  # over all cases, so that what disturbs for a second or two is not all that one of them sees
COLLECTIVE_TIMEOUT_S = 240.0  # on a CPU the second rank waits for the first one's figures
FLOAT8_CAPABILITY = (8, 9)  # NVIDIA's Ada, from which on there are tensor cores for it
LOAD_PRODUCT = {"cuda": ("bfloat16", (8192, 8192, 8192), 50), "cpu": ("float32", (512, 512, 512), 20)}


def main(folder):
    probe.answer(folder, lambda path, asked: Measurement(path, asked).answer())


class Measurement:
    """answer() -> {"rank", "figures", "collectives", "under_load", "omitted", "torch_facts"}."""

    def __init__(self, folder, asked):
        from bench.training import distributed

        self._until_s = min(time.monotonic() + asked["limit_s"], asked["until_s"])
        self._folder, self._asked = folder, asked
        self._ranks = distributed.start(asked["device"], COLLECTIVE_TIMEOUT_S)
        self._timer = works.CudaTimer() if asked["device"] == "cuda" else works.HostTimer()
        self._under_load = {}
        self._is_first = self._ranks.is_first

    def answer(self):
        from bench.machine import environment
        from bench.training import distributed

        alone, together = self._cases()
        measures = dict.fromkeys(alone, self._alone if self._asked["device"] == "cuda" or self._is_first else None)
        measures |= dict.fromkeys(together, lambda case: works.collective(case, self._ranks, self._timer))
        values = self._rounds(measures)
        facts = environment.torch_facts()
        distributed.stop()
        return {
            "rank": self._ranks.rank,
            "figures": [works.figure(case, values[case]) for case in alone if values.get(case)],
            "collectives": [works.figure(case, values[case]) for case in together if values.get(case)],
            "under_load": self._under_load,
            "omitted": [
                f"{case.what}: {NO_TIME if case not in values else CANNOT}" for case in measures if not values.get(case)
            ],
            "torch_facts": facts,
        }

    def _cases(self):
        import torch

        device = self._asked["device"]
        has_float8 = device == "cuda" and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
        alone = works.of_device(device, self._asked["num_threads"], has_float8)
        return alone, works.of_ranks(device, self._ranks.world_size)

    def _rounds(self, measures):
        """{case: how it is measured, None for a rank that only waits} -> {case: values of all rounds, or None}."""
        values, done = {}, 0
        for _ in range(NUM_ROUNDS):
            for case, measure in measures.items():
                if not self._goes_on():
                    return values
                if values.get(case, ()) is not None:
                    more = measure(case) if measure else None
                    values[case] = None if more is None else values.get(case, []) + more
                done += 1
                self._say(f"{done}/{NUM_ROUNDS * len(measures)} {case.what}")
        return values

    def _goes_on(self):
        """Whether the first rank has time left: all ranks measure the same."""
        import torch

        from bench.training import distributed

        left = torch.tensor(float(time.monotonic() < self._until_s), device=self._ranks.device)
        return bool((distributed.from_first(left) if self._ranks.world_size > 1 else left).item())

    def _alone(self, case):
        if case.kind == "clock":
            return self._clock()
        return works.values(case, self._ranks.device, self._timer)

    def _clock(self):
        precision, shape, num_calls = LOAD_PRODUCT[self._asked["device"]]
        product = works.Case("gemm", precision=precision, shape=shape)
        with works.product(product, self._ranks.device) as multiply:
            result = under(lambda: self._timer.seconds(multiply, num_calls), self._reader())
        clocks_mhz = [facts["clock_mhz"] for facts in result if facts["clock_mhz"]]
        self._under_load = result[-1] if result else {}
        return clocks_mhz

    def _reader(self):
        if self._asked["device"] == "cpu":
            return cpu_facts
        from bench.machine.telemetry import nvml

        gpus, _ = nvml.open_gpus([], self._ranks.local_rank + 1)
        gpu = gpus[self._ranks.local_rank] if self._ranks.local_rank < len(gpus) else None
        return lambda: gpu_facts(gpu)

    def _say(self, words):
        if self._is_first:
            with open(self._folder / "progress", "a") as file:
                file.write(words + "\n")


if __name__ == "__main__":
    processes.call_and_exit(main, sys.argv[1])
