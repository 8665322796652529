"""Creates, reads and upgrades run folders.  Everything that reads records uses this module.

    results/<track>/<run_id>/    run_id = <utc>-<name>-<config_id8>-s<seed>-m<mark>[-n]; older ones have no mark
      run.json          what happened (bench/record/run.schema.json); written whole or not at all
      config.yaml  overrides.yaml  environment.json  steps.csv  events.jsonl  code/  logs/  traces/  memory/

Format history of run.json:
  1  2026-11  first version
A new version gets a line here, a function in UPGRADERS and a kept example in tests/records/.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from bench.base import atomic, private, utc
from bench.base.paths import PUBLISHED
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged, reading_record
from bench.base.units import MIB
from bench.machine import processes
from bench.record import shape, validity
from bench.record.shape import Record, Section

SCHEMA_VERSION = 1
UPGRADERS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}  # {version: upgrades its records to the next}
# Files that launcher and workers exchange during a run; as temporary files they are not artifacts.
LAUNCH, PROGRESS, RESULT = ".launch.tmp", ".progress.tmp", ".result.tmp"
WEIGHTS = "checkpoint/weights.safetensors"  # with checkpoint.save=true
STALE_HEARTBEAT_S = 60.0  # six heartbeats of the launcher
MAX_NOT_KEPT = 100  # if more files cannot be kept, they are counted instead of named
BLOCK_BYTES = MIB
MAX_CLOCK_SKEW_S = 600.0  # between two machines that share a results folder (assumed)
ROLES = {  # {file or folder: its role in the record's artifacts}
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
WRITTEN_BEFORE = ("config", "overrides", "environment", "code")  # the launcher writes these, the workers the rest
OF_NODE = re.compile(r"\.node\d+(?=\.)")  # part of the name of a file that each node writes: telemetry.node1.csv
CHECKPOINT_STATE, WARNED = "state.json", ".warned.tmp"  # in a checkpoint; in a run folder whose launcher was warned
WARNING_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # after which ranks write a checkpoint and end
SEED_OF_NAME = re.compile(r"-s(\d+)(?:-m[0-9a-f]{6})?(?:-\d+)?$")
CHECKPOINT_NAME = re.compile(r"step(\d{1,12})")


# ---- where records are


def run_id(moment: datetime, name: str, config_id: str, seed: int, mark: str) -> str:
    """Returns a run id such as 20261121T031500Z-gpt2-adamw-1a2b3c4d-s0-m5e6f7a.  mark: from private.mark_of()."""
    return f"{moment:%Y%m%dT%H%M%SZ}-{name}-{config_id}-s{seed}-m{mark}"


def new_folder(
    results: Path | str, track: str, name: str, config_id: str, seed: int, moment: datetime | None = None
) -> Path:
    """Creates a run folder, with -2, -3, ... appended if the name is taken.  moment: the start in UTC; None: now."""
    wanted = run_id(moment or datetime.now(UTC), name, config_id, seed, private.mark_of(results))
    parent = Path(results) / track
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            folder.mkdir()  # atomic, so that two runs never share a folder
            return folder
        except FileExistsError:
            number += 1


def seed_of(name: str) -> int | None:
    """Returns the seed in the name of a run's folder, as new_folder() makes it; None if it has none."""
    found = SEED_OF_NAME.search(name)
    return int(found[1]) if found else None


def find_runs(paths: Iterable[Path | str]) -> Iterator[Path]:
    """Yields the run folders in and below each path, sorted.  Raises ValueError if a path is not a folder."""
    for path in paths:
        refuse_no_folder(path)
        yield from map(Path, sorted(walk(os.fspath(path))))


def refuse_no_folder(path: Path | str) -> None:
    """Raises ValueError if a path that should hold runs is not a folder."""
    if not os.path.isdir(path):
        raise ValueError(f"{path}: is not a folder of runs: ./run.sh table shows those of results/, import reads logs")


def walk(path: str) -> Iterator[str]:
    """Yields the run folders in and below path; none if path is not a folder.

    A folder of publications below path is not searched, so that no run counts twice, but path may be in it.
    """
    if os.path.exists(f"{path}/run.json"):  # the rest of the folder is not listed, which makes this faster than os.walk
        yield path
        return
    folders = list[str]()
    with contextlib.suppress(OSError), os.scandir(path) as entries:  # just removed, a file, or not readable
        folders = [entry.path for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        if os.path.basename(folder) != PUBLISHED:
            yield from walk(folder)


def refuse_links_out(folder: Path, paths: Iterable[Path]) -> None:
    """Raises ValueError if one of these files of a record, which may be a stranger's, lies elsewhere, by a link, and is
    not the run's by its hash."""
    artifacts: Any = atomic.read_json(folder / "run.json", {}).get("artifacts")
    listed = [part for part in artifacts if isinstance(part, dict)] if isinstance(artifacts, list) else []
    sha256_of = {str(part.get("path")): part.get("sha256") for part in listed}
    for path in paths:
        if not path.resolve().is_relative_to(folder.resolve()):
            with plain_file.opened(path) as file:
                sha256 = hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
            if sha256_of.get(path.relative_to(folder).as_posix()) != sha256:
                raise ValueError(f"{path}: a link leads to it, out of its record: name the file itself")


# ---- run.json


def read(folder: Path | str) -> Record:
    """Reads the record of a run folder, upgraded, through effective().  ValueError if it is missing or damaged."""
    run = read_raw(folder)
    with reading_record(folder):
        return effective(run, folder)


def read_raw(folder: Path | str, checked: bool = True) -> Record:
    """Reads the record as written, upgraded.  ValueError if missing or damaged; checked=False allows wrong fields."""
    path = os.path.join(folder, "run.json")
    run: dict[str, Any] = json_file.read(path)
    version = run.get("schema_version")
    if type(version) is not int or "run_id" not in run:
        raise ValueError(f"{path}: is not a run's record: it has no schema_version and run_id")
    if not 1 <= version <= SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version={version} is not 1 to {SCHEMA_VERSION}: update the harness")
    while version < SCHEMA_VERSION:
        run = UPGRADERS[version](run)
        assert run["schema_version"] == version + 1, f"UPGRADERS[{version}] left {run['schema_version']}"
        version += 1
    record = cast(Record, run)
    if checked:
        _check_kinds(path, record)
    return record


def _check_kinds(path: str, run: Record) -> None:
    """Raises Damaged unless all fields are present with the right types, and the metrics are numbers or null."""
    json_file.check_kind(run, shape.record(), path)
    for name, value in run["metrics"].items():
        if value is not None and type(value) not in (int, float, bool):
            raise Damaged(f"{path}: metrics.{name}={value!r:.40} is not a number: the file was damaged, restore it")
    if run.get("referee") and run.get("status") == "complete":
        try:
            validity.referee_findings(run)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise Damaged(f"{path}: referee cannot be read ({error!r}): the file was damaged, restore it") from None


def effective(run: Record, folder: Path | str) -> Record:
    """Returns a record whose status is running although its launcher is gone as aborted, and any other unchanged.

    The launcher is gone if, on the same boot, no process has its pid and start time.  On another machine or boot, it is
    if its last heartbeat is more than STALE_HEARTBEAT_S old; up to MAX_CLOCK_SKEW_S by the file system's clock too.
    """
    if run["status"] != "running":
        return run
    launcher = run.get("launcher") or {}
    boot = processes.boot_id_hash()
    if boot is not None and launcher.get("boot_id_hash") == boot:
        gone = processes.start_ticks(launcher["pid"]) != launcher["start_ticks"]
        why = f"its launcher, process {launcher['pid']}, is no longer there"
    else:
        age_s = time.time() - utc.seconds(run.get("heartbeat_at") or run["started_at"] or "")
        if abs(age_s) > STALE_HEARTBEAT_S and age_s <= MAX_CLOCK_SKEW_S:
            age_s = atomic.clock_s(Path(folder).parent) - os.stat(os.path.join(folder, "run.json")).st_mtime
        gone, why = age_s > STALE_HEARTBEAT_S, f"its last heartbeat is {age_s:.0f} s old"
    return killed(run, f"run.json says running, but {why}") if gone else run


def killed(run: Record, message: str) -> Record:
    """Returns a record whose status is running as aborted, because its launcher is gone, as the message says."""
    failure = {"kind": "launcher_killed", "rank": None, "step": None, "signal": None, "exit_code": None}
    return {
        **run,
        "status": "aborted",
        "failure": {**failure, "message": message, "hint": "run it again"},
        "ended_at": run.get("heartbeat_at") or run["started_at"],  # the last sign of life
        "validity": "invalid",
        "validity_reasons": [validity.NOT_COMPLETE],
    }


def progress(folder: Path | str) -> dict[str, Any]:
    """Returns the last progress that rank 0 wrote: {"step" (None or a number), "num_steps", ...}; {} without any."""
    facts = atomic.read_json(Path(folder) / PROGRESS, {})
    return facts if isinstance(facts, dict) and type(facts.get("step")) in (int, type(None)) else {}


# ---- its files


def listed(folder: Path | str) -> list[Section]:
    """Returns all files of the folder except run.json and temporary ones: [{"path", "sha256", "num_bytes", "role"}]."""
    return kept(folder)[0]


def kept(folder: Path | str, ended_by: Callable[[], str | None] = lambda: None) -> tuple[list[Section], dict[str, str]]:
    """Returns what listed() does, and {file or folder: why it is not listed}.

    ended_by(): returns the name of a signal that stops the reading of large files, None while there is none.
    """
    artifacts, not_kept = list[Section](), dict[str, str]()
    for path in files(folder, not_kept.__setitem__):
        try:
            artifacts.append({"path": path, **_read_whole(folder, path, ended_by), "role": _role(path)})
        except _NotKeptError as error:
            not_kept[plain_file.name_in_utf8(path)] = str(error)
        except OSError as error:
            if error.errno not in plain_file.UNREADABLE:
                raise
            not_kept[path] = str(error.strerror)
    if len(not_kept) > MAX_NOT_KEPT:
        first = next(iter(not_kept.values()))
        tops = Counter(name.partition("/")[0] for name in not_kept)
        not_kept = {top: f"{count} of its files, the first because {first}" for top, count in tops.items()}
    return artifacts, not_kept


class _NotKeptError(Exception):
    """The message says why a file is not listed as an artifact."""


def _read_whole(folder: Path | str, path: str, ended_by: Callable[[], str | None]) -> Section:
    """Returns the sha256 and num_bytes of a file.  Raises _NotKeptError or OSError."""
    if plain_file.name_in_utf8(path) != path:
        raise _NotKeptError("its name is not UTF-8")
    with open(os.path.join(folder, path), "rb", buffering=0, opener=plain_file.open_now) as file:
        sha256, block, num_bytes = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES)), 0
        while count := file.readinto(block):
            if signal_name := ended_by():
                raise _NotKeptError(f"{signal_name} came before it was read")
            sha256.update(block[:count])
            num_bytes += count
    return {"sha256": sha256.hexdigest(), "num_bytes": num_bytes}


def _role(path: str) -> str:
    name = OF_NODE.sub("", path)
    return ROLES.get(name, ROLES.get(name.partition("/")[0], "other"))


def files(folder: Path | str, missed: Callable[[str, str], object] = lambda path, why: None) -> list[str]:
    """Returns the sorted relative paths of the files that are artifacts.  missed: see plain_file.entries_below()."""
    start = len(os.path.join(folder, ""))
    entries = plain_file.entries_below(folder, lambda path, why: missed(plain_file.name_in_utf8(path[start:]), why))
    names = sorted(entry.path[start:] for entry in entries if os.path.isfile(entry.path))  # False for circular links
    return [name for name in names if name != "run.json" and not any(map(_is_temporary, name.split("/")))]


def remove_outputs(folder: Path | str) -> None:
    """Deletes what the workers wrote, so that only the launcher's files and run.json remain."""
    remove_temporary(folder)
    for path in files(folder):
        if _role(path) not in (*WRITTEN_BEFORE, "other"):
            (Path(folder) / path).unlink()


def remove_links(folder: Path | str) -> None:
    """Deletes the links and empty folders in and below a folder, because they are not part of a record."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a script removed it, or replaced it by a file
        for entry in reversed(list(plain_file.entries_below(folder))):
            with contextlib.suppress(OSError):  # not empty, or immutable
                os.unlink(entry.path) if entry.is_symlink() else os.rmdir(entry.path) if entry.is_dir() else None
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def remove_temporary(folder: Path | str) -> None:
    """Deletes the run's temporary files and the reserve; files that cannot be deleted remain.  Raises nothing."""
    with contextlib.suppress(OSError):  # the folder may be gone
        for path in filter(lambda path: _is_temporary(path.name), Path(folder).iterdir()):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_temporary(name: str) -> bool:
    return name == atomic.RESERVE or (name.startswith(".") and name.endswith(".tmp"))


# ---- checkpoints, which bench/training/checkpoint.py writes


def checkpoint_folder(run: Path, step: int) -> Path:
    """Returns the folder of a run's checkpoint after this step."""
    return run / "checkpoint" / f"step{step}"


def checkpoints(run: Path) -> list[Path]:
    """Returns the folders of a run's complete checkpoints, the one after the most steps first."""
    folders = [
        path.parent
        for path in (run / "checkpoint").glob(f"step*/{CHECKPOINT_STATE}")
        if CHECKPOINT_NAME.fullmatch(path.parent.name)
    ]
    return sorted(folders, key=lambda folder: -int(folder.name.removeprefix("step")))


def newest_checkpoint_state(run: Path) -> dict[str, Any]:
    """Returns state.json of the newest checkpoint; {} without one."""
    folders = checkpoints(run)
    state: dict[str, Any] = atomic.read_json(folders[0] / CHECKPOINT_STATE, {}) if folders else {}
    return state


def remove_checkpoints(run: Path) -> None:
    """Removes all checkpoints of a run, once it is complete."""
    for folder in (run / "checkpoint").glob("step*"):
        if CHECKPOINT_NAME.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    if (run / "checkpoint").is_dir() and not any((run / "checkpoint").iterdir()):
        (run / "checkpoint").rmdir()
