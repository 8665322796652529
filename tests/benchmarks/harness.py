"""What the harness needs beside the steps: the loader's rate, the start of a verb and of a run."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.base.paths import REPO

BARE = """  # as many passes of as large a model as in the run: two validations of 8 batches, and a step
import torch
torch.set_num_threads(1)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True), 4)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
with torch.no_grad():
    losses = [model(torch.randn(8, 128, 128)).mean() for _ in range(16)]
model(torch.randn(8, 128, 128)).mean().backward()
optimizer.step()
"""


def measure():
    """The fields of a rows.Row for each figure."""
    return [*loader(), *startup(), *run_of_one_step()]


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


def run_of_one_step(num_rounds: int = 5) -> list[tuple]:
    """CPU seconds of all processes of a run, and of a bare program that does as much; the launcher's peak in MiB."""
    arguments = ["run", "track=free", "experiment=smoke", "look=off", "goal.num_steps=1", "hardware.num_threads=1"]
    run_s, bare_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        _bench(*arguments, SPEEDRUN_RESULTS=folder)  # the first copies and compiles the code
        for _ in range(num_rounds):
            marks_s = [sum(os.times()[2:4])]  # CPU seconds of the processes that have ended, and of theirs
            _bench(*arguments, SPEEDRUN_RESULTS=folder)
            marks_s.append(sum(os.times()[2:4]))
            subprocess.run([sys.executable, "-c", BARE], check=True)
            run_s.append(marks_s[1] - marks_s[0])
            bare_s.append(sum(os.times()[2:4]) - marks_s[1])
        path = next(Path(folder).glob("*/*/run.json"))
        peak_mib = json.loads(path.read_text())["measured"]["launcher_peak_mem_gib"] * 1024
    ratio = statistics.median(run / bare for run, bare in zip(run_s, bare_s))
    seconds = ", ".join(f"{statistics.median(spent_s):.2f}" for spent_s in (run_s, bare_s))
    return [
        (f"CPU s of a run of one step / of a bare program ({seconds})", ratio, "<=", 1.3),
        ("launcher peak memory, MiB", peak_mib, "<=", 200),
    ]


def _bench(*arguments, **env):
    arguments = [sys.executable, "-m", "bench", *arguments]
    subprocess.run(arguments, cwd=REPO, env=os.environ | env, check=True, stdout=subprocess.DEVNULL)
