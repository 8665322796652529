"""A file that arrives from a server that may break off, send something else, or send too much.

The function http_get of huggingface_hub goes on where a file ends; its hf_hub_download (2.4) throws away what a broken
call has fetched.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.data import shards


def arrived(part: Path, num_bytes: int, sha256: str, get: Callable[[Any], None]) -> str:
    """Fetches what is missing of part -> its sha256; with another than the wanted one it is gone.

    get(file): writes what follows file.tell().  What was there before and proves wrong is thrown away, and all is
    fetched once more.  ValueError, from within get(): more than num_bytes came.
    """
    was_begun = _is_begun(part, num_bytes)
    digest = _fetched(part, num_bytes, get)
    if digest != sha256:
        part.unlink()
        if was_begun:
            return arrived(part, num_bytes, sha256, get)
    return digest


def _is_begun(part, num_bytes):
    """Whether something is there to go on with; a link, a folder's entry of another kind or too long a file goes."""
    try:
        result = part.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISREG(result.st_mode) and 0 < result.st_size <= num_bytes:
        return True
    part.unlink()
    return False


def _fetched(part, num_bytes, get):
    with open(part, "ab", opener=_no_link) as file:
        if file.tell() < num_bytes:
            get(_Bounded(file, num_bytes))
        file.flush()
        os.fsync(file.fileno())
    return shards.sha256(part)


def _no_link(path, flags):
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


class _Bounded:
    """A file that takes no more than so many bytes, whatever a server sends; all but write() is the file's own."""

    def __init__(self, file, num_bytes):
        self._file, self._num_bytes = file, num_bytes

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if self._file.tell() + len(data) > self._num_bytes:
            raise ValueError(f"the server sends more than the {self._num_bytes} bytes that this file has")
        return self._file.write(data)
