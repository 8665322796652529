"""Renders rows of runs or groups as text (with as many columns as fit a terminal), Markdown, CSV and JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.base import atomic, escape, text_table
from bench.base.metric import VAL_LOSS

Rows = Sequence[Mapping[str, Any]]

MAX_ID_CHARS = 44  # shorter ids stay whole, to be pasted; those of imported logs can be three times as long
MIN_ID_CHARS = 32  # to which longer ids are shortened before columns are dropped
NARROW_ID_CHARS = 20  # to which ids are shortened after columns were dropped
# fmt: off
# Columns on a terminal, except empty ones; they are dropped from the right until the rest fits.
SHOWN = (
    "run_id", "track", "status", "val_loss", "train_s", "step_avg_ms", "tokens_per_s", "mfu", "peak_mem_gib",
    "certificate",
)
GROUP_SHOWN = (
    "config_id", "name", "track", "n", "val_loss_mean", "val_loss_sd", "train_s_mean", "train_s_sd",
    "step_avg_ms_mean", "step_avg_ms_sd", "tokens_per_s_mean", "tokens_per_s_sd", "certificate",
)
DECIMALS = {
    "score": 5, "val_loss": 4, "gap_nats": 4, "train_s": 2, "wall_s": 2, "cost_usd": 4, "compile_s": 2,
    "cost_usd_to_target": 4, "energy_kj_to_target": 2,
    "step_avg_ms": 2, "step_ms_p50": 2, "step_ms_p95": 2, "tokens_per_s": 0, "tokens_per_s_per_gpu": 0, "mfu": 3,
    "mfu_causal": 3, "peak_mem_gib": 2, "goodput_frac": 2, "epochs": 2, "energy_j": 0, "mean_power_w": 1,
    "num_steps": 0, "train_s_change_pct": 2, "train_s_ci95_pct": 2, "score_change": 4, "score_ci95": 4,
}
HEADLINE = ("score", "score_mean", "val_loss", "val_loss_mean", "n")  # dropped after other numbers and settings

# fmt: on
OPEN = "(open): the run changed what its track fixes, and is not eligible for it"


def runs_table(rows: Rows) -> str:
    """Returns the table of runs for a terminal."""
    return fit(rows, with_metric(rows, SHOWN))


def with_metric(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Returns SHOWN or GROUP_SHOWN, with the goal's metric before val_loss if it differs from it in some row."""
    if all(row.get("metric") in (None, VAL_LOSS.name) for row in rows):
        return list(columns)
    before = next(number for number, name in enumerate(columns) if name.startswith("val_loss"))
    scores = ["score_mean", "score_sd"] if columns[before] == "val_loss_mean" else ["score"]
    return [*columns[:before], "metric", *scores, *columns[before:]]


def fit(rows: Rows, columns: Sequence[str], wanted: Sequence[str] = (), varied: Sequence[str] = ()) -> str:
    """Returns a table with the most useful columns that fit the terminal, or with all of them without a terminal.

    wanted: columns that the user named, which are always shown.  varied: settings that tell the rows apart, which are
    dropped after all numbers except HEADLINE.  Long ids are shortened in the middle before a column is dropped.
    """
    columns = filled(rows, [*columns, *(name for name in wanted if name not in columns)])
    cells = {name: [cell(row, name) for row in rows] for name in columns}
    limit = text_table.screen_width()
    if limit is not None:
        _shorten_names(cells, limit, MIN_ID_CHARS, MAX_ID_CHARS)
        late = [*columns[: columns.index(varied[0])], *HEADLINE] if varied else []  # dropped after the settings
        spare = [name for name in reversed(columns[1:]) if name not in wanted]
        for name in sorted(spare, key=lambda name: 1 if name in varied else 2 if name in late else 0):
            if _excess(cells, limit) > 0:
                del cells[name]
        _shorten_names(cells, limit, NARROW_ID_CHARS)
    text = render(rows, list(cells), "simple", list(cells.values()))
    is_open = "track" in cells and any(row["num_deviations"] for row in rows)
    return text + ("\n" + OPEN if is_open else "")


def _excess(cells: Mapping[str, Sequence[str]], limit: int) -> int:
    """Returns by how many characters the table is wider than the terminal."""
    return sum(max([len(name), *map(len, column)]) + text_table.GAP for name, column in cells.items()) - 2 - limit


def _shorten_names(cells: dict[str, list[str]], limit: int, min_chars: int, may_stay_chars: int = 0) -> None:
    """Shortens ids and names longer than may_stay_chars until the table fits, but not below min_chars."""
    for column in ("run_id", "name"):
        excess, names = _excess(cells, limit), cells.get(column)
        if excess > 0 and names:
            whole = [len(name) for name in names if len(name) <= may_stay_chars]
            longest = max([min_chars, max(map(len, names)) - excess, *whole])
            cells[column] = [text_table.middle(name, longest) for name in names]


def filled(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Returns the columns that have a value in some row."""
    return [name for name in columns if any(row.get(name) is not None for row in rows)]


def render(rows: Rows, columns: Sequence[str], form: str, cells: Sequence[Sequence[str]] | None = None) -> str:
    """Returns a table as text, "" without columns.  form: as in text_table; cells: by column; None to make them."""
    if not columns:
        return ""
    cells = cells or [[cell(row, name) for row in rows] for name in columns]
    numeric = [any(isinstance(row[name], (int, float)) for row in rows) for name in columns]
    return text_table.render(columns, list(zip(*cells, strict=True)), numeric, form)


def _decimals(column: str) -> int:
    name, _, statistic = column.rpartition("_") if column.endswith(("_mean", "_sd")) else (column, "", "")
    return DECIMALS.get(name, 3) + (statistic == "sd")


def cell(row: Mapping[str, Any], column: str) -> str:
    """Returns a cell of the table as text, "" if the value is unknown."""
    value = row[column]
    if column == "track" and row["num_deviations"]:
        return f"{value} (open)"  # it changed what the track fixes: MLPerf's open division
    if column == "status":
        if row["discarded"] and value == "complete":
            return "warm-up"
        return row["validity"] if value == "complete" and row["validity"] != "valid" else value
    if column == "n":
        kinds = ("suspect", "invalid", "failed", "aborted", "stopped", "preempted", "running")  # n includes suspect
        return ", ".join([str(value), *(f"{row[f'num_{kind}']} {kind}" for kind in kinds if row[f"num_{kind}"])])
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        digits = _decimals(column)
        return f"[{value[0]:+.{digits}f}, {value[1]:+.{digits}f}]" if "_ci95" in column else " ".join(map(str, value))
    if column.endswith(("_change_pct", "_change")):
        return f"{value:+.{_decimals(column)}f}"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.10g}" if "." in column else number_text(column, value)  # settings are not rounded


def as_json(rows: Rows, columns: Sequence[str]) -> str:
    """Returns JSON with a run per line: the C encoder, which cannot indent, is five times as fast."""
    lines = [atomic.json_text({column: row[column] for column in columns}) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]"


def print_csv(rows: Rows, columns: Sequence[str]) -> None:
    """Prints rows as CSV with a header, unrounded; lists are joined by spaces, None is an empty cell."""
    values = ([row[name] for name in columns] for row in rows)
    cells = ([" ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row] for row in values)
    print(escape.csv_text([columns, *cells]), end="")


def number_text(column: str, value: float, extra_decimals: int = 0) -> str:
    """Returns a number with the decimals of its column plus extra_decimals."""
    return f"{value:,.{_decimals(column) + extra_decimals}f}"


def value_text(value: object) -> str:
    """Returns a setting's value as text, "none" for None."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
