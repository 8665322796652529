"""Starts ranks that answer a question instead of training, for the doctor and for passports, and has the doctor's
question: can the ranks communicate, and is each device as fast as the others?

A rank is  python -m MODULE FOLDER  which reads FOLDER/asked.json and writes FOLDER/rankN.answer.json, or
logs/rankN.failure.json as in a run.  The doctor's MODULE is this one.
"""

import dataclasses
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.reading import plain_file
from bench.base.units import GIB, MIB
from bench.config.schema import HardwareConfig
from bench.launch import ranks
from bench.machine import peak_rates, processes
from bench.machine.preflight import Check
from bench.record import failures
from bench.training import flight_recorder

START_S = 90.0  # for the processes to import torch, also from a cold disk
ERROR_LINE = re.compile(r"timed out|timeout|error", re.I)
COLLECTIVE_TIMEOUT_S = 30.0
SLOW_FRAC = 0.03  # below the median GPU; the same model differs by a few percent at most when it is healthy
NUM_CPU_RANKS = 2  # as many as a probe of gloo needs
GPU_BYTES, CPU_BYTES = 64 * MIB, MIB  # size of the timed all-reduce
NUM_REPEATS = 10
MATMUL_SIZE = 8192  # 2 * 8192**3 = 1.1 TFLOP: 1.5 ms at an H100's dense bfloat16 peak
MATMUL_REPEATS = 50


@dataclass(frozen=True)
class Answers:
    """What ranks answered.  received, failed: answers and failures, in rank order; exit_code: None after a timeout."""

    num_ranks: int
    received: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    exit_code: int | None
    output: str

    def why_missing(self) -> Check:
        """Returns why not every rank answered, as far as it is known."""
        if self.failed:
            first = min(self.failed, key=lambda failure: failure["failed_at_s"])
            why, hint = f"rank {first['rank']}: {first['message'][:300]}", first["hint"]
        else:
            lines = [line.strip() for line in self.output.splitlines()]
            lines = [line for line in lines if line and not line.startswith('File "')]  # a stack frame
            last = next(filter(ERROR_LINE.search, lines), lines[-1] if lines else "they printed nothing")
            ended = "did not end in time" if self.exit_code is None else f"ended with exit code {self.exit_code}"
            why = f"the processes {ended}: {last[:300]}"
            hint = "the same with more output: NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL ./run.sh doctor"
        if "timed out" in why.lower() or "timeout" in why.lower():
            hint = "look for a firewall, a dead rank or a broken NVLink between them"
        return Check("collective", "fail", f"{len(self.received)} of {self.num_ranks} ranks answered; {why}", hint)


def answers_of_ranks(
    module: str,
    question: dict[str, Any],
    hardware: HardwareConfig,
    num_ranks: int,
    num_threads: int,
    wait: Callable[[ranks.Group, Path], bool],
) -> Answers:
    """Starts the ranks, ends them and returns their answers.  hardware: resolved.

    wait(group, folder): waits until the ranks have ended or time is up, and returns whether they have ended.
    """
    env = ranks.environment(dataclasses.replace(hardware, num_processes=num_ranks, num_threads=num_threads))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "asked.json").write_text(json.dumps(question))
        try:
            with (
                ranks.Guard(folder) as guard,
                ranks.started(guard, num_ranks, folder, env, (sys.executable, "-m", module)) as group,
            ):
                exit_code = group.exit_code() if wait(group, folder) else None
            output = plain_file.text(folder / "logs" / ranks.LOG, plain_file.MAX_LINES_BYTES, errors="replace")
        except ranks.CannotStart as error:
            exit_code, output = 1, str(error)
        received, failed = (
            [answer for rank in range(num_ranks) if (answer := atomic.read_json(folder / f"{name.format(rank)}.json"))]
            for name in ("rank{}.answer", "logs/rank{}.failure")  # an unfinished file is left out
        )
    return Answers(num_ranks, received, failed, exit_code, output)


def answer(folder: str, of: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """Runs in a rank: writes what of(folder, question) returns, or why it failed."""
    path, rank = Path(folder), int(os.environ.get("RANK", 0))
    flight_recorder.enable_stack_dumps(path)
    try:
        content = of(path, json.loads((path / "asked.json").read_text()))
        (path / f"rank{rank}.answer.json").write_text(json.dumps(content))
    except BaseException as error:
        failures.write(path, rank, None, error)
        raise


def probe(hardware: HardwareConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[Check]:
    """Probes the ranks' communication and speed.  hardware: resolved; timeout_s: of one collective."""
    num_ranks = max(hardware.num_processes or 1, NUM_CPU_RANKS if hardware.device == "cpu" else 1)

    def wait(group: ranks.Group, _: Path) -> bool:
        return group.has_ended(START_S + 4 * timeout_s)

    question = {"device": hardware.device, "timeout_s": timeout_s}
    answers = answers_of_ranks("bench.launch.probe", question, hardware, num_ranks, 1, wait)
    if len(answers.received) < num_ranks:
        return [answers.why_missing()]
    return judge(hardware.device, answers.received)


def judge(device: str, answers: list[dict[str, Any]]) -> list[Check]:
    """Returns the checks that follow from the answers of all ranks, which are in rank order."""
    first, num_ranks = answers[0], len(answers)
    facts = first["torch_facts"]
    software = f"torch {facts['torch']}"
    if device == "cuda":
        software += f", CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}"
    checks = [Check("software", "ok", software)]
    if first["all_reduce_ms"] is None:
        checks.append(Check("collective", "ok", "one process: nothing to communicate with"))
    else:
        slowest_ms, num_bytes = max(rank["all_reduce_ms"] for rank in answers), first["num_bytes"]
        # Bus bandwidth of an all-reduce, 2 (n - 1) / n of the bytes over the time: nccl-tests, PERFORMANCE.md
        gib_per_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / GIB / (slowest_ms / 1e3)
        speed = f"all-reduce of {num_bytes / MIB:g} MiB: {slowest_ms:.2f} ms, {gib_per_s:.3g} GiB/s per rank"
        checks.append(Check("collective", "ok", f"{num_ranks} ranks agree; {speed}"))
    if device == "cuda":
        rates = [rank["matmul_tflop_per_s"] for rank in answers]
        checks.append(gpu_speed(rates, [rank["device_name"] for rank in answers]))
    return checks


def gpu_speed(rates: list[float], names: list[str]) -> Check:
    """Compares the TFLOP/s of all GPUs in a matrix multiplication at the same time: the slowest sets everybody's pace.

    names: of the GPUs, as the driver gives them; a rate above a GPU's data sheet shows that the measurement is wrong.
    """
    median, name = statistics.median(rates), names[rates.index(max(rates))]
    sheet = peak_rates.peak_flops(name, "bfloat16")
    if peak_rates.is_beyond_sheet(1e12 * max(rates), sheet):
        found = f"{max(rates):,.0f} TFLOP/s bfloat16, and the data sheet of {name} says {(sheet or 0) / 1e12:g}"
        remedy = "no time measured here can be trusted: is the GPU what its driver says, and its clock real?"
        return Check("gpu speed", "fail", found, remedy)
    slow = [f"GPU {rank} {rate:.0f}" for rank, rate in enumerate(rates) if rate < (1 - SLOW_FRAC) * median]
    if slow:
        remedy = "run on the others (CUDA_VISIBLE_DEVICES), or look at its temperature, power and PCIe slot"
        return Check("gpu speed", "warn", f"{', '.join(slow)} TFLOP/s bfloat16, the median {median:.0f}", remedy)
    share = f", at most {1e14 * max(rates) / sheet:.0f} % of the data sheet's" if sheet else ""
    return Check("gpu speed", "ok", f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s bfloat16{share}")


# ---- in a rank


def main(folder: str) -> None:
    answer(folder, lambda _, question: _answer(question["device"], question["timeout_s"]))


def _answer(device_type: str, timeout_s: float) -> dict[str, Any]:
    import torch

    from bench.machine import environment
    from bench.training import distributed

    ranks = distributed.start(device_type, timeout_s)
    num_bytes = GPU_BYTES if device_type == "cuda" else CPU_BYTES
    numbers = torch.full((num_bytes // 4,), float(ranks.rank + 1), device=ranks.device)
    distributed.all_sum(numbers)
    wanted = ranks.world_size * (ranks.world_size + 1) / 2
    if not bool((numbers == wanted).all()):
        raise RuntimeError(f"a sum over {ranks.world_size} ranks gave {numbers[0].item()} instead of {wanted}")
    alone = ranks.world_size == 1
    facts = {
        "torch_facts": environment.torch_facts(),
        "num_bytes": num_bytes,
        "all_reduce_ms": None if alone else _median_ms(lambda: distributed.all_sum(numbers), ranks.device),
        "matmul_tflop_per_s": _matmul_tflop_per_s(ranks.device) if device_type == "cuda" else None,
        "device_name": torch.cuda.get_device_name(ranks.device) if device_type == "cuda" else None,
    }
    distributed.stop()
    return facts


def _matmul_tflop_per_s(device: Any) -> float:
    import torch

    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16)
    for _ in range(MATMUL_REPEATS):  # until the clocks are up
        torch.mm(a, b)
    ms = _median_ms(lambda: [torch.mm(a, b) for _ in range(MATMUL_REPEATS)], device)
    return MATMUL_REPEATS * 2 * MATMUL_SIZE**3 / (ms / 1e3) / 1e12


def _median_ms(work: Callable[[], object], device: Any) -> float:
    from bench.training import distributed

    spent_ms = []
    for _ in range(NUM_REPEATS):
        distributed.sync(device)
        started_ns = time.perf_counter_ns()
        work()
        distributed.sync(device)
        spent_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
    return statistics.median(spent_ms)


if __name__ == "__main__":
    processes.call_and_exit(main, sys.argv[1])
