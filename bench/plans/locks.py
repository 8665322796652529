"""Locks that a process holds for as long as it works: on a race, a search, the replays of a folder, a collection.

flock(2) tells at once whether a lock is held.  Some network file systems refuse it, and on others it excludes only the
processes of one machine.  Therefore the holder also writes into the file which process it is, and a thread of it
touches the file, which stops with the process.  On the holder's machine the process itself is looked for; on another
one the lock counts as held until nobody has touched it for STALE_S by the file system's clock.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.reading import plain_file
from bench.machine import leases, processes

BEAT_S, STALE_S = 10.0, 120.0  # nodes may see a touch 60 s late (acregmax in nfs(5))
NUM_ATTEMPTS, LOOK_S = 10, 0.05  # holder() itself holds a lock for microseconds


@contextlib.contextmanager
def held(path: Path, work: str, wait: Callable[[str], object] | None = None) -> Iterator[None]:
    """Context in which no other process holds this lock.

    If one does, wait(holder()) is called once and its end waited for; without wait, leases.Busy is raised, which says
    that the other process does this work ("runs this race").
    """
    # without a buffer, as one that a full disk refuses would fail again as it is closed
    with open(path, "ab", buffering=0, opener=plain_file.open_here) as file:
        if other := _taken(file, path):
            if wait is None:
                raise leases.Busy(f"{path.parent}: {other} {work}: wait for its end")
            wait(other)
            while _taken(file, path):
                time.sleep(LOOK_S)
        own, released = processes.identity(os.getpid()), threading.Event()
        touching = threading.Thread(target=_touch, args=(path, own, released), name="lock", daemon=True)
        try:
            touching.start()
            yield
        finally:
            released.set()
            with contextlib.suppress(OSError):  # the folder was removed on another machine
                if atomic.read_json(path) == own:
                    file.truncate(0)


def _touch(path: Path, own: dict[str, Any], released: threading.Event) -> None:
    """Touches the lock until it is released, unless another process took it while this one was suspended."""
    while not released.wait(BEAT_S):
        with contextlib.suppress(OSError):
            if atomic.read_json(path) == own:
                os.utime(path)


def holder(path: Path) -> str | None:
    """Returns who holds a lock now, such as "process 4711"; None if nobody does."""
    with contextlib.suppress(OSError), open(path, opener=plain_file.open_now) as file:  # no lock, or none supported
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _named(path) or "another process"
    return _named(path)


def _taken(file: FileIO, path: Path) -> str | None:
    """Takes the lock, and returns None; or who holds it."""
    other = None
    for _ in range(NUM_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:  # a file system without such locks
            break
    else:
        return _named(path) or "another process"
    with contextlib.suppress(OSError), atomic.locked(path.with_name(f"{path.name}.tmp")):  # on a full disk: flock alone
        if other := _named(path):
            fcntl.flock(file, fcntl.LOCK_UN)
        else:
            file.truncate(0)
            file.write(json.dumps(processes.identity(os.getpid())).encode())
    return other


def _named(path: Path) -> str | None:
    """Returns the holder that the file names, None if it has ended or the file names none."""
    owner = atomic.read_json(path)
    if not isinstance(owner, dict) or "pid" not in owner:
        return None
    if processes.is_of_this_boot(owner):
        return f"process {owner['pid']}" if processes.is_there(owner) else None
    silent_s = max(0.0, atomic.clock_s(path.parent) - path.stat().st_mtime)
    sign = f"its last sign of life is {silent_s:.0f} s old, and after {STALE_S:g} s it counts as ended"
    return None if silent_s > STALE_S else f"a process of another machine or container ({sign})"
