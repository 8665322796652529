"""Part of bench-self: the race loop with its default instruments, without any, and a bare loop of the same model and data.

One trainer, stepped by the three in turn; only ratios of what lies in one round are compared.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench import stats


def _of_ratios(what, ratios, target):
    return what, statistics.median(ratios), "<=", target, stats.median_interval(ratios)


def measure(num_block_steps=2):
    """[(what, measured, sign, target[, 95 % interval])] of alternating blocks of the same steps on this machine's CPU.

    Short blocks: what disturbs a shared machine lasts for seconds, and a round of longer blocks is no less noisy.
    SPEEDRUN_BENCH_ROUNDS=400 (of a second each; the default: 150) for a narrower interval.
    """
    num_rounds = int(os.environ.get("SPEEDRUN_BENCH_ROUNDS", 150))
    with _Loops(["track=cpu_nano", "hardware=cpu"], num_block_steps) as loops:
        started_ns, waited_ns = time.perf_counter_ns(), loops.trainer.loader.wait_ns
        to_plain, to_bare, _ = loops.rounds(num_rounds)
        wait_pct = 100 * (loops.trainer.loader.wait_ns - waited_ns) / (time.perf_counter_ns() - started_ns)
        return [
            _of_ratios("race loop with default instruments / bare loop (CPU)", to_bare, 1.01),
            _of_ratios("race loop with default instruments / without (CPU)", to_plain, 1.005),
            ("default instruments' host time, us a step (CPU)", loops.host_us(), "<=", 20),
            ("waiting for the loader, % of CPU steps", wait_pct, "<=", 1.0),
        ]


def measure_gpu(num_rounds=10, num_block_steps=20):
    """The same on one GPU with GPT-2 124M, bfloat16, compiled, 64 sequences of 1,024; and the bare loop's MFU."""
    from bench.machine.gpus import nvml_facts
    from bench.machine.peak_rates import peak_flops

    found = nvml_facts()["gpus"]
    if not found:
        print("gpu: left out, this machine shows no NVIDIA GPU", file=sys.stderr)
        return []
    name = found[0]["name"]
    batch = ["data.seq_len=1024", "data.batch_tokens=65536", "goal.val_tokens=65536", "model.vocab_size=50304"]
    overrides = ["track=free", "model/size=small", "hardware=cuda", "hardware.num_processes=1", *batch]
    with _Loops(overrides, num_block_steps) as loops:
        to_plain, to_bare, bare_step_s = loops.rounds(num_rounds)
        flops_per_s = loops.trainer.model.flops_per_token(1024) * 65536 / statistics.median(bare_step_s)
        rows = [
            _of_ratios(f"race loop with default instruments / bare loop ({name})", to_bare, 1.002),
            _of_ratios(f"race loop with default instruments / without ({name})", to_plain, 1.002),
            (f"default instruments' host time, us a step ({name})", loops.host_us(), "<=", 20),
        ]
    peak = peak_flops(name, "bfloat16")
    if peak is None:
        print(f"gpu: no peak is known for {name}, so no MFU", file=sys.stderr)
        return rows
    return [*rows, ("MFU, GPT-2 124M, bfloat16, compiled", flops_per_s / peak, ">=", 0.45)]


class _Loops:
    """One trainer, stepped by three loops: each block does the same number of steps and returns its seconds."""

    def __init__(self, overrides, num_block_steps):
        import torch

        from bench.data import shards
        from bench.instruments import load
        from bench.instruments.base import Context, InstrumentSet
        from bench.launch.prepare import prepare
        from bench.training import distributed
        from bench.training.timers import marks_for
        from bench.training.trainer import Trainer

        job = prepare(overrides)
        config = job.config
        torch.set_num_threads(config.hardware.num_threads)
        self.ranks = distributed.start(config.hardware.device, 60)
        files = {split: [shards.check(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
        self.trainer = Trainer(config, self.ranks, files["train"], files["val"])
        self.marks, self.num_block_steps = marks_for(self.ranks.device.type), num_block_steps
        self._folder = tempfile.TemporaryDirectory()
        context = Context(
            Path(self._folder.name), 0, 1, self.ranks.device.type, num_block_steps, self.marks, self.ranks.device.index
        )
        made, warnings = load(config.instruments, context)
        for warning in warnings:
            print(f"without {warning['instrument']}: {warning['error']}", file=sys.stderr)
        self._watches = {"instrumented": InstrumentSet(made), "plain": InstrumentSet()}
        self._bare(), self._race("plain"), self._race("instrumented")  # warm
        self._watches["instrumented"].on_run_start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._sample(True)
        self._watches["instrumented"].on_run_end()
        self._watches["instrumented"].close()
        for warning in self._watches["instrumented"].warnings:
            print(f"{warning['instrument']} failed: {warning['error']}", file=sys.stderr)
        self.trainer.close()
        self._folder.cleanup()

    def rounds(self, num_rounds):
        """Of each round of I P B B P I: instrumented / plain, instrumented / bare, and bare seconds a step."""
        to_plain, to_bare, bare_step_s = [], [], []
        for _ in range(num_rounds):
            first, plain, bare = self._race("instrumented"), self._race("plain"), self._bare()
            bare, plain, last = bare + self._bare(), plain + self._race("plain"), self._race("instrumented")
            to_plain.append((first + last) / plain)
            to_bare.append((first + last) / bare)
            bare_step_s.append(bare / 2 / self.num_block_steps)
        return to_plain, to_bare, bare_step_s

    def host_us(self, num_steps=1000, num_repeats=9):
        """Microseconds that the instruments take of a step's host time: their edges alone, no training between them."""
        from bench.instruments.base import PHASES

        def spent_us(watch):
            started_ns = time.perf_counter_ns()
            for step in range(num_steps):
                watch.on_step_start(step)
                for phase in PHASES:
                    watch.on_phase(phase)
                watch.on_step_end(step)
            return (time.perf_counter_ns() - started_ns) / 1e3 / num_steps

        found = []
        for _ in range(num_repeats):
            found.append(spent_us(self._watches["instrumented"]) - spent_us(self._watches["plain"]))
            self._sync()
        return statistics.median(found)

    def _sync(self):
        from bench.training import distributed

        distributed.sync(self.ranks.device)

    def _race(self, name):
        from bench.training.clock import Clock
        from bench.training.loop import race
        from bench.training.step_log import StepLog

        watch, trainer = self._watches[name], self.trainer
        self._sample(name == "instrumented")
        log = StepLog(self.marks, self.ranks.device, self.num_block_steps)
        watch.attach(log)
        trainer.attach(watch, log)
        clock = Clock(self._sync, lambda: None)
        race(trainer.step, lambda: 0.0, lambda loss: False, self.num_block_steps, self.num_block_steps, clock, watch)
        watch.attach(None)
        return clock.train_s

    def _sample(self, on):
        """A sampler that went on beside the blocks without it would cost both sides alike and not be seen."""
        for instrument in self._watches["instrumented"].instruments:
            if hasattr(instrument, "pause"):
                instrument.resume() if on else instrument.pause()

    def _bare(self):
        trainer = self.trainer
        self._sample(False)
        self._sync()
        started = time.perf_counter()
        for step in range(self.num_block_steps):
            tokens_BT, targets_BT = trainer.loader.next()
            with trainer.autocast():
                loss = trainer.forward(tokens_BT, targets_BT)
            loss.backward()
            trainer.update(step)
        self._sync()
        return time.perf_counter() - started
