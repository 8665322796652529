"""Trains a small model in the test's process with a run's calls of the instruments, for tests of the profiler."""

import gzip
import json
import time
from pathlib import Path

import torch

from bench.config import compose
from bench.training.instruments import registry
from bench.training.instruments.base import Context, InstrumentSet
from bench.training.timing.clock import HostMarks

VAL_EVERY_STEPS = 4


class Spy:
    """Collects what an instrument says and emits."""

    def __init__(self):
        self.said, self.emitted = [], []

    def emit(self, name, **facts):
        self.emitted.append((name, facts))


def watch_of(folder, chosen, num_steps=12, rank=0, world_size=1, spy=None):
    """Returns the InstrumentSet of chosen ({"trace": {changed settings}}), made as a worker makes it."""
    compose._check_settings("instruments", chosen)
    spy = spy or Spy()
    context = Context(
        Path(folder),
        rank,
        world_size,
        "cpu",
        num_steps,
        HostMarks(time.perf_counter_ns),
        emit=spy.emit,
        say=spy.said.append,
    )
    instruments, warnings = registry.load(chosen, context)
    assert not warnings
    return InstrumentSet(instruments)


def model():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))


def train_under(watch, num_steps=12, num_micro_steps=2, fail_at=None, stop_after=None):
    """Trains with the calls of bench/training/timing/loop.py and bench/training/trainer.py.  Returns the losses.

    fail_at: step whose backward raises.  stop_after: step after which the target is reached.
    """
    torch.manual_seed(0)
    watch.on_build_start()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    watch.on_build_end()
    watch.on_warmup_start()
    watch.on_warmup_end()
    watch.on_run_start()
    losses = []
    for step in range(num_steps + 1):
        last = step in (num_steps, stop_after)
        if last or step % VAL_EVERY_STEPS == 0:
            watch.on_phase("validation")
            with torch.no_grad():
                losses.append(net(torch.ones(4, 16)).square().mean().item())
            watch.on_validation(step, losses[-1], 0.0)
        if last:
            break
        watch.on_step_start(step)
        for _ in range(num_micro_steps):
            watch.on_phase("data")
            batch = torch.randn(8, 16)
            watch.on_phase("forward")
            loss = net(batch).square().mean()
            watch.on_phase("backward")
            if step + 1 == fail_at:
                raise RuntimeError("out of luck")
            loss.backward()
            losses.append(loss.item())
        watch.on_phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        watch.on_step_end(step)
    watch.on_run_end()
    return losses


def read(path):
    """Returns the JSON of a trace file."""
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
        return json.load(file)


def names(trace, category="user_annotation"):
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == category]


def step_names(trace):
    return [name for name in names(trace) if name.startswith("ProfilerStep#")]


def outside_of_steps(trace):
    """Returns the operators before the first ProfilerStep or after the last."""
    steps = [event for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    first, last = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    operators = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    return [event["name"] for event in operators if event["ts"] < first or event["ts"] + event["dur"] > last]
