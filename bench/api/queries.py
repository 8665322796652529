"""Queries runs by SQL: ./run.sh sql and speedrun.sql()."""

import contextlib
import difflib
import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from bench.api.tables import Named, Table, names_of
from bench.base import text_table
from bench.base.reading.damage import Damaged, reading_record
from bench.record import named, rows, step_files
from bench.record.database import KINDS, quoted
from bench.record.store import Store

TABLES = ("runs", "metrics", "steps", "columns")
MAX_STEPS_RUNS = 2000  # the most runs whose steps a query may read, as each has a file of them
STEPS_TO_INTERRUPT = 1_000_000  # instructions of SQLite's virtual machine after which Python can handle a Ctrl-C
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
# string literals and quoted names, which stay unchanged; comments; dotted names, some of which are settings
TOKEN = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")*)"|--[^\n]*|\b[A-Za-z_]\w*(?:\.\w+)+""")
ALIAS = re.compile(r'\bas\s+"((?:[^"]|"")*)"', re.IGNORECASE)
MISSING = re.compile(r"no such (column|table|function): (.*)")


class Found(Table):
    """The rows of a query.  Unlike in the results table, a column's name does not determine how numbers are rounded."""

    def __str__(self) -> str:
        return self._drawn("simple")

    def to_markdown(self) -> str:
        return self._drawn("github")

    def _repr_html_(self) -> str:
        from bench.web import page

        return str(page.table(self.columns, self._cells()))

    def _drawn(self, form: str) -> str:
        numeric = [any(isinstance(row[name], (int, float)) for row in self._rows) for name in self.columns]
        return text_table.render(self.columns, self._cells(), numeric, form)

    def _cells(self) -> list[list[str]]:
        return [[_cell(row[name]) for name in self.columns] for row in self._rows]


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)


def sql(query: str, *names: Named) -> Table:
    """Query the runs with these names, or all of results/, by one SELECT in SQLite's SQL.

        speedrun.sql("SELECT optim.lr, avg(val_loss) AS loss, count(*) AS n FROM runs GROUP BY 1 ORDER BY loss")

    names: as for load().
    runs: a row per run, with the columns of ./run.sh table and every setting by its dotted name.
    metrics: run_id, metric, value, of the metrics that a run has.
    steps: run_id and the columns of steps.csv; read when a query names it.
    columns: table_name, name and type of the columns of these.

    NULL means off, unknown or not measured; a boolean is 1 or 0, a list is JSON.  Nothing can be changed.
    Unreadable runs are omitted and named on standard error.  Raises ValueError for an invalid query or unknown name.
    """
    store = named.store_of([name for part in names for name in names_of(part)])
    store.choose("1")
    _add_tables(store, with_steps=bool(re.search(r"\bsteps\b", query, re.IGNORECASE)))
    text = _with_settings(query, store)
    with contextlib.suppress(sqlite3.Error):  # load JSON's functions, if SQLite has them, before loading is forbidden
        store.db.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')")
    store.db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
    store.db.set_progress_handler(lambda: 0, STEPS_TO_INTERRUPT)
    try:
        cursor = store.db.execute(text)
        if not cursor.description:
            raise ValueError(f"{query!r}: there is no query: give one SELECT")
        columns = _distinct([name for name, *_ in cursor.description])
        rows = (
            [cell.hex() if isinstance(cell, bytes) else cell for cell in row] for row in cursor
        )  # no JSON has bytes
        return Found([dict(zip(columns, row, strict=True)) for row in rows], columns)
    except (sqlite3.Error, sqlite3.Warning) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:  # Ctrl-C, in the progress handler
            raise KeyboardInterrupt from None
        raise ValueError(f"{_short(query)}: {_explained(str(error), store)}") from None


def _add_tables(store: Store, with_steps: bool) -> None:
    metric_query = "SELECT run_id, '{0}' AS metric, {0} AS value FROM runs WHERE {0} NOTNULL"
    store.db.execute(f"CREATE TEMP VIEW metrics AS {' UNION ALL '.join(map(metric_query.format, rows.METRICS))}")
    kinds = {("runs", name): kind for name, kind in (KINDS | store.settings).items()}
    kinds |= {("metrics", "run_id"): "TEXT", ("metrics", "metric"): "TEXT", ("metrics", "value"): "REAL"}
    step_types = {name: "INTEGER" if name in step_files.INT_COLUMNS else "REAL" for name in step_files.CORE_COLUMNS}
    step_types |= {"run_id": "TEXT", "flags": "TEXT"}
    kinds |= {("steps", name): step_types[name] for name in ("run_id", *step_files.CORE_COLUMNS)}
    store.db.execute("CREATE TEMP TABLE columns (table_name TEXT, name TEXT, type TEXT)")
    store.db.executemany("INSERT INTO columns VALUES (?, ?, ?)", [(*key, kind) for key, kind in kinds.items()])
    if not with_steps:
        return
    runs, steps = store.rows(), list[dict[str, Any]]()
    if len(runs) > MAX_STEPS_RUNS:
        raise ValueError(f"steps: {len(runs):,} runs have a file each: name at most {MAX_STEPS_RUNS:,} after the query")
    for folder, row in runs.items():
        try:
            with reading_record(folder):
                steps += ({"run_id": row["run_id"]} | step for step in step_files.read(folder))
        except Damaged as error:
            named.report_excluded("sql", str(error))
    names = list(dict.fromkeys(["run_id", *step_files.CORE_COLUMNS, *(name for row in steps for name in row)]))
    store.db.execute(f"CREATE TEMP TABLE steps ({', '.join(map(quoted, names))})")
    marks = ", ".join("?" * len(names))
    cells = ([row.get(name) for name in names] for row in steps)
    store.db.executemany(f"INSERT INTO steps VALUES ({marks})", cells)


def _with_settings(query: str, store: Store) -> str:
    """Puts quotes around the settings that a query names.

    Raises ValueError for a quoted name that does not exist, which SQLite would take for a string literal.
    """
    exact = {name.lower(): name for name in (*KINDS, *store.settings)}
    known_names = {*exact, *TABLES, *(alias.lower() for alias in ALIAS.findall(query))}
    columns = {name for (name,) in store.db.execute("SELECT lower(name) FROM columns")}

    def spelled(match: re.Match[str]) -> str:
        text, name = match[0], match[1]
        if name is not None and name.lower() not in known_names | columns:
            near = _near(name, [*exact.values()])
            raise ValueError(f'{_short(query)}: there is no column "{name}"; {near}a text stands in single quotes')
        before, _, rest = text.partition(".")
        if text.lower() in store.settings:
            return quoted(text)
        return f"{before}.{quoted(rest)}" if rest in store.settings else text

    return TOKEN.sub(spelled, query)


def _explained(error: str, store: Store) -> str:
    """Rewords an error of SQLite, with a remedy."""
    missing = MISSING.fullmatch(error)
    if missing:
        kind, name = missing.groups()
        if kind == "function":
            return f"there is no function {name}: use those of SQLite (https://sqlite.org/lang_corefunc.html)"
        names = [name for (name,) in store.db.execute("SELECT name FROM columns")] if kind == "column" else list(TABLES)
        every = f"there are {', '.join(TABLES)}" if kind == "table" else "./run.sh sql --schema lists the columns"
        return (
            f"there is no {kind} {name}; {_near(name.rpartition('.')[2] if kind != 'column' else name, names)}{every}"
        )
    if "one statement" in error:
        return "these are several statements: give one SELECT"
    if "authoriz" in error or "prohibited" in error:
        return "results are read only: give one SELECT"
    return f"{error}: it is SQLite's SQL, as in SELECT run_id, val_loss FROM runs WHERE optim.lr < 0.01"


def _near(name: str, names: Sequence[str]) -> str:
    names = [column for column in dict.fromkeys(names) if column != name]  # a column of that name is another table's
    near = [other for other in names if other.rpartition(".")[2] == name] or difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(near[:3])}? " if near else ""


def _distinct(names: Sequence[str]) -> list[str]:
    """Makes the names of a query's columns distinct: a, a -> a, a:1."""
    distinct: list[str] = []
    for name in names:
        number = sum(other.partition(":")[0] == name for other in distinct)
        distinct.append(f"{name}:{number}" if name in distinct else name)
    return distinct


def _short(query: str) -> str:
    return text_table.middle(" ".join(query.split()), 60)
