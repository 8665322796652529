"""What the harness adds to a step: the training loop with its default instruments, without any, and a bare loop.

One trainer, stepped by the three alternately.  A round runs the block of each, then once more in the other order, so
that a clock that drifts falls on all alike; ratios are taken within a round, medians over rounds, with 95 % intervals.
"""

import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import scipy.stats
import torch

from bench.config.stages import num_micro_steps, stages_of
from bench.data import shards
from bench.launch.prepare import prepare
from bench.training import distributed
from bench.training.instruments.base import PHASES, Context, InstrumentSet
from bench.training.instruments.registry import load
from bench.training.timing.clock import Clock, marks_for
from bench.training.timing.loop import train
from bench.training.timing.step_log import StepLog
from bench.training.trainer import Trainer
from benchmarks.rows import Row

MIN_ROUNDS = 5


def measured(
    blocks: Mapping[str, Callable[[], float]],
    max_rounds: int,
    is_spent: Callable[[Any], bool] = lambda seconds_of: False,
) -> dict[str, list[float]]:
    """Returns {name: seconds of its two blocks, of each round}; after MIN_ROUNDS it stops once is_spent(those)."""
    seconds_of: dict[str, list[float]] = {name: [] for name in blocks}
    for number in range(max_rounds):
        if number and is_spent(seconds_of) and number >= MIN_ROUNDS:
            break
        seconds = dict.fromkeys(blocks, 0.0)
        for name in [*blocks, *reversed(list(blocks))]:
            seconds[name] += blocks[name]()
        for name, spent_s in seconds.items():
            seconds_of[name].append(spent_s)
    return seconds_of


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None) -> Row:
    """Ratio of the seconds of two contestants, round by round."""
    ratios = [our_s / their_s for our_s, their_s in zip(ours, theirs, strict=True)]
    sign = None if target is None else "<="
    low, high = map(float, scipy.stats.quantile_test(ratios).confidence_interval())  # of the median
    return Row(what, statistics.median(ratios), sign, target, None if math.isnan(low) else (low, high))


def measure(num_block_steps: int = 2) -> list[Row]:
    """Alternating blocks of the same steps on this machine's CPU, in rounds of I P B B P I: instrumented, plain, bare.

    Short blocks: what disturbs a shared machine lasts for seconds, and a round of longer blocks is no less noisy.
    SPEEDRUN_BENCH_ROUNDS=400 (of a second each; the default: 150) for a narrower interval.
    """
    num_rounds = int(os.environ.get("SPEEDRUN_BENCH_ROUNDS", 150))
    with contextlib.closing(Loops(["track=cpu_nano", "hardware=cpu"], num_block_steps)) as loops:
        started_ns, waited_ns = time.perf_counter_ns(), loops.trainer.loader.wait_ns
        blocks = {"instrumented": lambda: loops.train(loops.instrumented), "without": lambda: loops.train(loops.plain)}
        seconds_of = measured(blocks | {"bare loop": loops.bare}, num_rounds)
        ours, what = seconds_of["instrumented"], "training loop with default instruments"
        host_us = loops.host_us()
        wait_pct = 100 * (loops.trainer.loader.wait_ns - waited_ns) / (time.perf_counter_ns() - started_ns)
    return [
        ratio(f"{what} / bare loop (CPU)", ours, seconds_of["bare loop"], 1.01),
        ratio(f"{what} / without (CPU)", ours, seconds_of["without"], 1.005),
        Row("default instruments' host time, us a step (CPU)", host_us, "<=", 20),
        Row("waiting for the loader, % of CPU steps", wait_pct, "<=", 1.0),
    ]


class Loops:
    """One trainer, stepped by three loops of the same steps.  instrumented, plain: what train() takes."""

    def __init__(self, overrides: list[str], num_block_steps: int) -> None:
        job = prepare(overrides)
        self.config, self.num_block_steps = job.config, num_block_steps
        torch.set_num_threads(self.config.hardware.num_threads)
        ranks = distributed.start(self.config.hardware.device, 60)
        self.device, self._marks = ranks.device, marks_for(ranks.device.type)
        files = (job.dataset.train, job.dataset.val)
        train_shards, val_shards = ([shards.check(file.path) for file in split] for split in files)
        self.trainer, self.tokens = Trainer(self.config, ranks, train_shards, val_shards), train_shards[0].tokens()
        self._folder = tempfile.TemporaryDirectory()
        device = (self.device.type, num_block_steps, self._marks, self.device.index)
        instruments, warnings = load(self.config.instruments, Context(Path(self._folder.name), 0, 1, *device))
        for warning in warnings:
            print(f"without {warning['instrument']}: {warning['error']}", file=sys.stderr)
        self.instrumented, self.plain = cast(Any, InstrumentSet(instruments)), cast(Any, InstrumentSet())
        self.bare(), self.train(self.plain), self.train(self.instrumented)  # warm
        self.instrumented.on_run_start()

    def close(self) -> None:
        """End the sampler, the loader and what the instruments have open."""
        self.sample(True)
        self.instrumented.on_run_end()
        self.instrumented.close()
        for warning in self.instrumented.warnings:
            print(f"{warning['instrument']} failed: {warning['error']}", file=sys.stderr)
        self.trainer.close()
        self._folder.cleanup()

    def host_us(self, num_steps: int = 1000, num_repeats: int = 9) -> float:
        """Microseconds that the instruments take of a step's host time: their edges alone, no training between them."""

        def spent_us(instruments: Any) -> float:
            started_ns = time.perf_counter_ns()
            for step in range(num_steps):
                instruments.on_step_start(step)
                for phase in PHASES:
                    instruments.on_phase(phase)
                instruments.on_step_end(step)
            return (time.perf_counter_ns() - started_ns) / 1e3 / num_steps

        differences = []
        for _ in range(num_repeats):
            differences.append(spent_us(self.instrumented) - spent_us(self.plain))
            self.sync()
        return statistics.median(differences)

    def sync(self) -> None:
        distributed.sync(self.device)

    def train(self, instruments: Any) -> float:
        """Seconds of a block of the training loop."""
        self.sample(instruments is self.instrumented)
        log = StepLog(self._marks, self.device, self.num_block_steps)
        instruments.attach(log)
        self.trainer.attach(instruments, log)
        clock, num_steps = Clock(self.sync, lambda: None), self.num_block_steps
        finish_line: Any = SimpleNamespace(next_stop=lambda done, *_: None if done else num_steps, stop_after=None)
        train(self.trainer.step, lambda: 0.0, finish_line, clock, instruments)
        instruments.attach(None)
        return clock.train_s

    def sample(self, on: bool) -> None:
        """A sampler that went on beside the blocks without it would cost both sides alike and not be seen."""
        for instrument in self.instrumented.instruments:
            if hasattr(instrument, "pause"):
                instrument.resume() if on else instrument.pause()

    def bare(self) -> float:
        """Seconds of a block of the same steps without the training loop."""
        trainer = self.trainer
        self.sample(False)
        self.sync()
        started_s, num_parts = time.perf_counter(), num_micro_steps(self.config, stages_of(self.config)[0])
        for step in range(self.num_block_steps):
            for _ in range(num_parts):
                tokens_BT, targets_BT = trainer.loader.next()
                with trainer.autocast():
                    loss = trainer.reducer.forward(tokens_BT, targets_BT)
                (loss / num_parts).backward()
            trainer.update(step)
        self.sync()
        return time.perf_counter() - started_s
