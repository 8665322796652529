"""What a sweep found: its runs by their values, the best config, the mean over each axis, what failed or did not run.

Read from the records alone; the sweep's own folder says what was asked for.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.base.terminal.text_table import counted
from bench.record import configs, index, run_folder, sweep
from bench.record.rows import Row, row_of
from bench.report import table_columns, table_groups, table_pivot

SEED = "seed"
LOST = ("failed", "aborted", "stopped")  # statuses


@dataclass(frozen=True)
class Results:
    """A sweep, read.  Each row has the axes as columns of its own."""

    facts: sweep.Facts
    axes: dict[str, list]  # {key: values in the order asked for}, the seed among them
    rows: list[Row]  # of every run, by start
    folders: dict[str, Path]  # {run_id: where it lies}
    not_run: list[list[str]]  # overrides of points without a record

    @property
    def keys(self) -> list[str]:
        """The axes but the seed: what may make a difference."""
        return [key for key in self.axes if key != SEED]

    @property
    def lost(self) -> list[Row]:
        """Runs that failed, were aborted or stopped, unless their point has a complete run."""
        done = {self._point(row) for row in self.rows if row["status"] == "complete"}
        return [row for row in self.rows if row["status"] in LOST and self._point(row) not in done]

    def _point(self, row):
        return row["config_id"], row["seed"]

    @property
    def groups(self) -> list[dict]:
        """Repeats of each config, the least mean val_loss first; those without a number last."""
        result = table_groups.groups(self.rows)
        for group in result:
            group |= {key: group["members"][0][key] for key in self.keys}
        return sorted(result, key=lambda group: (group["val_loss_mean"] is None, group["val_loss_mean"]))

    @property
    def ranked(self) -> list[dict]:
        """groups, those with a val_loss."""
        return [group for group in self.groups if group["val_loss_mean"] is not None]

    @property
    def sd_of_repeats(self) -> float | None:
        """Of val_loss within a config, nats, pooled over those with repeats; None where none has."""
        some = [(group["n"] - 1, group["val_loss_sd"]) for group in self.ranked if group["val_loss_sd"] is not None]
        df = sum(one for one, _ in some)
        return math.sqrt(sum(one * sd**2 for one, sd in some) / df) if df else None

    def effects(self) -> list[table_pivot.Pivot]:
        """means() of val_loss, the widest range first, without settings of which no value has two configs."""
        num_configs = len(self.ranked)
        result = [pivot for pivot in self.means() if len(pivot.cells) < max(num_configs, 2)]
        return sorted(result, key=self.range_nats, reverse=True)

    @staticmethod
    def range_nats(pivot: table_pivot.Pivot) -> float:
        """Between the best and the worst mean val_loss over a setting."""
        means = [cell.mean for cell in pivot.cells.values() if cell.mean is not None]
        return max(means) - min(means)

    def means(self, value: str = "val_loss") -> list[table_pivot.Pivot]:
        """For each axis with at least two values that ran, the mean over all the others."""
        result = [table_pivot.of_rows(self.rows, [key], value) for key in self.keys]
        return [pivot for pivot in result if sum(cell.n > 0 for cell in pivot.cells.values()) > 1]


def read(folder: Path | str, known: Iterable[tuple[str, Row]] | None = None) -> Results:
    """A sweep's folder -> Results.  ValueError where it is damaged.

    known: (absolute folder, row) of every run in the results folder, where they were read already.
    """
    folder = Path(folder).absolute()
    facts, points = sweep.read(folder), sweep.points(folder)
    results = folder.parent.parent
    result, numbers = {}, {}  # run_id: folder, values of its point
    for point in points:
        if point.folder is not None:
            result[point.folder.name] = point.folder
            numbers[point.folder.name] = sweep.values(point.overrides)
    if known is None:
        known = index.read_rows([results], on_error=lambda message: None)
    by_path = dict(known)
    for path, row in by_path.items():
        if row["sweep_id"] == facts["sweep_id"]:
            result.setdefault(row["run_id"], Path(path))
    rows = [dict(by_path[str(path)]) if str(path) in by_path else _row(path) for path in result.values()]
    axes = sweep.axes([point.overrides for point in points])
    rows = sorted((row for row in rows if row), key=lambda row: (row["started_at"] or "", row["run_id"]))
    _add_axes(rows, axes, numbers)
    ran = {row["run_id"] for row in rows}
    at = [[row[key] for key in axes] for row in rows if row["run_id"] not in numbers]  # killed before they were kept
    not_run = [
        point.overrides
        for point in points
        if (point.folder is None or point.folder.name not in ran) and _values(point, axes) not in at
    ]
    return Results(facts, axes, rows, result, not_run)


def _values(point, axes):
    values = sweep.values(point.overrides)
    return [values.get(key) for key in axes]


def _row(folder):
    try:
        return row_of(run_folder.read(folder), configs.read(str(folder)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: verify says so


def _add_axes(rows: Sequence[dict], axes: Mapping, values: Mapping) -> None:
    """Gives each row the value of each axis: the config's where it has such a setting, else that of its point."""
    known = set(configs.keys(rows))
    configs.add(rows, [key for key in axes if key in known])
    for row in rows:
        for key in axes:
            if key not in known and key not in table_columns.COLUMNS:
                row[key] = values.get(row["run_id"], {}).get(key)


def about(axes: Mapping[str, Sequence], num_runs: int) -> str:
    """E.g. 8 runs: 2 optim.lr x 2 model.num_layers x 2 seed."""
    product = " x ".join(f"{len(values)} {key}" for key, values in axes.items())
    return counted(num_runs, "run") + (f": {product}" if product else "")
