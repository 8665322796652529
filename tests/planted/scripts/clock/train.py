"""A script that keeps its own clock and needs no torch: tests/test_clock_audit.py moves its table around."""

import os  # noqa: F401 of what the test puts in
import subprocess  # noqa: F401
import sys  # noqa: F401
import threading  # noqa: F401
import time

STEPS = 4


def table(seconds):
    start, rows = time.process_time(), []
    while time.process_time() - start < seconds:
        rows.append(sum(range(1000)))
    return rows


# BEFORE
training_time_ms = 0
t0 = time.perf_counter()
rows = table(0.3)  # TIMED
for step in range(STEPS + 1):
    if step == STEPS or step % 2 == 0:
        training_time_ms += 1000 * (time.perf_counter() - t0)
        table(0.03)
        # PAUSE
        val_loss = 4.0 - 0.1 * step
        print(
            f"step:{step}/{STEPS} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms step_avg:1ms", flush=True
        )
        t0 = time.perf_counter()
    if step == STEPS:
        break
    table(0.02)
    approx_ms = training_time_ms + 1000 * (time.perf_counter() - t0)
    print(f"step:{step + 1}/{STEPS} train_time:{approx_ms:.0f}ms step_avg:1ms", flush=True)
# AFTER
