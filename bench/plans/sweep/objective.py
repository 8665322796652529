"""The number that a search makes small, of a finished record."""

import math

from bench.record import step_files
from bench.record.rows import row_of

DEFAULT = "val_loss"
NAMES = {  # what hydra.sweeper.objective may be: what it is
    "val_loss": "nats per token of the last validation",
    "train_s": "seconds of timed training",
    "step_avg_ms": "milliseconds of a step",
    "target_s": "seconds of timed training to the first validation that reaches the target",
}


def of(run: dict | None, name: str) -> float | None:
    """A record with its folder -> the number; None: it did not complete, was not measured, or missed the target."""
    if run is None or run["status"] != "complete":
        return None
    value = _target_s(run) if name == "target_s" else run["metrics"].get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def _target_s(run):
    target = row_of(run)["target_val_loss"]
    if target is None:
        raise ValueError("hydra.sweeper.objective=target_s: the runs have no target: give goal.target_val_loss=NUMBER")
    train_ms = 0.0
    for row in step_files.read(run["folder"]):
        train_ms += row["step_ms"] or 0.0
        if row["val_loss"] is not None and row["val_loss"] <= target:
            return train_ms / 1e3
    return None
