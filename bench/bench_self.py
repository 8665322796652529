"""What this harness itself costs, against targets.  ./run.sh bench-self [PART ...] [--json]

Ratios only of things measured interleaved in one run, medians; absolute times are this machine's, now.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import stats

REPO = Path(__file__).resolve().parent.parent


def main(argv):
    """Exit codes: 0 no target missed, 1 one missed, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="./run.sh bench-self", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unknown = [what for what in args.what if what not in PARTS]
    if unknown:
        raise ValueError(f"bench-self {unknown[0]}: choose from {', '.join(PARTS)}")
    rows = []
    for part in args.what or [part for part in PARTS if part not in ON_REQUEST]:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        rows += PARTS[part]()
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        from tabulate import tabulate

        cells = [[row["what"], row["measured"], _interval(row), f"{row['sign']} {row['target']}", verdict(row)] for row in rows]
        print(tabulate(cells, headers=["what", "measured", "95 %", "target", ""], floatfmt=".4g"))
    return 1 if any(verdict(row) == "MISSED" for row in rows) else 0


def verdict(row):
    """met, MISSED, or unclear where the interval has the target in it: the machine is too busy to tell."""
    low, high = row["ci95"] or (row["measured"], row["measured"])
    is_met = [value <= row["target"] if row["sign"] == "<=" else value >= row["target"] for value in (low, high)]
    return "met" if all(is_met) else "unclear" if any(is_met) else "MISSED"


def row(what, measured, sign, target, ci95=None):
    return {"what": what, "measured": measured, "ci95": ci95, "sign": sign, "target": target}


def _interval(row):
    return "" if row["ci95"] is None else "{:.4g} to {:.4g}".format(*row["ci95"])


def _of_ratios(what, ratios, target):
    return row(what, statistics.median(ratios), "<=", target, stats.median_interval(ratios))


def loop(num_block_steps=2):
    """The race loop with its default instruments, without any, and a bare loop, in alternating blocks of the same steps.

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
            row("default instruments' host time, us a step (CPU)", loops.host_us(), "<=", 20),
            row("waiting for the loader, % of CPU steps", wait_pct, "<=", 1.0),
        ]


def gpu(num_rounds=10, num_block_steps=20):
    """The same on one GPU with GPT-2 124M, bfloat16, compiled, 64 sequences of 1,024; and the bare loop's MFU."""
    from bench.gpus import nvml_facts
    from bench.hardware import peak_flops

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
            row(f"default instruments' host time, us a step ({name})", loops.host_us(), "<=", 20),
        ]
    peak = peak_flops(name, "bfloat16")
    if peak is None:
        print(f"gpu: no peak is known for {name}, so no MFU", file=sys.stderr)
        return rows
    return [*rows, row("MFU, GPT-2 124M, bfloat16, compiled", flops_per_s / peak, ">=", 0.45)]


class _Loops:
    """One trainer, stepped by three loops: each block does the same number of steps and returns its seconds."""

    def __init__(self, overrides, num_block_steps):
        import torch

        from bench import distributed, shards
        from bench.instruments import load
        from bench.instruments.base import Context, Watch
        from bench.job import prepare
        from bench.timers import marks_for
        from bench.trainer import Trainer

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
        self._watches = {"instrumented": Watch(made), "plain": Watch()}
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
        from bench import distributed

        distributed.sync(self.ranks.device)

    def _race(self, name):
        from bench.clock import Clock
        from bench.loop import race
        from bench.steplog import StepLog

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


def loader(num_steps=200):
    """Tokens per second of global batches from page cache, one core, in the reference batch shape."""
    import torch

    from bench import shards
    from bench.loader import Loader

    with tempfile.TemporaryDirectory() as folder:
        import numpy as np

        path = Path(folder) / "train_000000.bin"
        shards.write(path, np.arange(20_000_000) % 50_257)
        rates = []
        for _ in range(5):
            one = Loader([shards.check(path)], 64 * 1024, 1024, 1, 0, 1, torch.device("cpu"))
            one.next()
            started = time.perf_counter()
            for _ in range(num_steps):
                one.next()
            rates.append(num_steps * 64 * 1024 / (time.perf_counter() - started) / 1e6)
            one.close()
    return [row("loader, million tokens/s", statistics.median(rates), ">=", 50)]


def startup(num_repeats=7):
    """Seconds of a whole process, interpreter start included."""
    seconds = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "bench", "--help"], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return [row("--help, s", statistics.median(seconds), "<=", 0.3)]


def results():
    """Seconds of table and compare over 10,000 run folders."""
    from bench import bench_results

    return [row(what, seconds, "<=", target_s) for what, seconds, target_s in bench_results.measure()]


def memory():
    """The launcher's own peak, from the record of a short race."""

    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"SPEEDRUN_RESULTS": folder}
        words = ["run", "track=free", "experiment=smoke"]
        subprocess.run([sys.executable, "-m", "bench", *words], cwd=REPO, env=env, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("*/*/run.json")
        peak_mib = json.loads(path.read_text())["measured"]["launcher_peak_mem_gib"] * 1024
    return [row("launcher peak memory, MiB", peak_mib, "<=", 200)]


def trace():
    """Trace analysis against HolisticTraceAnalysis; not among the default parts: it installs that, and takes minutes."""
    from bench import bench_trace

    return [row(*one) for one in bench_trace.measure()]


def telemetry():
    """The share of a core that the sampler takes."""
    from bench import bench_telemetry

    return [row(*one) for one in bench_telemetry.measure()]


def imports():
    """Reading public logs of modded-nanogpt, half of each the code that they embed; on one core, in memory."""
    from bench import bench_import

    return [row(*one) for one in bench_import.measure()]


PARTS = {
    "loop": loop, "gpu": gpu, "loader": loader, "startup": startup, "results": results, "memory": memory, "imports": imports,
    "telemetry": telemetry,
    "trace": trace,
}  # fmt: skip
ON_REQUEST = ("trace",)
