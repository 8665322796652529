"""Curves of many runs in one chart: loss by step, time and tokens, and step time, with a band over an arm's runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import curve_data
from bench.web.chart import of_arms

X_LABELS = {"step": "step", "train_s": "train time, s", "tokens": "tokens"}
Y_LABELS = {"val_loss": "val_loss, nats per token", "train_loss": "train_loss, nats per token", "step_ms": "step, ms"}
PART = {"val_loss": "val", "train_loss": "train", "step_ms": "train"}  # of curve_data.of_run()
ARM_CHARTS = (  # title, y, x
    ("val_loss by step", "val_loss", "step"),
    ("val_loss by time", "val_loss", "train_s"),
    ("Step time", "step_ms", "step"),
)


def arm_charts(arms: Mapping[str, Sequence[Path | str]], sync: str | None = None) -> list[dict]:
    """{arm: its run folders} -> specs for page.figure(): val_loss by step, val_loss by time, step time by step.

    One line an arm in the order of the mapping, the mean of its runs, with a band from their smallest to their largest.
    The caller names the runs that count (no warm-up runs).  A chart for which no run has values is not there.
    sync: None, or the key of charts that share their cursor.
    """
    return charts_of({name: [curve_data.of_run(folder) for folder in folders] for name, folders in arms.items()}, sync)


def charts_of(arms: Mapping[str, Sequence[dict]], sync: str | None = None) -> list[dict]:
    """{arm: curve_data.of_run() of its runs} -> the specs of arm_charts()."""
    charts = []
    for title, y, x in ARM_CHARTS:
        drawn = [{"name": name, "runs": [_points(run, x, y) for run in runs]} for name, runs in arms.items()]
        drawn = [arm | {"runs": [run for run in arm["runs"] if run["x"]]} for arm in drawn]
        if any(arm["runs"] for arm in drawn):
            spec = of_arms(f"arms-{y}-{x}", title, _caption(arms, y), X_LABELS[x], Y_LABELS[y], drawn)
            charts.append(spec | {"sync": f"{sync}-{x}" if sync else None})
    return charts


def _points(run, x, y):
    part = run[PART[y]]
    pairs = [pair for pair in zip(part[x] or (), part[y] or ()) if None not in pair]
    return {"x": [one for one, _ in pairs], "y": [one for _, one in pairs]}


def _caption(arms, y):
    words = []
    if any(len(runs) > 1 for runs in arms.values()):
        words.append("mean of an arm's runs, band from the smallest to the largest")
    every = max((run["every"] for runs in arms.values() for run in runs), default=1)
    if every > 1 and PART[y] == "train":
        words.append(f"a point is the mean of up to {every} steps")
    if y == "step_ms":
        words.append("within-run: for diagnosis, not for the verdict")
    return "; ".join(words)
