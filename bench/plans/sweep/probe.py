"""One run's load for a few seconds, to see what runs side by side cost each other.

python -m bench.plans.sweep.probe SLOT

SLOT: a packing.Slot as JSON.  Prints "ready", waits for a line, prints the median milliseconds of a step: products of
matrices, which fill the cores or the GPU, and a copy, which fills the way to memory, as in a training step.
"""

import statistics
import sys
import time

from bench.plans.sweep import packing

SECONDS = 3.0
WIDTH = 512  # of the matrices on cores; a GPU gets 8 times that
COPIED_BYTES = 32 * 2**20  # above a core's share of the caches


def main(text: str) -> None:
    """text: the slot."""
    slot = packing.parsed(text)
    packing.pin(slot)
    import torch

    torch.set_num_threads(len(slot.cores))
    device = torch.device("cuda" if slot.gpu is not None else "cpu")
    width = WIDTH * (8 if device.type == "cuda" else 1)
    left_WW, right_WW = torch.rand(2, width, width, device=device)
    copied = torch.zeros(COPIED_BYTES // 4, device=device)

    def step():
        for _ in range(4):
            torch.mm(left_WW, right_WW)
        copied.clone()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    times_ms, end_s = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        step()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    print(statistics.median(times_ms), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
