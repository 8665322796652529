"""Draws chart specs (bench/web/chart.py) as matplotlib figures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.api.tables import optional
from bench.web.chart import Spec
from bench.web.forest import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, HEIGHT_IN = 8.0, 3.2  # the size of a chart


def figure(charts: Sequence[Spec], changes: Sequence[Panel] = ()) -> "Figure":
    """Draws changes with their intervals side by side, and below them charts one below the other.

    Raises ImportError without matplotlib, ValueError if there is nothing to draw.
    """
    if not charts and not changes:
        raise ValueError("nothing to plot: no run has these values; to_dict() returns what is known")
    drawing = _empty(len(charts) + bool(changes))
    rows = [[f"chart {number}"] * max(1, len(changes)) for number in range(len(charts))]
    top = [[panel.title for panel in changes]] if changes else []
    axes = drawing.subplot_mosaic([*top, *rows], height_ratios=[0.5] * len(top) + [1.0] * len(rows))
    for panel in changes:
        _draw_changes(axes[panel.title], panel)
    for number, spec in enumerate(charts):
        _draw(axes[f"chart {number}"], spec)
    return drawing


def bars(title: str, lengths: Sequence[tuple[str, float]], unit: str) -> "Figure":
    """Draws a bar for each name, the first one on top."""
    drawing = _empty(1, 0.8 + 0.28 * len(lengths))
    axes = drawing.subplots()
    axes.barh([name for name, _ in lengths], [length for _, length in lengths])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlabel(unit)
    return drawing


def _empty(num: int, height_in: float = HEIGHT_IN) -> "Figure":
    """Returns a figure that opens no window and that a notebook shows only once, as pyplot has closed it already."""
    pyplot = optional("matplotlib.pyplot")
    drawing: Figure = pyplot.figure(figsize=(WIDTH_IN, height_in * num), layout="constrained")
    pyplot.close(drawing)
    return drawing


def _draw_changes(axes: "Axes", panel: Panel) -> None:
    """Draws a row for each candidate: its change, the interval, and in grey the changes that count as equal."""
    for number, row in enumerate(panel.rows):
        low, high = (row.change if edge is None else edge for edge in (row.low, row.high))
        error = [[row.change - low], [high - row.change]]
        axes.errorbar(row.change, number, xerr=error, fmt="o", capsize=3, color=f"C{row.colour}")
    axes.axvline(0, color="0.5", linewidth=0.8)
    if panel.margin:
        axes.axvspan(*panel.margin, color="0.9", zorder=0)
    axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows])
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set(title=panel.title, xlabel=f"change, {panel.unit}: {panel.directions[0]} | {panel.directions[1]}")


def _draw(axes: "Axes", spec: Spec) -> None:
    for arm in spec.get("arms", ()):
        _draw_arm(axes, arm, spec["band"])
    stacked = [0.0] * len(spec.get("x", ()))
    for series in spec.get("series", ()):
        x, y = spec["x"], [float("nan") if value is None else value for value in series["y"]]
        kind, options = series["kind"], {"label": series["name"]}
        if kind == "area":
            above = [below + (0.0 if value != value else value) for below, value in zip(stacked, y, strict=True)]
            axes.fill_between(x, stacked, above, **options)
            stacked = above
        elif kind == "bars":
            axes.bar(x, y, **options)
        elif kind == "points":
            axes.plot(x, y, ".", **options)
        else:
            axes.plot(x, y, drawstyle="steps-post" if kind == "stepped" else "default", **options)
    for mark in spec.get("marks", ()):
        axes.axvline(mark["x"], color="0.7", linewidth=0.8)
    axes.set(title=spec["title"], xlabel=spec["x_label"], ylabel=spec["y_label"])
    if spec.get("log_x"):
        axes.set_xscale("log")
    if spec.get("log_y"):
        axes.set_yscale("log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _draw_arm(axes: "Axes", arm: dict[str, Any], band: str) -> None:
    """Draws the mean of an arm's runs and a band, to the end of the longest run; ended runs keep their last value."""
    import numpy as np

    runs = [(np.asarray(run["x"], float), np.asarray(run["y"], float)) for run in arm["runs"]]
    if not runs:
        return
    low, high = max(x[0] for x, _ in runs), max(x[-1] for x, _ in runs)
    at = np.unique(np.concatenate([x for x, _ in runs]))
    at = at[(at >= low) & (at <= high)]
    values = np.stack([np.interp(at, x, y) for x, y in runs])
    (line,) = axes.plot(at, values.mean(0), label=arm["name"], marker="." if len(at) < 2 else None)
    if len(runs) > 1 and band != "none":
        spread = values.std(0, ddof=1)
        edges = (
            (values.min(0), values.max(0)) if band == "range" else (values.mean(0) - spread, values.mean(0) + spread)
        )
        axes.fill_between(at, *edges, color=line.get_color(), alpha=0.2, linewidth=0)
