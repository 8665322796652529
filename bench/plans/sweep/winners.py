"""The best points of a sweep as the arms of a race, which alone can say whether one is better, and how much faster.

A sweep's best is the luckiest of many, and runs side by side have no times that count; so its winners are run again,
with fresh seeds, alone on the machine, in turn.
"""

import shlex
from pathlib import Path

from bench.record import run_folder, sweep
from bench.record.rows import row_of

NAMES = "ABCDEFGHIJ"


def arms(folder: Path, top: int) -> list[str]:
    """A sweep's folder -> words for ./run.sh race: A='optim.lr=0.002 ...', the best first by mean val_loss.

    ValueError: it has too few configs with complete runs, or top is not a number of arms.
    """
    if not 2 <= top <= len(NAMES):
        raise ValueError(f"--top {top}: use 2 to {len(NAMES)}: a race has that many arms")
    losses, words = {}, {}
    for point in sweep.points(folder):
        run = point.folder and run_folder.read(point.folder)
        if run and run["status"] == "complete" and run["validity"] != "invalid":
            own = tuple(word for word in point.overrides if not word.startswith("seed="))
            words.setdefault(run["config_id"], own)
            losses.setdefault(run["config_id"], {})[run["run_id"]] = row_of(run)["val_loss"]
    best = sorted(losses, key=lambda config_id: sum(losses[config_id].values()) / len(losses[config_id]))[:top]
    if len(best) < top:
        raise ValueError(f"--top {top}: {folder.name} has {len(best)} configs with complete runs")
    return [f"{name}={shlex.join(words[config_id])}" for name, config_id in zip(NAMES, best)]
