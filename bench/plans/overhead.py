"""What the harness adds to a step: the training loop with its default instruments, without any, and a bare loop.

One trainer, stepped by the three alternately.  A round runs the block of each, then once more in the other order, so
that a clock that drifts falls on all alike; ratios are taken within a round, medians over rounds, with 95 % intervals.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bench.base import stats
from bench.config.stages import num_micro_steps, stages_of
from bench.data import shards
from bench.launch.prepare import prepare
from bench.training import distributed
from bench.training.clock import Clock, marks_for
from bench.training.instruments.base import PHASES, Context, InstrumentSet
from bench.training.instruments.registry import load
from bench.training.run import train
from bench.training.step_log import StepLog
from bench.training.trainer import Trainer

MIN_ROUNDS = 5


def measured(
    blocks: Mapping[str, Callable[[], float]], max_rounds: int, is_spent: Callable[[], bool]
) -> dict[str, list[float]]:
    """{name: seconds of its two blocks, of each round}; after MIN_ROUNDS only until is_spent(), asked every round."""
    result = {name: [] for name in blocks}
    for number in range(max_rounds):
        if is_spent() and number >= MIN_ROUNDS:
            break
        seconds = dict.fromkeys(blocks, 0.0)
        for name in [*blocks, *reversed(blocks)]:
            seconds[name] += blocks[name]()
        for name, spent_s in seconds.items():
            result[name].append(spent_s)
    return result


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None) -> tuple:
    """A row for bench-self, (what, measured, sign, target, 95 % interval), of the seconds of two contestants."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    sign = None if target is None else "<="
    return what, statistics.median(ratios), sign, target, stats.median_interval(ratios)


def step_ms(name: str, seconds: Sequence[float], num_block_steps: int, where: str) -> tuple:
    """The same of one contestant's milliseconds a step."""
    return f"{name}, ms a step ({where})", 1e3 * statistics.median(seconds) / 2 / num_block_steps, None, None


def measure(num_block_steps: int = 2) -> list[tuple]:
    """[(what, measured, sign, target[, 95 % interval])] of alternating blocks of the same steps on this machine's CPU.

    Short blocks: what disturbs a shared machine lasts for seconds, and a round of longer blocks is no less noisy.
    SPEEDRUN_BENCH_ROUNDS=400 (of a second each; the default: 150) for a narrower interval.
    """
    num_rounds = int(os.environ.get("SPEEDRUN_BENCH_ROUNDS", 150))
    with Loops(["track=cpu_nano", "hardware=cpu"], num_block_steps) as loops:
        started_ns, waited_ns = time.perf_counter_ns(), loops.trainer.loader.wait_ns
        rows = loops.compare(num_rounds, "CPU", 1.01, 1.005)
        wait_pct = 100 * (loops.trainer.loader.wait_ns - waited_ns) / (time.perf_counter_ns() - started_ns)
        return [*rows, ("waiting for the loader, % of CPU steps", wait_pct, "<=", 1.0)]


class Loops:
    """One trainer, stepped by three loops of the same steps.  instrumented, plain: what train() takes."""

    def __init__(self, overrides: list[str], num_block_steps: int):
        job = prepare(overrides)
        config, self.num_block_steps = job.config, num_block_steps
        self.config = config
        torch.set_num_threads(config.hardware.num_threads)
        ranks = distributed.start(config.hardware.device, 60)
        self.device, self._marks = ranks.device, marks_for(ranks.device.type)
        files = (job.dataset.train, job.dataset.val)
        train_shards, val_shards = ([shards.check(file.path) for file in split] for split in files)
        self.trainer, self.tokens = Trainer(config, ranks, train_shards, val_shards), train_shards[0].tokens()
        self._folder = tempfile.TemporaryDirectory()
        folder, device = Path(self._folder.name), ranks.device
        context = Context(folder, 0, 1, device.type, num_block_steps, self._marks, device.index)
        made, warnings = load(config.instruments, context)
        for warning in warnings:
            print(f"without {warning['instrument']}: {warning['error']}", file=sys.stderr)
        self.instrumented, self.plain = InstrumentSet(made), InstrumentSet()
        self.bare(), self.train(self.plain), self.train(self.instrumented)  # warm
        self.instrumented.on_run_start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self) -> None:
        """End the sampler, the loader and what the instruments have open."""
        self.sample(True)
        self.instrumented.on_run_end()
        self.instrumented.close()
        for warning in self.instrumented.warnings:
            print(f"{warning['instrument']} failed: {warning['error']}", file=sys.stderr)
        self.trainer.close()
        self._folder.cleanup()

    def compare(self, num_rounds, where, bare_target, plain_target):
        """Rows as of measure(), of rounds of I P B B P I: instrumented, plain, bare."""
        blocks = {"with default instruments": lambda: self.train(self.instrumented)}
        blocks |= {"without": lambda: self.train(self.plain), "bare loop": self.bare}
        result = measured(blocks, num_rounds, lambda: False)
        ours = result["with default instruments"]
        rows = [
            ratio(f"training loop with default instruments / {what} ({where})", ours, result[what], target)
            for what, target in (("bare loop", bare_target), ("without", plain_target))
        ]
        return [*rows, (f"default instruments' host time, us a step ({where})", self._host_us(), "<=", 20)]

    def _host_us(self, num_steps=1000, num_repeats=9):
        """Microseconds that the instruments take of a step's host time: their edges alone, no training between them."""

        def spent_us(instruments):
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

    def sync(self):
        distributed.sync(self.device)

    def train(self, instruments):
        self.sample(instruments is self.instrumented)
        log = StepLog(self._marks, self.device, self.num_block_steps)
        instruments.attach(log)
        self.trainer.attach(instruments, log)
        clock, num_steps = Clock(self.sync, lambda: None), self.num_block_steps
        train(self.trainer.step, lambda: 0.0, lambda loss: False, num_steps, num_steps, clock, instruments)
        instruments.attach(None)
        return clock.train_s

    def sample(self, on):
        """A sampler that went on beside the blocks without it would cost both sides alike and not be seen."""
        for instrument in self.instrumented.instruments:
            if hasattr(instrument, "pause"):
                instrument.resume() if on else instrument.pause()

    def bare(self):
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
