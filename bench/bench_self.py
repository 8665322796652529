"""What this harness itself costs, against targets.  ./run.sh bench-self [loop|gpu|loader|startup|memory ...] [--json]

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
    trainer, harness_block, bare_block = _pair(["track=cpu_nano", "hardware=cpu"], num_block_steps)
    started_ns, waited_ns = time.perf_counter_ns(), trainer.loader.wait_ns
    ratio, _ = _interleaved(harness_block, bare_block, num_rounds, num_block_steps)
    wait_pct = 100 * (trainer.loader.wait_ns - waited_ns) / (time.perf_counter_ns() - started_ns)
    trainer.close()
    return [
        row("race loop with default instruments / bare loop (CPU)", ratio, "<=", 1.01),
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
    batch = ["data.seq_len=1024", "data.batch_tokens=65536", "goal.val_tokens=65536", "model.vocab_size=50304"]
    overrides = ["track=free", "model/size=small", "hardware=cuda", "hardware.num_processes=1", *batch]
    trainer, harness_block, bare_block = _pair(overrides, num_block_steps)
    ratio, bare_step_s = _interleaved(harness_block, bare_block, num_rounds, num_block_steps)
    flops_per_s = trainer.model.flops_per_token(1024) * 65536 / bare_step_s
    peak = peak_flops(found[0]["name"], "bfloat16")
    trainer.close()
    rows = [row(f"race loop with default instruments / bare loop ({found[0]['name']})", ratio, "<=", 1.002)]
    if peak is None:
        print(f"gpu: no peak is known for {found[0]['name']}, so no MFU", file=sys.stderr)
        return rows
    return [*rows, row("MFU, GPT-2 124M, bfloat16, compiled", flops_per_s / peak, ">=", 0.45)]


def _pair(overrides, num_block_steps):
    """(trainer, block with the harness, block without): each block does the same steps and returns its seconds."""
    import torch

    from bench import distributed, launch, shards
    from bench.clock import Clock
    from bench.instruments import load
    from bench.instruments.base import Context, Watch
    from bench.loop import race
    from bench.steplog import StepLog
    from bench.timers import marks_for
    from bench.trainer import Trainer

    job = launch.prepare(overrides)
    config = job.config
    torch.set_num_threads(config.hardware.num_threads)
    ranks = distributed.start(config.hardware.device, 60)
    files = {split: [shards.check(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
    trainer = Trainer(config, ranks, files["train"], files["val"])
    marks = marks_for(ranks.device.type)

    def sync():
        distributed.sync(ranks.device)

    def harness_block():
        log = StepLog(marks, ranks.device, num_block_steps)
        context = Context(Path("."), 0, 1, ranks.device.type, num_block_steps, marks)
        watch = Watch(load(config.instruments, context)[0], essential=log)
        trainer.attach(watch, log)
        clock = Clock(sync, lambda: None)
        race(trainer.step, lambda: 0.0, lambda loss: False, num_block_steps, num_block_steps, clock, watch)
        watch.on_run_end()
        return clock.train_s

    def bare_block():
        sync()
        started = time.perf_counter()
        for step in range(num_block_steps):
            tokens_BT, targets_BT = trainer.loader.next()
            with trainer.autocast():
                loss = trainer.forward(tokens_BT, targets_BT)
            loss.backward()
            trainer.update(step)
        sync()
        return time.perf_counter() - started

    harness_block(), bare_block()
    return trainer, harness_block, bare_block


def _interleaved(harness_block, bare_block, num_rounds, num_block_steps):
    """Median ratio harness / bare over rounds of A B B A, and the bare loop's median seconds a step."""
    ratios, bare_step_s = [], []
    for _ in range(num_rounds):
        first, bare, again, last = harness_block(), bare_block(), bare_block(), harness_block()
        ratios.append((first + last) / (bare + again))
        bare_step_s.append((bare + again) / 2 / num_block_steps)
    return statistics.median(ratios), statistics.median(bare_step_s)


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


def _fake_runs(folder):
    """Copies of a kept record under other names."""
    run = json.loads(next((REPO / "tests" / "records").glob("*/run.json")).read_text())
    for number in range(NUM_TABLE_RUNS):
        home = folder / "cpu_nano" / f"{run['run_id']}-{number + 2}"
        home.mkdir(parents=True)
        (home / "run.json").write_text(json.dumps(run | {"run_id": home.name, "seed": number}))


PARTS = {"loop": loop, "gpu": gpu, "loader": loader, "startup": startup, "memory": memory}
