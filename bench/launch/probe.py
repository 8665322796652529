"""The doctor's probe: start the ranks of a run, let them talk to each other, and judge their answers.

probe_rank.py is one rank of it.
"""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import atomic
from bench.config.schema import HardwareConfig
from bench.launch import ranks
from bench.machine.preflight import Check
from bench.reading import plain_file
from bench.units import GIB, MIB

COLLECTIVE_TIMEOUT_S = 30.0
START_S = 90.0  # for the processes to import torch, also from a cold disk
SLOW_FRAC = 0.03  # below the median GPU; the same model differs by a few percent at most when it is healthy
NUM_CPU_RANKS = 2  # what a probe of gloo needs
ERROR_LINE = re.compile(r"timed out|timeout|error", re.I)


def probe(hardware: HardwareConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[Check]:
    """hardware: resolved; timeout_s: of one collective.  What fails is a Check that says so."""
    num_ranks = max(NUM_CPU_RANKS, hardware.num_processes) if hardware.device == "cpu" else hardware.num_processes
    env = ranks.environment(dataclasses.replace(hardware, num_processes=num_ranks, num_threads=1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "probe.json").write_text(json.dumps({"device": hardware.device, "timeout_s": timeout_s}))
        with (
            open(folder / "logs" / "agent.log", "wb") as log,
            ranks.agent(folder, num_ranks, env, log, (sys.executable, "-m", "bench.launch.probe_rank")) as process,
        ):
            try:
                exit_code = process.wait(START_S + 4 * timeout_s)
            except subprocess.TimeoutExpired:
                exit_code = None
        answers = [atomic.read_json(path) for path in sorted(folder.glob("rank*.probe.json"), key=_rank)]
        answers = [answer for answer in answers if answer]  # one that a rank could not finish is none
        failed = [atomic.read_json(path) for path in sorted(folder.glob("logs/rank*.failure.json"), key=_rank)]
        failed = [failure for failure in failed if failure]
        output = plain_file.text(folder / "logs" / "agent.log", plain_file.MAX_LINES_BYTES, errors="replace")
    if len(answers) < num_ranks:
        return [no_answer(num_ranks, len(answers), failed, exit_code, output, timeout_s)]
    return judge(hardware.device, answers)


def _rank(path):
    return int("".join(filter(str.isdigit, path.name)))


def no_answer(
    num_ranks: int, num_answers: int, failed: list[dict], exit_code: int | None, output: str, timeout_s: float
) -> Check:
    """Why not every rank answered, as far as it is known, as a Check.  exit_code: None if the time was exceeded."""
    if failed:
        first = min(failed, key=lambda one: one["failed_at_s"])
        why, hint = f"rank {first['rank']}: {first['message'][:300]}", first["hint"]
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        last = next((line for line in lines if ERROR_LINE.search(line)), lines[-1] if lines else "they printed nothing")
        ended = "did not end in time" if exit_code is None else f"ended with exit code {exit_code}"
        why = f"the processes {ended}: {last[:300]}"
        hint = "the same with more output: NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL ./run.sh doctor"
    if "timed out" in why.lower() or "timeout" in why.lower():
        hint = f"is a firewall, a dead rank or a broken NVLink between them? --timeout-s={2 * timeout_s:g} waits longer"
    return Check("collective", "fail", f"{num_answers} of {num_ranks} ranks answered; {why}", hint)


def judge(device, answers):
    """What every rank answered, in rank order -> list of Check."""
    first, num_ranks = answers[0], len(answers)
    facts = first["torch_facts"]
    software = f"torch {facts['torch']}"
    if device == "cuda":
        software += f", CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}"
    checks = [Check("software", "ok", software)]
    if first["all_reduce_ms"] is None:
        checks.append(Check("collective", "ok", "one process: nothing to communicate with"))
    else:
        slowest_ms, num_bytes = max(one["all_reduce_ms"] for one in answers), first["num_bytes"]
        # Bus bandwidth of an all-reduce, 2 (n - 1) / n of the bytes over the time: nccl-tests, PERFORMANCE.md
        gib_per_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / GIB / (slowest_ms / 1e3)
        speed = f"all-reduce of {num_bytes / MIB:g} MiB {slowest_ms:.2f} ms, {gib_per_s:.3g} GiB/s a rank"
        checks.append(Check("collective", "ok", f"{num_ranks} ranks agree; {speed}"))
    return [*checks, gpu_speed([one["matmul_tflop_per_s"] for one in answers])] if device == "cuda" else checks


def gpu_speed(rates):
    """TFLOP/s of a matrix multiplication on each GPU, all at once, as a Check: the slowest sets everybody's pace."""
    median = statistics.median(rates)
    slow = [f"GPU {rank} {rate:.0f}" for rank, rate in enumerate(rates) if rate < (1 - SLOW_FRAC) * median]
    if slow:
        remedy = "run on the others (CUDA_VISIBLE_DEVICES), or look at its temperature, power and PCIe slot"
        return Check("gpu speed", "warn", f"{', '.join(slow)} TFLOP/s bfloat16, the median {median:.0f}", remedy)
    return Check("gpu speed", "ok", f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s bfloat16")
