"""Keeps rows of runs in SQLite tables, with a view `runs` in which every setting is a column.

What repeats share (config, code, machine) is stored once, as a setup, so that 100,000 runs take 40 MB and queries read
less.  Columns have no declared type, so that a value stays the int or float of its record; their types are in KINDS
and Database.settings.
"""

import contextlib
import hashlib
import json
import marshal
import operator
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, cast

from bench.record import configs
from bench.record.rows import COLUMNS, Row

# fmt: off
SHARED = (
    "track", "num_deviations", "name", "model", "optim", "metric", "data", "world_size", "device", "dtype", "torch",
    "size", "num_params", "num_shards", "config_id", "commit", "source_sha256", "comparability_id", "session_id",
    "race_id", "arm", "discarded", "sweep_id", "provenance", "batch_tokens", "metric_unit", "metric_direction",
    "target", "budget", "stop_at_target", "val_tokens", "setting", "outside_unknown", "headline", "identity_version",
    "config",
)
# fmt: on
OWN = tuple(name for name in COLUMNS if name not in SHARED)
TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bool": "BOOLEAN", "NoneType": "NULL"}
JSON, ANY = "JSON", "ANY"  # a list or dict; numbers in some rows and text in others
KINDS = {  # {column of the view: its type}
    name: TYPES.get((kind.__name__ if isinstance(kind, type) else str(kind)).partition(" ")[0], JSON)
    for name, kind in Row.__annotations__.items()
    if name not in ("config", "setting", "headline", "log_id", "identity_version", "outside_unknown")  # internal
} | {"folder": "TEXT", "certificate": "TEXT"}
MAX_SETTINGS = 1800  # SQLite allows 2,000 columns
TABLES = """
CREATE TABLE _facts (name TEXT PRIMARY KEY, value);
CREATE TABLE _folders (id INTEGER PRIMARY KEY, path TEXT UNIQUE, signature TEXT);
CREATE TABLE _texts (id INTEGER PRIMARY KEY, text TEXT UNIQUE);
CREATE TABLE _settings (name TEXT PRIMARY KEY, kind TEXT);
CREATE TABLE _setups (id INTEGER PRIMARY KEY, key BLOB UNIQUE, {shared});
CREATE TABLE _rows (id INTEGER PRIMARY KEY, folder INTEGER, dir TEXT, signature TEXT, setup INTEGER, {own},
                    UNIQUE (folder, dir));
CREATE INDEX _pending ON _rows (folder) WHERE signature IS NULL;
"""
JOINED = "_rows r JOIN _folders f ON f.id = r.folder LEFT JOIN _setups s ON s.id = r.setup"
CHOSEN = "r.id IN (SELECT id FROM temp._chosen)"
_own_of, _shared_of = (operator.itemgetter(*map(COLUMNS.index, names)) for names in (OWN, SHARED))
_in_order = operator.itemgetter(*map((*OWN, *SHARED).index, COLUMNS))

SCHEMA = "SELECT type, name, sql FROM sqlite_schema WHERE name != 'runs' ORDER BY name"  # without the view
Values = tuple[Any, ...]  # the values of a row, in the order of COLUMNS


def quoted(name: str) -> str:
    """Quotes a column's name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def plain(value: object) -> Any:
    """Converts a value for a column: lists and dicts to JSON, an integer of over 64 bits to a float."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else float(value)
    return json.dumps(value, separators=(",", ":")) if isinstance(value, (list, dict, tuple)) else value


def _tables() -> str:
    shared, own = (", ".join(map(quoted, names)) for names in (SHARED, OWN))
    return TABLES.format(shared=shared, own=own)


def check_tables(db: sqlite3.Connection) -> None:
    """Raises ValueError if the database holds anything but these tables, such as triggers or views that never end."""
    with contextlib.closing(sqlite3.connect(":memory:")) as own:
        own.executescript(_tables())
        expected = own.execute(SCHEMA).fetchall()
    present = db.execute(SCHEMA).fetchall()
    for (kind, name, text), reference in zip(present, expected, strict=True):
        gained_columns = name == "_setups" and str(text).startswith(reference[2][:-1] + ", ")
        if (kind, name) != reference[:2] or (text != reference[2] and not gained_columns):
            raise ValueError(f"{name} is not as it is made here")


class Database:
    """Rows of runs in SQLite.  db: the connection.  settings: {setting that some run has: its type}."""

    def __init__(self, db: sqlite3.Connection | None = None) -> None:
        """db: a connection to a database with these tables; None creates an empty database in memory."""
        self.db = db or sqlite3.connect(":memory:", isolation_level=None)
        if db is None:
            self.db.executescript(_tables())
        self.settings: dict[str, str] = dict(self.db.execute("SELECT name, kind FROM _settings").fetchall())
        self._taken = {name.lower() for name in (*self.settings, *COLUMNS, *KINDS)}

    def __del__(self) -> None:
        if "db" in vars(self):  # Python 3.13 warns about a connection that is not closed
            self.db.close()

    def put(self, rows: Iterable[tuple[int, str, str | None, Values | None]]) -> None:
        """Adds or replaces rows: (number of the parent folder, run folder, signature, values or None if unreadable)."""
        setups, lines = {key: id for id, key in self.db.execute("SELECT id, key FROM _setups")}, []
        for number, name, signature, values in rows:
            own: Iterable[Any] = [None] * len(OWN)
            setup = None
            if values is not None:
                own, shared = map(plain, _own_of(values)), _shared_of(values)
                key = hashlib.blake2b(marshal.dumps(shared, 2), digest_size=16).digest()  # format 2: no references
                setup = setups[key] = setups.get(key) or self._new_setup(key, shared)
            lines.append((number, name, signature, setup, *own))
        marks, names = ", ".join("?" * (4 + len(OWN))), ", ".join(map(quoted, OWN))
        insert = f"INSERT OR REPLACE INTO _rows (folder, dir, signature, setup, {names}) VALUES ({marks})"
        self.db.executemany(insert, lines)

    def _new_setup(self, key: bytes, shared: Values) -> int:
        columns = {name: plain(value) for name, value in zip(SHARED, shared, strict=True)}
        config = shared[SHARED.index("config")]
        columns["config"] = json.dumps([self._text(text) for text in config])
        for name, value in configs.columns(config).items():
            kind = self._kind_with(name, value)
            if kind is not None:
                columns[name] = str(value).lower() if kind == ANY and isinstance(value, bool) else plain(value)
        names, marks = ", ".join(map(quoted, columns)), ", ?" * len(columns)
        done = self.db.execute(f"INSERT INTO _setups (key, {names}) VALUES (?{marks})", [key, *columns.values()])
        return cast(int, done.lastrowid)

    def _kind_with(self, name: str, value: object) -> str | None:
        """Returns the type of a setting that now also has this value; None if the setting cannot be a column."""
        kind, current = TYPES.get(type(value).__name__, JSON), self.settings.get(name)
        if current in (kind, ANY) or (current and value is None):
            return current
        if current is None:
            if name.lower() in self._taken or len(self.settings) >= MAX_SETTINGS:  # SQL ignores the case of names
                return None
            self._taken.add(name.lower())
            self.db.execute(f"ALTER TABLE _setups ADD COLUMN {quoted(name)}")
        elif current != "NULL":
            if current == "BOOLEAN":
                as_text = f"CASE {quoted(name)} WHEN 1 THEN 'true' WHEN 0 THEN 'false' END"
                self.db.execute(f"UPDATE _setups SET {quoted(name)} = {as_text}")
            kind = "REAL" if {kind, current} == {"INTEGER", "REAL"} else ANY
        self.settings[name] = kind
        self.db.execute("INSERT OR REPLACE INTO _settings VALUES (?, ?)", [name, kind])
        return kind

    def _text(self, text: str) -> int:
        """Returns the id of a group's JSON text, which is stored if it is new."""
        text = plain(text)
        row = self.db.execute("SELECT id FROM _texts WHERE text = ?", [text]).fetchone()
        return cast(int, (row or [self.db.execute("INSERT INTO _texts (text) VALUES (?)", [text]).lastrowid])[0])

    def show(self, columns: Mapping[str, str], scope: str, is_kept: bool) -> None:
        """Creates the view runs.  columns: {further column: SQL}; scope: a condition; is_kept: also for the file."""
        names = {name: f"{'r' if name in OWN else 's'}.{quoted(name)}" for name in KINDS if name in COLUMNS}
        names |= dict(columns) | {name: f"s.{quoted(name)}" for name in self.settings}
        source = f"FROM {JOINED} WHERE r.run_id IS NOT NULL AND {scope}"
        schema, rest = ("main", "") if is_kept else ("temp", "r.id AS _id, ")
        shown = ", ".join(f"{text} AS {quoted(name)}" for name, text in names.items())
        self.db.execute(f"DROP VIEW IF EXISTS {schema}.runs")
        if not is_kept:
            self.db.execute("DROP VIEW IF EXISTS temp._all")
            self.db.execute(f"CREATE TEMP VIEW _all AS SELECT {rest}{shown} {source}")
            shown, source = ", ".join(map(quoted, names)), "FROM temp._all"
        self.db.execute(f"CREATE VIEW {schema}.runs AS SELECT {shown} {source}")

    def chosen_rows(self) -> list[tuple[str, str, Row]]:
        """Returns (path of the parent folder, name of the run folder, row) of each run in temp._chosen."""
        texts = dict(self.db.execute("SELECT id, text FROM _texts").fetchall())
        setups_query = f"SELECT id, {', '.join(map(quoted, SHARED))} FROM _setups s WHERE id IN"
        setups, at = {}, SHARED.index("config")
        for id, *shared in self.db.execute(f"{setups_query} (SELECT setup FROM _rows r WHERE {CHOSEN})"):
            shared[at] = tuple([texts[number] for number in json.loads(shared[at])])
            setups[id] = shared
        own = ", ".join(f"r.{quoted(name)}" for name in OWN)
        cursor = self.db.execute(f"SELECT f.path, r.dir, r.setup, {own} FROM {JOINED} WHERE {CHOSEN}")
        rows = [
            (path, name, dict(zip(COLUMNS, _in_order((*values, *setups[id]))))) for path, name, id, *values in cursor
        ]
        booleans = [name for name, kind in KINDS.items() if kind == "BOOLEAN"]
        for *_, row in rows:
            row["machine_doubts"] = json.loads(row["machine_doubts"])
            for name in booleans:
                if row[name] is not None:
                    row[name] = bool(row[name])
        return cast(list[tuple[str, str, Row]], rows)
