"""The files of a run folder: what each is for, their hashes for run.json, and which are temporary."""

import contextlib
import hashlib
import re
import shutil
from pathlib import Path

from bench.base import atomic

ROLES = {
    "config.yaml": "config",
    "overrides.yaml": "overrides",
    "steps.csv": "steps",
    "steps_by_rank.csv": "steps",
    "telemetry.csv": "telemetry",
    "events.jsonl": "events",
    "environment.json": "environment",
    "code": "code",
    "logs": "log",
    "traces": "trace",
    "memory": "memory",
    "work": "work",
    "checkpoint": "checkpoint",
}
WRITTEN_BEFORE = ("config", "overrides", "environment", "code")  # by the launcher; the workers write the rest
OF_NODE = re.compile(r"\.node\d+(?=\.)")  # in the name of a file that each node writes: telemetry.node1.csv


def listed(folder: Path | str) -> list[dict]:
    """All files of the folder but run.json and temporary ones: [{"path", "sha256", "num_bytes", "role"}]."""
    result = []
    for path in files(folder):
        with open(Path(folder) / path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = (Path(folder) / path).stat().st_size
        result.append({"path": path, "sha256": sha256, "num_bytes": num_bytes, "role": _role(path)})
    return result


def _role(path):
    name = OF_NODE.sub("", path)
    return ROLES.get(name, ROLES.get(name.partition("/")[0], "other"))


def files(folder: Path | str) -> list[str]:
    """Sorted paths, relative and with "/", of what belongs into artifacts."""
    paths = (path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
    names = sorted(path.as_posix() for path in paths if not any(map(_is_temporary, path.parts)))
    return [name for name in names if name != "run.json"]


def remove_outputs(folder: Path | str) -> None:
    """Deletes what workers wrote into folder; the folder is then as before its run, but for run.json."""
    remove_temporary(folder)
    for path in files(folder):
        if _role(path) not in (*WRITTEN_BEFORE, "other"):
            (Path(folder) / path).unlink()


def remove_temporary(folder: Path | str) -> None:
    """Deletes the run's temporary files and the reserve; what a disk does not let go stays."""
    for path in Path(folder).iterdir():
        if _is_temporary(path.name):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_temporary(name):
    return name == atomic.RESERVE or (name.startswith(".") and name.endswith(".tmp"))
