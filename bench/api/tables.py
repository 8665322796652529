"""Tabulates runs: ./run.sh table and speedrun.table().

No large package is imported here, so that the command shows 10,000 runs in half a second.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench.record import database, named
from bench.report import table_columns, table_groups, table_text
from bench.report.table_columns import COLUMNS, Columns, TableRow

if TYPE_CHECKING:
    import pandas

Named = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]  # runs: a name, a Run, Runs, or a list of these
SHOWN_IN_NOTEBOOKS = 50  # rows of a table that a notebook shows


class Table:
    """Rows of runs, or of groups of repeats.  print() shows it as ./run.sh table does; len() is the number of rows.

    columns: names of the columns in the order of the exports, settings by their dotted names.
    notes: sentences about what the printed table omits or estimates.
    """

    def __init__(
        self,
        rows: Sequence[TableRow],
        columns: Sequence[str],
        shown: Sequence[str] | None = None,
        requested: Sequence[str] = (),
        varied: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        """shown: the columns of the text; None: all columns, however narrow the terminal is.

        In a narrow terminal, columns in requested are never dropped, and those in varied (settings) after most others.
        """
        self.columns, self.notes = list(columns), list(notes)
        self._rows, self._shown = list(rows), shown
        self._requested, self._varied = requested, varied

    def __len__(self) -> int:
        return len(self._rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dict per row, with numbers not rounded; None means off, unknown or not measured."""
        return [{name: row.get(name) for name in self.columns} for row in self._rows]

    def to_json(self) -> str:
        return table_text.as_json(self._rows, self.columns)

    def print_csv(self) -> None:
        """Print CSV, with numbers not rounded and spreadsheet formulas escaped."""
        table_text.print_csv(self._rows, self.columns)

    def to_markdown(self) -> str:
        """Return Markdown for a pull request, without empty columns."""
        shown = self.columns if self._shown is None else table_text.filled(self._rows, self._shown)
        return table_text.render(self._rows, shown, "github")

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the rows as a DataFrame.  Needs pandas."""
        frame: pandas.DataFrame = optional("pandas").DataFrame(self.to_dict(), columns=self.columns)
        return frame

    def __str__(self) -> str:
        if self._shown is None:
            return table_text.render(self._rows, self.columns, "wide")
        return table_text.fit(self._rows, self._shown, self._requested, self._varied)

    def __repr__(self) -> str:
        return f"<Table: {len(self)} rows>"

    def _repr_html_(self) -> str:
        return html(self._rows, self._shown or self.columns)


def names_of(what: Named) -> list[str]:
    """Returns names for the commands.  Raises ValueError if there are none."""
    parts = [*what] if isinstance(what, Iterable) and not isinstance(what, (str, os.PathLike)) else [what]
    if not parts or not all(isinstance(part, (str, os.PathLike)) for part in parts):
        raise ValueError(f"{what!r} names no run: give a path, a run id, a Run, or Runs or a list with at least one")
    return [os.fspath(part) for part in parts]


def names_for(function: str, what: Sequence[Named]) -> list[str]:
    """Returns the names in all arguments of a function that needs one.  Raises ValueError if it has none."""
    if not what:
        raise ValueError(f"{function}() needs a name: print(speedrun.load()) lists the runs in results/")
    return [name for part in what for name in names_of(part)]


def optional(module: str) -> Any:
    """Imports a module of an optional package.  Raises ImportError, with the remedy, if it is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{package} is not installed: {sys.executable} -m pip install {package}") from None


def table(
    *names: Named,
    where: str | Sequence[str] = (),
    sort: str | None = None,
    columns: str | Sequence[str] = (),
    group: bool = False,
    baseline: str | Sequence[str] = (),
    sweep: str | None = None,
) -> Table:
    """Tabulate the runs with these names, oldest first; without a name, all of results/.

        speedrun.table("results/", where=["optim=muon", "optim.lr<0.01"], group=True, sort="val_loss_mean")

    names: as for load().  KEY below is a column or a setting such as optim.lr.
    where: a condition, or several that must all hold: "KEY=VALUE", "KEY=A,B", "KEY<VALUE" ...; a value may be a glob.
    sort: "KEY,-KEY", with - for the largest first.
    columns: show only these; "optim.*" matches several, "*" all of them and every setting.
    group: a row per set of repeats, with n, mean and standard deviation.
    baseline: part of an id, or conditions: the row to which the changes of all others are relative.
    sweep: only the runs of this sweep, by (a part of) its id.

    Unreadable runs are omitted and named on standard error.  Raises ValueError for an unknown name or key.
    """
    rows, filtered_keys = rows_of(names, [where] if isinstance(where, str) else where, sweep)
    columns, baseline = ([part] if isinstance(part, str) else part for part in (columns, baseline))
    fixed: tuple[str, ...] = table_groups.GROUP_COLUMNS if group else COLUMNS
    rows = [*table_groups.groups(rows)] if group else rows
    fields = Columns(rows, fixed)
    orders = fields.orders(sort)
    chosen = fields.named([key for text in columns for key in text.split(",") if key], f"--columns {' '.join(columns)}")
    notes, changes = list[str](), list[str]()
    if baseline:
        base = table_groups.find_baseline(rows, baseline, fields)
        notes, changes = table_groups.add_changes(rows, base), list(table_groups.CHANGE_COLUMNS)
        rows = [base, *(row for row in rows if row is not base)]
    rows = table_columns.sort(rows, orders)
    varied = [] if chosen else fields.varied()
    every = [*fixed, *(name for name in varied if name not in fixed)]
    exported = [*(chosen or every), *(name for name in changes if name not in chosen)]
    shown: Sequence[str] = table_text.with_metric(rows, table_text.GROUP_SHOWN if group else table_text.SHOWN)
    behind = shown.index("track" if group else "status") + 1
    shown = list(dict.fromkeys([*(chosen or [*shown[:behind], *varied, *shown[behind:]]), *changes]))
    # Columns in conditions are always shown; for groups, their means.
    keys = [name for key in filtered_keys for name in (key, f"{key}_mean") if rows and name in rows[0]]
    requested = list(dict.fromkeys([*(key for key, _ in orders), *keys, *changes]))
    num_hidden = 0 if chosen else fields.num_varied - table_columns.MAX_VARIED
    if num_hidden > 0:
        notes.append(f"{num_hidden} more settings differ: --columns run_id,'optim.*' or --columns '*' shows them")
    return Table(rows, exported, shown, chosen or requested, varied, notes)


def rows_of(
    names: Sequence[Named], where: Sequence[str] = (), sweep: str | None = None
) -> tuple[list[TableRow], list[str]]:
    """Returns the rows of the runs that meet all conditions, and the conditions' keys.  ValueError: see table()."""
    store = named.store_of([name for part in names for name in names_of(part)])
    columns = Columns([], settings=store.settings)
    conditions = [columns.condition(condition) for condition in where]
    kinds = database.KINDS | store.settings
    texts, values = ["1"], list[Any]()
    for condition in conditions:
        text, parameters = table_columns.in_sql(condition, kinds.get(condition.key, database.ANY))
        texts.append(text)
        values += parameters
    rows: list[Any] = named.listed(store.rows(" AND ".join(texts), values))
    if sweep:
        from bench.record import sweep as sweeps

        sweep_ids = [sweep_id for (sweep_id,) in store.db.execute("SELECT DISTINCT sweep_id FROM runs") if sweep_id]
        rows = sweeps.chosen(rows, sweep, sweep_ids)
    return rows, [condition.key for condition in conditions]


def html(rows: Sequence[TableRow], columns: Sequence[str]) -> str:
    """Returns HTML for a notebook: the first rows, without empty columns."""
    from bench.web import page

    first = rows[:SHOWN_IN_NOTEBOOKS]
    names = table_text.filled(first, columns)
    cells = [[table_text.cell(row, name) for name in names] for row in first]
    num_omitted = len(rows) - len(first)
    return str(page.table(names, cells)) + (str(page.text(f"and {num_omitted} more")) if num_omitted else "")
