"""What a record must not say: paths and names that lead to a person or a machine, and passwords in URLs."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bench import atomic
from bench.paths import COPY_NAME, copy_roots
from bench.reading import plain_file
from bench.reading.damage import Damaged
from bench.units import MIB

BLOCK_BYTES = 16 * MIB  # of a log, in memory at once


def salted_hash(text: str) -> str:
    """16 hex digits that are the same for the same text, in this project only."""
    return hashlib.sha256(b"speedrun-bench:" + text.encode()).hexdigest()[:16]


def redact(
    text: str, repo: Path | str, home: str | None = None, user: str | None = None, host: str | None = None
) -> str:
    """Without private paths and names: the repository is ".", home "~", the user USER in other paths, the host HOST.

    Who a URL logs in as, if it holds a password, is USER:PASSWORD.  home, user, host: None is this process's own.
    """
    for root in copy_roots():
        if str(root) in text:  # of a source: what the repository's own path becomes
            text = re.sub(rf"{re.escape(str(root))}/{COPY_NAME.pattern}", ".", text)
    text = re.sub(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+@", "USER:PASSWORD@", text)
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


def redact_all(values: Any, repo: Path | str) -> Any:
    """Nested dicts and lists with redact() of each text in them."""
    if isinstance(values, dict):
        return {key: redact_all(value, repo) for key, value in values.items()}
    if isinstance(values, list):
        return [redact_all(value, repo) for value in values]
    return redact(values, repo) if isinstance(values, str) else values


def redact_logs(folder: Path, repo: Path | str) -> None:
    """The texts in a run folder's logs/, in place; what cannot be read (a pipe) or written stays as it is.

    Binary files stay too: dumps of NCCL's.  Takes a block's memory however long a log is.
    """
    for path in (folder / "logs").glob("*"):
        with contextlib.suppress(OSError, Damaged), plain_file.opened(path) as file:
            is_private = False
            for block in _blocks(file):
                if b"\0" in block:
                    break
                is_private = is_private or _is_private(block, repo)
            else:
                if is_private:
                    file.seek(0)
                    with atomic.replacing(path, durable=False) as clean:
                        for block in _blocks(file):
                            clean.write(redact(block.decode(errors="replace"), repo).encode())


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines, a block at a time."""
    while block := file.read(BLOCK_BYTES):
        yield block + file.readline(BLOCK_BYTES)


def _is_private(block, repo):
    text = block.decode(errors="replace")
    return redact(text, repo) != text
