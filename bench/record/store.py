"""Opens the runs of a results folder as a database, with .store.sqlite as a cache that is made from the run folders.

Any SQLite program can read it: its view runs has a row for each run.  If it is deleted, the next call creates it again.

Writing.  The file is never changed in place: a new one is made in memory and renamed over it.  So readers need no
locks, which network file systems do not guarantee, a killed writer leaves at most a temporary file, and of several
simultaneous writers the last one's file remains, which is as good as any.

Trust.  A file is used only if nobody but its owner may write to it, and its owner is this user, root, or the owner of
the results folder, who could replace the run folders themselves.  Anybody else with write access to the folder could
otherwise make runs appear with numbers that no record has.  A user who does not own the folder keeps what they read in
their own cache, which starts from the shared file if there is one.

Validity of a row.  A row has the size, inode and times of change of the run.json that it was made from, and these are
compared again for every row that is returned.  Changed runs are found without visiting 100,000 folders:
- a run that was added, removed or renamed changes the modification time of its parent folder, which is compared;
- a run that ended or was resumed has a line in the ledger, which is read from where the last reading ended;
- a run that is still running, or that cannot be read, is read again every time;
- if a folder has another inode (a copy), or the ledger has changed other than by growing, every row is compared.
A final run.json is never written again.  If somebody changes one without the ledger, a query with a condition may miss
the run, because the condition is tested on the old values; but a row that is returned is always that of the file, and a
listing without a condition, verify and judge see the change.  Files that changed in the last seconds before they were
read are read again, because time stamps of file systems are coarse.
"""

import contextlib
import functools
import glob
import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from bench.base import atomic, paths
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.record import certificates, database, ledger, line_count, row_reader, run_folder
from bench.record.database import CHOSEN, JOINED, KINDS, Database
from bench.record.row_reader import Place
from bench.record.rows import Row

NAME = ".store.sqlite"
MIN_RUNS = 50  # fewer runs are read as fast without a store
NUM_STALE_KEPT = 20  # writing a store takes longer than reading this many runs again
CRC = slice(68, 72)  # SQLite's application_id, which SQLite ignores: the CRC-32 of all bytes after it
TAIL_BYTES = 4096  # the end of a ledger whose hash shows that the ledger has only grown since
IN_SCOPE = "(r.folder IN (SELECT id FROM temp._scope) OR (r.folder, r.dir) IN (SELECT folder, dir FROM temp._named))"
SCOPE = """
CREATE TEMP TABLE _scope (id INTEGER PRIMARY KEY);
CREATE TEMP TABLE _named (folder INTEGER, dir TEXT, PRIMARY KEY (folder, dir));
CREATE TEMP TABLE _chosen (id INTEGER PRIMARY KEY);
"""

OnError = Callable[[str], object] | None


def read_rows(folders: Iterable[Path | str], on_error: OnError = None, logs_too: bool = False) -> list[tuple[str, Row]]:
    """Returns [(absolute run folder, row)] of every run in and below these folders, sorted by folder.

    Runs that cannot be read are skipped and reported to on_error(message).  Raises ValueError if a path is not a
    folder; with logs_too such paths are skipped, as the caller reads them as logs.
    """
    row_by_folder: dict[str, Row] = {}
    for home, below in _by_home(folders, logs_too).items():
        row_by_folder |= Store(home, below, on_error).rows()
    return sorted(row_by_folder.items(), key=lambda item: item[0])


def opened(folders: Iterable[Path | str], on_error: OnError = None) -> "Store":
    """Opens the runs in and below these folders as one database.  on_error, ValueError: see read_rows()."""
    by_home = _by_home(folders, False)
    if len(by_home) == 1:
        ((home, below),) = by_home.items()
        return Store(home, below, on_error)
    union = Store("/", [], on_error)
    for home, below in by_home.items():
        store = Store(home, below, on_error)
        union.include(store.rows())
        union.faults |= store.faults
    return union


def _by_home(folders: Iterable[Path | str], logs_too: bool) -> dict[str, list[str]]:
    """Groups paths by results folder, {results folder: paths}.  A folder without a ledger above it is its own."""
    by_home: dict[str, list[str]] = {}
    homes: dict[str, str] = {}  # {folder: its results folder}
    for path in dict.fromkeys(map(os.path.abspath, folders)):
        if not os.path.isdir(path):
            if logs_too:
                continue
            run_folder.refuse_no_folder(path)
        is_run = os.path.exists(f"{path}/run.json")
        start = os.path.dirname(path) if is_run else path
        if start not in homes:
            homes[start] = str(ledger.find(start) or (os.path.dirname(start) if is_run else start))
        by_home.setdefault(homes[start], []).append(path)
    return by_home


class Store(Database):
    """The runs of one results folder, in memory: rows from the cache, except that changed runs are read again.

    db has the view runs, of the requested runs.  faults: {run folder that cannot be read: why}.
    """

    def __init__(self, home: str, below: Iterable[str], on_error: OnError = None) -> None:
        """home: the results folder; below: folders and run folders in it."""
        self.home, self.faults = home, dict[str, str]()
        self._on_error: Callable[[str], object] = on_error or (lambda message: None)
        self._read_now = set[Place]()  # runs whose rows were read from their folders by this object
        self._num_changes, self._checks_all = 0, False
        with row_reader.no_garbage_collection():
            database = self._load()
            super().__init__(database)
            if database is None:
                self.db.executemany("INSERT INTO _facts VALUES (?, ?)", self._identity().items())
            self._folders: dict[str, tuple[int, str | None]] = {
                path: (id, signature) for id, path, signature in self.db.execute("SELECT * FROM _folders")
            }
            self._below: dict[str, list[str]] = {}
            for path in filter(None, self._folders):
                self._below.setdefault(os.path.dirname(path), []).append(path)
            absolute = functools.partial(row_reader.absolute, home)  # without self, to avoid a cycle with db
            shown = functools.cache(lambda folder: paths.shared(absolute(folder)))
            self.db.create_function("_shown", 2, lambda folder, name: f"{shown(folder)}/{name}")
            self.db.create_function("_certificate", 2, lambda *place: certificates.outcome(absolute(*place)))
            self._refresh(below)

    # ---- the file

    def _load(self) -> sqlite3.Connection | None:
        """Returns the database in the newest file that can be trusted, None without one."""
        files = []
        for path, owner in ((Path(self.home, NAME), self.home), (self._own_path(), None)):
            with contextlib.suppress(Damaged, OSError):
                trusted = (0, os.stat(owner).st_uid) if owner else ()
                files.append((plain_file.opened(path, plain_file.MAX_LINES_BYTES), trusted))
        newest_first = sorted(files, key=lambda item: os.fstat(item[0].fileno()).st_mtime_ns, reverse=True)
        trusted_db = None
        for file, trusted in newest_first:
            with file, contextlib.suppress(sqlite3.Error, OSError, ValueError):
                if trusted_db is None and plain_file.is_own(file, trusted):
                    with contextlib.ExitStack() as unless_known:
                        db = sqlite3.connect(":memory:", isolation_level=None)
                        unless_known.callback(db.close)
                        db.deserialize(_checked(file))
                        database.check_tables(db)
                        facts = dict(db.execute("SELECT name, value FROM _facts").fetchall())
                        if facts.items() >= self._identity().items():
                            trusted_db = db
                            unless_known.pop_all()
        return trusted_db

    def _identity(self) -> dict[str, str]:
        """Returns facts that a file must contain: they show that this code made it for this folder, not for a copy."""
        return {"code": row_reader.code(), "home": self.home, "inode": str(os.stat(self.home).st_ino)}

    def _own_path(self) -> Path:
        place = hashlib.sha256(os.fsencode(os.path.realpath(self.home))).hexdigest()[:16]
        return paths.cache_root() / "speedrun" / "stores" / f"{place}.sqlite"

    def _save(self) -> None:
        """Writes the file if enough has changed: for all users if this one owns the folder, else to their own cache."""
        num_runs = self.db.execute("SELECT count(*) FROM _rows").fetchone()[0]
        if self._num_changes <= NUM_STALE_KEPT or num_runs < MIN_RUNS:
            return
        self._num_changes = 0
        self.show({"folder": "f.path || '/' || r.dir"}, "1", is_kept=True)
        content = bytearray(self.db.serialize())
        content[CRC] = zlib.crc32(memoryview(content)[CRC.stop :]).to_bytes(4, "big")
        is_owner = os.geteuid() in (0, os.stat(self.home).st_uid)
        for path in [Path(self.home, NAME)] * is_owner + [self._own_path()]:
            with contextlib.suppress(OSError):  # if the disk is read-only or full, the next call reads the runs again
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic.remove_left(path.parent, f".{path.name}.*.tmp")
                atomic.write_own(path, bytes(content))
                return

    # ---- what changed since the file was written

    def _refresh(self, below: Iterable[str]) -> None:
        if lost := line_count.lost(Path(self.home, ledger.NAME)):
            self._on_error(lost)
        self.db.executescript(SCOPE)
        self.db.execute("BEGIN")
        self._read_ledger()
        for path in below:
            if (shown := plain_file.name_in_utf8(path)) != path:
                self._on_error(f"{shown}: its name is not UTF-8: give it another")
            elif os.path.exists(f"{path}/run.json"):
                parent, name = os.path.split(path)
                number, _ = self._folder(parent)
                self._expect(number, name)
                self.db.execute("INSERT OR IGNORE INTO temp._named VALUES (?, ?)", [number, name])
            else:
                self._visit(path)
        pending = f"SELECT f.path, r.dir FROM {JOINED} WHERE r.signature IS NULL AND {IN_SCOPE}"
        self._read_again({(row_reader.absolute(self.home, folder), name) for folder, name in self.db.execute(pending)})
        self._show()
        self.db.execute("COMMIT")
        self._save()
        if self._checks_all:
            self.choose("1")

    def _show(self) -> None:
        columns = {"folder": "_shown(f.path, r.dir)", "certificate": "_certificate(f.path, r.dir)"}
        self.show(columns, IN_SCOPE, is_kept=False)

    def _read_ledger(self) -> None:
        """Marks runs that have ended or been resumed for reading again; all if the ledger did not only grow."""
        row = self.db.execute("SELECT value FROM _facts WHERE name = 'ledger'").fetchone()
        size, tail = json.loads(row[0]) if row else (0, hashlib.sha256(b"").hexdigest())
        start, content = self._ledger_from(size - TAIL_BYTES)
        if hashlib.sha256(content[: size - start]).hexdigest() != tail:
            self._checks_all = True
            start, content = self._ledger_from(0)
        elif self._folders:
            lines = filter(None, map(ledger.parsed, content[size - start :].split(b"\n")))
            ended = [line.get("run", "").rpartition("/") for line in lines if line["event"] in ("end", "resume")]
            is_run = "folder = (SELECT id FROM _folders WHERE path = ?) AND dir = ?"
            again = f"UPDATE _rows SET signature = NULL WHERE {is_run}"
            self.db.executemany(again, [(folder, name) for folder, _, name in ended])
        position = json.dumps([start + len(content), hashlib.sha256(content[-TAIL_BYTES:]).hexdigest()])
        self.db.execute("INSERT OR REPLACE INTO _facts VALUES ('ledger', ?)", [position])

    def _ledger_from(self, start: int) -> tuple[int, bytes]:
        """Returns (offset, the complete lines of the ledger from there on); no lines without a ledger."""
        start, content = max(0, start), b""
        name, most_bytes = f"{self.home}/{ledger.NAME}", plain_file.MAX_LINES_BYTES
        with contextlib.suppress(Damaged), plain_file.opened(name, most_bytes) as file:
            file.seek(start)
            content = file.read()
        return start, content[: content.rfind(b"\n") + 1]

    def _visit(self, path: str, parent: int | None = None) -> None:
        """Adds a folder and those below it to the scope, and notes changed runs.  parent: number of its parent."""
        try:
            stat = os.stat(path)
        except OSError:  # just removed
            return
        if parent is not None and os.path.exists(f"{path}/run.json"):  # the folder has become a run
            self._expect(parent, os.path.basename(path))
            self.db.execute("DELETE FROM _folders WHERE path = ?", [self._relative(path)])
            return
        number, old_signature = self._folder(path)
        self.db.execute("INSERT OR IGNORE INTO temp._scope VALUES (?)", [number])
        signature = f"{stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        if old_signature == signature:
            below = self._below.get(self._relative(path), ())
            folders = [row_reader.absolute(self.home, name) for name in below if _is_searched(os.path.basename(name))]
        else:
            self._checks_all |= old_signature is not None and old_signature.partition(" ")[0] != str(stat.st_ino)
            folders = self._scan(path, number, signature if row_reader.is_settled(stat) else None)
        for folder in folders:
            self._visit(folder, number)

    def _scan(self, path: str, number: int, signature: str | None) -> list[str]:
        """Updates the rows for the runs that a folder has gained and lost.  Returns its folders that are not runs."""
        try:
            with os.scandir(path) as scan:
                entries = [entry for entry in scan if _is_searched(entry.name)]
        except (FileNotFoundError, NotADirectoryError):  # just removed
            return []
        except OSError as error:
            self._on_error(f"{path}: cannot be read ({error.strerror})")
            return []
        listed = {name for (name,) in self.db.execute("SELECT dir FROM _rows WHERE folder = ?", [number])}
        names, folders = set[str](), list[str]()
        for entry in entries:
            if (shown := plain_file.name_in_utf8(entry.path)) != entry.path or entry.is_symlink():
                signature = None  # scan the folder again next time, so that the message is repeated
                if shown != entry.path:
                    self._on_error(f"{shown}: its name is not UTF-8: give it another")
                elif any(glob.glob(f"{glob.escape(entry.path)}/{below}run.json") for below in ("", "*/")):
                    remedy = "name it, or move what it leads to here"
                    self._on_error(f"{entry.path}: is a link, which is not followed: {remedy}")
            elif entry.name in listed:
                names.add(entry.name)
            elif entry.is_dir():
                is_run = os.path.exists(f"{entry.path}/run.json")
                self._expect(number, entry.name) if is_run else folders.append(entry.path)
        gone = listed - names
        self.db.executemany("DELETE FROM _rows WHERE folder = ? AND dir = ?", [(number, name) for name in gone])
        self._num_changes += len(gone)
        self._sign(path, number, signature)
        return folders

    def _folder(self, path: str) -> tuple[int, str | None]:
        """Returns the folder's number, and its signature at the time its runs were listed; None if they were not."""
        name = self._relative(path)
        if name not in self._folders:
            done = self.db.execute("INSERT INTO _folders (path) VALUES (?)", [name])
            self._folders[name] = cast(int, done.lastrowid), None
        return self._folders[name]

    def _sign(self, path: str, number: int, signature: str | None) -> None:
        self._folders[self._relative(path)] = number, signature
        self.db.execute("UPDATE _folders SET signature = ? WHERE id = ?", [signature, number])

    def _expect(self, number: int, name: str) -> None:
        """Adds a run whose row is still to be read, unless the run has a row."""
        self.db.execute("INSERT OR IGNORE INTO _rows (folder, dir) VALUES (?, ?)", [number, name])

    def choose(self, condition: str, values: Sequence[object] = ()) -> None:
        """Puts the runs that meet a condition into temp._chosen, after comparing their rows with their files.

        condition: SQL over the view runs, with a question mark for each of the values.
        """
        stale: set[Place] | None = None
        while stale is None or stale:  # a run that was read again may begin or cease to meet the condition
            self.db.execute("DELETE FROM temp._chosen")
            self.db.execute(f"INSERT INTO temp._chosen SELECT _id FROM temp._all WHERE {condition}", values)
            kept = self.db.execute(f"SELECT f.path, r.dir, r.signature FROM {JOINED} WHERE {CHOSEN}")
            places = (((row_reader.absolute(self.home, folder), name), before) for folder, name, before in kept)
            unread = ((place, before) for place, before in places if place not in self._read_now)
            stale = {place for place, before in unread if row_reader.signature(place)[0] != before}
            self._read_again(stale)
            if stale:
                self._show()
        self._save()

    def _read_again(self, places: set[Place]) -> None:
        signatures = {place: row_reader.signature(place) for place in places}
        rows = []
        for place in sorted(place for place in places if signatures[place][0]):
            values, message = row_reader.read(place)
            if values is None:
                self.faults["/".join(place)] = str(message)
                self._on_error(str(message))
            signature, is_settled = signatures[place]
            is_settled &= values is not None and not row_reader.may_end(values)
            rows.append((self._folder(place[0])[0], place[1], signature if is_settled else None, values))
        self.put(rows)
        self._num_changes += sum(signature is not None for _, _, signature, _ in rows)
        self._read_now |= places
        for parent, name in (place for place in places if not signatures[place][0]):  # no longer runs
            number, _ = self._folder(parent)
            self._sign(parent, number, None)
            self.db.execute("DELETE FROM _rows WHERE folder = ? AND dir = ?", [number, name])

    def include(self, rows: Mapping[str, Row]) -> None:
        """Adds rows of another results folder, {absolute folder: row}."""
        added = [(*os.path.split(folder), tuple(row.values())) for folder, row in rows.items()]
        self.put((self._folder(parent)[0], name, None, values) for parent, name, values in added)
        self._read_now |= {(parent, name) for parent, name, _ in added}
        numbers = {self._folder(parent)[0] for parent, *_ in added}
        self.db.executemany("INSERT OR IGNORE INTO temp._scope VALUES (?)", [(number,) for number in numbers])
        self._show()

    # ---- rows

    def rows(self, condition: str = "1", values: Sequence[object] = ()) -> dict[str, Row]:
        """Returns {absolute run folder: row} of the runs that meet a condition; see choose()."""
        with row_reader.no_garbage_collection():
            self.choose(condition, values)
            return {row_reader.absolute(self.home, path, name): row for path, name, row in self.chosen_rows()}

    def listing(self) -> list[dict[str, Any]]:
        """Returns the rows of the view runs, sorted by track and time: {column or setting: value}.

        Every column has one type; a value of another type, from a damaged record, becomes None.
        """
        self.choose("1")
        cursor = self.db.execute("SELECT * FROM runs ORDER BY track, started_at, run_id")
        names = [name for name, *_ in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        kinds = KINDS | self.settings
        number, any_kind = (int, float), (int, float, str)
        types: dict[str, tuple[type, tuple[type, ...]]]
        types = {"BOOLEAN": (bool, number), "REAL": (float, number), "ANY": (str, any_kind)}
        for name, (make, python_type) in ((name, types[kinds[name]]) for name in names if kinds[name] in types):
            for row in rows:
                row[name] = make(row[name]) if isinstance(row[name], python_type) else None
        return rows

    def folders(self) -> list[str]:
        """Returns the absolute paths of the run folders in scope, including those that cannot be read."""
        cursor = self.db.execute(f"SELECT f.path, r.dir FROM {JOINED} WHERE {IN_SCOPE}")
        return [row_reader.absolute(self.home, path, name) for path, name in cursor]

    def _relative(self, path: str) -> str:
        return "" if path == self.home else os.path.relpath(path, self.home)


def _checked(file: BinaryIO) -> bytes:
    """Returns the content of a store.  Raises ValueError if it is damaged, for example by a power failure."""
    content = file.read()  # not mapped: if the file were truncated or replaced on NFS, the process would get SIGBUS
    with memoryview(content) as view, view[CRC.stop :] as rest:
        if len(content) < CRC.stop or zlib.crc32(rest) != int.from_bytes(view[CRC], "big"):
            raise ValueError("it is damaged")
    return content


def _is_searched(name: str) -> bool:
    return not name.startswith(".") and name != paths.PUBLISHED
