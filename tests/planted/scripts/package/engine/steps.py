"""Relative imports, which need the package's root on the path."""

import os
import time
import tomllib

from .data import VAL_LOSS


def train(settings_path, num_steps):
    """nanoGPT's lines; refuses to be a rank, as nanoGPT's train.py takes NCCL where RANK is set."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    with open(settings_path, "rb") as file:
        step_s = tomllib.load(file)["step_s"]
    for step in range(num_steps + 1):
        started_s = time.perf_counter()
        time.sleep(step_s)
        if step % num_steps == 0:
            print(f"step {step}: train loss 6.0, val loss {VAL_LOSS - 0.1 * step}")
        print(
            f"iter {step}: loss {VAL_LOSS - 0.1 * step}, time {1e3 * (time.perf_counter() - started_s):.2f}ms, mfu 1%"
        )
