"""Reading regular files that others may have written: never a pipe or a device, and only up to a given size."""

import contextlib
import errno
import io
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from bench.base.reading.damage import Damaged, Missing
from bench.base.units import GIB, MIB

MAX_BYTES = 16 * MIB  # of a file of facts: a record, a race, a plan.  The largest of ours is 0.1 MiB
MAX_LINES_BYTES = 512 * MIB  # of a file with a line a step or a sample
MAX_FOLDERS = 64  # within each other
# of a file, not of its disk
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG)
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk that is written to
MAX_LINE_CHARS = 100_000  # of a table: csv takes no cell that is longer
LIVE = re.compile(r"/(?:\.[^/]*|ledger\.jsonl|ledgers/[^/]*)$")  # other commands may write to these meanwhile

_seen: dict[str, tuple[int, ...]] | None = None  # within unchanging(): {path: its file when it was opened first}


@contextlib.contextmanager
def unchanging() -> Iterator[None]:
    """Within this block, opening a file that has changed since it was first opened fails, except for LIVE ones.

    A verdict reads some files several times; this ensures that what was checked is what is counted and shown.
    """
    global _seen
    before, _seen = _seen, {}
    try:
        yield
    finally:
        _seen = before


def opened(path: Path | str, max_bytes: float = math.inf, buffering: int = -1) -> BinaryIO:
    """A regular file, opened to be read as bytes; never blocks on a pipe or a device.

    Raises Missing or Damaged, also for more than max_bytes.  buffering: as of open().
    """
    try:
        file = open(path, "rb", buffering, opener=open_now)  # noqa: SIM115 - the caller's to close
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Missing(f"{path}: cannot be read ({error.strerror}): is the path right?") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror}): restore it") from None
    except ValueError as error:  # a NUL in the name
        raise Damaged(f"{path!r}: cannot be read ({error}): name a file") from None
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > max_bytes:
        file.close()
        raise Damaged(f"{path}: has {num_bytes:,} bytes, more than {max_bytes:,} are not read: restore it")
    return file


def open_now(path: str, flags: int) -> int:
    """An opener for open() that only opens regular files and never waits for the other end of a pipe.

    It also refuses a file of over a GiB that is mostly a hole, as np.memmap makes, because reading it takes hours.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file")
    is_thin = status.st_size > GIB and status.st_blocks * 512 < status.st_size // 2  # so are compressed ones
    if is_thin and not flags & os.O_ACCMODE and os.lseek(fd, 0, os.SEEK_HOLE) < status.st_size:
        os.close(fd)
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, most of which are a hole")
    if _seen is not None and not flags & os.O_ACCMODE and not LIVE.search(path):
        now = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if _seen.setdefault(path, now) != now:
            os.close(fd)
            raise OSError(errno.ESTALE, "it changed while this command read it; run it again")
    return fd


def entries_below(
    folder: Path | str, missed: Callable[[str, str], object] = lambda path, why: None
) -> Iterator[os.DirEntry[str]]:
    """The entries in and below a folder, each folder before its entries, without following links or recursion.

    missed(path, why) is called for a folder that cannot be read or lies too deep.  Errors of the disk are raised.
    """
    waiting = [(os.fspath(folder), 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                contents = list(entries)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            missed(path, os.strerror(error.errno))
            continue
        yield from contents
        folders = [entry.path for entry in contents if entry.is_dir(follow_symlinks=False)]
        if folders and depth == MAX_FOLDERS:
            missed(path, f"it has more than {MAX_FOLDERS} folders within each other")
        else:
            waiting += [(inner, depth + 1) for inner in folders]


def name_in_utf8(path: str) -> str:
    """A path with the bytes that are not UTF-8 shown, as \\xff."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_own(file: BinaryIO, owners: Collection[int] = ()) -> bool:
    """Whether only this user (and root) can have written an open file: they own it, and nobody else may write to it.

    Caches must meet this to be trusted, as others may write to their folder.  owners: further users who may own it.
    """
    status = os.fstat(file.fileno())
    return status.st_uid in (os.geteuid(), *owners) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def content(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file.  Missing, Damaged: as opened()."""
    with opened(path, max_bytes, buffering=0) as file:
        try:
            return file.read()
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror}): restore it") from None


def text(path: Path | str, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """UTF-8 with any line ends, as "\\n".  errors: as of bytes.decode; strict is Damaged, naming the byte."""
    data = content(path, max_bytes)
    try:
        return data.decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: byte {error.start} is damaged ({error.reason}): restore it") from None


@contextlib.contextmanager
def lines(path: Path | str, max_bytes: int = MAX_LINES_BYTES) -> Iterator[Iterator[str]]:
    """with lines(path) as found: ...   The lines of a table, one after the other, each of at most MAX_LINE_CHARS.

    What is not UTF-8, and NUL, becomes "\N{REPLACEMENT CHARACTER}".  Missing, Damaged: as opened(), or a longer line.
    """
    with opened(path, max_bytes) as raw, io.TextIOWrapper(raw, errors="replace", newline="") as file:
        yield _bounded(path, file)


def _bounded(path: Path | str, file: io.TextIOWrapper) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARS):
        if len(line) == MAX_LINE_CHARS:
            raise Damaged(f"{path}: has a line of {MAX_LINE_CHARS:,} characters: restore it")
        yield line.replace("\0", "\N{REPLACEMENT CHARACTER}")
