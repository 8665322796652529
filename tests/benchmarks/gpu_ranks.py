"""What reducing gradients costs: hardware.reducer's kinds side by side, in one interleaved run of several processes.

All contestants live in the same processes and are stepped alternately (overhead.py).  Rank 0 times a block
between two barriers, so by the slowest rank.
measure() starts a process a rank: torchrun -m benchmarks.gpu_ranks FILE WORLD_SIZE MAX_ROUNDS MOST_S ...
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.base.paths import REPO
from bench.data import shards
from bench.launch.prepare import prepare
from bench.machine import processes
from bench.training import distributed
from bench.training.instruments.base import InstrumentSet
from bench.training.timing.clock import marks_for
from bench.training.timing.step_log import StepLog
from bench.training.trainer import Trainer
from benchmarks import overhead

NUM_BLOCK_STEPS = 2
MODELS = {"gpt2 with AdamW": ["model=gpt2", "optim=adamw"], "modern with Muon": ["model=modern", "optim=muon"]}
REDUCERS = {"DDP": "null", "all-reduce after backward": "plain", "shares beside backward": "shard"}


def measure(overrides: list[str], world_size: int, max_rounds: int, most_s: float, where: str) -> list[tuple]:
    """Rows as of gpu.measure(): ratios to DDP and ms a step.  overrides: of size, batch and device.

    most_s: seconds of rounds, after which no round begins; compiling comes before.  RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        arguments = [str(path), str(world_size), str(max_rounds), str(most_s), *overrides]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        torchrun += [f"--log-dir={folder}"]  # else it leaves one of its own in the temp directory
        command = [sys.executable, *torchrun, "-m", "benchmarks.gpu_ranks", *arguments]
        env = {"OMP_NUM_THREADS": "1"} | os.environ  # as torchrun would set it, after six lines of stars
        env["PYTHONPATH"] = os.pathsep.join((str(REPO), str(REPO / "tests")))
        with processes.child(command, REPO, env, sys.stderr, 10.0) as torchrun:
            torchrun.wait()
        if torchrun.returncode or not path.exists():
            raise RuntimeError(f"benchmarks.gpu_ranks ended with {torchrun.returncode}: what its ranks say is above")
        return rows(json.loads(path.read_text()), f"{world_size} x {where}")


def rows(seconds_by_name: dict[str, list[float]], where: str) -> list[tuple]:
    """Returns rows as gpu.measure() does, without targets.  seconds_by_name: of both blocks of each round."""
    ratios = []
    for model in MODELS:
        base_s = seconds_by_name[f"{model}, DDP"]
        for reducer in [name for name in REDUCERS if name != "DDP"]:
            ours = seconds_by_name[f"{model}, {reducer}"]
            ratios.append(overhead.ratio(f"{model}, {reducer} / DDP ({where})", ours, base_s))
    return ratios + [step_ms(name, found_s, NUM_BLOCK_STEPS, where) for name, found_s in seconds_by_name.items()]


def step_ms(name: str, seconds: list[float], num_block_steps: int, where: str) -> tuple:
    """A row as of overhead.ratio() of one contestant's milliseconds a step.  seconds: of two blocks."""
    return f"{name}, ms a step ({where})", 1e3 * statistics.median(seconds) / 2 / num_block_steps, None, None


def main(path: str, world_size: str, max_rounds: str, most_s: str, *overrides: str) -> None:
    """One rank: build and warm all contestants, run the rounds; rank 0 writes {name: seconds} to path."""
    processes.die_with_parent()
    shared = ["track=free", f"hardware.num_processes={world_size}", *overrides]
    jobs = {
        f"{model}, {reducer}": prepare([*shared, *settings, f"hardware.reducer={kind}"])
        for model, settings in MODELS.items()
        for reducer, kind in REDUCERS.items()
    }
    hardware = next(iter(jobs.values())).config.hardware
    torch.set_num_threads(hardware.num_threads)
    ranks = distributed.start(hardware.device, distributed.WARMUP_TIMEOUT_S, int(world_size))
    trainers = {}
    for name, job in jobs.items():
        files = ([shards.check(file.path) for file in split] for split in (job.dataset.train, job.dataset.val))
        trainers[name] = Trainer(job.config, ranks, *files)
    for name, trainer in trainers.items():
        started_s = time.perf_counter()
        _block_s(trainer)
        if ranks.is_first:
            print(f"ranks: {name}: warm after {time.perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    until_s = time.perf_counter() + float(most_s)

    def is_spent(seconds):
        by_first = torch.tensor(float(time.perf_counter() > until_s), device=ranks.device)
        return bool(distributed.from_first(by_first).item())

    blocks = {name: lambda trainer=trainer: _block_s(trainer) for name, trainer in trainers.items()}
    seconds = overhead.measured(blocks, int(max_rounds), is_spent)
    if ranks.is_first:
        Path(path).write_text(json.dumps(seconds))
    for trainer in trainers.values():
        trainer.close()
    distributed.stop()


def _block_s(trainer):
    device = trainer.ranks.device
    log = StepLog(marks_for(device.type), device, NUM_BLOCK_STEPS)
    instruments = InstrumentSet(essential=log)
    trainer.attach(instruments, log)
    distributed.sync(device)
    distributed.barrier()
    started_s = time.perf_counter()
    for step in range(NUM_BLOCK_STEPS):
        instruments.on_step_start(step)
        trainer.step(step)
        instruments.on_step_end(step)
    distributed.sync(device)
    distributed.barrier()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main(*sys.argv[1:])
