"""The page of a sweep: its best config, how the result depends on each setting, what failed and what was not run.

Of one axis a line with its interval, of two a heat map, of more parallel coordinates with the mean over each axis.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.base import atomic, stats
from bench.base.text_table import counted
from bench.base.units import format_s
from bench.report import run_page, sweep_results, table_groups, table_pivot
from bench.report.sweep_results import Results
from bench.report.table_text import number_words, value_words
from bench.web import heat
from bench.web.chart import chart, series_of
from bench.web.page import REPORT_STYLES, Safe, bullets, details, figure, page, section, soft, table, tag, tiles

UNITS = {"val_loss": "val_loss, nats per token", "train_s": "train time, s", "tokens_per_s": "tokens/s"}
VALUES = ("val_loss", "train_s")  # of heat maps
LOG_FROM = 20  # an axis whose ends lie further apart than this factor is logarithmic
NAME = "sweep.html"
MAX_RUNS = 2000


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
        heat.Axis(key, [_plain(group[key]) for group in groups], [value_words(group[key]) for group in groups])
        for key in result.keys
    ]
    means = [group[f"{value}_mean"] for group in groups]
    axes.append(heat.Axis(value, means, [number_words(value, mean) for mean in means]))
    about = "a line is a config, the mean of its runs; low on the last axis is worse, the best is thick"
    return Drawing(
        "parallel", f"{value} of every config", heat.plot_lines(UNITS[value], about, axes, 0), heat.lines_height_px()
    )


def _plain(value):
    """What an axis can be sorted by."""
    return (
        value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else value_words(value)
    )


def write(folder: Path | str, result: sweep_results.Results | None = None) -> Path:
    """A sweep's folder -> sweep.html in it, its path.  result: what was read of it, None: it is read."""
    path = Path(folder) / NAME
    atomic.write_text(path, html(folder, result=result), durable=False)
    return path


def html(folder: Path | str, at: Path | str | None = None, result: sweep_results.Results | None = None) -> str:
    """A sweep's folder -> its page.  ValueError for a damaged sweep.

    at: the folder that the page will lie in, None: the sweep's; result: what was read of it, None: it is read.
    """
    result, at = result or sweep_results.read(folder), Path(at or folder)
    specs, pictures = charts(result), drawings(result)
    title = f"Sweep over {', '.join(result.axes) or 'nothing'}"
    body = [
        tag("h1", title),
        soft("; ".join(_facts(result)), "; ", tag("code", result.facts["sweep_id"])),
        tiles(_tiles(result)),
        _best(result),
        *(drawing.markup for drawing in pictures),
        tag("div", *map(figure, specs), class_="columns"),
        section("Configs, best first", _groups(result)),
        _means(result),
        _lost(result, at),
        section("Runs", _runs(result, at)),
        section("Command", tag("pre", " ".join(["./run.sh", *result.facts["command"]]))),
    ]
    return page(title, *body, data={"charts": specs}, styles=REPORT_STYLES)


def charts_of(folder: Path | str) -> list[dict]:
    """Specs, for pictures."""
    return charts(sweep_results.read(folder))


def drawings_of(folder: Path | str) -> list[Drawing]:
    """Heat maps or parallel coordinates, for pictures."""
    return drawings(sweep_results.read(folder))


def block(folder: Path | str) -> str:
    """The sweep in Markdown: of two axes the table of one against the other, else the mean over each."""
    result = sweep_results.read(folder)
    pivots = [table_pivot.of_rows(result.rows, result.keys, "val_loss")] if len(result.keys) == 2 else result.means()
    best = sweep_results.best(result)
    return "\n\n".join([*([best] if best else []), *(table_pivot.text(pivot, "github") for pivot in pivots)]) + "\n"


def _facts(result):
    facts = result.facts
    started = facts["started_at"][:16].replace("T", " ")
    state = "running, or killed" if facts["ended_at"] is None else facts["why"] or "complete"
    budget = f"budget {format_s(facts['budget_s'])}" if facts["budget_s"] is not None else ""
    tracks = ", ".join(sorted({str(row["track"]) for row in result.rows}))
    return [word for word in (f"track {tracks}" if tracks else "", state, budget, started) if word]


def _tiles(result):
    num_points = len(result.not_run) + len({(row["config_id"], row["seed"]) for row in result.rows})
    complete = sum(row["status"] == "complete" for row in result.rows)
    spent_s = sum(row["wall_s"] or 0.0 for row in result.rows)
    lost = sum(row["status"] in sweep_results.LOST for row in result.rows)
    yield "runs asked for", num_points
    yield "complete", complete
    yield "failed, aborted or stopped", lost
    yield "not run", len(result.not_run)
    yield "wall time of complete runs", format_s(spent_s)


def _best(result):
    words = sweep_results.best(result)
    return tag("p", words, class_="verdict") if words else Safe("")


def _groups(result):
    lines = [
        [
            *(value_words(group[key]) for key in result.keys),
            group["n"],
            *_numbers(group),
            tag("code", group["config_id"]),
        ]
        for group in result.groups
    ]
    heads = [
        *result.keys,
        "n",
        "val_loss",
        "sd",
        "train_s",
        "sd",
        "step_avg_ms",
        "tokens_per_s",
        "peak_mem_gib",
        "config_id",
    ]
    return table(heads, lines, class_="tight")


def _numbers(group) -> Iterator[Safe]:
    names = ("val_loss_mean", "val_loss_sd", "train_s_mean", "train_s_sd", "step_avg_ms_mean", "tokens_per_s_mean")
    for name in (*names, "peak_mem_gib_mean"):
        value = group[name]
        yield tag("span", "–" if value is None else number_words(name, value), class_="number")


def _means(result):
    pivots = result.means() if len(result.keys) > 1 else []
    if not pivots:
        return Safe("")
    tables = []
    for pivot in pivots:
        lines = [
            [
                value_words(at[0]),
                cell.n,
                "–" if cell.mean is None else number_words(pivot.value, cell.mean),
                "best" if cell.is_best else "",
            ]
            for at, cell in pivot.cells.items()
        ]
        tables.append(table((pivot.keys[0], "n", "val_loss", ""), lines, class_="tight"))
    about = soft("The mean over all runs with that value, whatever their other settings.")
    return section("Mean over each setting", about, tag("div", *tables, class_="columns"))


def _lost(result, at):
    lines = [tag("span", row["status"], ": ", _link(result, row, at), " ", row["failure"] or "") for row in result.lost]
    parts = [section("Failed, aborted or stopped", bullets(lines))] if lines else []
    if result.not_run:
        why = result.facts["why"] or "the sweep was interrupted"
        words = f"{counted(len(result.not_run), 'run')}: {why}.  The same command goes on with them."
        listed = details("which", bullets(" ".join(one) for one in result.not_run))
        parts.append(section("Not run", tag("p", words), listed))
    return tag("div", *parts) if parts else Safe("")


def _runs(result, at):
    lines = [
        [
            _link(result, row, at),
            *(value_words(row[key]) for key in result.axes),
            _state(row),
            *("–" if row[name] is None else number_words(name, row[name]) for name in ("val_loss", "train_s")),
        ]
        for row in result.rows[:MAX_RUNS]
    ]
    return table(("run", *result.axes, "status", "val_loss", "train_s"), lines, class_="tight")


def _state(row):
    words = row["status"] if row["status"] != "complete" else row["validity"]
    return tag("span", words, class_="bad" if row["status"] != "complete" else run_page.COLOUR.get(row["validity"]))


def _link(result, row, at):
    target = run_page.link(result.folders[row["run_id"]], at)
    return tag("a", row["run_id"], href=target) if target else tag("span", row["run_id"])
