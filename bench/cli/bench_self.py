"""What this harness itself costs, against targets.  ./run.sh bench-self [PART ...] [--json]

What needs the tests' own files or another program is measured by  python tests/benchmarks.

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

from bench import text_table
from bench.paths import REPO


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
    for part in args.what or PARTS:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        rows += PARTS[part]()
    return show(rows, args.json)


def show(rows, as_json=False):
    """Print what was measured against its targets.  Exit code: 1 if a target is missed."""
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        cells = [
            [row["what"], f"{row['measured']:.4g}", _interval(row), f"{row['sign']} {row['target']}", verdict(row)]
            for row in rows
        ]
        print(text_table.render(["what", "measured", "95 %", "target", ""], cells, [False, True, False, False, False]))
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


def loop():
    """The race loop on this machine's CPU: with its default instruments, without any, and a bare loop."""
    from bench.overhead import loop as bench_loop

    return [row(*one) for one in bench_loop.measure()]


def gpu():
    """The same on one GPU, and its MFU; nothing where there is none."""
    from bench.overhead import loop as bench_loop

    return [row(*one) for one in bench_loop.measure_gpu()]


def loader(num_steps=200):
    """Tokens per second of global batches from page cache, one core, in the reference batch shape."""
    import torch

    from bench.data import shards
    from bench.data.loader import Loader

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


def memory():
    """The launcher's own peak, from the record of a short race."""

    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"SPEEDRUN_RESULTS": folder}
        words = ["run", "track=free", "experiment=smoke"]
        subprocess.run(
            [sys.executable, "-m", "bench", *words], cwd=REPO, env=env, check=True, stdout=subprocess.DEVNULL
        )
        (path,) = Path(folder).glob("*/*/run.json")
        peak_mib = json.loads(path.read_text())["measured"]["launcher_peak_mem_gib"] * 1024
    return [row("launcher peak memory, MiB", peak_mib, "<=", 200)]


PARTS = {"loop": loop, "gpu": gpu, "loader": loader, "startup": startup, "memory": memory}
