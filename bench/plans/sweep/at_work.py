"""The processes of this machine in which a launcher that is not ours makes the runs of a sweep.

Each leaves a file in the sweep's folder while it makes a run, .at_work/PID, so that the sweep's own process can end it
in order before that launcher kills it, as joblib does with its workers and all that they started.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.base import atomic
from bench.machine import processes
from bench.record import failures, run_folder

FOLDER = ".at_work"
LOOK_EVERY_S = 0.2
KILLED = "the process of hydra/launcher that made this run was killed"


@contextlib.contextmanager
def here(folder: Path) -> Iterator[None]:
    """Around a run that this process makes.  folder: the sweep's."""
    path = folder / FOLDER / str(os.getpid())
    path.parent.mkdir(exist_ok=True)
    atomic.write_json(path, processes.identity(os.getpid()), durable=False)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def end(folder: Path, within_s: float) -> bool:
    """SIGTERM to those of this machine, and wait until they have written their records.  False: not all have."""
    for pid in _pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + within_s
    while left := _pids(folder):
        if time.monotonic() > until_s:
            return False
        processes.has_ended(left[0], LOOK_EVERY_S)  # or its run has, and its file is gone
    return True


def clear(folder: Path) -> None:
    """Of processes that were killed: what their runs left alive is ended, and their records are finished."""
    killed = [path for path in _files(folder) if not _is_alive(path)]
    if killed:
        finish(folder, lambda run: run_folder.effective(run)["status"] != "running", KILLED)
    for path in killed:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FOLDER).rmdir()


def finish(folder: Path, is_gone: Callable[[dict], bool], why: str) -> None:
    """End and finish the runs of the sweep whose record says running although is_gone(record): its launcher is.

    why: for the records.
    """
    for path in run_folder.find_runs([folder.parent.parent]):
        run = atomic.read_json(path / "run.json", {})
        is_its_own = (run.get("sweep") or {}).get("sweep_id") == folder.name
        if is_its_own and run["status"] == "running" and is_gone(run):
            failures.write_launcher_killed(path, why)


def _files(folder):
    return sorted(path for path in (folder / FOLDER).glob("*") if path.name.isdecimal())


def _is_alive(path):
    """Whether the process that left this file is there, on this machine."""
    return processes.is_there(atomic.read_json(path))


def _pids(folder):
    return [int(path.name) for path in _files(folder) if _is_alive(path)]
