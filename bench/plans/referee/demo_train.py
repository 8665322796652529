"""The script that ./run.sh referee demo optimizes: bigrams of bytes by gradient descent, with wasteful constants.

python demo_train.py --seed=3
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 20
BATCH = 2048
PASSES = 3  # computations of the same gradient: one is enough
LEARNING_RATE = 40.0
VOCABULARY = 257


def gradient(weights: Any, tokens: Any) -> tuple[float, Any]:
    """Returns the mean nats of tokens [n + 1] under weights [V, V], and its gradient."""
    x, y = tokens[:-1], tokens[1:]
    logits = weights[x]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -float(np.log(p[np.arange(len(x)), y]).mean())
    p[np.arange(len(x)), y] -= 1
    weights_grad = np.zeros_like(weights)
    np.add.at(weights_grad, x, p / len(x))
    return loss, weights_grad


def report(step: int, name: str, loss: float, train_ms: float) -> None:
    """Prints a line in modded-nanogpt's format."""
    times = f"train_time:{train_ms:.3f}ms step_avg:{train_ms / max(step, 1):.3f}ms"
    print(f"step:{step}/{STEPS} {name}_loss:{loss:.6f} {times}", flush=True)


def main() -> None:
    """Trains on the track's shards, and validates before and after."""
    rng = np.random.default_rng(int(sys.argv[1].partition("=")[2]))
    data = Path("data/fineweb10B")
    train, val = (np.fromfile(next(data.glob(f"*_{split}_*.bin")), np.uint16)[512:] for split in ("train", "val"))
    weights, train_ms = np.zeros((VOCABULARY, VOCABULARY), np.float32), 0.0
    report(0, "val", gradient(weights, val[:8193])[0], train_ms)
    for step in range(1, STEPS + 1):
        start_s = time.perf_counter()
        first = rng.integers(len(train) - BATCH - 1)
        loss, weights_grad = 0.0, weights
        for _ in range(PASSES):
            loss, weights_grad = gradient(weights, train[first : first + BATCH + 1])
        weights -= LEARNING_RATE * weights_grad
        train_ms += 1e3 * (time.perf_counter() - start_s)
        report(step, "train", loss, train_ms)
    report(STEPS, "val", gradient(weights, val[:8193])[0], train_ms)


if __name__ == "__main__":
    main()
