"""Atomic writes, locks, and a reserve of disk space for the file that must be written when the disk is full."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bench.base.reading import json_file, plain_file
from bench.base.units import KIB

MAX_LINKS = 40  # as Linux follows
RESERVE = ".reserve"
RESERVE_BYTES = 64 * KIB  # several times a run.json
LOOK_EVERY_S = 0.02  # how often a process that waits for a lock tries to take it
STALE_S = 15.0  # a lock older than this is removed: it is normally held for milliseconds
LEFT_S = 3600.0  # a temporary file that was not written to for so long was left by a process that was killed
OF_RECORDS = ("run.json", "plan.json", "ledger.jsonl", "sweep.json")  # each marks the folder of a run, race, ...
RECORDS = (
    *(*OF_RECORDS, "race.json", "race.md", "config.yaml", "overrides.yaml", "environment.json", "events.jsonl"),
    *("steps.csv", "steps_by_rank.csv", "telemetry.csv", "analysis.json", "audit.json", "certificate.json"),
    *("summary.md", "study.json", "points.jsonl", "claim.yaml", ".ledger.count"),
)
OF_PROCESS = re.compile(r"\.node\d+(?=\.)|(?<=^points)\.[\w.]*(?=\.jsonl$)")  # in a file of one node or process
FOLDERS = ("code", "logs", "traces", "memory", "checkpoint", "work", "ledgers")  # in a record; pages are made again
MARKED_BYTES = 256  # of a file, in which its mark is
PAGES = ("report.html", "race.html", "sweep.html", "study.html", "ladder.html")  # whose names are ours


def write_out(
    path: Path, content: str | bytes, option: str = "--out", may_follow: bool = True, mark: bytes = b""
) -> None:
    """Writes a file that the user requested with an option, and creates its parent folders.

    A link is followed, and a pipe or a device in /dev, such as /dev/stdout, is written to and never replaced.  Raises
    ValueError if the file cannot be written or belongs to a record (see refuse_record), for what is no file elsewhere,
    and for a page that would replace anything but a page.

    mark: what all files of this kind have near their beginning; empty: what this page has before its title.
    may_follow: False for a page beside a record, which may be somebody else's: a link there is refused.
    """
    if path.is_symlink() and not may_follow:
        raise ValueError(f"{path}: is a link, through which no page is written: remove it, or name a file with --out")
    for _ in range(MAX_LINKS):  # what a link leads to is written, as by >
        if not path.is_symlink() or _is_descriptor(path):
            break
        path = path.parent / os.readlink(path)
    else:
        raise ValueError(f"{option} {path}: is a loop of links; name another path")
    in_dev = Path(os.path.abspath(path)).parts[:2] == ("/", "dev")
    is_device = path.exists() and not path.is_dir() and (_is_descriptor(path) or (in_dev and not path.is_file()))
    refuse_record(path, option)
    content = content.encode() if isinstance(content, str) else content
    begins, has_title, _ = content.partition(b"<title>")  # as every page of bench/web/page.py
    if path.exists() and not (path.is_file() or is_device):
        raise ValueError(f"{option} {path}: is no file, and would be replaced; name another path")
    is_other = path.is_file() and path.name not in PAGES and path.stat().st_size > 0
    if has_title and is_other:
        refuse_other(path, mark or begins, option)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_device:
            with open(path, "wb", opener=_device) as out:
                out.write(content)
        else:
            with replacing(path) as file:
                if path.exists():  # which may be private
                    os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
                file.write(content)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written ({error.strerror}); name another path") from None


def _is_descriptor(path: Path) -> bool:
    """Returns whether a path is /dev/stdout, /dev/fd/N or the like, which may be a file that is already open."""
    place = Path(os.readlink(path)) if path.is_symlink() and path.parent == Path("/dev") else path
    return os.path.realpath(place.parent).startswith("/proc/")


def _device(path: str, flags: int) -> int:
    """Opens a device; of standard output or error, which may be a file, it is their own descriptor with its place."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return os.dup(descriptor)
    return os.open(path, flags & ~os.O_TRUNC)


def refuse_other(path: Path, mark: bytes, option: str) -> None:
    """Raises ValueError if a file would be replaced that does not begin with the mark of this program's files."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb", opener=plain_file.open_now) as file:
            if mark in file.read(max(MARKED_BYTES, len(mark))):
                return
        why = "would be replaced, and has no mark of this program (as those of earlier versions)"
        raise ValueError(f"{option} {path}: {why}; remove it, or name another path")


def refuse_record(path: Path, option: str = "--out") -> None:
    """Raises ValueError if the path is a file of a run, race, sweep or results folder, which must not be replaced."""
    folder, is_page = Path(os.path.realpath(path.parent)), path.suffix == ".html"
    names = {path.name, OF_PROCESS.sub("", path.name)}.intersection(RECORDS)
    inner = [part.parent for part in (folder, *folder.parents) if part.name in FOLDERS and not is_page]
    if any((place / name).exists() for place in [folder] * bool(names) + inner for name in OF_RECORDS):
        raise ValueError(f"{option} {path}: is a file of a record, which is not replaced; name another path")


def read_json(path: Path | str, default: Any = None, max_bytes: int = plain_file.MAX_BYTES) -> Any:
    """Returns the object in a JSON file, or default if the file is missing, damaged or does not hold an object."""
    try:
        return json_file.read(path, max_bytes=max_bytes)
    except ValueError:
        return default


def write_json(path: Path | str, obj: Any, durable: bool = True) -> None:
    """Writes an object as JSON, atomically: temporary file, fsync, rename.

    If the disk is full, the folder's reserve is released.  nan and inf become null, as JSON has neither.
    durable=False omits fsync and the reserve, for files that need not survive a crash of the machine.
    """
    write_text(Path(path), json_text(obj, indent=1) + "\n", durable)


def json_text(obj: Any, indent: int | None = None) -> str:
    """Returns an object as JSON; nan and inf become null, as JSON has neither."""
    try:
        return json.dumps(obj, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(without_nan(obj), indent=indent, allow_nan=False)


def write_text(path: Path | str, text: str, durable: bool = True) -> None:
    """Writes text as write_json() writes JSON."""
    try:
        write_bytes(path, text.encode(), durable)
    except OSError as error:
        if not durable or error.errno not in (errno.ENOSPC, errno.EDQUOT) or not release(Path(path).parent):
            raise
        write_bytes(path, text.encode(), durable)


def write_bytes(path: Path | str, content: bytes, durable: bool = True) -> None:
    """Writes bytes as write_json() writes JSON, but without using a reserve."""
    with replacing(Path(path), durable) as file:
        file.write(content)


def inner_folder(folder: Path, *names: str) -> Path:
    """Makes and returns a folder within a record's.  Raises OSError for a link, which may lead to a reader's files."""
    for name in names:
        folder /= name
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, through which nothing is written: remove it", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_own(path: Path | str, content: bytes) -> None:
    """Writes bytes atomically, not durably, to a file for which plain_file.is_own() is true whatever the umask."""
    with replacing(Path(path), durable=False) as file:
        with contextlib.suppress(OSError):  # on a file system without modes is_own() stays false
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        file.write(content)


def write_for_owner(path: Path | str, obj: Any) -> None:
    """Writes an object as JSON, atomically, to a file that only its owner can read, from its first byte on."""
    with replacing(Path(path)) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"{json_text(obj, indent=1)}\n".encode())


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """with replacing(path) as file: ...  What is written appears at path if the block succeeds; else nothing changes.

    An OSError names path, whichever operation on the temporary file beside it failed.
    """
    # in the same folder, as a rename is atomic within one file system; random, as another node may have the same pid
    folder, temporary = str(path.parent), path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            folder_fd = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary), folder):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_left(folder: Path, pattern: str) -> None:
    """Removes the temporary files and folders in a folder that match a pattern and that killed processes left."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another process has finished or removed it
            if clock_s(folder) - path.stat().st_mtime > LEFT_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def without_nan(obj: Any) -> Any:
    """Returns nested dicts and lists with None in place of nan and inf; tuples become lists."""
    if isinstance(obj, dict):
        return {key: without_nan(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [without_nan(value) for value in obj]
    return None if isinstance(obj, float) and not math.isfinite(obj) else obj


def reserve(folder: Path | str) -> None:
    """Allocates space that release() frees when the disk is full, so that the record can still be finished."""
    with open(Path(folder) / RESERVE, "wb") as file:
        file.write(os.urandom(RESERVE_BYTES))  # random: file systems cannot compress it
        file.flush()
        os.fsync(file.fileno())


def release(folder: Path | str) -> bool:
    """Removes the reserve.  Returns True if there was one, so that its space is now free."""
    with contextlib.suppress(OSError):
        os.unlink(Path(folder) / RESERVE)
        return True
    return False


def clock_s(folder: Path) -> float:
    """Returns the time by the clock of a folder's file system, or this machine's if the folder cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as probe:
            return os.stat(probe.name).st_mtime
    except OSError:
        return time.time()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that also excludes other nodes: the process that creates the file at path has it.

    NFS does not always support flock, and appends from two nodes overwrite each other there, but exclusive creation is
    reliable (open(2), O_EXCL).  A lock that is older than STALE_S by the file system's clock is removed.
    """
    own = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        except FileExistsError:
            _remove_stale(path, own)
            time.sleep(LOOK_EVERY_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_stale(path: Path, own: Path) -> None:
    with contextlib.suppress(OSError):  # the lock was released, or another process is removing it
        made_s = path.stat().st_mtime
        own.touch()
        now_s = own.stat().st_mtime
        own.unlink()
        if abs(now_s - made_s) > STALE_S:  # or the clock was set back since
            os.rename(path, own)  # if several processes try, only one succeeds
            own.unlink()
