"""A piece of work -> samples of its time, -> a figure.  Works on whatever device a Timer times."""

import time
from collections.abc import Callable
from typing import Protocol

from bench.base import stats
from bench.machine.passport.figures import UNIT, Figure
from bench.plans.passport.cases import Case

NUM_SAMPLES, MIN_SAMPLES = 5, 2  # of a round
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
