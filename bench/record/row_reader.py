"""Reads run folders into rows for the store, and computes the signatures by which the store notices changes."""

import contextlib
import functools
import gc
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bench.base.reading import damage
from bench.base.reading.damage import Damaged, reading_record
from bench.record import configs, run_folder, shape
from bench.record.database import Values
from bench.record.rows import COLUMNS, row_of

SETTLED_S = 2.0  # a younger file may change again within one tick of its time stamps

Place = tuple[str, str]  # the absolute path of a run folder's parent, and the folder's name


def absolute(home: str, *parts: str) -> str:
    """Joins the path of home with parts; empty ones are ignored."""
    return "/".join([home.rstrip("/"), *filter(None, parts)])


def is_settled(stat: os.stat_result) -> bool:
    return time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S


def signature(place: Place) -> tuple[str | None, bool]:
    """Returns the signature of a run folder's run.json, None without one, and whether the signature may be kept."""
    try:
        stat = os.stat("/".join((*place, "run.json")))
    except OSError:
        return None, False
    return f"{stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}", is_settled(stat)


def may_end(values: Values) -> bool:
    """Whether a row may change although run.json does not, as the run's processes may end."""
    status, failure = values[COLUMNS.index("status")], values[COLUMNS.index("failure")]
    return status == "running" or failure == "launcher_killed"


def read(place: Place) -> tuple[Values | None, str | None]:
    """Returns (the row of a run folder, None), or (None, why it cannot be read)."""
    folder = "/".join(place)
    try:
        with reading_record(folder):
            return tuple(row_of(run_folder.read(folder), configs.read(folder)).values()), None
    except Damaged as error:
        return None, str(error)


@functools.cache
def code() -> str:
    """Returns a hash of the code that makes rows; a store that other code made is ignored."""
    record, reading = Path(__file__).parent, Path(damage.__file__).parent
    sources = sorted([*record.glob("*.py"), *reading.glob("*.py"), shape.SCHEMA])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: rows hold no cycles, and looking for some takes longer than making 10,000 rows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
