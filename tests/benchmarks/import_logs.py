"""how fast logs of modded-nanogpt are read, on text made in its format, one core, in memory."""

import statistics
import time
from pathlib import Path

from bench.record.importers import modded_nanogpt

REPO = Path(__file__).resolve().parent.parent.parent
NUM_LOGS, NUM_STEPS = 20, 1490
CODE_FRAC = 0.45  # of the bytes of the public logs
TARGET_MB_PER_S = 15


def measure(num_rounds=5):
    """Returns [(what, measured, sign, target)]."""
    figures = []
    for what, code_frac in (("logs of modded-nanogpt read", CODE_FRAC), ("the same without the code in them", 0)):
        data = _log(code_frac)
        rates = []
        for _ in range(num_rounds):
            started = time.perf_counter()
            for _ in range(NUM_LOGS):
                modded_nanogpt.read(data)
            rates.append(NUM_LOGS * len(data) / 1e6 / (time.perf_counter() - started))
        figures.append((f"{what}, MB/s ({len(data) // 1000} kB each)", statistics.median(rates), ">=", TARGET_MB_PER_S))
    return figures


def _log(code_frac):
    """As the public logs are: code, then one line a step (research: 239 MB, 2.3 million metric lines, 1,568 files)."""
    lines = []
    for step in range(NUM_STEPS + 1):
        time_ms = 59.1 * step + 7 * (step % 3)  # as uneven as real steps
        if step:
            lines.append(f"step:{step}/{NUM_STEPS} train_time:{time_ms:.0f}ms step_avg:{time_ms / max(step, 1):.2f}ms")
        if step % 250 == 0 or step == NUM_STEPS:
            lines.append(
                f"step:{step}/{NUM_STEPS} val_loss:4.0000 train_time:{time_ms:.0f}ms "
                f"step_avg:{time_ms / max(step, 1):.2f}ms"
            )
    metrics = "\n".join(lines)
    code = "".join(path.read_text() for path in sorted((REPO / "models").glob("*.py")))
    code = (code * (len(metrics) // len(code) + 1))[: int(len(metrics) * code_frac / (1 - code_frac))]
    return "\n".join(
        [code, "=" * 100, "Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8", "=" * 100, metrics, ""]
    ).encode()
