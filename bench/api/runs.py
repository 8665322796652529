"""Loads runs as Python objects: speedrun.load().  They have their settings, metrics, record and steps."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from bench.api import plotting, tables
from bench.base.metric import VAL_LOSS
from bench.base.paths import user_path
from bench.record import configs, named, run_folder, step_files
from bench.record.exporters import formats
from bench.record.rows import ListedRow
from bench.record.shape import Record
from bench.report import curves, table_text

if TYPE_CHECKING:
    import pandas
    import polars
    from matplotlib.figure import Figure


class Run:
    """One training run.  Two Runs of the same folder are equal.

    id: the run id; folder: the folder with its files.  Metrics are keys, run["val_loss"], and so are the other
    columns of ./run.sh table and every setting by its dotted name, run["optim.lr"].  None means off, unknown or not
    measured.
    """

    def __init__(self, row: ListedRow) -> None:
        self._row = row

    @property
    def id(self) -> str:
        return self._row["run_id"]

    @property
    def folder(self) -> Path:
        return user_path(self._row["folder"])

    def __fspath__(self) -> str:
        """Return the folder, so that a Run can be used as a path."""
        return str(self.folder)

    def __getitem__(self, name: str) -> Any:
        """Return a column or a setting.  Raises KeyError if there is neither with this name."""
        values = self.to_dict()
        if name not in values:
            raise KeyError(f"{name}: {self.id} has no such column or setting: to_dict() has all of them")
        return values[name]

    def to_dict(self) -> dict[str, Any]:
        """Return all columns and settings, {"run_id": ..., "val_loss": ..., "optim.lr": ...}."""
        columns = {name: value for name, value in self._row.items() if name not in ("config", "setting")}
        return columns | self.settings

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of config.yaml, {dotted name: value}; {} for an imported log."""
        return configs.settings(self._row["config"])

    @functools.cached_property
    def record(self) -> Record:
        """run.json, upgraded to the newest version.  Raises ValueError if it is damaged."""
        return run_folder.read(self.folder)

    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of steps.csv in order of step: step, train_loss and val_loss (nats per token), step_ms, ...

        None is an empty cell.
        """
        return step_files.read(self.folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self._row['status']}, val_loss {self._row['val_loss']}>"


class Runs(Sequence[Run]):
    """Runs by track, then by time.  A slice and filter() are Runs too; runs["val_loss"] is a list, a value per run."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "Runs": ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> "Run | Runs | list[Any]":
        if isinstance(index, str):
            return [run[index] for run in self._runs]
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def filter(self, keep: Callable[[Run], object]) -> "Runs":
        """Return the runs for which keep(run) is true: runs.filter(lambda run: run["optim.lr"] > 1e-3)."""
        return Runs(run for run in self._runs if keep(run))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return Run.to_dict() of each run."""
        return [run.to_dict() for run in self._runs]

    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of steps.csv of all runs, each with its run_id."""
        return [{"run_id": run.id} | row for run in self._runs for row in run.steps()]

    def to_pandas(self, steps: bool = False) -> "pandas.DataFrame":
        """Return a row per run with every setting, or with steps=True a row per step.  Needs pandas."""
        frame: pandas.DataFrame = tables.optional("pandas").DataFrame(self._rows(steps))
        return frame

    def to_polars(self, steps: bool = False) -> "polars.DataFrame":
        """Return a row per run with every setting, or with steps=True a row per step.  Needs polars."""
        library = tables.optional("polars")
        frame: polars.DataFrame = library.DataFrame(self._rows(steps), infer_schema_length=None, strict=False)
        return frame

    def to_parquet(self, path: str | Path, steps: bool = False) -> None:
        """Write the rows of to_pandas() to a parquet file.  Raises ValueError without pyarrow or write access."""
        formats.write_parquet(self._rows(steps), user_path(path))

    def _rows(self, steps: bool) -> list[dict[str, Any]]:
        """Returns rows that all have the same columns."""
        rows = self.steps() if steps else self.to_dicts()
        names = list(dict.fromkeys(name for row in rows for name in row))
        return [{name: _cell(row.get(name)) for name in names} for row in rows]

    def plot(self, y: str = "val_loss", x: str = "step") -> "Figure":
        """Plot a curve per run.  Needs matplotlib; raises ValueError if no run has the values.

        y: val_loss, the metric of the runs' goal, train_loss or step_ms.  x: step, train_s or tokens.
        """
        goal = curves.metric_of(run.record.get("goal") for run in self._runs)
        known_y = list(dict.fromkeys((goal.name, *curves.Y_LABELS)))
        if y not in known_y or x not in curves.X_LABELS:
            raise ValueError(f"plot(y={y!r}, x={x!r}): y is {', '.join(known_y)}; x is {', '.join(curves.X_LABELS)}")
        goal = goal if y == goal.name else VAL_LOSS
        drawn = {run.id: [curves.curves_of_run(run.folder, score=goal.name)] for run in self._runs}
        return plotting.figure(curves.charts_of(drawn, [(f"{y} by {x}", y, x)], goal))

    def __str__(self) -> str:
        return table_text.runs_table([dict(run._row) for run in self._runs]) if self._runs else "no runs"

    def __repr__(self) -> str:
        return f"<Runs: {len(self._runs)}>"

    def _repr_html_(self) -> str:
        rows = [dict(run._row) for run in self._runs]
        return tables.html(rows, table_text.with_metric(rows, table_text.SHOWN))


def _cell(value: object) -> Any:
    """Converts lists and dicts to text, as columns of other libraries have one type."""
    return str(value) if isinstance(value, (list, dict, tuple)) else value


def load(*names: tables.Named) -> Runs:
    """Load the runs with these names; without a name, all of results/.

    names: run folders, folders of them, quoted globs, (parts of) run ids, races, RACE:ARM, sweeps, as ./run.sh table
    takes them.  Unreadable runs are omitted and named on standard error.  Raises ValueError if nothing has a name.
    """
    return Runs(Run(row) for row in named.rows_of_names([name for part in names for name in tables.names_of(part)]))
