"""Where a run's checkpoints lie, and whether they are as the ledger knows them (bench/training/checkpoint.py)."""

import re
import shutil
from pathlib import Path
from typing import Any

from bench.base import atomic

STATE, WARNED = "state.json", ".warned.tmp"  # of a checkpoint; in the run's folder: the launcher was warned
NAME = re.compile(r"step(\d{1,12})")


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint of a run's folder after so many steps."""
    return run / "checkpoint" / f"step{step}"


def newest_first(run: Path) -> list[Path]:
    """The folders of a run's whole checkpoints, the one of the most steps first."""
    folders = [path.parent for path in (run / "checkpoint").glob(f"step*/{STATE}") if NAME.fullmatch(path.parent.name)]
    return sorted(folders, key=lambda folder: -int(folder.name.removeprefix("step")))


def newest_state(run: Path) -> dict[str, Any]:
    """state.json of the newest; {} without one."""
    folders = newest_first(run)
    state: dict[str, Any] = atomic.read_json(folders[0] / STATE, {}) if folders else {}
    return state


def remove(run: Path) -> None:
    """All of them: the run is complete."""
    for folder in (run / "checkpoint").glob("step*"):
        if NAME.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    if (run / "checkpoint").is_dir() and not any((run / "checkpoint").iterdir()):
        (run / "checkpoint").rmdir()
