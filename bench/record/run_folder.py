"""The run folder: made, written, read, upgraded.  Everything after a race reads folders through here.

    results/<track>/<run_id>/    run_id = <utc>-<name>-<config_id8>-s<seed>[-n]
      run.json          what happened (bench/record/run.schema.json); written whole or not at all
      config.yaml  overrides.yaml  environment.json  steps.csv  events.jsonl  code/  logs/  traces/  memory/

Format history of run.json:
  1  2026-11  first version
A new version gets a line here, a function in UPGRADERS and a kept example in tests/records/.
"""

import errno
import json
import math
import os
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

from bench import atomic, utc
from bench.machine import processes
from bench.paths import PUBLISHED, REPO, published_root, race_roots, results_root, working_folder

SCHEMA_VERSION = 1
MAX_BYTES = 256 * 2**20  # of a run.json: more is none
UPGRADERS = {}  # version -> function from a record of that version to one of the next
# What passes between launcher and workers while a run lasts; named so that they are no artifacts.
LAUNCH, PROGRESS, RESULT = ".launch.tmp", ".progress.tmp", ".result.tmp"
STALE_HEARTBEAT_S = 60.0  # six heartbeats of the launcher
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
}
OUTPUT_ROLES = ("steps", "telemetry", "events", "log", "trace", "memory")  # written by the workers, the rest before


# ---- where records are


def run_id(moment, name, config_id, seed):
    """moment: a datetime.  E.g. 20261121T031500Z-gpt2-adamw-1a2b3c4d-s0"""
    return f"{moment:%Y%m%dT%H%M%SZ}-{name}-{config_id}-s{seed}"


def new_folder(results, track, name, config_id, seed, moment=None):
    """Make a folder that nobody else has, -2, -3, ... appended where needed; mkdir is atomic, so two never share."""
    wanted = run_id(moment or datetime.now(UTC), name, config_id, seed)
    parent = Path(results) / track
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def find_runs(paths):
    """Folders -> the run folders (pathlib.Path) in and below them, sorted.  ValueError for a path that is no folder.

    What is published below them is not searched, so that no run counts twice; a path may name it, or lie in it.
    """
    for path in paths:
        if not os.path.isdir(path):
            raise ValueError(f"{path}: there is no such folder; ./run.sh table without a folder shows results/")
        for folder in _below(os.fspath(path)):
            yield Path(folder)


def _below(folder):
    if os.path.exists(os.path.join(folder, "run.json")):
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:  # somebody else's, or just removed
        return
    for name in names:
        if not name.startswith(".") and name != PUBLISHED:
            yield from _below(os.path.join(folder, name))


def locate(word):
    """What a user typed -> a folder: a path from where they stand or from the repository, a race's id, or (part of) a run id.

    Ids are looked for in this machine's own results, then among the published.
    """
    for base in (working_folder(), REPO, results_root(), *race_roots()):
        path = Path(base, os.path.expanduser(word))
        if path.is_dir():
            return path
        if path.name == "run.json" and path.is_file():
            return path.parent
    found = []
    for root in (results_root(), published_root()):
        if not found and root.is_dir():
            found = [folder for folder in find_runs([root]) if word in folder.name]
    exact = [folder for folder in found if folder.name == word]
    if len({folder.name for folder in exact or found}) == 1:  # a run may be published twice
        return (exact or found)[0]
    what = f"is part of {len(found)} run ids, {found[0].name} among them" if found else "is no folder and no run id"
    raise ValueError(f"{word} {what}: ./run.sh table without a folder lists the runs of results/")


# ---- run.json


def read(folder, now_s=None, boot=None, start_ticks_of=None):
    """A run folder -> its record, newest version; one whose launcher is gone is shown as aborted, nothing is written.

    now_s, boot and start_ticks_of(pid) stand for the clock and this machine, so that a test can hold them.
    """
    run = read_raw(folder)
    try:
        return effective(run, now_s, boot, start_ticks_of)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder}: the record lacks something or is damaged ({error!r})") from None


def read_raw(folder):
    """A run folder -> its record as written, upgraded to the newest version.  ValueError names a file that is none."""
    path = os.path.join(folder, "run.json")
    try:
        with open(path, "rb", opener=_open_file) as file:
            run = json.loads(file.read(), parse_constant=_refuse_constant)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): give a run folder") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON ({error}): the file was damaged, restore it") from None
    version = run.get("schema_version") if isinstance(run, dict) else None
    if type(version) is not int or "run_id" not in run:
        raise ValueError(f"{path}: is no record of a run: it has no schema_version and run_id")
    if version > SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version={version} is newer than {SCHEMA_VERSION}: update the harness")
    while version < SCHEMA_VERSION:
        run = UPGRADERS[version](run)
        assert run["schema_version"] == version + 1, f"UPGRADERS[{version}] left {run['schema_version']}"
        version += 1
    _check_kinds(path, run)
    return run


def _open_file(path, flags):
    """Neither waits for a pipe nor reads a device without an end."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > MAX_BYTES:
        os.close(fd)
        raise OSError(errno.EINVAL, f"it is no file of up to {MAX_BYTES // 2**20} MiB")
    return fd


def _refuse_constant(word):
    raise ValueError(f"{word} is no number of JSON")


def _check_kinds(path, run):
    """What every verb sorts and counts with: words, and in the metrics finite numbers, yes and no, or nothing."""
    for name in ("run_id", "track", "started_at"):
        if type(run.get(name)) is not str and (name == "run_id" or run.get(name) is not None):
            raise ValueError(f"{path}: {name}={str(run.get(name))[:40]!r} is no word: the file was damaged, restore it")
    for name in ("metrics", "measured", "environment"):
        if name == "metrics" and type(run.get(name)) is not dict or name in run and type(run[name]) is not dict:
            raise ValueError(f"{path}: is no record of a run: it has no {name}")
    for name, value in run["metrics"].items():
        if value is not None and (type(value) not in (int, float, bool) or not -math.inf < value < math.inf):
            raise ValueError(
                f"{path}: metrics.{name}={str(value)[:40]!r} is no number: the file was damaged, restore it"
            )


def read_all(paths, on_error=None):
    """Folders -> the records in and below them.  What cannot be read is left out and told to on_error(message)."""
    for folder in find_runs([path for path in paths if os.path.isdir(path)]):
        try:
            yield read(folder)
        except ValueError as error:
            if on_error:
                on_error(str(error))


def effective(run, now_s=None, boot=None, start_ticks_of=None):
    """A record that says running although its launcher is gone, as aborted; any other as it is.

    Gone is: on the same boot, no process with the launcher's pid and start time; elsewhere, no heartbeat for 60 s.
    """
    if run["status"] != "running":
        return run
    launcher = run.get("launcher") or {}
    boot = processes.boot_id_hash() if boot is None else boot
    if boot is not None and launcher.get("boot_id_hash") == boot:
        gone = (start_ticks_of or processes.start_ticks)(launcher["pid"]) != launcher["start_ticks"]
        why = f"its launcher, process {launcher['pid']}, is no longer there"
    else:
        age_s = (time.time() if now_s is None else now_s) - utc.seconds(run.get("heartbeat_at") or run["started_at"])
        gone, why = age_s > STALE_HEARTBEAT_S, f"its last heartbeat is {age_s:.0f} s old"
    if not gone:
        return run
    failure = {
        "kind": "launcher_killed",
        "rank": None,
        "step": None,
        "signal": None,
        "exit_code": None,
        "message": f"run.json says running, but {why}",
        "hint": "run it again",
    }
    ended_at = run.get("heartbeat_at") or run["started_at"]  # the last sign of life
    doubt = {"validity": "invalid", "validity_reasons": ["the run did not complete"]}
    return run | {"status": "aborted", "failure": failure, "ended_at": ended_at} | doubt


# ---- what is in a folder


def artifacts(folder):
    """All files of the folder but run.json and what passes: [{"path", "sha256", "num_bytes", "role"}]."""
    import hashlib

    found = []
    for path in files(folder):
        with open(Path(folder) / path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = (Path(folder) / path).stat().st_size
        found.append({"path": path, "sha256": sha256, "num_bytes": num_bytes, "role": _role(path)})
    return found


def _role(path):
    return ROLES.get(path, ROLES.get(path.partition("/")[0], "other"))


def files(folder):
    """Sorted paths, relative and with "/", of what belongs into artifacts."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and not _is_passing(path.name)]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name != "run.json"]


def remove_outputs(folder):
    """Deletes what workers wrote into folder; the folder is then as before its run, but for run.json."""
    remove_passing(folder)
    for path in files(folder):
        if _role(path) in OUTPUT_ROLES:
            (Path(folder) / path).unlink()


def remove_passing(folder):
    """Deletes the run's temporary files and the reserve."""
    for path in Path(folder).iterdir():
        if _is_passing(path.name):
            path.unlink(missing_ok=True)


def _is_passing(name):
    return name == atomic.RESERVE or (name.startswith(".") and name.endswith(".tmp"))
