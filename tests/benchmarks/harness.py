"""What the harness needs beside the steps: the loader's rate, the start of a verb, the launcher's memory."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.base.paths import REPO


def measure():
    """The fields of a rows.Row for each figure."""
    return [*loader(), *startup(), *memory()]


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
