"""Planted slowdowns: each is the first line of where the next millisecond is, with its size within 15 %, and its place.

Real traces of this machine's CPU, and a real run of two ranks, one of them slow.
"""

import gc
import threading
import time

import pytest
import real_runs

from bench.analysis.explain import account, explained, parts
from bench.analysis.trace import load

WITHIN = 0.15
NUM_ATTEMPTS = 4  # another program may take the core within a step, and that time is nobody's here


@pytest.fixture(autouse=True)
def one_thread():
    """On a machine that others use, threads that wait for each other take many times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def traced(path, work, slow, with_stack=True):
    """Three steps that count, of work and a planted slowdown -> the mean milliseconds of each, (work, slow)."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    slow(99)  # what it imports is none of a step's time
    took_s = []
    plan = schedule(wait=0, warmup=1, active=4, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        with_stack=with_stack,
        schedule=plan,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for number in range(5):
            began_s = time.perf_counter()
            work()
            middle_s = time.perf_counter()
            with record_function(slow.__name__):
                slow(number)
            took_s.append((middle_s - began_s, time.perf_counter() - middle_s))
            profiler.step()
    return [1e3 * sum(column) / 3 for column in zip(*took_s[1:4])]  # the first warms up, the last does not count


def products():
    import torch

    weights = torch.ones(256, 256)
    for _ in range(8):
        torch.mm(weights, weights)


def sleeps(number):
    time.sleep(0.05)


KEPT = [[number] for number in range(200_000)]  # what a collection has to look through


def collects(number):
    gc.collect()


def waits(number):
    done = threading.Event()
    threading.Timer(0.05, done.set).start()
    done.wait()


def recompiles(number):
    import torch

    torch.compile(doubled, backend="eager", dynamic=False)(torch.ones(number + 2))


def doubled(numbers):
    for power in range(20):
        numbers = numbers * 2 + power
    return numbers


@pytest.mark.parametrize(
    "slow, part",
    [(sleeps, parts.HOST), (collects, parts.GARBAGE), (waits, parts.SYNC), (recompiles, parts.COMPILATION)],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_slowdown_of_the_host_is_the_first_line(tmp_path, slow, part):
    for attempt in range(NUM_ATTEMPTS):
        # a compilation has a million frames, and is annotated by torch
        _, took_ms = traced(tmp_path / f"{attempt}.json", products, slow, with_stack=slow is not recompiles)
        first = account.explain_ranks(load.load_all([tmp_path / f"{attempt}.json"]))["next"][0]
        if first["part"] == part and first["gain_ms"] == pytest.approx(took_ms, rel=WITHIN):
            break
    assert first["part"] == part, first
    assert first["gain_ms"] == pytest.approx(took_ms, rel=WITHIN)
    assert slow.__name__ in first["where"]


def test_a_product_split_into_small_ones_is_the_first_line_with_what_the_split_costs(tmp_path):
    """64 rows by a matrix at once, and again row by row: the whole matrix is read for each of them."""
    import torch

    rows, matrix = torch.ones(64, 1024), torch.ones(1024, 2048)
    single = rows.split(1)

    def whole():
        torch.mm(rows, matrix)

    def split(number):
        for row in single:
            torch.mm(row, matrix)

    for attempt in range(NUM_ATTEMPTS):
        whole_ms, split_ms = traced(tmp_path / f"{attempt}.json", whole, split, with_stack=False)
        first = account.explain_ranks(load.load_all([tmp_path / f"{attempt}.json"]))["next"][0]
        if first["gain_ms"] == pytest.approx(split_ms - whole_ms, rel=WITHIN):
            break
    assert first["part"] == parts.SLOWER
    assert first["what"].startswith("aten::mm [1, 1024] [1024, 2048]")
    assert (first["count"], first["where"]) == (64, "split")
    assert first["gain_ms"] == pytest.approx(split_ms - whole_ms, rel=WITHIN)


@pytest.mark.slow
def test_a_rank_that_sleeps_is_whom_the_others_wait_for(tmp_path):
    """A real run of two ranks, of which the second sleeps 150 ms in each step before its backward pass."""
    planted = str(real_runs.REPO / "tests" / "planted")
    tiny = ["model.num_layers=1", "model.width=32", "model.num_heads=2", "data.batch_tokens=256"]
    folder = real_runs.run(tmp_path / "results", *tiny, *real_runs.TWO, PYTHONPATH=planted)
    answer = explained.explain_record(folder)
    first = answer["next"][0]
    assert (first["part"], first["rank"]) == (parts.WAITING, 1)
    assert first["gain_ms"] == pytest.approx(150, rel=WITHIN)
    ns = [line["sum_ns"] for line in answer["ranks"]["0"]["parts"]]
    assert sum(ns) == answer["ranks"]["0"]["step_sum_ns"]
