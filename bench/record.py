"""The run folder: made, written, read, upgraded.  Everything after a race reads folders through here.

    results/<track>/<run_id>/    run_id = <utc>-<name>-<config_id8>-s<seed>[-n]
      run.json          what happened (bench/run.schema.json); written whole or not at all
      config.yaml  overrides.yaml  environment.json  steps.csv  events.jsonl  code/  logs/  traces/  memory/

Format history of run.json:
  1  2026-11  first version
A new version gets a line here, a function in UPGRADERS and a kept example in tests/records/.
"""

import errno
import json
import math
import os
import re
import time
from datetime import datetime, timezone
from pathlib import Path

from bench.units import KIB

SCHEMA_VERSION = 1
UPGRADERS = {}  # version -> function from a record of that version to one of the next
RESERVE = ".reserve"
RESERVE_BYTES = 64 * KIB  # several times a run.json
STALE_HEARTBEAT_S = 60.0  # six heartbeats of the launcher
CORE_COLUMNS = ("step", "flags", "tokens", "lr", "train_loss", "val_loss", "step_ms")
ROLES = {"config.yaml": "config", "overrides.yaml": "overrides", "steps.csv": "steps", "telemetry.csv": "telemetry",
         "events.jsonl": "events", "environment.json": "environment", "code": "code", "logs": "log",
         "traces": "trace", "memory": "memory"}  # fmt: skip
REPO = Path(__file__).resolve().parent.parent


def utc_now():
    """E.g. 2026-11-21T03:15:00.123Z"""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- where records are


def results_root():
    """SPEEDRUN_RESULTS, else results/ of the repository."""
    return Path(os.environ.get("SPEEDRUN_RESULTS", REPO / "results")).expanduser()


def run_id(utc, name, config_id, seed):
    """utc: a datetime.  E.g. 20261121T031500Z-gpt2-adamw-1a2b3c4d-s0"""
    return f"{utc:%Y%m%dT%H%M%SZ}-{name}-{config_id}-s{seed}"


def new_folder(results, track, name, config_id, seed, utc=None):
    """Make a folder that nobody else has, -2, -3, ... appended where needed; mkdir is atomic, so two never share."""
    wanted = run_id(utc or datetime.now(timezone.utc), name, config_id, seed)
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
    """Folders -> the run folders (pathlib.Path) in and below them, sorted.  ValueError for a path that is no folder."""
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
        if not name.startswith("."):
            yield from _below(os.path.join(folder, name))


def locate(word):
    """What a user typed -> a folder: a path from where they stand or from the repository, or (part of) a run id."""
    for base in (os.environ.get("SPEEDRUN_CWD", os.getcwd()), REPO, results_root()):
        path = Path(base, os.path.expanduser(word))
        if path.is_dir():
            return path
        if path.name == "run.json" and path.is_file():
            return path.parent
    root = results_root()
    found = [folder for folder in find_runs([root]) if word in folder.name] if root.is_dir() else []
    exact = [folder for folder in found if folder.name == word]
    if len(exact or found) == 1:
        return (exact or found)[0]
    what = f"is part of {len(found)} run ids, {found[0].name} among them" if found else "is no folder and no run id"
    raise ValueError(f"{word} {what}: ./run.sh table lists the runs")


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
        with open(path, "rb") as file:
            run = json.loads(file.read())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): give a run folder") from None
    except ValueError as error:
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
    return run


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
    boot = boot_id_hash() if boot is None else boot
    if boot is not None and launcher.get("boot_id_hash") == boot:
        gone = (start_ticks_of or start_ticks)(launcher["pid"]) != launcher["start_ticks"]
        why = f"its launcher, process {launcher['pid']}, is no longer there"
    else:
        age_s = (time.time() if now_s is None else now_s) - _seconds(run.get("heartbeat_at") or run["started_at"])
        gone, why = age_s > STALE_HEARTBEAT_S, f"its last heartbeat is {age_s:.0f} s old"
    if not gone:
        return run
    failure = {"kind": "launcher_killed", "rank": None, "step": None, "signal": None, "exit_code": None,
               "message": f"run.json says running, but {why}", "hint": "run it again"}  # fmt: skip
    ended_at = run.get("heartbeat_at") or run["started_at"]  # the last sign of life
    doubt = {"validity": "invalid", "validity_reasons": ["the run did not complete"]}
    return run | {"status": "aborted", "failure": failure, "ended_at": ended_at} | doubt


def boot_id_hash():
    """Hash of this boot and of this container's process numbers: where it is equal, a pid means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return salted_hash(boot + os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux
        return None


def start_ticks(pid):
    """When process pid started, ticks since boot (field 22 of /proc/PID/stat); None: no such process, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold spaces
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # fields[0] is field 3


def salted_hash(text):
    """16 hex digits that are the same for the same text, in this project only."""
    import hashlib

    return hashlib.sha256(b"speedrun-bench:" + text.encode()).hexdigest()[:16]


def _seconds(utc):
    return datetime.fromisoformat(utc.replace("Z", "+00:00")).timestamp()


# ---- writing


def write_json_atomic(path, obj, durable=True):
    """Whole or not at all: temporary file, fsync, rename.  On a full disk the folder's reserve is given up.

    JSON has no nan and inf: they become null.  durable=False leaves out fsync and the reserve, for what only the
    living read.
    """
    try:
        text = json.dumps(obj, indent=1, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(obj), indent=1, allow_nan=False)
    _write_atomic(Path(path), text + "\n", durable)


def _write_atomic(path, text, durable=True):
    try:
        _write_once(path, text, durable)
    except OSError as error:
        if not durable or error.errno not in (errno.ENOSPC, errno.EDQUOT) or not release(path.parent):
            raise
        _write_once(path, text, durable)


def _write_once(path, text, durable):
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder_fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)


def _without_nan(obj):
    if isinstance(obj, dict):
        return {key: _without_nan(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_without_nan(value) for value in obj]
    return None if isinstance(obj, float) and not math.isfinite(obj) else obj


def reserve(folder):
    """Ballast: space that release() frees when the disk is full, so that the record can still be finished."""
    with open(Path(folder) / RESERVE, "wb") as file:
        file.write(os.urandom(RESERVE_BYTES))  # random: a compressing file system keeps its size
        file.flush()
        os.fsync(file.fileno())


def release(folder):
    """Remove the reserve.  True if there was one."""
    try:
        os.unlink(Path(folder) / RESERVE)
    except FileNotFoundError:
        return False
    return True


def artifacts(folder):
    """All files of the folder but run.json and what passes: [{"path", "sha256", "num_bytes", "role"}]."""
    import hashlib

    found = []
    for path in files(folder):
        with open(Path(folder) / path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        role = ROLES.get(path, ROLES.get(path.partition("/")[0], "other"))
        found.append({"path": path, "sha256": sha256, "num_bytes": (Path(folder) / path).stat().st_size, "role": role})
    return found


def files(folder):
    """Sorted paths, relative and with "/", of what belongs into artifacts."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and not _is_passing(path.name)]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name != "run.json"]


def _is_passing(name):
    return name == RESERVE or (name.startswith(".") and name.endswith(".tmp"))


# ---- steps.csv and events.jsonl


def write_steps(folder, rows):
    """rows: dicts by column; None is an empty cell.  The core columns come first, the others in order of appearance."""
    extra = {column: None for row in rows for column in row if column not in CORE_COLUMNS}
    columns = [*CORE_COLUMNS, *extra]
    lines = [",".join(_cell(row.get(column)) for column in columns) for row in rows]
    _write_atomic(Path(folder) / "steps.csv", "\n".join([",".join(columns), *lines]) + "\n")


def _cell(value):
    return "" if value is None else value if isinstance(value, str) else repr(value)


def read_steps(folder, strict=False):
    """steps.csv -> rows in order of step; step and tokens int, flags str, the rest float or None.  No file: [].

    Lines of one step are made one row (a race in progress writes losses and times on lines of their own).  A line that
    a kill or a full disk cut is left out; with strict it is a ValueError naming the file and the line.
    """
    path = Path(folder) / "steps.csv"
    try:
        head, *lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    columns = head.split(",")
    rows = {}
    cut = lines.pop() if lines else ""  # what follows the last newline
    for number, line in enumerate(lines, 2):
        try:
            row = {column: _value(column, cell) for column, cell in zip(columns, line.split(","), strict=True)}
            if strict and row["step"] in rows:
                raise ValueError
            rows.setdefault(row["step"], row).update(
                {name: value for name, value in row.items() if value not in (None, "")}
            )
        except (ValueError, KeyError):
            if strict:
                raise ValueError(f"{path}: line {number} is damaged or there twice: {line[:60]!r}") from None
    if strict and cut:
        raise ValueError(f"{path}: the last line is cut: {cut[:60]!r}")
    return [rows[step] for step in sorted(rows)]


def _value(column, cell):
    if column == "flags":
        return cell
    if column == "step":
        return int(cell)
    return None if cell == "" else int(cell) if column == "tokens" else float(cell)


def append_event(folder, event):
    """One line of events.jsonl; event has t_ns (time.perf_counter_ns), utc, event (a name) and what else it knows."""
    fd = os.open(Path(folder) / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, (json.dumps(_without_nan(event)) + "\n").encode())  # one write: lines of two writers never mix
    finally:
        os.close(fd)


def read_events(folder):
    """events.jsonl -> list of dicts, without a line that a kill cut.  No file: []."""
    try:
        lines = (Path(folder) / "events.jsonl").read_text().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1]]


# ---- what a record must not say


def redact(text, repo, home=None, user=None, host=None):
    """Without private paths and names: the repository is ".", home "~", the user USER in other paths, the host HOST."""
    home = os.path.expanduser("~") if home is None else home
    user = os.path.basename(home) if user is None else user
    host = os.uname().nodename if host is None and hasattr(os, "uname") else host or ""
    for folder, short in ((os.fspath(repo), "."), (home, "~")):
        for path in {folder, os.path.realpath(folder)}:
            if len(path) > 1:
                text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w.-]*\w)", short, text)
    if user and user != "root":
        text = re.sub(rf"(?<=/){re.escape(user)}(?![\w.-])", "USER", text)
    if len(host) > 4 and re.search(r"[\d.-]", host):  # a distinctive name, not a word like "node"
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "HOST", text)
    return text
