"""Planted slowdowns: each is the first line of where the next millisecond is, with its size within 15 %, and its place;
and eight causes, each named in the first three lines of a comparison.

Real traces of this machine's CPU, and a real run of two ranks, one of them slow.
"""

import gc
import os
import threading
import time

import pytest
import real_runs
from traces import event, launched, load_all, step, write

from bench.analysis.explain import account, explained, parts
from bench.api import traces

WITHIN = 0.15
NUM_ATTEMPTS = 4  # another program may take the core within a step, and that time is nobody's here


# on a machine that others use, threads that wait for each other take many times as long
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def profiled(path, step, with_stack=True):
    """Three steps that count, step(number) each, recorded into path: the first warms up, the last does not count."""
    from torch.profiler import ProfilerActivity, profile, schedule

    plan, cpu = schedule(wait=0, warmup=1, active=4, repeat=1), [ProfilerActivity.CPU]
    with profile(activities=cpu, record_shapes=True, with_stack=with_stack, schedule=plan) as profiler:
        for number in range(5):
            step(number)
            profiler.step()
    profiler.export_chrome_trace(str(path))


def traced(path, work, slow, with_stack=True):
    """Steps of work and a planted slowdown -> the mean milliseconds of each, (work, slow)."""
    from torch.profiler import record_function

    took_s = []

    def step(number):
        began_s = time.perf_counter()
        work()
        middle_s = time.perf_counter()
        with record_function(slow.__name__):
            slow(number)
        took_s.append((middle_s - began_s, time.perf_counter() - middle_s))

    slow(99)  # what it imports is none of a step's time
    profiled(path, step, with_stack)
    return [1e3 * sum(column) / 3 for column in zip(*took_s[1:4])]


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
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_slowdown_of_the_host_is_the_first_line(tmp_path, slow, part):
    for attempt in range(NUM_ATTEMPTS):
        # a compilation has a million frames, and is annotated by torch
        _, took_ms = traced(tmp_path / f"{attempt}.json", products, slow, with_stack=slow is not recompiles)
        first = account.accounts_of(load_all([tmp_path / f"{attempt}.json"]))[1]["next"][0]
        if first["part"] == part and first["gain_ms"] == pytest.approx(took_ms, rel=WITHIN):
            break
    assert first["part"] == part, first
    assert first["gain_ms"] == pytest.approx(took_ms, rel=WITHIN)
    assert slow.__name__ in first["where"]


def test_a_product_split_into_small_ones_is_the_first_line_with_what_the_split_costs(tmp_path):
    """Multiplies 64 rows by a matrix at once, then row by row, which reads the whole matrix for each row."""
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
        first = account.accounts_of(load_all([tmp_path / f"{attempt}.json"]))[1]["next"][0]
        if first["gain_ms"] == pytest.approx(split_ms - whole_ms, rel=WITHIN):
            break
    assert first["part"] == parts.SLOWER
    assert first["what"].startswith("aten::mm [1, 1024] [1024, 2048]")
    assert (first["count"], first["where"]) == (64, "split")
    assert first["gain_ms"] == pytest.approx(split_ms - whole_ms, rel=WITHIN)


def traced_loop(path, batches, num_products, make_optimizer, between, with_stack=True):
    """Traces steps of a loader, products and an optimizer, as a training script has them."""
    import torch

    weights = [torch.nn.Parameter(torch.ones(32, 32)) for _ in range(40)]
    optimizer, matrix = make_optimizer(weights), torch.ones(256, 256)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()  # what it makes at first is none of a step's time
    loader = iter(torch.utils.data.DataLoader(batches, batch_size=None))

    def step(number):
        next(loader)
        with torch.profiler.record_function("forward"):
            for _ in range(num_products):
                torch.mm(matrix, matrix)
            between(number)
        optimizer.step()

    profiled(path, step, with_stack)


class Batches(list):
    """Eight batches; read(number) is what it takes to have one."""

    def __init__(self, read):
        super().__init__(range(8))
        self.read = read

    def __getitem__(self, number):
        self.read(number)
        if number > 7:
            raise IndexError
        return number


def sgd(weights):
    import torch

    return torch.optim.SGD(weights, lr=0.1, foreach=True)


def one_by_one(weights):
    import torch

    return torch.optim.AdamW(weights, lr=0.1, foreach=False)


def reads_disk(folder):
    path = folder / "shard.bin"
    path.write_bytes(os.urandom(2**20) * 64)

    def read(number):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()

    return read


def nothing(number):
    pass


def change_of(a, b):
    """Returns the first three lines that ./run.sh explain A B prints."""
    return "\n".join(str(traces.explain(a, b)).splitlines()[:3])


@pytest.mark.parametrize(
    "cause, named",
    [
        ("loader", "loader: enumerate(DataLoader)"),
        ("disk", "loader: read (built-in)"),
        pytest.param("collection", "garbage collection: collect (built-in)", marks=pytest.mark.slow),
        ("matmul", "products, peak unknown: aten::mm [256, 256] x2 float32"),  # whatever the best rates of both were
        ("optimizer", "Optimizer.step#AdamW.step"),
        ("recompilation", "compilation: "),
    ],
)
def test_the_first_three_lines_of_a_comparison_name_the_cause(tmp_path, cause, named):
    planted = {"batches": Batches(nothing), "num_products": 8, "make_optimizer": sgd, "between": nothing}
    planted["with_stack"] = cause in ("disk", "collection")  # which a file is, or a collection, only frames say
    usual = list(planted.values())
    planted |= {
        "loader": {"batches": Batches(lambda number: time.sleep(0.02))},
        "disk": {"batches": Batches(reads_disk(tmp_path))},
        "collection": {"between": lambda number: gc.collect()},
        "matmul": {"num_products": 40},
        "optimizer": {"make_optimizer": one_by_one},
        "recompilation": {"between": recompiles},
    }[cause]
    for _ in range(NUM_ATTEMPTS):
        if cause == "recompilation":
            __import__("torch")._dynamo.reset()  # the same shapes were compiled before
        traced_loop(tmp_path / "a.json", *usual)
        traced_loop(tmp_path / "b.json", *planted.values())
        if named in change_of(tmp_path / "a.json", tmp_path / "b.json"):
            break
    assert named in change_of(tmp_path / "a.json", tmp_path / "b.json")


def device_step(late_us, synchronises=False):
    """A step of a rank of two: a kernel, a collective that begins late_us later, and perhaps a wait for the device."""
    wait = [event("cuda_runtime", "cudaStreamSynchronize", 3, 37)] if synchronises else []
    next_us = 45 if synchronises else 3
    return [
        step(1, 0, 100),
        *launched("forward", 1 + late_us, 30, 0, 1, call_dur=0.5),
        *launched("backward", max(31, next_us + 2) + late_us, 20, next_us, 2, call_dur=1),
        *launched("ncclDevKernel_AllReduce", 70 + late_us, 30 - late_us, next_us + 2, 3, call_dur=1),
        *wait,
    ]


@pytest.mark.parametrize(
    "b, named",
    [
        ([device_step(0, synchronises=True)] * 2, "synchronisation: cudaStreamSynchronize"),
        ([device_step(0), device_step(20)], "waiting for a late rank (rank 1): ncclDevKernel_AllReduce"),
    ],
)
def test_the_first_three_lines_name_what_a_device_waited_for(tmp_path, b, named):
    for name, ranks in (("a", [device_step(0)] * 2), ("b", b)):
        (tmp_path / name).mkdir()
        for rank, events in enumerate(ranks):
            write(tmp_path / name / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
    assert named in change_of(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_a_rank_that_sleeps_is_whom_the_others_wait_for(tmp_path):
    """In a real run of two ranks the second sleeps 150 ms in each step before its backward pass."""
    planted = str(real_runs.REPO / "tests" / "planted")
    tiny = ["model.num_layers=1", "model.width=32", "model.num_heads=2", "data.batch_tokens=256"]
    folder = real_runs.run(tmp_path / "results", *tiny, *real_runs.TWO, PYTHONPATH=planted)
    explanation = explained.explain_record(folder)
    first = explanation["next"][0]
    assert (first["part"], first["rank"]) == (parts.WAITING, 1)
    assert first["gain_ms"] == pytest.approx(150, rel=WITHIN)
    ns = [line["sum_ns"] for line in explanation["ranks"]["0"]["parts"]]
    assert sum(ns) == explanation["ranks"]["0"]["step_sum_ns"]
