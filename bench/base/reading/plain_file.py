"""Reads regular files that others may have written: never a pipe or a device, and only up to a given size."""

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

MAX_BYTES = 16 * MIB  # the limit for a record, a race or a plan; the largest of ours has 0.1 MiB
MAX_LINES_BYTES = 512 * MIB  # the limit for a file with a line per step or per sample
MAX_FOLDERS = 64  # levels of nested folders
# errors that are due to one file, not to the disk
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG)
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of writing to a full disk
MAX_LINE_CHARS = 100_000  # the limit for a line of a table; csv refuses longer cells
LIVE = re.compile(r"/(?:\.[^/]*|ledger\.jsonl|ledgers/[^/]*)$")  # other commands may write to these files meanwhile

_seen: dict[str, tuple[int, ...]] | None = None  # in unchanging(): {path: the file's status when it was first opened}


@contextlib.contextmanager
def unchanging() -> Iterator[None]:
    """Makes opening a file fail in this block if it has changed since it was first opened, except for LIVE files.

    A verdict reads some files several times; this ensures that what was checked is what is counted and shown.
    """
    global _seen
    before, _seen = _seen, {}
    try:
        yield
    finally:
        _seen = before


def opened(path: Path | str, max_bytes: float = math.inf, buffering: int = -1) -> BinaryIO:
    """Opens a regular file for reading bytes; never blocks on a pipe or a device.  buffering: as in open().

    Raises Missing if it does not exist, and Damaged if it cannot be read or has more than max_bytes.
    """
    try:
        file = open(path, "rb", buffering, opener=open_now)  # noqa: SIM115 - the caller closes it
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Missing(f"{path}: cannot be read ({error.strerror}): is the path right?") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror}): restore it") from None
    except ValueError as error:  # the name contains NUL
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
    is_thin = status.st_size > GIB and status.st_blocks * 512 < status.st_size // 2  # sparse or compressed
    if is_thin and not flags & os.O_ACCMODE and os.lseek(fd, 0, os.SEEK_HOLE) < status.st_size:
        os.close(fd)
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, most of which are a hole")
    if _seen is not None and not flags & os.O_ACCMODE and not LIVE.search(path):
        now = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if _seen.setdefault(path, now) != now:
            os.close(fd)
            raise OSError(errno.ESTALE, "it changed while this command read it; run it again")
    return fd


def open_here(path: str, flags: int) -> int:
    """An opener like open_now() for a file to write to: it refuses a link too, which may lead to another's file."""
    try:
        return open_now(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        why = "is a link, which is not written through" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, f"{os.path.basename(path)}: {why}", path) from None


def entries_below(
    folder: Path | str, missed: Callable[[str, str], object] = lambda path, why: None
) -> Iterator[os.DirEntry[str]]:
    """Yields the entries in and below a folder, each folder before its entries.  Links are not followed.

    missed(path, why) is called for a folder that cannot be read or is nested too deeply.  Disk errors are raised.
    """
    waiting = [(os.fspath(folder), 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                contents = list(entries)
        except OSError as error:
            if depth and error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue  # removed meanwhile
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
    """Returns a path with bytes that are not UTF-8 in visible form, such as \\xff."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_own(file: BinaryIO, owners: Collection[int] = ()) -> bool:
    """Whether only this user (or root) can have written an open file: they own it, and nobody else may write to it.

    A cache is trusted only then, as others may write to its folder.  owners: ids of further users who may own it.
    """
    status = os.fstat(file.fileno())
    return status.st_uid in (os.geteuid(), *owners) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def content(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the bytes of a regular file.  Raises Missing or Damaged, as opened() does."""
    with opened(path, max_bytes, buffering=0) as file:
        try:
            return file.read()
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror}): restore it") from None


def text(path: Path | str, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """Returns the text of a UTF-8 file, with any line ends as "\\n".  errors: as in bytes.decode.

    Raises Missing or Damaged, as opened() does; with errors="strict" also Damaged for a byte that is not UTF-8.
    """
    data = content(path, max_bytes)
    try:
        return data.decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: byte {error.start} is damaged ({error.reason}): restore it") from None


def text_or_empty(path: Path | str, max_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a file as far as it is UTF-8; "" if it is missing or cannot be read."""
    with contextlib.suppress(Damaged):
        return text(path, max_bytes, errors="replace")
    return ""


@contextlib.contextmanager
def lines(path: Path | str, max_bytes: int = MAX_LINES_BYTES) -> Iterator[Iterator[str]]:
    """with lines(path) as rows: ...   Reads a table line by line.

    NUL and bytes that are not UTF-8 become "\N{REPLACEMENT CHARACTER}".  Raises Missing or Damaged, as opened() does,
    and Damaged for a line of MAX_LINE_CHARS or more.
    """
    with opened(path, max_bytes) as raw, io.TextIOWrapper(raw, errors="replace", newline="") as file:
        yield _bounded(path, file)


def _bounded(path: Path | str, file: io.TextIOWrapper) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARS):
        if len(line) == MAX_LINE_CHARS:
            raise Damaged(f"{path}: has a line of {MAX_LINE_CHARS:,} characters: restore it")
        yield line.replace("\0", "\N{REPLACEMENT CHARACTER}")
