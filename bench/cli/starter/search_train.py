"""A script for searches: bigrams of the track's bytes by gradient descent, with constants that waste time and loss.

python train.py --seed=3
"""

import sys
import time
from pathlib import Path

import numpy as np

STEPS = 20
BATCH = 2048
PASSES = 3  # of the same gradient: one is enough
LEARNING_RATE = 40.0
WIDTH = 257

seed = int(sys.argv[1].partition("=")[2])
rng = np.random.default_rng(seed)
data = Path("data/fineweb10B")
train, val = (np.fromfile(next(data.glob(f"*_{split}_*.bin")), np.uint16)[512:] for split in ("train", "val"))
weights = np.zeros((WIDTH, WIDTH), np.float32)


def gradient(tokens):
    x, y = tokens[:-1], tokens[1:]
    logits = weights[x]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(x)), y]).mean()
    p[np.arange(len(x)), y] -= 1
    of_weights = np.zeros_like(weights)
    np.add.at(of_weights, x, p / len(x))
    return loss, of_weights


def validate():
    return gradient(val[: 4 * BATCH + 1])[0]


def report(step, name, loss, train_ms):
    times = f"train_time:{train_ms:.3f}ms step_avg:{train_ms / max(step, 1):.3f}ms"
    print(f"step:{step}/{STEPS} {name}_loss:{loss:.6f} {times}", flush=True)


train_ms = 0.0
report(0, "val", validate(), train_ms)
for step in range(1, STEPS + 1):
    start_s = time.perf_counter()
    first = rng.integers(len(train) - BATCH - 1)
    for _ in range(PASSES):
        loss, of_weights = gradient(train[first : first + BATCH + 1])
    weights -= LEARNING_RATE * of_weights
    train_ms += 1e3 * (time.perf_counter() - start_s)
    report(step, "train", loss, train_ms)
report(STEPS, "val", validate(), train_ms)
