"""The table of a sweep: one or two settings against each other, in each cell the mean of a metric over its runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.base import stats, text_table
from bench.record import configs
from bench.report import table_groups
from bench.report.table_columns import rank
from bench.report.table_text import number_words, value_words

LOWER = (
    *("val_loss", "gap_nats", "train_s", "wall_s", "compile_s", "step_avg_ms", "step_ms_p50", "step_ms_p95"),
    *("peak_mem_gib", "energy_j", "mean_power_w", "throttled_frac", "num_steps"),
)
HIGHER = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "mfu_causal", "goodput_frac")


@dataclass(frozen=True)
class Cell:
    """The counted runs with one value of each key (bench/report/table_groups.py); None where there is none of them."""

    n: int  # with a number
    mean: float | None
    sd: float | None  # None for n below 2
    num_lost: int  # that failed, were aborted or invalid
    is_best: bool = False


@dataclass(frozen=True)
class Pivot:
    """keys: one or two columns; values: those of each key, sorted; cells: by their values; over: what else varies."""

    value: str
    keys: list[str]
    values: list[list]
    cells: dict[tuple, Cell]
    over: list[str]

    @property
    def best(self) -> tuple | None:
        """The values of the best cell; None where no direction is better."""
        return next((at for at, cell in self.cells.items() if cell.is_best), None)


def of_rows(rows: Sequence[Mapping], keys: Sequence[str], value: str) -> Pivot:
    """Rows that have the keys and the value as columns -> Pivot.  ValueError where the value is not a number."""
    if any(row[value] is not None and not isinstance(row[value], (int, float)) for row in rows):
        raise ValueError(f"--value {value}: it is not a number: choose from {', '.join((*LOWER, *HIGHER))}")
    members = {}
    for row in rows:
        members.setdefault(tuple(_hashable(row[key]) for key in keys), []).append(row)
    cells = {at: _cell(members[at], value) for at in sorted(members, key=lambda at: tuple(map(rank, at)))}
    means = {at: cell.mean for at, cell in cells.items() if cell.mean is not None}
    if means and value in (*LOWER, *HIGHER):
        best = (min if value in LOWER else max)(means, key=means.get)
        cells[best] = Cell(**{**cells[best].__dict__, "is_best": True})
    values = [sorted({at[number] for at in cells}, key=rank) for number in range(len(keys))]
    return Pivot(value, list(keys), values, cells, _over(rows, keys))


def _hashable(value):
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _cell(rows, value):
    counted = table_groups.counted(rows)
    result = [row[value] for row in counted if row[value] is not None]
    return Cell(len(result), stats.mean(result) if result else None, stats.sd(result), len(rows) - len(result))


def _over(rows, keys):
    """What else the means are over: settings that differ within a cell, and the seed."""
    result = {}
    for at in {tuple(_hashable(row[key]) for key in keys) for row in rows}:
        inside = [row for row in rows if tuple(_hashable(row[key]) for key in keys) == at]
        result |= dict.fromkeys(["seed"] * (len({row["seed"] for row in inside}) > 1) + configs.varied(inside))
    return [name for name in result if name not in keys]


# ---- forms


def text(pivot: Pivot, form: str) -> str:
    """A line a value of the first key, a column a value of the second; of one key mean, sd and n as columns."""
    if len(pivot.keys) == 1:
        head = [pivot.keys[0], pivot.value, "sd", "n", ""]
        lines = [[value_words(value), *_parts(pivot, (value,))] for value in pivot.values[0]]
        right = [_is_number(pivot.values[0]), True, True, True, False]
    else:
        head = [" \\ ".join(pivot.keys), *map(value_words, pivot.values[1])]
        lines = [
            [value_words(one), *(_words(pivot, (one, other)) for other in pivot.values[1])] for one in pivot.values[0]
        ]
        right = [_is_number(pivot.values[0]), *[True] * len(pivot.values[1])]
    return f"{text_table.render(head, lines, right, form)}\n\n{_about(pivot)}"


def _is_number(values):
    return all(isinstance(value, (int, float)) for value in values)


def _parts(pivot, at):
    cell = pivot.cells[at]
    sd = "" if cell.sd is None else number_words(pivot.value, cell.sd, 1)
    mean = "" if cell.mean is None else number_words(pivot.value, cell.mean)
    return [mean, sd, f"{cell.n}{_lost(cell)}", "best" if cell.is_best else ""]


def _words(pivot, at):
    """E.g. 3.9123 ±0.0021 n=2 *"""
    cell = pivot.cells.get(at)
    if cell is None:
        return ""
    if cell.mean is None:
        return f"-{_lost(cell)}"
    spread = "" if cell.sd is None else f" ±{number_words(pivot.value, cell.sd)}"
    return f"{'* ' if cell.is_best else ''}{number_words(pivot.value, cell.mean)}{spread} n={cell.n}{_lost(cell)}"


def _lost(cell):
    return f", {cell.num_lost} lost" if cell.num_lost else ""


def _about(pivot):
    what = f"{pivot.value}: mean, sd, n" if len(pivot.keys) == 1 else f"{pivot.value}: mean ± sd, n runs; * the best"
    over = f"; over {', '.join(pivot.over)}" if pivot.over else ""
    lost = "; lost: failed, aborted or invalid" if any(cell.num_lost for cell in pivot.cells.values()) else ""
    return what + over + lost


def rows_of(pivot: Pivot) -> list[dict]:
    """A row a cell, for csv and JSON: the keys, then VALUE_mean, VALUE_sd, n, num_lost, best."""
    result = []
    for at, cell in pivot.cells.items():
        numbers = {f"{pivot.value}_mean": cell.mean, f"{pivot.value}_sd": cell.sd, "n": cell.n}
        keys = dict(zip(pivot.keys, at, strict=True))
        result.append(keys | numbers | {"num_lost": cell.num_lost, "best": cell.is_best})
    return result
