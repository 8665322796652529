"""The results of a sweep: its runs and configs, the best one, the mean over each axis, what failed or did not run.

Results come from the records; the sweep's folder lists the requested points.  The second half of this module words the
summary at the end of ./run.sh run -m: what won and by how much, which setting mattered, what failed.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.base.metric import VAL_LOSS, Metric, from_goal
from bench.base.paths import shown
from bench.base.text_table import GAP, MARK_WIDTH, counted
from bench.compare import target
from bench.record import configs, run_folder, store, sweep
from bench.record.rows import Row, row_of
from bench.record.shape import Record
from bench.report import table_columns, table_groups, table_text
from bench.report.table_columns import TableRow
from bench.report.table_text import number_text, value_text
from bench.web.document import Table

SEED, MIN_REPEATS = "seed", 3
# settings that all arms of a race have in common; the others are the candidate's
SHARED = ("track=", "data=", "data.", "hardware=", "hardware.device=", "hardware.num_processes=")
LOST = ("failed", "aborted", "stopped", "preempted")  # statuses
MAX_CONFIGS = 20  # most configs in the table; ./run.sh table --sweep shows all
MAX_LOST = 10  # most failed runs and points that did not begin to be named
TIMES = ("train_s_mean", "train_s_sd", "step_avg_ms_mean")


@dataclass(frozen=True)
class Results:
    """A sweep and its runs.  Each row also has a column for each axis."""

    facts: sweep.Facts
    axes: dict[str, list[Any]]  # {key: values in the requested order}, including the seed
    rows: list[TableRow]  # all runs, by start
    folders: dict[str, Path]  # {run_id: run folder}
    not_run: list[list[str]]  # overrides of points without a record
    metric: Metric = VAL_LOSS  # metric of the runs' goal; val_loss if their goals differ

    @property
    def score(self) -> str:
        """The column with the values of the metric."""
        return "val_loss" if self.metric == VAL_LOSS else "score"

    @property
    def label(self) -> str:
        """The metric with its unit, for an axis."""
        return self.metric.label

    def text(self, value: float | None) -> str:
        return "" if value is None else number_text(self.score, value)

    @property
    def keys(self) -> list[str]:
        """The axes without the seed: the settings whose effect is of interest."""
        return [key for key in self.axes if key != SEED]

    @property
    def lost(self) -> list[TableRow]:
        """Runs that failed, were aborted or stopped, unless their point has a complete run."""
        done = {self._point(row) for row in self.rows if row["status"] == "complete"}
        return [row for row in self.rows if row["status"] in LOST and self._point(row) not in done]

    def _point(self, row: TableRow) -> tuple[Any, Any]:
        return row["config_id"], row["seed"]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Repeats of each config, the best mean of the metric first; those without a number last."""
        groups = table_groups.groups(self.rows)
        for group in groups:
            group |= {key: group["members"][0][key] for key in self.keys}
        mean, sign = f"{self.score}_mean", self.metric.sign
        return sorted(groups, key=lambda group: (group[mean] is None, sign * (group[mean] or 0.0)))

    @property
    def ranked(self) -> list[dict[str, Any]]:
        """The groups with a value of the metric."""
        return [group for group in self.groups if group[f"{self.score}_mean"] is not None]

    @property
    def trusted(self) -> list[dict[str, Any]]:
        """The ranked groups whose runs' losses are not in doubt, one of which may be called the best."""
        return [group for group in self.ranked if table_groups.may_be_best(group["members"], self.score)]

    @property
    def num_points(self) -> int:
        """Number of requested runs."""
        return len(self.not_run) + len({self._point(row) for row in self.rows})

    @property
    def num_complete(self) -> int:
        """Number of requested runs that are complete."""
        return len({self._point(row) for row in self.rows if row["status"] == "complete"})

    @property
    def sd_of_repeats(self) -> float | None:
        """Standard deviation of the metric within a config, pooled over configs with repeats; None without repeats."""
        sds = [(group["n"] - 1, group[f"{self.score}_sd"]) for group in self.ranked]
        measured = [(df, sd) for df, sd in sds if sd is not None]
        df = sum(freedom for freedom, _ in measured)
        return math.sqrt(sum(freedom * sd**2 for freedom, sd in measured) / df) if df else None

    def effects(self) -> list[table_groups.Pivot]:
        """Returns means() by descending range, without settings of which no value has two configs."""
        pivots = [pivot for pivot in self.means() if len(pivot.cells) < max(len(self.ranked), 2)]
        return sorted(pivots, key=self.range_of, reverse=True)

    @staticmethod
    def range_of(pivot: table_groups.Pivot) -> float:
        """Returns the difference between the best and the worst mean over a setting."""
        means = [cell.mean for cell in pivot.cells.values() if cell.mean is not None]
        return max(means) - min(means)

    def pivot(self, keys: Sequence[str]) -> table_groups.Pivot:
        return table_groups.pivot_of(self.rows, keys, self.score, self.metric)

    def means(self) -> list[table_groups.Pivot]:
        """Returns the mean of the metric over all other axes, for each axis with at least two values that ran."""
        pivots = [self.pivot([key]) for key in self.keys]
        return [pivot for pivot in pivots if sum(cell.n > 0 for cell in pivot.cells.values()) > 1]


def read(folder: Path | str, entries: Iterable[tuple[str, Row]] | None = None) -> Results:
    """Reads a sweep's folder.  Raises ValueError if it is damaged.

    entries: (absolute folder, row) of every run in the results folder; None to read them.
    """
    folder = Path(folder).absolute()
    facts, points = sweep.read(folder), sweep.points(folder)
    folders, numbers = {}, {}  # {run_id: folder}, {run_id: values of its point}
    for point in points:
        if point.folder is not None:
            folders[point.folder.name] = point.folder
            numbers[point.folder.name] = sweep.values(point.overrides)
    if entries is None:
        entries = store.opened([folder.parent.parent]).rows("sweep_id = ?", [facts["sweep_id"]]).items()
    by_path = dict(entries)
    for path, row in by_path.items():
        if row["sweep_id"] == facts["sweep_id"]:
            folders.setdefault(row["run_id"], Path(path))
    paths = (str(path) for path in folders.values())
    all_rows: list[Any] = [dict(by_path[path]) if path in by_path else _row(path) for path in paths]
    axes = sweep.axes([point.overrides for point in points])
    rows: list[TableRow] = sorted(
        (row for row in all_rows if row), key=lambda row: (row["started_at"] or "", row["run_id"])
    )
    _add_axes(rows, axes, numbers)
    ran = {row["run_id"] for row in rows}
    killed = [[row[key] for key in axes] for row in rows if row["run_id"] not in numbers]  # unrecorded
    not_run = []
    for point in points:
        settings = sweep.values(point.overrides)
        has_run = point.folder is not None and point.folder.name in ran
        if not has_run and [settings.get(key) for key in axes] not in killed:
            not_run.append(point.overrides)
    results = Results(facts, axes, rows, folders, not_run)
    if len({row["metric"] for row in rows}) == 1 and rows[0]["metric"] != VAL_LOSS.name:
        return replace(results, metric=from_goal(_record(results, rows[0]).get("goal")))
    return results


def _row(folder: str) -> Row | None:
    try:
        return row_of(run_folder.read(folder), configs.read(folder))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged, which verify reports


def _add_axes(rows: Sequence[TableRow], axes: Iterable[str], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds the value of each axis to each row: the config's if it has such a setting, else that of the row's point."""
    keys = set(configs.keys(rows))
    configs.add(rows, [key for key in axes if key in keys])
    for row in rows:
        for key in axes:
            if key not in keys and key not in table_columns.COLUMNS:
                row[key] = values.get(row["run_id"], {}).get(key)


def about(axes: Mapping[str, Sequence[Any]], num_runs: int) -> str:
    """Returns text such as "8 runs: 2 optim.lr x 2 model.num_layers x 2 seed"."""
    product = " x ".join(f"{len(values)} {key}" for key, values in axes.items())
    return counted(num_runs, "run") + (f": {product}" if product else "")


def table(results: Results) -> list[str]:
    """Returns lines of text: the configs, best first, and the settings' means; [] for fewer than two configs."""
    groups = results.ranked[:MAX_CONFIGS]
    if len(groups) < 2:
        return []
    table_groups.add_changes(groups, groups[0])
    complete = [row for row in results.rows if row["status"] == "complete"]
    all_suspect = all(group["num_suspect"] == group["n"] for group in groups)
    all_beside = all_suspect and all(_record(results, row).get("beside") for row in complete)
    shown = [group | {"num_suspect": 0} for group in groups] if all_suspect else groups  # stated once, by suspects()
    first = "least" if results.metric.sign > 0 else "greatest"
    about = (
        f"{len(results.ranked)} configs, {first} mean {results.metric.name} first; score_change: against the first row"
    )
    times = () if all_beside else TIMES  # times of runs beside each other are not eligible
    points = results.facts["points"]
    common = [setting for setting in points[0] if all(setting in overrides for overrides in points)] if points else []
    typed = [f"settings of all: {' '.join(common)}"] if common else []
    scores = f"{results.score}_mean", f"{results.score}_sd", "score_change", "score_ci95"
    columns = [*results.keys, "n", *scores, *times, "config_id"]
    lines = ["", about, *typed, "", table_text.fit(shown, columns, results.keys)]
    if len(results.ranked) > MAX_CONFIGS:
        num_more = len(results.ranked) - MAX_CONFIGS
        lines.append(f"and {num_more} more: ./run.sh table --group --sweep {results.facts['sweep_id']}")
    effects = [line for block in effects_table(results) for line in ("", *block.text(False).split("\n"))]
    return [*lines, *(["", sentence] if (sentence := suspects(results)) else []), *effects, ""]


def suspects(results: Results) -> str:
    """Returns text on how many runs are suspect, the first reason, and what it means; "" if none is."""
    complete = [row for row in results.rows if row["status"] == "complete"]
    suspect = [row for row in complete if row["validity"] == "suspect"]
    if not suspect:
        return ""
    reason = _record(results, suspect[0])["validity_reasons"][0]
    counts = f"{len(suspect)} of {len(complete)} complete runs are suspect ({reason})"
    doubted = sum(bool(row["script_doubt"]) for row in suspect)
    trust = f"the losses of {doubted} are doubted too" if doubted else "trust their losses, not their times"
    return f"{counts}: {trust}"


def _record(results: Results, row: TableRow) -> Record:
    return run_folder.read(results.folders[row["run_id"]])


def effects_table(results: Results) -> list[Table]:
    """Returns a table of the mean over each value of each setting; [] for fewer than two settings."""
    rows = []
    for pivot in results.effects() if len(results.keys) > 1 else []:
        for (value,), cell in pivot.cells.items():
            name, best = pivot.keys[0] if value == pivot.values[0][0] else "", "best" if cell.is_best else ""
            rows.append([name, value_text(value), pivot.text(cell.mean), f"{cell.n}{cell.lost}", best])
    heads = ("setting", "value", f"{results.metric.name}_mean", "n", "")
    about = "mean over all runs with a value, whatever their other settings; what matters most first"
    return [Table(heads, rows, [False, False, True, True, False], about, style="tight")] if rows else []


def best(results: Results) -> str:
    """Returns a sentence on the best of the configs that were tried, or on the repeats of a single one; "" for less."""
    groups = results.trusted
    if not groups or (len(groups) == 1 and groups[0]["n"] < 2):
        return ""
    first, *others = groups
    mean, sd = results.text(first[f"{results.score}_mean"]), first[f"{results.score}_sd"]
    spread = f"mean of {first['n']} runs, sd {results.text(sd)}" if sd is not None else "one run"
    score = f"{results.metric.name} {mean} ({spread})"
    if not others:
        judge = f"./run.sh judge {first['config_id']}"
        return score + f"; {judge} says whether they reach the target" * (first["members"][0]["target"] is not None)
    second, which = others[0], f"{values(results, first)}, {score}"
    return f"best of {len(groups)}: {which}; {_ahead(results, first, second)}"


def _ahead(results: Results, first: TableRow, second: TableRow) -> str:
    """Returns text on the lead of the best over the next, and whether repeats tell the two apart."""
    pair = [dict(first), dict(second)]
    table_groups.add_changes(pair, pair[0])
    change, interval, sign = pair[1]["score_change"], pair[1]["score_ci95"], results.metric.sign
    if change is None:
        change = second[f"{results.score}_mean"] - first[f"{results.score}_mean"]
    unit = results.metric.unit or f"of {results.metric.name}"
    where = " run by other code or on other hardware" if first["config_id"] == second["config_id"] else ""
    by = f"{sign * change:.4f} {unit} ahead of {values(results, second)}{where}"
    if interval is None:
        return f"{by}, and without repeats it is unknown whether by chance: sweep seed=0,1,2 too"
    low, high = sorted(sign * edge for edge in interval)
    interval_text = f"95 % interval {low:+.4f} to {high:+.4f}"
    return f"{by} ({interval_text})" if low > 0 else f"{by}, which these runs do not tell apart ({interval_text})"


def why(results: Results) -> str:
    """Returns a sentence on how much each setting mattered, vs the sd of repeats; "" for fewer than two settings."""
    effects = results.effects() if len(results.keys) > 1 else []
    if not effects:
        return ""
    parts = [
        f"{pivot.keys[0]} {results.text(results.range_of(pivot))} (best {_best_value(pivot)})" for pivot in effects
    ]
    sd, noise = results.sd_of_repeats, ""
    if sd is not None:
        less = [pivot.keys[0] for pivot in effects if results.range_of(pivot) < sd]
        noise = f"; repeats of one config differ by sd {results.text(sd)}"
        noise += f", more than {' and '.join(less)} made" * bool(less)
    uneven = any(len({cell.n for cell in pivot.cells.values()}) > 1 for pivot in effects)
    doubt = "; not every combination ran: the means are of unlike runs" if uneven else ""
    unit = results.metric.unit or results.metric.name
    return f"{unit} between the best and the worst mean of each setting: {', '.join(parts)}{noise}{doubt}"


def _best_value(pivot: table_groups.Pivot) -> str:
    """Returns the best value as text, with advice to try beyond it if it is at the edge of three or more numbers."""
    framed = [at for at, cell in pivot.cells.items() if cell.is_best]
    if not framed:
        return "unknown, as all are doubted"
    ((best,),) = framed
    values = pivot.values[0]
    is_edge = best in (values[0], values[-1]) and len(values) > 2
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    edge = "least" if best == values[0] else "greatest"
    return value_text(best) + f", the {edge} that was tried: try beyond it" * (is_edge and numbers)


def fastest(results: Results) -> str:
    """Returns a sentence on the fastest config whose runs all reach their target, with the command that races it.

    "" if there are fewer than two such configs, or their times do not count.
    """
    reach = [group for group in results.trusted if all(row["target_reached"] for row in group["members"])]
    if len(reach) < 2 or any(group["num_suspect"] or group["train_s_mean"] is None for group in reach):
        return ""
    first = min(reach, key=lambda group: group["train_s_mean"])
    score = results.text(first[f"{results.score}_mean"])
    which = f"fastest of {len(reach)} that reach the target of {first['members'][0]['target']:g}: "
    points = [[word for word in point if not word.startswith(f"{SEED}=")] for point in results.facts["points"]]
    own = {key: first[key] for key in results.keys}
    point = next((point for point in points if own.items() <= sweep.values(point).items()), [])
    shared = [word for word in point if word.startswith(SHARED)]
    arm = f"B={' '.join(word for word in point if word not in shared)}"
    n = target.track_settings(first["members"][0]["track"]).get("repeats", MIN_REPEATS)
    race = f": ./run.sh race A= {shlex.join([arm, *shared])} on=time n={n}" if point else ""
    which += f"{values(results, first)}, train_s {first['train_s_mean']:.2f} s, {results.metric.name} {score}"
    return f"{which}; race it against the default for its time{race}"


def confirm(results: Results) -> str:
    """Returns a sentence with the command that confirms the best; "" for fewer than two, or beside fastest()."""
    if len(results.trusted) < 2 or fastest(results):
        return ""
    command = f"./run.sh race --from-sweep {results.facts['sweep_id']} --top 2 n=5"
    return f"the best of many is partly lucky: race the best with fresh seeds on an idle machine: {command}"


def values(results: Results, row: Mapping[str, Any]) -> str:
    """Returns a row's settings as text such as "optim.lr=0.003 model.num_layers=1"."""
    return " ".join(f"{key}={_typed(row[key])}" for key in results.keys)


def _typed(value: object) -> str:
    """Returns a value as it is typed on the command line: null and true, where a table has none and yes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value_text(value)


def ended(results: Results, page: Path, all_complete: int, all_requested: int) -> str:
    """Returns lines of text on how many runs are complete, which failed or did not begin and why, and the page."""
    lines = [f"{all_complete} of {all_requested} complete"]
    lines += _first([_lost(results, row) for row in results.lost])
    lines += filter(None, [again(results)])
    lines += _first([f"not begun: {' '.join(overrides)}" for overrides in results.not_run])
    lines.append(f"{shown(page)}; ./run.sh table --sweep {results.facts['sweep_id']}")
    return f"\n{' ' * (MARK_WIDTH + GAP)}".join(lines)


def again(results: Results) -> str:
    """Returns what repeating the command would do: run the rest, or retry what failed; "" if all is complete."""
    why = results.facts["why"]
    if results.not_run:
        return f"{len(results.not_run)} not run, {why or 'it was interrupted'}: repeat the command to run them"
    return (f"{why}: " if why else "") + "the same command runs again what did not complete" if results.lost else ""


def _first(lines: list[str]) -> list[str]:
    num_omitted = len(lines) - MAX_LOST
    return lines[:MAX_LOST] + ([f"and {num_omitted} more"] if num_omitted > 0 else [])


def _lost(results: Results, row: TableRow) -> str:
    failure = _record(results, row)["failure"] or {}
    message = (failure.get("message") or "").partition("\n")[0]
    kind = "" if row["failure"] in (None, row["status"]) else f" {row['failure']}:"
    return f"{row['status']}: {values(results, row)} seed={row['seed']}:{kind} {message}".rstrip(": ")
