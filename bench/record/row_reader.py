"""A run folder -> its row and the signature of the file that the row is made from; thousands by two processes."""

import contextlib
import functools
import gc
import hashlib
import marshal
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.base.reading import damage, json_file, plain_file, yaml_file
from bench.base.reading.damage import Damaged, reading_record
from bench.machine import processes
from bench.record import configs, database, metrics, run_folder, shape, validity
from bench.record import rows as rows_module
from bench.record.database import Values
from bench.record.rows import COLUMNS, row_of

SETTLED_S = 2.0  # a file younger than this may change again within one tick of its time stamps
MIN_PARALLEL = 2000
NUM_PARTS = 8  # of the work of two processes

Place = tuple[str, str]  # of a run folder: its parent, absolute, and its name
Answer = tuple[Place, Values | None, str | None]  # a row or None, None or why it cannot be read


def absolute(home: str, *parts: str) -> str:
    """A path below home, from parts of it, of which "" is none."""
    return "/".join([home.rstrip("/"), *filter(None, parts)])


def is_settled(stat: os.stat_result) -> bool:
    return time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S


def signature(place: Place) -> tuple[str | None, bool]:
    """Of a run folder's run.json, and whether it may be kept; None: there is none."""
    try:
        stat = os.stat("/".join((*place, "run.json")))
    except OSError:
        return None, False
    return f"{stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}", is_settled(stat)


def may_end(values: Values) -> bool:
    """Whether a row may become another one while its file stays as it is."""
    status, failure = values[COLUMNS.index("status")], values[COLUMNS.index("failure")]
    return status == "running" or failure == "launcher_killed"


def read_all(places: Sequence[Place]) -> Iterator[Answer]:
    """Thousands of them by two processes."""
    if len(places) < MIN_PARALLEL:
        yield from map(_read, places)
        return
    size = -(-len(places) // NUM_PARTS)
    parts = [places[at : at + size] for at in range(0, len(places), size)]
    with processes.started(_read_part, parts, are_many=True) as read:
        for part in read:
            yield from marshal.loads(part)


def _read_part(places: Sequence[Place]) -> bytes:
    """Uses marshal, which takes a third of pickle's time, between two of our own processes."""
    return marshal.dumps([_read(place) for place in places])


def _read(place: Place) -> Answer:
    folder = "/".join(place)
    try:
        with reading_record(folder):
            return place, tuple(row_of(run_folder.read(folder), configs.read(folder)).values()), None
    except Damaged as error:
        return place, None, str(error)


@functools.cache
def code() -> str:
    """Hash of the code that makes rows: what other code made is ignored."""
    modules = (damage, json_file, plain_file, yaml_file, run_folder, rows_module, configs, metrics, validity, database)
    own = [Path(__file__), Path(__file__).with_name("store.py"), shape.SCHEMA]
    sources = [*(Path(str(module.__file__)) for module in modules), *own]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Rows hold no reference cycles; looking for some takes longer than making 10,000 rows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
