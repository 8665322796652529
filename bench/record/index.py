"""Run folders -> rows, fast: what was read before is kept beside the runs, in .index.json.gz of the folder they lie in.

The index is a copy and never an authority.  An entry counts only while its run.json has the same size, inode, time of
change and time of status change, and while the code that made it is the same; an index that is deleted, damaged, of
another user or writable by one is ignored.  config.yaml is written before its run.json and never again, so that
run.json's signature stands for both.  A run that still runs, or whose run.json changed in the last seconds before it
was read (file systems count time in coarse ticks), is read again every time.  Where the index cannot be written,
everything still works.
"""

import contextlib
import functools
import gc
import gzip
import hashlib
import marshal
import operator
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from bench.base import atomic
from bench.base.reading import damage, json_file, plain_file, yaml_file
from bench.base.reading.damage import Damaged, reading_record
from bench.machine import processes
from bench.record import configs, metrics, run_folder, shape, validity
from bench.record import rows as rows_module
from bench.record.rows import COLUMNS, Row, encoded, row_of

NAME = ".index.json.gz"
MIN_RUNS = 50  # fewer are read as fast without
SETTLED_S = 2.0  # a file younger than this may change again within one tick of its time stamps
MIN_PARALLEL = 2000
NUM_PARTS = 8  # of the work of two processes
NUM_STALE_KEPT = 20  # writing an index costs more than reading so few runs again

Answer = tuple[str, Row | None, str | None]  # a run folder's name, its row or None, None or why it cannot be read
# By name: the signature of run.json, the row's values by COLUMNS
Entries = dict[str, tuple[list[int], tuple[Any, ...]]]


def read_rows(
    paths: Iterable[Path | str], on_error: Callable[[str], None] | None = None, logs_too: bool = False
) -> list[tuple[str, Row]]:
    """Folders -> [(folder, row)] of every run in and below them, each once, by folder; folder is an absolute path.

    What cannot be read is skipped and reported to on_error(message).  ValueError if a path is not a folder, unless
    logs_too says that the caller reads those.
    """
    stats: dict[str, dict[str, os.stat_result]] = {}  # by parent and name
    for path in map(os.path.abspath, paths):
        for parent, name, stat in run_folder.walk(path, on_error):
            stats.setdefault(parent, {})[name] = stat
        if not logs_too and not os.path.isdir(path):
            raise ValueError(f"{path}: is not a folder: ./run.sh table without a folder shows results/")
    with _no_garbage_collection():
        return [
            (f"{parent}/{name}", row)
            for parent in sorted(stats)
            for name, row in _rows_of_folder(parent, stats[parent], on_error)
        ]


def fault_of(folder: str) -> str | None:
    """Why a run folder has no row; None: it has one."""
    return _read(*os.path.split(folder))[2]


def _rows_of_folder(
    parent: str, stats: dict[str, os.stat_result], on_error: Callable[[str], None] | None
) -> list[tuple[str, Row]]:
    known = _load(parent) if len(stats) >= MIN_RUNS else {}
    names = sorted(stats)
    signatures = {name: _signature(stats[name]) for name in names}
    fresh = [name for name in names if name in known and known[name][0] == signatures[name]]
    rows = {name: cast(Row, dict(zip(COLUMNS, known[name][1], strict=True))) for name in fresh}
    stale = [name for name in names if name not in rows]
    for name, row, message in _read_all(parent, stale):
        if row is not None:
            rows[name] = row
        elif on_error and message is not None:
            on_error(message)
    if len(stats) >= MIN_RUNS and len(stale) > NUM_STALE_KEPT:
        settled = []  # whose row stays true as long as the file stays as it is
        for name in (name for name in stale if name in rows):
            age_s = time.time() - max(stats[name].st_mtime, stats[name].st_ctime)
            may_end = rows[name]["status"] == "running" or rows[name]["failure"] == "launcher_killed"
            settled += [name] * (age_s > SETTLED_S and not may_end)
        _save(parent, known, {name: (signatures[name], tuple(rows[name].values())) for name in settled})
    return [(name, rows[name]) for name in names if name in rows]


def _signature(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_all(parent: str, names: Sequence[str]) -> list[Answer]:
    """Thousands of them by two processes."""
    if len(names) < MIN_PARALLEL:
        return [_read(parent, name) for name in names]
    size = -(-len(names) // NUM_PARTS)
    parts = [names[at : at + size] for at in range(0, len(names), size)]
    with processes.started(functools.partial(_read_part, parent), parts, are_many=True) as read:
        return sorted((answer for part in read for answer in marshal.loads(part)), key=operator.itemgetter(0))


def _read_part(parent: str, names: Sequence[str]) -> bytes:
    """Uses marshal, which takes a third of pickle's time, between two of our own processes."""
    return marshal.dumps([_read(parent, name) for name in names])


def _read(parent: str, name: str) -> Answer:
    folder = f"{parent}/{name}"
    try:
        with reading_record(folder):
            return name, row_of(run_folder.read(folder), configs.read(folder)), None
    except Damaged as error:
        return name, None, str(error)


# ---- the file


def _load(parent: str) -> Entries:
    """The index of this folder; {} for one that is missing, damaged or of other code."""
    path = Path(parent, NAME)
    try:
        with reading_record(path):
            with plain_file.opened(path) as file:
                is_own = plain_file.is_own(file)  # what somebody else may have written is not a copy of these runs
            return _parsed(path, *_signature(path.stat())) if is_own else {}
    except (Damaged, EOFError, zlib.error):
        return {}


@functools.lru_cache(maxsize=4)  # the arms of one comparison lie in one folder
def _parsed(path: Path, *signature: int) -> Entries:
    import msgspec

    index = msgspec.json.decode(gzip.decompress(plain_file.content(path, plain_file.MAX_LINES_BYTES)))
    if index["code"] != _code():
        return {}
    texts, at = index["texts"], COLUMNS.index("config")
    for values in index["rows"]:
        if len(values) != len(COLUMNS):
            raise ValueError(f"{path}: a row has {len(values)} values")
        values[at] = tuple([texts[number] for number in values[at]])
    return dict(zip(index["names"], zip(index["signatures"], index["rows"], strict=True), strict=True))


def _save(parent: str, known: Entries, changed: Entries) -> None:
    """known: what the index held, of runs that were not asked for now as well; of those that are gone nothing is kept.

    Compressed, because most columns hold few different values: 10,000 rows are 11 MB, and half a megabyte in the file.
    """
    with contextlib.suppress(OSError):  # read-only or full: the next call reads the runs again
        there = set(os.listdir(parent))
        entries = {name: entry for name, entry in (known | changed).items() if name in there}
        texts: dict[str, int] = {}  # of settings, each once: its number
        at, rows = COLUMNS.index("config"), []
        for _, values in entries.values():
            numbers = [texts.setdefault(text, len(texts)) for text in values[at]]
            rows.append([*values[:at], numbers, *values[at + 1 :]])
        signatures = [signature for signature, _ in entries.values()]
        index = {"code": _code(), "names": list(entries), "signatures": signatures, "texts": list(texts), "rows": rows}
        atomic.write_own(Path(parent, NAME), gzip.compress(encoded(index).encode(), compresslevel=1, mtime=0))


def _code() -> str:
    """Hash of the code that makes rows: entries that other code made are ignored."""
    sources = (
        Path(str(module.__file__)).read_bytes()
        for module in (damage, json_file, plain_file, yaml_file, run_folder, rows_module, configs, metrics, validity)
    )
    parts = [*sources, Path(__file__).read_bytes(), shape.SCHEMA.read_bytes()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Rows hold no reference cycles; looking for some takes longer than making 10,000 rows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
