"""One rank of the doctor's probe: can these ranks talk to each other, and is each device as fast as the others?

It is asked {"device", "timeout_s"} (bench/launch/answers.py).
"""

import statistics
import sys
import time

from bench.base.units import MIB
from bench.launch import answers
from bench.machine import processes

GPU_BYTES, CPU_BYTES = 64 * MIB, MIB  # of the all-reduce that is timed
NUM_REPEATS = 10
MATMUL_SIZE = 8192  # 2 * 8192**3 = 1.1 TFLOP: 1.5 ms at an H100's dense bfloat16 peak
MATMUL_REPEATS = 50


def main(folder):
    answers.answer(folder, lambda _, asked: _answer(asked["device"], asked["timeout_s"]))


def _answer(device_type, timeout_s):
    import torch

    from bench.machine import environment
    from bench.training import distributed

    if device_type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use no GPU here: its CUDA is newer than the "
            "driver, or it is the CPU build"
        )
    ranks = distributed.start(device_type, timeout_s)
    num_bytes = GPU_BYTES if device_type == "cuda" else CPU_BYTES
    numbers = torch.full((num_bytes // 4,), float(ranks.rank + 1), device=ranks.device)
    distributed.all_sum(numbers)
    wanted = ranks.world_size * (ranks.world_size + 1) / 2
    if not bool((numbers == wanted).all()):
        raise RuntimeError(f"a sum over {ranks.world_size} ranks gave {numbers[0].item()} instead of {wanted}")
    alone = ranks.world_size == 1
    answer = {
        "torch_facts": environment.torch_facts(),
        "num_bytes": num_bytes,
        "all_reduce_ms": None if alone else _median_ms(lambda: distributed.all_sum(numbers), ranks.device),
        "matmul_tflop_per_s": _matmul_tflop_per_s(ranks.device) if device_type == "cuda" else None,
    }
    distributed.stop()
    return answer


def _matmul_tflop_per_s(device):
    import torch

    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16)
    b = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16)
    for _ in range(MATMUL_REPEATS):  # the clocks come up
        torch.mm(a, b)
    ms = _median_ms(lambda: [torch.mm(a, b) for _ in range(MATMUL_REPEATS)], device)
    return MATMUL_REPEATS * 2 * MATMUL_SIZE**3 / (ms / 1e3) / 1e12


def _median_ms(work, device):
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
