"""What is measured of a device, the work of each case in torch, and its samples as a figure in the case's unit."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.base import stats
from bench.base.units import GIB, KIB, MIB, format_bytes
from bench.machine.passport import kept
from bench.machine.passport.kept import UNIT, Figure, bus_bytes

NUM_SAMPLES, MIN_SAMPLES = 5, 2  # of a round
GPU_PRECISIONS = ("bfloat16", "tf32", "float16", "float32", "float8")
CPU_PRECISIONS = ("float32", "bfloat16")
# m, k, n: squares, and products of a language model: tokens by width by its multiples, weights' gradients, a vocabulary
GPU_SHAPES = (
    *((size, size, size) for size in (8192, 4096, 2048, 1024, 512)),
    *((16384, 768, 768), (16384, 768, 3072), (16384, 3072, 768), (768, 16384, 3072), (16384, 768, 50304)),
    (64, 4096, 4096),
)
CPU_SHAPES = (
    *((size, size, size) for size in (512, 256, 1024, 128)),
    *((1024, 128, 512), (128, 1024, 512), (1024, 128, 128), (2, 256, 256)),
)
GPU_COPIES, CPU_COPIES = (2 * GIB, 256 * MIB, 32 * MIB, 2 * MIB), (256 * MIB, 32 * MIB, 2 * MIB, 256 * KIB)
GPU_MESSAGES = (GIB // 4, 64 * MIB, 16 * MIB, MIB, 64 * KIB, 4 * KIB)
CPU_MESSAGES = (16 * MIB, MIB, 64 * KIB, 4 * KIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
LAUNCHES = {"cuda": (kept.HOST_LAUNCH, "kernel, until it is done"), "cpu": ("thread wake-up",)}


@dataclass(frozen=True)
class Case:
    """One figure to be.  name: of a collective or a launch; the other fields as of figures.Figure, None: has none."""

    kind: kept.Kind
    name: str | None = None
    precision: str | None = None
    shape: tuple[int, int, int] | None = None
    num_bytes: int | None = None
    num_threads: int | None = None
    world_size: int | None = None

    @property
    def what(self) -> str:
        """The figure's own name."""
        words = [self.kind, self.name, self.precision, self.shape and "x".join(map(str, self.shape))]
        words += [format_bytes(self.num_bytes), self.num_threads and f"{self.num_threads} threads"]
        words += [self.world_size and f"{self.world_size} ranks"]
        return " ".join(word for word in words if word).replace(" 1 threads", " 1 thread")

    @property
    def facts(self) -> dict:
        """What of a Figure is known before it is measured."""
        names = ("name", "precision", "num_bytes", "num_threads", "world_size")
        result = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"what": self.what, "kind": self.kind} | result | ({"shape": list(self.shape)} if self.shape else {})


def of_device(device_type: str, num_threads: Sequence[int] = (), has_float8: bool = False) -> list[Case]:
    """num_threads: of a CPU, each number of threads that is measured; has_float8: of a GPU."""
    launches = [Case("launch", name) for name in LAUNCHES[device_type]]
    if device_type == "cuda":
        precisions = [one for one in GPU_PRECISIONS if one != "float8" or has_float8]
        gemms = [Case("gemm", precision=one, shape=shape) for shape in GPU_SHAPES for one in precisions]
        return [Case("clock"), *[Case("copy", num_bytes=size) for size in GPU_COPIES], *launches, *gemms]
    copies = [Case("copy", num_bytes=size, num_threads=number) for size in CPU_COPIES for number in num_threads]
    gemms = [
        Case("gemm", precision=one, shape=shape, num_threads=number)
        for one in CPU_PRECISIONS
        for shape in CPU_SHAPES
        for number in num_threads
    ]
    return [Case("clock"), *copies, *launches, *gemms]


def of_ranks(device_type: str, world_size: int) -> list[Case]:
    """Collectives of all ranks together; none for one."""
    messages = GPU_MESSAGES if device_type == "cuda" else CPU_MESSAGES
    sized = [(size, name) for name in COLLECTIVES for size in messages] if world_size > 1 else []
    return [Case("collective", name, num_bytes=size, world_size=world_size) for size, name in sized]


MAX_CASE_S = 0.4  # of a case in a round; fewer samples than NUM_SAMPLES where one takes long
SAMPLE_S = {"cuda": 5e-3, "cpu": 10e-3}  # at least: a hundred times a launch, or what the host's clock resolves
PERCENTILES = {"low": 10, "value": 50, "high": 90}


class Timer(Protocol):
    """device_type: cuda or cpu; seconds(): of num_calls calls of work on the device, from the first to the end."""

    device_type: str

    def seconds(self, work: Callable[[], object], num_calls: int) -> float: ...


class HostTimer:
    """Work that is done when it returns."""

    device_type = "cpu"

    def seconds(self, work: Callable[[], object], num_calls: int) -> float:
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            work()
        return (time.perf_counter_ns() - started_ns) / 1e9


class CudaTimer:
    """By the GPU's own clock: events before and after."""

    device_type = "cuda"

    def __init__(self):
        import torch

        self._event = lambda: torch.cuda.Event(enable_timing=True)

    def seconds(self, work: Callable[[], object], num_calls: int) -> float:
        first, last = self._event(), self._event()
        first.record()
        for _ in range(num_calls):
            work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3  # ms


def of_work(
    work: Callable[[], object], timer: Timer, now_s: Callable[[], float] = time.perf_counter, max_case_s=MAX_CASE_S
) -> list[float]:
    """Seconds of one call, a mean over calls of SAMPLE_S each; the first call warms up and counts only as a guess."""
    until_s = now_s() + max_case_s
    timer.seconds(work, 1)
    guess_s = timer.seconds(work, 1)
    num_calls = max(1, round(SAMPLE_S[timer.device_type] / guess_s)) if guess_s > 0 else 1
    result = []
    while len(result) < NUM_SAMPLES and (len(result) < MIN_SAMPLES or now_s() < until_s):
        result.append(timer.seconds(work, num_calls) / num_calls)
    return result


def of_calls(work: Callable[[], object], timer: Timer, num_calls: int, before: Callable[[], object]) -> list[float]:
    """The same of a number of calls that is given, so that all ranks make as many; before: each sample."""
    timer.seconds(work, 2)
    result = []
    for _ in range(NUM_SAMPLES):
        before()
        result.append(timer.seconds(work, num_calls) / num_calls)
    return result


def figure(case: Case, values: list[float]) -> Figure:
    """values: one a sample, in the unit of its kind."""
    by_name = {name: stats.percentile(values, pct) for name, pct in PERCENTILES.items()}
    return {**case.facts, "unit": UNIT[case.kind], **by_name, "num_samples": len(values)}


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
        return [2 * m * k * n / FLOP_PER_TFLOP / spent_s for spent_s in of_work(multiply, timer)]


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
    return [case.num_bytes / GIB / spent_s for spent_s in of_work(lambda: other.copy_(half), timer)]


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
    for _ in range(NUM_SAMPLES + 1):
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
        for _ in range(NUM_SAMPLES):
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
    spent_s = of_calls(call, timer, int(num_calls), distributed.barrier)
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
