"""The page of a sweep: its best config, how the result depends on each setting, what failed and what was not run."""

from collections.abc import Iterator
from pathlib import Path

from bench.base import atomic
from bench.base.terminal.text_table import counted
from bench.base.units import format_s
from bench.report import run_page, sweep_charts, sweep_results, sweep_text, table_pivot
from bench.report.table_text import number_words, value_words
from bench.web.page import REPORT_STYLES, Safe, bullets, details, figure, page, section, soft, table, tag, tiles

NAME = "sweep.html"
MAX_RUNS = 2000


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
    charts, drawings = sweep_charts.charts(result), sweep_charts.drawings(result)
    title = f"Sweep over {', '.join(result.axes) or 'nothing'}"
    body = [
        tag("h1", title),
        soft("; ".join(_facts(result)), "; ", tag("code", result.facts["sweep_id"])),
        tiles(_tiles(result)),
        _best(result),
        *(drawing.markup for drawing in drawings),
        tag("div", *map(figure, charts), class_="columns"),
        section("Configs, best first", _groups(result)),
        _means(result),
        _lost(result, at),
        section("Runs", _runs(result, at)),
        section("Command", tag("pre", " ".join(["./run.sh", *result.facts["command"]]))),
    ]
    return page(title, *body, data={"charts": charts}, styles=REPORT_STYLES)


def charts_of(folder: Path | str) -> list[dict]:
    """Specs, for pictures."""
    return sweep_charts.charts(sweep_results.read(folder))


def drawings_of(folder: Path | str) -> list[sweep_charts.Drawing]:
    """Heat maps or parallel coordinates, for pictures."""
    return sweep_charts.drawings(sweep_results.read(folder))


def block(folder: Path | str) -> str:
    """The sweep in Markdown: of two axes the table of one against the other, else the mean over each."""
    result = sweep_results.read(folder)
    pivots = [table_pivot.of_rows(result.rows, result.keys, "val_loss")] if len(result.keys) == 2 else result.means()
    best = sweep_text.best(result)
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
    words = sweep_text.best(result)
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
