"""Collects the files of a node's ranks into the record when the run has ended; each node writes only its own folder.

A node's ranks write into .nodes/RUN_ID.nodeN in its results folder.  Whether or not node 0 shares that folder, the
files travel over the connection, and one process writes the record.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bench.base import atomic
from bench.machine import processes
from bench.record import run_folder

OWNER = ".owner.tmp"  # identifies the process that made a node's folder and removes it
ABANDONED_S = 86400.0  # age from which a folder of another machine is removed
FOLDER = ".nodes"  # in a results folder; searches skip names with a leading dot
NOT_SHARED = "another results folder, but checkpoints need one that all nodes share: set SPEEDRUN_RESULTS to it"
SEEN_S = 5.0  # by then a network file system should show what another node wrote (assumed)
KEPT = ("config.yaml", "run.json", "environment.json")  # files of the record that node 0 writes itself


def folder_of(results: Path, run_id: str, node: int) -> Path:
    """Returns the folder into which this node's ranks write."""
    return results / FOLDER / f"{run_id}.node{node}"


def make(folder: Path, texts: dict[str, str], launch: dict[str, Any]) -> None:
    """Creates a node's folder with the files that its workers read: config.yaml, run.json and the launch file."""
    remove(folder)
    (folder / "logs").mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (folder / name).write_text(texts[name])
    atomic.write_json(folder / OWNER, processes.identity(os.getpid()), durable=False)
    atomic.write_json(folder / run_folder.LAUNCH, launch | {"folder": str(folder.resolve())}, durable=False)


def remove(folder: Path) -> None:
    """Removes the folder, and the one around it if no other run uses it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def marked(results: Path) -> Path | None:
    """Creates a folder in this node's results that node 0 sees if it has the same ones; None if it cannot."""
    mark = results / FOLDER / secrets.token_hex(16)
    try:
        mark.mkdir(parents=True)
        atomic.write_json(mark / OWNER, processes.identity(os.getpid()), durable=False)
    except OSError:
        return None
    return mark


def is_seen(results: Path, mark: object) -> bool:
    """Whether another node's mark is in these results; over a network it may appear a moment later."""
    path, until_s = results / FOLDER / str(mark) / OWNER, time.monotonic() + SEEN_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    return path.exists()


def clear(results: Path) -> None:
    """Removes the folders of nodes whose process was killed; its guard has ended the ranks."""
    for folder in () if (results / FOLDER).is_symlink() else (results / FOLDER).glob("*"):  # a link leads to others'
        owner = atomic.read_json(folder / OWNER)
        with contextlib.suppress(OSError):  # another process is removing it
            if processes.is_of_this_boot(owner):
                is_abandoned = not processes.is_there(owner)
            else:
                written_s = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))  # by the disk's clock
                is_abandoned = time.time() - written_s > ABANDONED_S
            if is_abandoned:
                remove(folder)


def rescue(folder: Path, files: "Incoming") -> None:
    """Adds the logs of a lost node to the record, if this machine can read that node's folder."""
    for name in names(folder) if folder.is_dir() else ():
        if name.startswith("logs/"):
            with contextlib.suppress(OSError, ValueError):  # ValueError: it had been sent
                files.add(name, (folder / name).read_bytes(), is_last=True)


def of_earlier_segments(record: Path) -> set[str]:
    """Returns the names of files that nodes sent in earlier segments of a run."""
    return {name for name in run_folder.files(record) if name.startswith("logs/") or run_folder.OF_NODE.search(name)}


def names(folder: Path) -> Iterator[str]:
    """Returns the relative paths of the files that belong in the record."""
    return (name for name in run_folder.files(folder) if name not in KEPT)


class Incoming:
    """Writes the files of a node into the record; they arrive one after another, in pieces.

    earlier: the names, shared by all nodes, of_earlier_segments(): logs are continued, other files replaced.
    """

    def __init__(self, record: Path, earlier: set[str]):
        self._record, self._earlier = record, earlier
        self._name: str | None = None  # the file that is arriving
        self._path: Path | None = None  # where it is written; None: its remaining pieces are ignored
        self._num_bytes = 0  # size of the record's file before

    def add(self, name: str, piece: bytes, is_last: bool) -> None:
        """Appends a piece of a file.  Raises OSError if it cannot be written, ValueError for a bad or taken name."""
        if name != self._name:
            self._name, self._path = name, None
            path = self._place(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._path, self._num_bytes = path, path.stat().st_size if path.exists() else 0
        if self._path is not None:
            with open(self._path, "ab") as file:
                file.write(piece)
        if is_last:
            self._name = self._path = None

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or parts[0].startswith("."):
            raise ValueError(f"{name[:200]!r} is not a file's name in a run's folder")
        path = self._record.joinpath(*parts)
        if name in self._earlier:
            self._earlier.remove(name)
            if parts[0] != "logs":
                path.unlink()
        elif path.exists() and parts != ("events.jsonl",):
            raise ValueError(f"{name}: the record has this file already")
        return path

    def undo(self) -> str | None:
        """Removes an incomplete file from the record and returns its name; None if the last file is complete."""
        path, self._path = self._path, None
        if path is None:
            return None
        with contextlib.suppress(OSError):
            os.truncate(path, self._num_bytes)
            if not self._num_bytes:
                path.unlink()
        return self._name


def on_own_clock(folder: Path, rank: int, offset_s: float) -> None:
    """Converts the time of a rank's failure, in its file, from another node's clock to this node's."""
    path = folder / "logs" / f"rank{rank}.failure.json"
    failure = atomic.read_json(path)
    if isinstance(failure, dict) and isinstance(failure.get("failed_at_s"), (int, float)):
        path.write_text(json.dumps(failure | {"failed_at_s": failure["failed_at_s"] + offset_s}))
