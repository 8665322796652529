"""Files that are made of shards for scripts: tokens without headers, validation shards without a held-out slice.

They are kept in the data folder, or in the user's cache if that folder cannot be written: in each place the KEPT that
were used last, and every one that a process uses.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from bench.base import atomic
from bench.base.paths import cache_root
from bench.data.sources.source import data_root

KEPT = 8  # a nanoGPT's two files, and those of a few other data sets
NAME = re.compile(r"(raw|val-\d+-\d+)-[0-9a-f]{12}\.bin")
_used: dict[Path, IO[bytes]] = {}  # files that this process uses until it ends, each with a shared lock


def made_of(files: Sequence[Path], name: str, write: Callable[[Path], None]) -> Path:
    """Returns the file that write() makes of these files in their current state; it is made only once."""
    digest = hashlib.sha256("\n".join(f"{path.resolve()} {path.stat().st_mtime_ns}" for path in files).encode())
    roots = [data_root(), cache_root() / "speedrun-data"]
    paths = [(root / f"{name}-{digest.hexdigest()[:12]}.bin").absolute() for root in roots]
    for path in paths:
        atomic.remove_left(path.parent, f".{name}-*.tmp")
        if _use(path):
            return path.resolve()
    errors = []
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            _use(path)
            _prune(path.parent)
            return path.resolve()
        except OSError as error:
            errors.append(error)
    first, last = errors
    remedy = f"and {roots[1]} cannot be written either ({last.strerror}): set SPEEDRUN_DATA=/path to a folder of yours"
    raise OSError(first.errno, f"{first.strerror}, {remedy}", first.filename)


def _use(path: Path) -> bool:
    """Keeps a file from being removed until this process ends; returns whether it is there.  Its time of access is that
    of its last use."""
    try:
        file = _used.get(path) or open(path, "rb")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks removes none
            fcntl.flock(file, fcntl.LOCK_SH)
        facts = os.fstat(file.fileno())
        if not facts.st_nlink:  # removed a moment ago, or by hand
            _used.pop(path, file).close()
            return path.exists() and _use(path)
    except OSError:
        return False
    _used[path] = file
    with contextlib.suppress(OSError):  # another user's
        os.utime(path, ns=(time.time_ns(), facts.st_mtime_ns))
    return True


def _prune(folder: Path) -> None:
    used_ns = {}
    for path in [path for path in folder.iterdir() if NAME.fullmatch(path.name)]:
        with contextlib.suppress(OSError):  # another process has just removed it
            used_ns[path] = path.stat().st_atime_ns
    for path in sorted(used_ns, key=lambda path: -used_ns[path])[KEPT:]:
        with contextlib.suppress(OSError), open(path, "rb") as file:  # a process uses it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
