"""Exports runs to a lab's PostgreSQL: tables runs and steps, a view metrics, columns and types as in ./run.sh sql.

Each export is one transaction.  It updates the rows of runs that the database already has, adds the others, replaces
all steps of these runs, and does not change columns that the lab has added to runs.  Several machines may export to
one database, even at the same time, since no two make the same run id.  If a setting has different types on different
machines, its column is widened: bigint, then double precision, then text.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench.base import credentials
from bench.record import rows, step_files
from bench.record.database import ANY, JSON, KINDS, quoted
from bench.record.store import Store

TYPES = {
    "TEXT": "text",
    ANY: "text",
    "INTEGER": "bigint",
    "REAL": "double precision",
    "BOOLEAN": "boolean",
    JSON: "jsonb",
}
INT64 = range(-(2**63), 2**63)
HELD = {"bigint": (int,), "double precision": (int, float), "boolean": (bool,)}  # {type of a column: Python types}
KEYS = {"runs": ("run_id",), "steps": ("run_id", "step")}
MAX_NAME_BYTES = 63  # PostgreSQL truncates longer names
SYSTEM_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")  # every table of PostgreSQL has these
MISREAD = re.compile(r"://[^?]*[/@][^?]*@")  # libpq ends a login or its password at the first / or @
NUL = re.compile(r"(\\\\)|\\u0000")  # in JSON text; u0000 after an escaped backslash is not NUL
CONNECT_TIMEOUT_S = 20
TURNS = "SELECT pg_advisory_xact_lock(hashtext('speedrun export'))"  # serialises simultaneous exports
COLUMNS = """SELECT attname, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"""

Table = Sequence[Mapping[str, Any]]


def export(url: str, store: Store, steps: Table | None = None) -> tuple[str, list[str]]:
    """Exports the runs of a store to the database at url (see libpq).  steps: from formats.rows_of(), or None.

    Returns what was exported as text, and the settings and columns of steps whose names no column can have.  Raises
    ValueError if psycopg is not installed, or the database cannot be reached or refuses; then nothing was changed.
    """
    try:
        import psycopg
    except ImportError:
        hint = "pip install 'psycopg[binary]>=3.2' into the Python that runs this"
        raise ValueError(f"--to postgres: it needs psycopg: {hint}") from None
    kinds_of_runs = {name: TYPES[kind] for name, kind in (KINDS | store.settings).items() if kind in TYPES}
    columns = () if steps is None else ["run_id", *step_files.CORE_COLUMNS, *(name for row in steps for name in row)]
    kinds = dict.fromkeys(step_files.INT_COLUMNS, "bigint") | dict.fromkeys(("run_id", "flags"), "text")
    kinds_of_steps = {name: kinds.get(name, "double precision") for name in columns}
    left_out = sorted(name for name in kinds_of_runs | kinds_of_steps if not _is_possible(name))
    try:
        password = _password(url)
        with psycopg.connect(url, connect_timeout=CONNECT_TIMEOUT_S) as db:
            db.execute(TURNS)
            counts = [_put(db, "runs", kinds_of_runs, store.listing())]
            if steps is not None:
                counts.append(_put(db, "steps", kinds_of_steps, steps))
            target = db.info.dbname
    except psycopg.Error as error:
        first_line = str(error).strip().partition("\n")[0]
        if password:
            first_line = first_line.replace(password, credentials.SECRET)
        raise ValueError(f"--to postgres: {first_line or type(error).__name__}: nothing was exported") from None
    return f"database {target}: {', '.join(counts)}", left_out


def _password(url: str) -> str | None:
    """Returns the password in a URL or None.  Raises ValueError, which does not show it, if libpq would misread it."""
    from psycopg import ProgrammingError, conninfo

    try:
        if not MISREAD.search(url):
            return conninfo.conninfo_to_dict(url).get("password") or None
        why = "a / or @ in its login"
    except ProgrammingError as error:
        has_password = "@" in url or "password" in url.lower()  # the message may quote a part of it
        why = "it is no URL, or no words as psql takes them" if has_password else str(error).strip()
    remedy = "in a URL write a space as %20, / as %2F and @ as %40, and keep a password in ~/.pgpass"
    raise ValueError(f"--out: {why}: {remedy}; nothing was exported")


def _is_possible(name: str) -> bool:
    """Whether a column can have this name."""
    return 0 < len(name.encode()) <= MAX_NAME_BYTES and name not in SYSTEM_COLUMNS and "\0" not in name


def _put(db: Any, table: str, kinds: Mapping[str, str], table_rows: Table) -> str:
    """Adds and replaces rows.  Returns their number as text.  kinds: {column: type}; impossible names are omitted."""
    kinds = {name: kind for name, kind in kinds.items() if _is_possible(name)}
    column_types = _fitted(db, table, kinds)
    key, listed = (", ".join(map(quoted, names)) for names in (KEYS[table], kinds))
    db.execute(f"CREATE TEMP TABLE incoming (LIKE {table}) ON COMMIT DROP")
    with db.cursor().copy(f"COPY incoming ({listed}) FROM STDIN") as copy:
        for row in table_rows:
            cells = {name: _cell(row.get(name), column_types[name]) for name in kinds}
            if all(cells[name] is not None for name in KEYS[table]):  # a damaged record may lack the key
                copy.write_row(list(cells.values()))
    (num_before,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    if table == "steps":
        db.execute("DELETE FROM steps WHERE run_id IN (SELECT run_id FROM incoming)")
    done = db.execute(
        f"INSERT INTO {table} ({listed}) SELECT DISTINCT ON ({key}) {listed} FROM incoming "
        f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(f'{name} = EXCLUDED.{name}' for name in map(quoted, kinds))}"
    )
    (num_after,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    db.execute("DROP TABLE incoming")
    return f"{done.rowcount} {table} ({num_after - num_before} new)"


def _fitted(db: Any, table: str, kinds: Mapping[str, str]) -> dict[str, str]:
    """Adds or widens columns of the table so that they hold these kinds.  Returns {column: its type}."""
    key = [f"{quoted(name)} {kinds[name]}" for name in KEYS[table]]
    primary = ", ".join(map(quoted, KEYS[table]))
    if db.execute("SELECT to_regclass(%s)", [table]).fetchone()[0] is None:  # the user may lack the right to create
        db.execute(f"CREATE TABLE {table} ({', '.join(key)}, PRIMARY KEY ({primary}))")
    existing: dict[str, str] = dict(db.execute(COLUMNS, [table]).fetchall())
    changes = {name: _wider(existing.get(name), kind) for name, kind in kinds.items()}
    changes = {name: kind for name, kind in changes.items() if kind != existing.get(name)}
    if changes:
        parts = [
            f"ADD COLUMN {quoted(name)} {kind}"
            if name not in existing
            else f"ALTER COLUMN {quoted(name)} TYPE {kind} USING {quoted(name)}::{kind}"
            for name, kind in changes.items()
        ]
        db.execute(f"ALTER TABLE {table} {', '.join(parts)}")
        if table == "runs":
            casts = {name: "int::" * (kinds[name] == "boolean") for name in rows.METRICS}
            metric_values = ", ".join(f"('{name}', r.{name}::{cast}double precision)" for name, cast in casts.items())
            db.execute(
                "CREATE OR REPLACE VIEW metrics AS SELECT r.run_id, m.metric, m.value FROM runs r, "
                f"LATERAL (VALUES {metric_values}) AS m (metric, value) WHERE m.value IS NOT NULL"
            )
    return existing | changes


def _wider(current: str | None, kind: str) -> str:
    """Returns the type that holds both kinds; a type that the lab has chosen itself is kept."""
    if current in (None, kind):
        return kind
    if current not in TYPES.values():
        return str(current)
    return "double precision" if {current, kind} == {"bigint", "double precision"} else "text"


def _cell(value: Any, kind: str) -> Any:
    """Converts a value for a column; returns None for one of a damaged record that the column cannot hold."""
    if value is None:
        return None
    if kind == "text":
        return (str(value).lower() if isinstance(value, bool) else str(value)).replace("\0", "")
    if kind == "jsonb":  # it allows neither the character 0 nor nan and inf
        with contextlib.suppress(ValueError):
            return json.dumps(json.loads(NUL.sub(r"\1", value), parse_constant=lambda name: None))
        return None
    python_type = HELD.get(kind)
    is_held = (python_type is None or isinstance(value, python_type)) and (kind != "bigint" or value in INT64)
    return value if is_held else None
