"""The doctor's probe: start the ranks of a run, let them talk to each other, and judge their answers.

probe_rank.py is one rank of it.
"""

import statistics

from bench.base.units import GIB, MIB
from bench.config.schema import HardwareConfig
from bench.launch import answers
from bench.machine.preflight import Check

COLLECTIVE_TIMEOUT_S = 30.0
SLOW_FRAC = 0.03  # below the median GPU; the same model differs by a few percent at most when it is healthy
NUM_CPU_RANKS = 2  # what a probe of gloo needs


def probe(hardware: HardwareConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[Check]:
    """hardware: resolved; timeout_s: of one collective.  What fails is a Check that says so."""
    num_ranks = max(NUM_CPU_RANKS, hardware.num_processes) if hardware.device == "cpu" else hardware.num_processes

    def wait(group, _):
        return group.has_ended(answers.START_S + 4 * timeout_s)

    asked = {"device": hardware.device, "timeout_s": timeout_s}
    given = answers.of_ranks("bench.launch.probe_rank", asked, hardware, num_ranks, 1, wait)
    if len(given.found) < num_ranks:
        return [given.why_missing(timeout_s)]
    return judge(hardware.device, given.found)


def judge(device, result):
    """What every rank answered, in rank order -> list of Check."""
    first, num_ranks = result[0], len(result)
    facts = first["torch_facts"]
    software = f"torch {facts['torch']}"
    if device == "cuda":
        software += f", CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}"
    checks = [Check("software", "ok", software)]
    if first["all_reduce_ms"] is None:
        checks.append(Check("collective", "ok", "one process: nothing to communicate with"))
    else:
        slowest_ms, num_bytes = max(one["all_reduce_ms"] for one in result), first["num_bytes"]
        # Bus bandwidth of an all-reduce, 2 (n - 1) / n of the bytes over the time: nccl-tests, PERFORMANCE.md
        gib_per_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / GIB / (slowest_ms / 1e3)
        speed = f"all-reduce of {num_bytes / MIB:g} MiB {slowest_ms:.2f} ms, {gib_per_s:.3g} GiB/s a rank"
        checks.append(Check("collective", "ok", f"{num_ranks} ranks agree; {speed}"))
    return [*checks, gpu_speed([one["matmul_tflop_per_s"] for one in result])] if device == "cuda" else checks


def gpu_speed(rates):
    """TFLOP/s of a matrix multiplication on each GPU, all at once, as a Check: the slowest sets everybody's pace."""
    median = statistics.median(rates)
    slow = [f"GPU {rank} {rate:.0f}" for rank, rate in enumerate(rates) if rate < (1 - SLOW_FRAC) * median]
    if slow:
        remedy = "run on the others (CUDA_VISIBLE_DEVICES), or look at its temperature, power and PCIe slot"
        return Check("gpu speed", "warn", f"{', '.join(slow)} TFLOP/s bfloat16, the median {median:.0f}", remedy)
    return Check("gpu speed", "ok", f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s bfloat16")
