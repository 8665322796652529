"""The work of each case, in torch, and what its seconds mean in the unit of its kind."""

import contextlib
import math
import os
import threading
import time

from bench.base.units import GIB
from bench.machine.passport.figures import bus_bytes
from bench.plans.passport import samples

FLOP_PER_TFLOP = 1e12
LAUNCHES_A_SAMPLE = 200  # fewer than a stream's queue holds, so that the host never waits for it
NUM_ROUND_TRIPS = 200
SAFE_BYTES_FRAC = 0.5  # of the free memory of a GPU


def values(case, device, timer):
    """A case of one device -> values in its unit, one a sample; None where this device or this torch cannot do it."""
    import torch

    if case.num_threads:
        torch.set_num_threads(case.num_threads)
    measure = {"gemm": gemm, "copy": copy, "launch": launch}[case.kind]
    try:
        with torch.no_grad():
            return measure(case, device, timer)
    except (NotImplementedError, RuntimeError, AttributeError) as error:  # a type without a kernel, too little memory
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            raise  # the device is gone: nothing after it would be true
        return None


def gemm(case, device, timer):
    """TFLOP/s of [m, k] by [k, n]."""
    m, k, n = case.shape
    with product(case, device) as multiply:
        return [2 * m * k * n / FLOP_PER_TFLOP / spent_s for spent_s in samples.of_work(multiply, timer)]


@contextlib.contextmanager
def product(case, device):
    """Yields a call of a case's product, of random factors; tf32 is for the block only."""
    import torch

    (m, k, n), precision = case.shape, case.precision
    if precision == "float8":
        yield _float8(m, k, n, device)
        return
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    out, before = torch.empty((m, n), device=device, dtype=dtype), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield lambda: torch.mm(a, b, out=out)
    finally:
        torch.set_float32_matmul_precision(before)


def _float8(m, k, n, device):
    """cuBLASLt takes the second factor in columns; scales are one."""
    import torch

    a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def copy(case, device, timer):
    """GiB/s of a copy within the memory, read and written."""
    import torch

    if device.type == "cuda" and case.num_bytes > SAFE_BYTES_FRAC * torch.cuda.mem_get_info(device)[0]:
        return None
    half = torch.ones(case.num_bytes // 2 // 4, device=device)
    other = torch.zeros_like(half)
    return [case.num_bytes / GIB / spent_s for spent_s in samples.of_work(lambda: other.copy_(half), timer)]


def launch(case, device, timer):
    """Microseconds."""
    if device.type == "cpu":
        return wake_ups()
    return _kernels(device, waits="done" in case.name)


def _kernels(device, waits):
    """Of a kernel of one number: the host's time to launch it, or until the host has seen it done."""
    import torch

    number = torch.zeros(1, device=device)
    result, num_calls = [], 1 if waits else LAUNCHES_A_SAMPLE
    for _ in range(samples.NUM_SAMPLES + 1):
        torch.cuda.synchronize(device)
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            number.add_(1)
        if waits:
            torch.cuda.synchronize(device)
        result.append((time.perf_counter_ns() - started_ns) / 1e3 / num_calls)
    return result[1:]  # the first brings in the kernel


def wake_ups():
    """Until a thread that sleeps in a read of a pipe runs after a write to it: half of a round trip."""
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()

    def answers():
        while os.read(to_read, 1) == b"1":
            os.write(back_write, b"1")

    thread = threading.Thread(target=answers)
    thread.start()
    result = []
    try:
        for _ in range(samples.NUM_SAMPLES):
            started_ns = time.perf_counter_ns()
            for _ in range(NUM_ROUND_TRIPS):
                os.write(to_write, b"1")
                os.read(back_read, 1)
            result.append((time.perf_counter_ns() - started_ns) / 1e3 / (2 * NUM_ROUND_TRIPS))
    finally:
        os.write(to_write, b"0")
        thread.join()
        for fd in (to_read, to_write, back_read, back_write):
            os.close(fd)
    return result


def collective(case, ranks, timer):
    """GiB/s of bus bandwidth: bus bytes (figures.BUS_FACTORS) over the seconds of the slowest rank."""
    import torch
    from torch import distributed as dist

    from bench.training import distributed

    num_calls = max(1, min(50, (1 if ranks.device.type == "cuda" else 1 / 32) * GIB // case.num_bytes))
    call = _collective(case, ranks)
    spent_s = samples.of_calls(call, timer, int(num_calls), distributed.barrier)
    slowest_s = torch.tensor(spent_s, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return [bus_bytes(case.name, case.num_bytes, ranks.world_size) / GIB / one_s for one_s in slowest_s.tolist()]


def _collective(case, ranks):
    import torch
    from torch import distributed as dist

    from bench.training import distributed

    num_ranks = ranks.world_size
    part = torch.ones(math.ceil(case.num_bytes / 4 / num_ranks), device=ranks.device)
    whole = part.repeat(num_ranks)
    if case.name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if case.name == "all_gather":
        return lambda: distributed.gather_in_place(whole, part).wait()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(part, whole)
