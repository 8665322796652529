"""The page of a sweep: its best config, how the result depends on each setting, what failed and what was not run.

One axis gives a line with its interval, two axes a heat map, and of several each numeric one the mean over the others.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.base import atomic, stats
from bench.base.units import format_s
from bench.report import curves, run_page, sweep_results, table_groups
from bench.report.sweep_results import Results
from bench.report.table_text import number_text, value_text
from bench.web.chart import Spec, chart, series_of
from bench.web.document import (
    Block,
    Bullets,
    Chart,
    Columns,
    Document,
    Drawn,
    Lines,
    Picture,
    Section,
    Shown,
    Table,
    Verbatim,
    Verdict,
    code,
    link,
    texts,
)
from bench.web.page import Safe, tag, tiles

TRAIN_TIME = "train time, s"
LOG_FROM = 10  # an axis is logarithmic if the ratio of its ends exceeds this
NAME = "sweep.html"
MAX_RUNS = 2000
MAX_CURVES = 12  # most lines that a reader can tell apart in a chart
MAX_SHADE_PCT = 50  # the strongest share of colour in a cell: text stays readable in both themes
ROW_PX, HEAD_PX = 34, 90  # heights in a picture


@dataclass(frozen=True)
class _HeatCell:
    """A cell of a heat map."""

    value: float | None  # determines the colour; None: no colour
    text: str
    notes: str = ""  # small print below the text
    is_best: bool = False


def charts(results: Results) -> list[Spec]:
    """Returns a chart for each numeric axis: the mean, with its 95 % interval if it is the only axis."""
    return [_line(results, key) for key in results.keys if _is_numeric(results, key)]


def drawings(results: Results) -> list[Drawn]:
    """Returns heat maps for two axes or one that is not numeric; [] for others, or if nothing completed."""
    if not results.ranked:
        return []
    if len(results.keys) == 2 or (len(results.keys) == 1 and not _is_numeric(results, results.keys[0])):
        scored = [value for value in (results.score, "train_s") if any(row[value] is not None for row in results.rows)]
        return [_heat(results, value) for value in scored]
    return []


def _is_numeric(results: Results, key: str) -> bool:
    values: list[Any] = [row[key] for row in results.rows if row[results.score] is not None]  # script.args is a list
    return all(type(value) in (int, float) for value in values) and len(set(values)) > 1


def _line(results: Results, key: str) -> Spec:
    """Draws a point per run, in the order of the axis, and the mean at the first run of each value."""
    runs = sorted(table_groups.counted(results.rows), key=lambda row: row[key])
    runs = [row for row in runs if row[results.score] is not None]
    at = [row[key] for row in runs]
    scores = {x: [row[results.score] for row in runs if row[key] == x] for x in at}
    is_first = [number == 0 or at[number - 1] != x for number, x in enumerate(at)]

    def at_each(of: Callable[[Sequence[float]], Any]) -> list[Any]:
        return [of(scores[x]) if first else None for x, first in zip(at, is_first, strict=True)]

    mean = series_of("mean", at_each(stats.mean), "line")
    if len(results.keys) == 1:
        low, high = ([edges and edges[end] for edges in at_each(stats.mean_interval)] for end in (0, 1))
        mean |= {"low": low, "high": high}
        about = "mean with its 95 % interval (Student's t); points are runs"
    else:
        about = "mean over all the other settings; points are runs"
    labels = [f"{row['run_id']}\n{results.text(row[results.score])}" for row in runs]
    dots = series_of("runs", [row[results.score] for row in runs], "points", labels)
    name = f"by-{re.sub('[^a-z0-9_]', '-', key)}"
    spec = chart(name, f"{results.metric.name} by {key}", about, key, results.label, at, [mean, dots])
    return spec | {"log_x": at[0] > 0 and at[-1] / at[0] > LOG_FROM}


def _heat(results: Results, value: str) -> Drawn:
    keys = results.keys if len(results.keys) == 2 else [results.keys[0]]
    is_score, name = value == results.score, value.replace("_", "-")
    pivot = results.pivot(keys) if is_score else table_groups.pivot_of(results.rows, keys, value)
    title = results.label if is_score else TRAIN_TIME
    down, across = pivot.values[0], pivot.values[1] if len(keys) == 2 else [None]
    cells = [[_cell(pivot, (row, column) if len(keys) == 2 else (row,)) for column in across] for row in down]
    heads = ([value_text(row) for row in down], [value_text(column) if len(keys) == 2 else "" for column in across])
    has_best = any(cell.is_best for cell in pivot.cells.values())
    framed = "the best is framed" if has_best else "no best, as the runs are suspect"
    about = f"mean, sd and n of the runs in a cell; {framed}"
    markup = _heat_map(title, about, (keys[0], keys[1] if len(keys) == 2 else ""), heads, cells)
    return Drawn(f"heat-{name}", title, markup, HEAD_PX + (len(cells) + 1) * (ROW_PX + 18))


def _cell(pivot: table_groups.Pivot, at: tuple[Any, ...]) -> _HeatCell | None:
    cell = pivot.cells.get(at)
    if cell is None:
        return None
    if cell.mean is None:
        return _HeatCell(None, cell.lost.removeprefix(", "))
    sd = "" if cell.sd is None else f"±{pivot.text(cell.sd)}, "
    return _HeatCell(cell.mean, pivot.text(cell.mean), f"{sd}n={cell.n}{cell.lost}", cell.is_best)


def write(folder: Path | str, results: sweep_results.Results | None = None) -> Path:
    """Writes sweep.html in a sweep's folder and returns its path.  results: the read sweep, None to read it."""
    path = Path(folder) / NAME
    atomic.write_text(path, document(folder, results=results).html(), durable=False)
    return path


def document(folder: Path | str, at: Path | str | None = None, results: Results | None = None) -> Document:
    """Returns the page of a sweep.  Raises ValueError if the sweep is damaged.

    at: the folder of the page, None for the sweep's.  results: the read sweep, None to read it.
    """
    results, at = results or sweep_results.read(folder), Path(at or folder)
    best = sweep_results.best(results)
    means = [Columns(effects) for effects in [sweep_results.effects_table(results)] if effects]
    suspects = sweep_results.suspects(results)
    facts: list[tuple[str, object]] = [
        ("planned runs", results.num_points),
        ("complete", results.num_complete),
        ("failed, aborted or stopped", sum(row["status"] in sweep_results.LOST for row in results.rows)),
        ("not run", len(results.not_run)),
        ("wall time of complete runs", format_s(sum(row["wall_s"] or 0.0 for row in results.rows))),
    ]
    blocks: list[Block] = [
        Picture(tiles(facts)),
        *([Lines([f"{suspects}."])] if suspects else []),
        *(Picture(drawn) for drawn in drawings(results)),
        Columns([Chart(spec) for spec in charts(results)]),
        *_curves(results),
        Section("Configs, best first", [_groups(results)]),
        Section("Mean over each setting", means),
        *_lost(results, at),
        Section("Runs", [_runs(results, at)]),
        Section("Command", [Verbatim(" ".join(["./run.sh", *results.facts["command"]]))]),
    ]
    title = f"Sweep over {', '.join(results.axes) or 'nothing'}"
    return Document(title, [Verdict(best, "")] if best else [], blocks, about=_facts(results))


def block(folder: Path | str) -> str:
    """Returns the sweep in Markdown: for two axes a table of one against the other, else the mean over each."""
    results = sweep_results.read(folder)
    pivots = [results.pivot(results.keys)] if len(results.keys) == 2 else results.means()
    best = sweep_results.best(results)
    verdict = [Lines([best])] if best else []
    return texts([*verdict, *(block for pivot in pivots for block in table_groups.pivot_blocks(pivot))], True) + "\n"


def _curves(results: Results) -> list[Block]:
    """Returns charts of the metric and the training loss by step, with a line for each of the best configs."""
    groups = results.ranked[:MAX_CURVES]
    folders = {
        sweep_results.values(results, group) or group["config_id"]: [
            results.folders[row["run_id"]] for row in table_groups.counted(group["members"])
        ]
        for group in groups
    }
    metric = results.metric.name
    charts = [(f"{name} by step", name, "step") for name in dict.fromkeys((metric, "train_loss"))]
    specs = curves.arm_charts(folders, charts)
    which = f"the {len(groups)} best of {len(results.ranked)} configs" if len(results.ranked) > MAX_CURVES else ""
    title = f"Curves{' of ' * bool(which)}{which}"
    return [Section(title, [Columns([Chart(spec) for spec in specs])])] if specs else []


def _facts(results: Results) -> list[str]:
    facts = results.facts
    started = facts["started_at"][:16].replace("T", " ")
    done, wanted = results.num_complete, results.num_points
    ended = facts["why"] or ("complete" if done == wanted else f"{done} of {wanted} complete")
    state = "running, or killed" if facts["ended_at"] is None else ended
    budget = f"budget {format_s(facts['budget_s'])}" if facts["budget_s"] is not None else ""
    tracks = ", ".join(sorted({str(row["track"]) for row in results.rows}))
    facts_shown = (f"track {tracks}" if tracks else "", state, budget, started, code(facts["sweep_id"]))
    return [fact for fact in facts_shown if fact]


def _groups(results: Results) -> Table:
    speeds = ("train_s_mean", "train_s_sd", "step_avg_ms_mean", "tokens_per_s_mean", "peak_mem_gib_mean")
    names = (f"{results.score}_mean", f"{results.score}_sd", *speeds)
    rows = [
        [
            *(value_text(group[key]) for key in results.keys),
            str(group["n"]),
            *(_number(group, name) for name in names),
            code(group["config_id"]),
        ]
        for group in results.groups
    ]
    heads = (
        "n",
        results.metric.name,
        "sd",
        "train_s",
        "sd",
        "step_avg_ms",
        "tokens_per_s",
        "peak_mem_gib",
        "config_id",
    )
    right = [False] * len(results.keys) + [True] * (1 + len(names)) + [False]
    return Table((*results.keys, *heads), rows, right, style="tight")


def _number(row: Mapping[str, Any], name: str) -> str | None:
    return None if row[name] is None else number_text(name, row[name])


def _lost(results: Results, at: Path) -> list[Block]:
    failed = [[row["status"], ": ", _link(results, row, at), " ", row["failure"] or ""] for row in results.lost]
    blocks: list[Block] = [Section("Failed, aborted or stopped", [Bullets(failed)])] if failed else []
    if results.not_run:
        which = Section("which", [Bullets([" ".join(point) for point in results.not_run])], is_folded=True)
        blocks.append(Section("Not run", [Lines([sweep_results.again(results)]), which]))
    return blocks


def _runs(results: Results, at: Path) -> Table:
    rows = [
        [
            _link(results, row, at),
            *(value_text(row[key]) for key in results.axes),
            run_page.state(row),
            *(_number(row, name) for name in (results.score, "train_s")),
        ]
        for row in results.rows[:MAX_RUNS]
    ]
    right = [False] * (len(results.axes) + 2) + [True] * 2
    return Table(("run", *results.axes, "status", results.metric.name, "train_s"), rows, right, style="tight")


def _link(results: Results, row: Mapping[str, Any], at: Path) -> Shown:
    return link(row["run_id"], run_page.link_to(results.folders[row["run_id"]], at))


def _heat_map(
    title: str,
    about: str,
    names: tuple[str, str],
    heads: tuple[Sequence[str], Sequence[str]],
    cells: Sequence[Sequence[_HeatCell | None]],
) -> Safe:
    """Draws a heat map.  The smallest value, which is taken to be the best, has the strongest colour.

    names: of the axes down and across; heads: the texts of their values; cells: [down][across], a cell or None.
    """
    values = [cell.value for line in cells for cell in line if cell and cell.value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    top = tag("tr", tag("th", f"{names[0]} \\ {names[1]}".strip(" \\")), *(tag("th", label) for label in heads[1]))
    lines = [
        tag("tr", tag("th", label, scope="row"), *(_drawn_cell(cell, low, high) for cell in line))
        for label, line in zip(heads[0], cells, strict=True)
    ]
    body = tag("table", tag("thead", top), tag("tbody", *lines), class_="heat")
    caption = tag("figcaption", tag("b", title), " ", tag("span", about))
    return tag("figure", caption, tag("div", body, class_="scroll", tabindex="0"))


def _drawn_cell(cell: _HeatCell | None, low: float, high: float) -> Safe:
    if cell is None or cell.value is None:
        return tag("td", cell.text if cell else "", class_="soft")
    share = 1.0 if high == low else (high - cell.value) / (high - low)
    colour = f"background: color-mix(in srgb, var(--series-0) {share * MAX_SHADE_PCT:.0f}%, var(--page))"
    notes = tag("div", cell.notes, class_="soft") if cell.notes else ""
    return tag("td", cell.text, notes, style=colour, class_="number best" if cell.is_best else "number")
