"""Pictures of a sweep: of one axis a line with its interval, of two a heat map, of more parallel coordinates.

Beside the last two the mean over each axis of numbers.  Charts are specs (bench/web/chart.py), drawings are markup.
"""

import math
import re
from dataclasses import dataclass

from bench.base import stats
from bench.report import table_groups, table_pivot
from bench.report.sweep_results import Results
from bench.report.table_text import number_words, value_words
from bench.web import heat, parallel
from bench.web.chart import chart, series_of
from bench.web.page import Safe

UNITS = {"val_loss": "val_loss, nats per token", "train_s": "train time, s", "tokens_per_s": "tokens/s"}
VALUES = ("val_loss", "train_s")  # of heat maps
LOG_FROM = 20  # an axis whose ends lie further apart than this factor is logarithmic


@dataclass(frozen=True)
class Drawing:
    """A picture that is markup; height_px: of its picture."""

    id: str
    title: str
    markup: Safe
    height_px: int


def charts(result: Results) -> list[dict]:
    """A line for each axis of numbers: with one axis the mean with its 95 % interval, with more the mean alone."""
    return [_line(result, key) for key in result.keys if _is_numeric(result, key)]


def drawings(result: Results) -> list[Drawing]:
    """Of one axis of words and of two axes heat maps, of more parallel coordinates; [] where nothing completed."""
    if not any(group["val_loss_mean"] is not None for group in result.groups):
        return []
    if len(result.keys) == 2 or (len(result.keys) == 1 and not _is_numeric(result, result.keys[0])):
        values = [value for value in VALUES if any(row[value] is not None for row in result.rows)]
        return [_heat(result, value) for value in values]
    return [_parallel(result)] if len(result.keys) > 2 else []


def _is_numeric(result, key):
    values = [row[key] for row in result.rows if row["val_loss"] is not None]  # lists too: script.args
    return all(type(value) in (int, float) for value in values) and len(set(values)) > 1


def _line(result, key, value="val_loss"):
    """A point a run, in the order of the axis; the mean stands at the first run of each value."""
    runs = sorted(table_groups.counted(result.rows), key=lambda row: row[key])
    runs = [row for row in runs if row[value] is not None]
    at = [row[key] for row in runs]
    some = {x: [row[value] for row in runs if row[key] == x] for x in at}
    is_first = [number == 0 or at[number - 1] != x for number, x in enumerate(at)]

    def each(of):
        return [of(some[x]) if first else None for x, first in zip(at, is_first, strict=True)]

    mean = series_of("mean", each(stats.mean), "line")
    if len(result.keys) == 1:
        low, high = (each(lambda values, end=end: (stats.mean_interval(values) or (None, None))[end]) for end in (0, 1))
        mean |= {"low": low, "high": high}
        about = "mean with its 95 % interval (Student's t); points are runs"
    else:
        about = "mean over all the other settings; points are runs"
    labels = [f"{row['run_id']}\n{number_words(value, row[value])}" for row in runs]
    dots = series_of("runs", [row[value] for row in runs], "points", labels)
    name = f"by-{re.sub('[^a-z0-9_]', '-', key)}"
    spec = chart(name, f"{value} by {key}", about, key, UNITS[value], at, [mean, dots])
    return spec | {"log_x": at[0] > 0 and at[-1] / at[0] > LOG_FROM}


def _heat(result, value):
    keys = result.keys if len(result.keys) == 2 else [result.keys[0]]
    pivot = table_pivot.of_rows(result.rows, keys, value)
    across = pivot.values[1] if len(keys) == 2 else [None]
    cells = [[_cell(pivot, (one, other) if len(keys) == 2 else (one,)) for other in across] for one in pivot.values[0]]
    heads = (
        [value_words(one) for one in pivot.values[0]],
        [value_words(one) if len(keys) == 2 else "" for one in across],
    )
    about = "mean, sd and n of the runs in a cell; the best is framed"
    markup = heat.plot(UNITS[value], about, (keys[0], keys[1] if len(keys) == 2 else ""), heads, cells)
    return Drawing(f"heat-{value.replace('_', '-')}", UNITS[value], markup, heat.height_px(len(cells)))


def _cell(pivot, at):
    cell = pivot.cells.get(at)
    if cell is None:
        return None
    if cell.mean is None:
        return heat.Cell(None, f"{cell.num_lost} lost")
    sd = "" if cell.sd is None else f"±{number_words(pivot.value, cell.sd)}, "
    lost = f", {cell.num_lost} lost" if cell.num_lost else ""
    return heat.Cell(cell.mean, number_words(pivot.value, cell.mean), f"{sd}n={cell.n}{lost}", cell.is_best)


def _parallel(result, value="val_loss"):
    groups = [group for group in result.groups if group[f"{value}_mean"] is not None]
    axes = [
        parallel.Axis(key, [_plain(group[key]) for group in groups], [value_words(group[key]) for group in groups])
        for key in result.keys
    ]
    means = [group[f"{value}_mean"] for group in groups]
    axes.append(parallel.Axis(value, means, [number_words(value, mean) for mean in means]))
    about = "a line is a config, the mean of its runs; low on the last axis is worse, the best is thick"
    return Drawing(
        "parallel", f"{value} of every config", parallel.plot(UNITS[value], about, axes, 0), parallel.height_px()
    )


def _plain(value):
    """What an axis can be sorted by."""
    return (
        value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else value_words(value)
    )
