"""What the harness adds to a step: the training loop with its default instruments, without any, and a bare loop.

One trainer, stepped by the three in turn; only ratios of what lies in one round are compared.  Beside the steps: the
loader's rate, the start of a verb, the launcher's memory.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.base.paths import REPO
from bench.config.stages import num_micro_steps, stages_of
from bench.data import shards
from bench.launch.prepare import prepare
from bench.plans.overhead import rounds
from bench.training import distributed
from bench.training.clock import Clock, marks_for
from bench.training.instruments.base import PHASES, Context, InstrumentSet
from bench.training.instruments.registry import load
from bench.training.run import train
from bench.training.step_log import StepLog
from bench.training.trainer import Trainer


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
        result = rounds.measured(blocks, num_rounds, lambda: False)
        ours = result["with default instruments"]
        rows = [
            rounds.ratio(f"training loop with default instruments / {what} ({where})", ours, result[what], target)
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


def loader(num_steps: int = 200, num_repeats: int = 5) -> list[tuple]:
    """Million tokens per second of global batches from page cache, one core, in the reference batch shape."""
    import numpy as np
    import torch

    from bench.data import shards
    from bench.data.course import BatchShape
    from bench.data.loader import Loader

    rates = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train_000000.bin"
        shards.write(path, np.arange(20_000_000) % 50_257)
        for _ in range(num_repeats):
            batches = Loader([shards.check(path)], [BatchShape(None, 64 * 1024, 1024, 1)], 0, 1, torch.device("cpu"))
            batches.next()
            started_s = time.perf_counter()
            for _ in range(num_steps):
                batches.next()
            rates.append(num_steps * 64 * 1024 / (time.perf_counter() - started_s) / 1e6)
            batches.close()
    return [("loader, million tokens/s", statistics.median(rates), ">=", 50)]


def startup(num_repeats: int = 7) -> list[tuple]:
    """Seconds of a whole process, interpreter start included."""
    seconds = []
    for _ in range(num_repeats):
        started_s = time.perf_counter()
        _bench("--help")
        seconds.append(time.perf_counter() - started_s)
    return [("--help, s", statistics.median(seconds), "<=", 0.3)]


def memory() -> list[tuple]:
    """The launcher's own peak in MiB, from the record of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        _bench("run", "track=free", "experiment=smoke", SPEEDRUN_RESULTS=folder)
        (path,) = Path(folder).glob("*/*/run.json")
        peak_mib = json.loads(path.read_text())["measured"]["launcher_peak_mem_gib"] * 1024
    return [("launcher peak memory, MiB", peak_mib, "<=", 200)]


def _bench(*words, **env):
    words = [sys.executable, "-m", "bench", *words]
    subprocess.run(words, cwd=REPO, env=os.environ | env, check=True, stdout=subprocess.DEVNULL)
