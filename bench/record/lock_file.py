"""A lock that launchers on several nodes share: who makes the file holds it, and removes it at the end.

NFS knows no flock everywhere, and appends of two nodes overwrite each other there; that one of two makes a file is sure
(open(2), O_EXCL).  A stale one, by the file system's own clock, is removed.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_EVERY_S = 0.02
STALE_S = 15.0  # it is held for milliseconds


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """In this block no other process holds the lock."""
    own = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        except FileExistsError:
            _remove_stale(path, own)
            time.sleep(LOOK_EVERY_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_stale(path, own):
    with contextlib.suppress(OSError):  # it has just gone, or another process removes it
        made_s = path.stat().st_mtime
        own.touch()
        now_s = own.stat().st_mtime
        own.unlink()
        if now_s - made_s > STALE_S:
            os.rename(path, own)  # of two that try, one does
            own.unlink()
