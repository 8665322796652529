"""Finds and removes the checkpoints of a run folder, which bench/training/checkpoint.py writes."""

import re
import shutil
from pathlib import Path
from typing import Any

from bench.base import atomic

STATE, WARNED = "state.json", ".warned.tmp"  # in a checkpoint; in a run folder whose launcher was warned
WARNING_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # after which ranks write a checkpoint and end
NAME = re.compile(r"step(\d{1,12})")


def folder_of(run: Path, step: int) -> Path:
    """Returns the folder of a run's checkpoint after this step."""
    return run / "checkpoint" / f"step{step}"


def newest_first(run: Path) -> list[Path]:
    """Returns the folders of a run's complete checkpoints, the one after the most steps first."""
    folders = [path.parent for path in (run / "checkpoint").glob(f"step*/{STATE}") if NAME.fullmatch(path.parent.name)]
    return sorted(folders, key=lambda folder: -int(folder.name.removeprefix("step")))


def newest_state(run: Path) -> dict[str, Any]:
    """Returns state.json of the newest checkpoint; {} without one."""
    folders = newest_first(run)
    state: dict[str, Any] = atomic.read_json(folders[0] / STATE, {}) if folders else {}
    return state


def remove(run: Path) -> None:
    """Removes all checkpoints of a run, once it is complete."""
    for folder in (run / "checkpoint").glob("step*"):
        if NAME.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    if (run / "checkpoint").is_dir() and not any((run / "checkpoint").iterdir()):
        (run / "checkpoint").rmdir()
