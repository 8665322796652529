"""What this harness itself costs, against targets.  ./run.sh bench-self [loop|loader|startup|memory ...] [--json]

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

REPO = Path(__file__).resolve().parent.parent
NUM_TABLE_RUNS = 1000


def main(argv):
    """Exit codes: 0 all targets met, 1 one missed, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="./run.sh bench-self", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unknown = [what for what in args.what if what not in PARTS]
    if unknown:
        raise ValueError(f"bench-self {unknown[0]}: choose from {', '.join(PARTS)}")
    rows = []
    for part in args.what or PARTS:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        rows += PARTS[part]()
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        from tabulate import tabulate

        print(tabulate([[row["what"], row["measured"], f"{row['sign']} {row['target']}", verdict(row)] for row in rows],
                       headers=["what", "measured", "target", ""], floatfmt=".4g"))
    return 0 if all(verdict(row) == "met" for row in rows) else 1


def verdict(row):
    met = row["measured"] <= row["target"] if row["sign"] == "<=" else row["measured"] >= row["target"]
    return "met" if met else "MISSED"


def row(what, measured, sign, target):
    return {"what": what, "measured": measured, "sign": sign, "target": target}


def loop(num_rounds=40, num_block_steps=10):
    """The race loop with its default instruments against a bare loop, in alternating blocks of the same steps."""
    import torch

    from bench import distributed
    from bench.clock import Clock
    from bench.instruments import load
    from bench.instruments.base import Context, Watch
    from bench.loop import race
    from bench.steplog import StepLog
    from bench.timers import marks_for
    from bench.trainer import Trainer

    config, shards = _nano()
    torch.set_num_threads(config.hardware.num_threads)
    ranks = distributed.start("cpu", 60)
    trainer = Trainer(config, ranks, shards["train"], shards["val"])

    def harness_block():
        marks = marks_for("cpu")
        log = StepLog(marks, ranks.device, num_block_steps)
        context = Context(Path("."), 0, 1, "cpu", num_block_steps, marks)
        watch = Watch(load(config.instruments, context), essential=log)
        trainer.attach(watch, log)
        clock = Clock(lambda: None, lambda: None)
        race(trainer.step, lambda: 0.0, lambda loss: False, num_block_steps, num_block_steps, clock, watch)
        return clock.train_s

    def bare_block():
        started = time.perf_counter()
        for step in range(num_block_steps):
            tokens_BT, targets_BT = trainer.loader.next()
            trainer.model(tokens_BT, targets_BT).backward()
            lr_frac = trainer.lr_frac(step)
            for group in trainer.optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_frac
            if config.optim.grad_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), config.optim.grad_clip_norm)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    harness_block(), bare_block()
    ratios, step_s = [], []
    for _ in range(num_rounds):  # A B B A
        first, bare, again, last = harness_block(), bare_block(), bare_block(), harness_block()
        ratios.append((first + last) / (bare + again))
        step_s.append((bare + again) / 2 / num_block_steps)
    wait_pct = _wait_pct(trainer, statistics.median(step_s))
    trainer.loader.close()
    return [
        row("race loop with default instruments / bare loop (CPU)", statistics.median(ratios), "<=", 1.01),
        row("data wait, % of a CPU step", wait_pct, "<=", 1.0),
    ]


def _wait_pct(trainer, step_s, num_steps=50):
    """next() beside a computing main thread, as in a race."""
    waits_s = []
    for _ in range(num_steps):
        started = time.perf_counter()
        tokens_BT, targets_BT = trainer.loader.next()
        waits_s.append(time.perf_counter() - started)
        trainer.model(tokens_BT, targets_BT).backward()
    trainer.optimizer.zero_grad(set_to_none=True)
    return 100 * statistics.median(waits_s) / step_s


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
    """Seconds of whole processes, interpreter start included."""
    with tempfile.TemporaryDirectory() as folder:
        _fake_runs(Path(folder))
        commands = {"--help": ["--help"], f"table on {NUM_TABLE_RUNS} run folders": ["table", folder]}
        seconds = {name: [] for name in commands}
        for _ in range(num_repeats):
            for name, words in commands.items():
                started = time.perf_counter()
                subprocess.run([sys.executable, "-m", "bench", *words], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - started)
    return [row(f"{name}, s", statistics.median(found), "<=", 0.5) for name, found in seconds.items()]


def memory():
    """The launcher's own peak, from the record of a short race."""

    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"SPEEDRUN_RESULTS": folder}
        words = ["run", "track=free", "experiment=smoke"]
        subprocess.run([sys.executable, "-m", "bench", *words], cwd=REPO, env=env, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("*/*/run.json")
        peak_mib = json.loads(path.read_text())["measured"]["launcher_peak_mem_gib"] * 1024
    return [row("launcher peak memory, MiB", peak_mib, "<=", 200)]


def _nano():
    """The default race on a CPU: its resolved config and its shards."""
    from bench import launch, shards

    job = launch.prepare(["track=cpu_nano", "hardware=cpu"])
    files = {"train": job.dataset.train, "val": job.dataset.val}
    return job.config, {split: [shards.check(file.path) for file in found] for split, found in files.items()}


def _fake_runs(folder):
    """Copies of a kept record under other names."""
    run = json.loads(next((REPO / "tests" / "records").glob("*/run.json")).read_text())
    for number in range(NUM_TABLE_RUNS):
        home = folder / "cpu_nano" / f"{run['run_id']}-{number + 2}"
        home.mkdir(parents=True)
        (home / "run.json").write_text(json.dumps(run | {"run_id": home.name, "seed": number}))


PARTS = {"loop": loop, "loader": loader, "startup": startup, "memory": memory}
