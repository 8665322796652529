"""Defines the figures of a device: which are measured, the work of each in torch, and samples in the figure's unit."""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import distributed as dist

from bench.base import stats
from bench.base.units import GIB, KIB, MIB, format_bytes
from bench.machine import passports
from bench.machine.passports import UNIT, Figure, bus_bytes
from bench.training import distributed
from bench.training.timing import clock

NUM_SAMPLES, MIN_SAMPLES = 5, 2  # samples of a case in a round
GPU_PRECISIONS = ("bfloat16", "tf32", "float16", "float32", "float8")
CPU_PRECISIONS = ("float32", "bfloat16")
# (m, k, n): squares, and a language model's products: tokens by width by a multiple, weight gradients, vocabulary
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
LAUNCHES = {"cuda": (passports.HOST_LAUNCH, "kernel, until it is done"), "cpu": ("thread wake-up",)}


MAX_CASE_S = 0.4  # time of a case in a round; slow cases get fewer than NUM_SAMPLES
SAMPLE_S = {"cuda": 5e-3, "cpu": 10e-3}  # minimum: a hundred times a launch, or the resolution of the host's clock
PERCENTILES = {"low": 10, "value": 50, "high": 90}
FLOP_PER_TFLOP = 1e12
LAUNCHES_A_SAMPLE = 200  # fewer than a stream's queue holds, so that the host never waits for it
NUM_ROUND_TRIPS = 200
NUM_PRODUCTS = 2  # products per precision in few()
SAFE_BYTES_FRAC = 0.5  # part of a GPU's free memory that a copy may use


@dataclass(frozen=True)
class Case:
    """A figure to be measured. name: of a collective or a launch; other fields are Figure's, None if absent."""

    kind: passports.Kind
    name: str | None = None
    precision: str | None = None
    shape: tuple[int, int, int] | None = None
    num_bytes: int | None = None
    num_threads: int | None = None
    world_size: int | None = None

    @property
    def label(self) -> str:
        """The name of the figure."""
        parts: list[object] = [self.kind, self.name, self.precision, "x".join(map(str, self.shape or ()))]
        parts.append(format_bytes(self.num_bytes))
        parts.append(self.num_threads and f"{self.num_threads} thread{'s' * (self.num_threads > 1)}")
        parts.append(self.world_size and f"{self.world_size} ranks")
        return " ".join(str(part) for part in parts if part)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a Figure that are known before it is measured."""
        return {"what": self.label} | {name: value for name, value in asdict(self).items() if value is not None}


def cases_of_device(device_type: str, num_threads: Sequence[int] = (), has_float8: bool = False) -> list[Case]:
    """Returns the cases of one device. num_threads: the thread counts to measure on a CPU; has_float8: of a GPU."""
    launches = [Case("launch", name) for name in LAUNCHES[device_type]]
    if device_type == "cuda":
        precisions = [precision for precision in GPU_PRECISIONS if precision != "float8" or has_float8]
        gemms = [Case("gemm", precision=precision, shape=shape) for shape in GPU_SHAPES for precision in precisions]
        return [Case("clock"), *[Case("copy", num_bytes=size) for size in GPU_COPIES], *launches, *gemms]
    copies = [Case("copy", num_bytes=size, num_threads=number) for size in CPU_COPIES for number in num_threads]
    works = itertools.product(CPU_PRECISIONS, CPU_SHAPES, num_threads)
    gemms = [Case("gemm", precision=precision, shape=shape, num_threads=number) for precision, shape, number in works]
    return [Case("clock"), *copies, *launches, *gemms]


def cases_of_ranks(device_type: str, world_size: int) -> list[Case]:
    """Returns the collectives of all ranks together; [] for one rank."""
    messages = GPU_MESSAGES if device_type == "cuda" else CPU_MESSAGES
    sized = [(size, name) for name in COLLECTIVES for size in messages] if world_size > 1 else []
    return [Case("collective", name, num_bytes=size, world_size=world_size) for size, name in sized]


def few(cases: Sequence[Case], precisions: Sequence[str]) -> list[Case]:
    """Returns cases that fit in seconds: the clock, the largest copy and messages, the first launch, and the first
    products of each of these precisions."""
    chosen: list[Case] = []
    for case in cases:
        alike = [other for other in chosen if (other.kind, other.precision) == (case.kind, case.precision)]
        if case.kind == "gemm":
            is_wanted = case.precision in precisions and len(alike) < NUM_PRODUCTS
        else:
            is_wanted = all(case.kind == "collective" and other.name != case.name for other in alike)
        chosen += [case] if is_wanted else []
    return chosen


class Timer:
    """Times work with the device's clock: on a GPU with events before and after."""

    def __init__(self, device_type: str) -> None:
        self.device_type, self._marks = device_type, clock.marks_for(device_type)

    def seconds(self, work: Callable[[], object], num_calls: int) -> float:
        """Returns the seconds of num_calls calls of work together."""
        first = self._marks.mark()
        for _ in range(num_calls):
            work()
        last = self._marks.mark()
        self._marks.wait(last)
        spent_ms = self._marks.ms_between(first, last)
        self._marks.free(first, last)
        return spent_ms / 1e3


def call_seconds(
    work: Callable[[], object], timer: Timer, now_s: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Returns seconds of a call, each a mean over SAMPLE_S; the first call warms up, the second gives their number."""
    until_s = now_s() + MAX_CASE_S
    timer.seconds(work, 1)
    guess_s = timer.seconds(work, 1)
    num_calls = max(1, round(SAMPLE_S[timer.device_type] / guess_s)) if guess_s > 0 else 1
    means_s: list[float] = []
    while len(means_s) < NUM_SAMPLES and (len(means_s) < MIN_SAMPLES or now_s() < until_s):
        means_s.append(timer.seconds(work, num_calls) / num_calls)
    return means_s


def figure(case: Case, values: list[float]) -> Figure:
    """Returns the figure of a case. values: one per sample, in the unit of its kind."""
    by_name = {name: stats.percentile(values, pct) for name, pct in PERCENTILES.items()}
    return cast(Figure, {**case.facts, "unit": UNIT[case.kind], **by_name, "num_samples": len(values)})


def values(case: Case, device: torch.device, timer: Timer) -> list[float] | None:
    """Returns a device case's values in its unit, one per sample; None if this device or torch cannot measure it."""
    if case.num_threads:
        torch.set_num_threads(case.num_threads)
    measure = {"gemm": _gemm, "copy": _copy, "launch": _launch}[case.kind]
    try:
        with torch.no_grad():
            return measure(case, device, timer)
    except (NotImplementedError, RuntimeError, AttributeError) as error:  # no kernel for the dtype, too little memory
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            raise  # the device is lost: no later figure would be valid
        return None


def _gemm(case: Case, device: torch.device, timer: Timer) -> list[float]:
    """Returns the TFLOP/s of [m, k] by [k, n]."""
    with product(case, device) as multiply:
        num_flop = 2 * math.prod(case.shape or ())
        return [num_flop / FLOP_PER_TFLOP / spent_s for spent_s in call_seconds(multiply, timer)]


@contextlib.contextmanager
def product(case: Case, device: torch.device) -> Iterator[Callable[[], object]]:
    """Yields a call of a case's product, of random factors; TF32 is set only within the block."""
    m, k, n = case.shape or (0, 0, 0)
    if case.precision == "float8":  # cuBLASLt takes the second factor in columns; scales are one
        a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
        scale = torch.ones((), device=device)
        yield lambda: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        return
    is_tf32 = case.precision == "tf32"
    dtype = torch.float32 if is_tf32 else getattr(torch, case.precision or "")
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    out, before = torch.empty((m, n), device=device, dtype=dtype), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    try:
        yield lambda: torch.mm(a, b, out=out)
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(case: Case, device: torch.device, timer: Timer) -> list[float] | None:
    """Returns the GiB/s of a copy within the memory, counting bytes read and written."""
    num_bytes = case.num_bytes or 0
    if device.type == "cuda" and num_bytes > SAFE_BYTES_FRAC * torch.cuda.mem_get_info(device)[0]:
        return None
    half = torch.ones(num_bytes // 2 // 4, device=device)
    other = torch.zeros_like(half)
    return [num_bytes / GIB / spent_s for spent_s in call_seconds(lambda: other.copy_(half), timer)]


def _launch(case: Case, device: torch.device, timer: Timer) -> list[float]:
    """Returns microseconds."""
    return wake_ups() if device.type == "cpu" else _kernels(device, waits="done" in (case.name or ""))


def _kernels(device: torch.device, waits: bool) -> list[float]:
    """Returns microseconds of a tiny kernel: the host's to launch it, or if it waits, until the host sees it done."""
    number = torch.zeros(1, device=device)
    times_us, num_calls = [], 1 if waits else LAUNCHES_A_SAMPLE
    for _ in range(NUM_SAMPLES + 1):
        torch.cuda.synchronize(device)
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            number.add_(1)
        if waits:
            torch.cuda.synchronize(device)
        times_us.append((time.perf_counter_ns() - started_ns) / 1e3 / num_calls)
    return times_us[1:]  # the first call loads the kernel


def wake_ups() -> list[float]:
    """Returns microseconds for a thread to wake from a read of a pipe after a write to it: half of a round trip."""
    (to_read, to_write), (back_read, back_write) = os.pipe(), os.pipe()

    def echo() -> None:
        while os.read(to_read, 1) == b"1":
            os.write(back_write, b"1")

    thread = threading.Thread(target=echo)
    thread.start()
    times_us = []
    try:
        for _ in range(NUM_SAMPLES):
            started_ns = time.perf_counter_ns()
            for _ in range(NUM_ROUND_TRIPS):
                os.write(to_write, b"1")
                os.read(back_read, 1)
            times_us.append((time.perf_counter_ns() - started_ns) / 1e3 / (2 * NUM_ROUND_TRIPS))
    finally:
        os.write(to_write, b"0")
        thread.join()
        for fd in (to_read, to_write, back_read, back_write):
            os.close(fd)
    return times_us


def collective(case: Case, ranks: distributed.Ranks, timer: Timer) -> list[float]:
    """Returns the GiB/s of bus bandwidth: bus bytes (passports.BUS_FACTORS) over the seconds of the slowest rank.

    All ranks make the same number of calls, and begin each sample together.
    """
    name, num_bytes = case.name or "", case.num_bytes or 0
    part = torch.ones(math.ceil(num_bytes / 4 / ranks.world_size), device=ranks.device)
    whole = part.repeat(ranks.world_size)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: distributed.gather_in_place(whole, part).wait(),
        "reduce_scatter": lambda: scatter(part, whole),
    }[name]
    num_calls = int(max(1, min(50, (1 if ranks.device.type == "cuda" else 1 / 32) * GIB // num_bytes)))
    timer.seconds(call, 2)
    spent_s = []
    for _ in range(NUM_SAMPLES):
        distributed.barrier()
        spent_s.append(timer.seconds(call, num_calls) / num_calls)
    slowest_s = torch.tensor(spent_s, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return [bus_bytes(name, num_bytes, ranks.world_size) / GIB / one_s for one_s in slowest_s.tolist()]
