"""Groups rows of runs into repeats with means and standard deviations, compares them with a baseline, makes pivots.

Changes are computed as by ./run.sh compare (bench/compare/verdict.py), from runs and never from steps.  A pivot is a
table over the values of one or two settings, with the mean over the runs in each cell.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.base import stats, text_table
from bench.base.metric import Metric
from bench.compare import verdict
from bench.compare.eligibility import index_of_runs
from bench.record import certificates, configs
from bench.report import table_columns
from bench.report.table_columns import Columns, TableRow, rank
from bench.report.table_text import number_text, value_text
from bench.web.document import Block, Lines, Table, texts

GROUPED = (
    *("score", "val_loss", "train_s", "step_avg_ms", "tokens_per_s", "mfu", "peak_mem_gib", "energy_j", "mean_power_w"),
    *("throttled_frac", "gap_nats", "num_steps", "cost_usd_to_target", "energy_kj_to_target"),
)
# fmt: off
GROUP_COLUMNS = (
    "track", "num_deviations", "name", "model", "size", "num_params", "optim", "world_size", "num_shards", "epochs",
    "metric", "device", "config_id", "n", "num_suspect", "num_invalid", "num_failed", "num_aborted", "num_stopped",
    "num_running",
    *(f"{name}_{statistic}" for name in GROUPED for statistic in ("mean", "sd")),
    "certificate", "source_sha256", "comparability_id", "run_ids",
)
# fmt: on
CHANGE_COLUMNS = ("train_s_change_pct", "train_s_ci95_pct", "score_change", "score_ci95")
NAMES = ("run_id", "config_id", "name")  # by which a user may name a baseline
# fmt: off
LOWER = (  # columns in which lower is better
    "val_loss", "gap_nats", "train_s", "wall_s", "cost_usd", "cost_usd_to_target", "energy_kj_to_target", "compile_s",
    "step_avg_ms", "step_ms_p50", "step_ms_p95", "peak_mem_gib", "energy_j", "mean_power_w", "throttled_frac",
    "num_steps",
)
# fmt: on
OF_NO_CLOCK = (
    "score",
    "val_loss",
    "gap_nats",
    "num_steps",
    "peak_mem_gib",
)  # columns that a disturbed machine does not change
HIGHER = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "mfu_causal", "goodput_frac")  # higher is better


def groups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each of members_of() as a row: shared values, n, means and sds (ddof 1, None for n = 1) of counted().

    A group also has "config", that of its first run, and "members", its rows.
    """
    return [_group(members) for members in members_of(rows)]


def members_of(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Groups rows by track, config (or the name of logs), source and comparability_id.

    A run that did not complete may lack comparability_id; it joins the runs of the same track, config and source.
    """
    complete, incomplete, keys_of_family = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in rows:
        family = (row["track"], row["config_id"] or row["name"], row["source_sha256"])  # a log has no config
        if row["status"] == "complete":
            complete[*family, row["comparability_id"]].append(row)
        else:
            incomplete[family].append(row)
    for key in complete:
        keys_of_family[key[:3]].append(key)
    for family, members in incomplete.items():
        siblings = keys_of_family[family]
        for row in members:
            own = (*family, row["comparability_id"])
            complete[own if own in siblings or not siblings else siblings[-1]].append(row)
    return list(complete.values())


def counted(members: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the runs that a group's means use: complete, not invalid, not discarded, without copies of a log."""
    kept: list[Any] = [
        row for row in members if row["status"] == "complete" and row["validity"] != "invalid" and not row["discarded"]
    ]
    return [kept[index] for index in index_of_runs(kept)]


def may_be_best(members: Iterable[Mapping[str, Any]], value: str) -> bool:
    """Returns whether this column of the runs is free of doubt about the script's claims and machine disturbance."""
    return not any(
        row["script_doubt"] or (row["validity"] == "suspect" and value not in OF_NO_CLOCK) for row in counted(members)
    )


def _group(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    complete = [row for row in members if row["status"] == "complete"]
    first, used = [*complete, *members][0], counted(members)
    group = {name: first[name] for name in GROUP_COLUMNS if name in first}  # values that the members share
    group |= {"config": first["config"], "members": members}
    group |= {"n": len(used), "run_ids": [row["run_id"] for row in members]}
    group["num_suspect"] = sum(row["validity"] == "suspect" for row in used)
    group["num_invalid"] = sum(row["validity"] == "invalid" for row in complete)
    for status in ("failed", "aborted", "stopped", "preempted", "running"):
        group[f"num_{status}"] = sum(row["status"] == status for row in members)
    group["certificate"] = certificates.summarized(row.get("certificate") for row in complete)
    for name in GROUPED:
        values = [row[name] for row in used if row[name] is not None]
        group[f"{name}_mean"] = stats.mean(values) if values else None
        group[f"{name}_sd"] = stats.sd(values)
    return group


# ---- against a baseline


def find_baseline(rows: Sequence[TableRow], terms: Sequence[str], columns: Columns) -> TableRow:
    """Returns the row that a user names by part of its run id, config_id or name, or by settings (optim.lr=0.001).

    Raises ValueError if no row or several rows match.
    """
    matching, option = list(rows), f"--baseline {' '.join(terms)}"
    for term in terms:
        if table_columns.CONDITION.fullmatch(term):
            condition = columns.condition(term, option)
            if condition.sign != "=":
                raise ValueError(f"{option}: a baseline is one row: use KEY=VALUE")
            matching = [row for row in matching if table_columns.equals(row[condition.key], condition.wanted)]
        else:
            ids = [[row[name] for name in NAMES if row.get(name)] + list(row.get("run_ids") or ()) for row in matching]
            whole = [row for row, own in zip(matching, ids) if term in own]
            matching = whole or [row for row, own in zip(matching, ids) if any(term in name for name in own)]
    if len(matching) != 1:
        count = f"{len(matching)} of {text_table.counted(len(rows), 'row')}" if matching else "no row"
        raise ValueError(f"{option}: it matches {count}: give part of a run id, or KEY=VALUE ... that one row has")
    return matching[0]


def add_changes(rows: Sequence[TableRow], baseline: TableRow) -> list[str]:
    """Adds CHANGE_COLUMNS to each row; None for the baseline, and if times or losses may not be compared.

    Returns sentences on why they may not.
    """
    reasons: Counter[str] = Counter()
    for row in rows:
        if row is baseline:
            row.update(dict.fromkeys(CHANGE_COLUMNS))
            continue
        compared = verdict.compare_rows(*(group.get("members") or [group] for group in (baseline, row)))
        time, loss = compared["time"], compared["val_loss"]
        changes = time["change_pct"], time["ci95_pct"], loss["change"], loss["ci95"]
        row.update(zip(CHANGE_COLUMNS, changes, strict=True))
        if not compared["comparable"]:
            reasons[compared["reasons"][0]] += 1
    return [f"{text_table.counted(num, 'row')} without a change of time: {why}" for why, num in reasons.items()]


# ---- pivots


@dataclass(frozen=True)
class Cell:
    """The counted() runs with one value of each key."""

    n: int  # number of runs with a value
    mean: float | None  # None for n = 0
    sd: float | None  # None for n < 2
    num_lost: int  # number of runs that failed, were aborted or are invalid
    num_without: int  # number of the others that lack the value
    is_best: bool = False

    @property
    def lost(self) -> str:
        """Text such as ", 2 failed, 1 without"; "" for none."""
        kinds = ((self.num_lost, "failed"), (self.num_without, "without"))
        return "".join(f", {num_runs} {kind}" for num_runs, kind in kinds if num_runs)


@dataclass(frozen=True)
class Pivot:
    """A table of the mean of one column over the values of one or two others."""

    value: str  # the column that is averaged
    label: str  # the displayed name of the value
    keys: list[str]  # one or two columns
    values: list[list[Any]]  # sorted values of each key
    cells: dict[tuple[Any, ...], Cell]  # {value of each key: cell}
    over: list[str]  # settings that vary within a cell

    def text(self, number: float | None, extra_decimals: int = 0) -> str:
        """Returns a mean or standard deviation as text, with extra_decimals more than the column has; "" for None."""
        return "" if number is None else number_text(self.value, number, extra_decimals)


def pivot_of(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], value: str, goal: Metric | None = None) -> Pivot:
    """Returns the pivot of rows over the columns keys, without the warm-ups of races.

    Raises ValueError if the column value is not numeric, or is the score of several metrics.
    goal: the metric in the column "score"; None if its direction is unknown, so that no cell is the best.
    """
    if any(row[value] is not None and not isinstance(row[value], (int, float)) for row in rows):
        raise ValueError(f"--value {value}: it is not a number: choose from {', '.join((*LOWER, *HIGHER))}")
    metrics = sorted({str(row["metric"]) for row in rows if row["score"] is not None})
    if value == "score" and len(metrics) > 1:
        raise ValueError(f"--value score: of {' and '.join(metrics)}: add --where metric={metrics[0]}, or name another")
    members = defaultdict(list)
    for row in (row for row in rows if not row["discarded"]):
        values = (json.dumps(row[key]) if isinstance(row[key], (list, dict)) else row[key] for key in keys)
        members[tuple(values)].append(row)
    cells = {}
    for at in sorted(members, key=lambda at: tuple(map(rank, at))):
        shown = counted(members[at])
        numbers = [row[value] for row in shown if row[value] is not None]
        has_ended = [row for row in members[at] if row["status"] != "running"]
        num_lost = sum(row["status"] != "complete" or row["validity"] == "invalid" for row in has_ended)
        mean = stats.mean(numbers) if numbers else None
        cells[at] = Cell(len(numbers), mean, stats.sd(numbers), num_lost, len(shown) - len(numbers))
    means = {at: cell.mean for at, cell in cells.items() if cell.mean is not None and may_be_best(members[at], value)}
    goal = goal if value == "score" else None
    if means and (goal or value in (*LOWER, *HIGHER)):
        is_lower = goal.sign > 0 if goal else value in LOWER
        best = (min if is_lower else max)(means, key=lambda at: means[at])
        cells[best] = replace(cells[best], is_best=True)
    over: dict[str, None] = {}  # settings that differ within a cell, including the seed
    for inside in members.values():
        over |= dict.fromkeys(["seed"] * (len({row["seed"] for row in inside}) > 1) + configs.varied(inside))
    sides = [sorted({at[number] for at in cells}, key=rank) for number in range(len(keys))]
    return Pivot(
        value, goal.name if goal else value, list(keys), sides, cells, [name for name in over if name not in keys]
    )


def pivot_text(pivot: Pivot, is_md: bool) -> str:
    """Returns pivot_blocks() as text for a terminal, or as Markdown."""
    return texts(pivot_blocks(pivot), is_md)


def pivot_blocks(pivot: Pivot) -> list[Block]:
    """Returns a table with a row per value of the first key, and columns for the second, or mean, sd and n."""
    down, numeric = pivot.values[0], all(isinstance(value, (int, float)) for value in pivot.values[0])
    if len(pivot.keys) == 1:
        heads, right = [pivot.keys[0], pivot.label, "sd", "n", ""], [numeric, True, True, True, False]
        lines = []
        for value in down:
            cell = pivot.cells[value,]
            best = "best" if cell.is_best else ""
            numbers = pivot.text(cell.mean), pivot.text(cell.sd, 1), f"{cell.n}{cell.lost}"
            lines.append([value_text(value), *numbers, best])
    else:
        across = pivot.values[1]
        heads, right = [" \\ ".join(pivot.keys), *map(value_text, across)], [numeric, *[True] * len(across)]
        lines = [[value_text(head), *(_cell_text(pivot, (head, column)) for column in across)] for head in down]
    about = f"{pivot.label}: mean, sd, n" if len(pivot.keys) == 1 else f"{pivot.label}: mean ± sd, n runs; * the best"
    about += f"; over {', '.join(pivot.over)}" if pivot.over else ""
    about += "; failed: also aborted or invalid" if any(cell.num_lost for cell in pivot.cells.values()) else ""
    about += f"; without: of no {pivot.label}" if any(cell.num_without for cell in pivot.cells.values()) else ""
    return [Table(heads, lines, right), Lines([about])]


def _cell_text(pivot: Pivot, at: tuple[Any, ...]) -> str:
    """Returns text such as "* 3.9123 ±0.0021 n=2"."""
    cell = pivot.cells.get(at)
    if cell is None:
        return ""
    if cell.mean is None:
        return f"-{cell.lost}"
    spread = "" if cell.sd is None else f" ±{pivot.text(cell.sd)}"
    return f"{'* ' if cell.is_best else ''}{pivot.text(cell.mean)}{spread} n={cell.n}{cell.lost}"


def rows_of_pivot(pivot: Pivot) -> list[dict[str, Any]]:
    """Returns a row per cell for CSV and JSON: the keys, then VALUE_mean, VALUE_sd, n, num_lost, num_without, best."""
    rows = []
    for at, cell in pivot.cells.items():
        numbers = {f"{pivot.value}_mean": cell.mean, f"{pivot.value}_sd": cell.sd, "n": cell.n}
        keys = dict(zip(pivot.keys, at, strict=True))
        rows.append(keys | numbers | {"num_lost": cell.num_lost, "num_without": cell.num_without, "best": cell.is_best})
    return rows
