"""The files of a node's ranks, carried to the record when the run has ended: each node writes only its own.

A node's ranks write into their own folder, .nodes/RUN_ID.nodeN in its results folder.  Whether that folder is shared
with node 0 or not, its files travel over the connection, and one process writes the record.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bench.base import atomic
from bench.machine import processes
from bench.record import run_folder

OWNER = ".owner.tmp"  # the process that made a node's folder and removes it
ABANDONED_S = 86400.0  # a folder of another machine that nobody has touched for so long
FOLDER = ".nodes"  # in a results folder; what searches one skips a name with a dot
KEPT = ("config.yaml", "run.json", "environment.json")  # of the record, which node 0 writes itself


def folder_of(results: Path, run_id: str, node: int) -> Path:
    """Where this node's ranks write."""
    return results / FOLDER / f"{run_id}.node{node}"


def make(folder: Path, texts: dict[str, str], launch: dict[str, Any]) -> None:
    """A node's folder, with what its workers read: config.yaml, run.json and the launch file."""
    remove(folder)
    (folder / "logs").mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (folder / name).write_text(texts[name])
    atomic.write_json(folder / OWNER, processes.identity(os.getpid()), durable=False)
    atomic.write_json(folder / run_folder.LAUNCH, launch | {"folder": str(folder.resolve())}, durable=False)


def remove(folder: Path) -> None:
    """The folder, and the one around it when no other run uses it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def clear(results: Path) -> None:
    """Remove the folders of nodes whose process was killed; its guard has ended what it left alive."""
    for folder in (results / FOLDER).glob("*"):
        owner = atomic.read_json(folder / OWNER)
        with contextlib.suppress(OSError):  # another process removes it
            if processes.is_of_this_boot(owner):
                is_abandoned = not processes.is_there(owner)
            else:
                written_s = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))  # by its disk's clock
                is_abandoned = time.time() - written_s > ABANDONED_S
            if is_abandoned:
                remove(folder)


def rescue(folders: Iterable[Path], record: Path) -> None:
    """The logs of lost nodes into the record, where this machine sees those nodes' folders."""
    for folder in filter(Path.is_dir, folders):
        for name in names(folder):
            if name.startswith("logs/") and not (record / name).exists():
                with contextlib.suppress(OSError):
                    shutil.copyfile(folder / name, record / name)


def names(folder: Path) -> Iterator[str]:
    """Relative paths of the files that belong into the record."""
    return (name for name in run_folder.files(folder) if name not in KEPT)


class Incoming:
    """The files of a node on their way into the record, one after the other, in pieces."""

    def __init__(self, record: Path):
        self._record = record
        self._name: str | None = None  # of the file that is coming
        self._path: Path | None = None  # where it is written; None: the rest of it is ignored
        self._num_bytes = 0  # that the record's file had before

    def add(self, name: str, piece: bytes, is_last: bool) -> None:
        """OSError: it cannot be written.  ValueError: a name that leads elsewhere or that is taken."""
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
        if path.exists() and parts != ("events.jsonl",):
            raise ValueError(f"{name}: the record has this file already")
        return path

    def undo(self) -> str | None:
        """Take out of the record the part of a file that has come -> the file's name; None: there is no such part."""
        path, self._path = self._path, None
        if path is None:
            return None
        with contextlib.suppress(OSError):
            os.truncate(path, self._num_bytes)
            if not self._num_bytes:
                path.unlink()
        return self._name


def on_own_clock(folder: Path, rank: int, offset_s: float) -> None:
    """A failure that another node's clock dated, in place: when it was by this node's."""
    path = folder / "logs" / f"rank{rank}.failure.json"
    failure = atomic.read_json(path)
    if isinstance(failure, dict) and isinstance(failure.get("failed_at_s"), (int, float)):
        path.write_text(json.dumps(failure | {"failed_at_s": failure["failed_at_s"] + offset_s}))
