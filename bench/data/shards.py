"""Writes and reads the .bin shards of llm.c and modded-nanogpt, and refuses any other file by name.

256 little-endian int32: magic 20240520, version 1, token count, zeros; then that many little-endian uint16 tokens.

Facts caches the sha256 and the largest token of unchanged files, so that a launch need not read all of them. Its file,
<data root>/.checked.json, is trusted only if no other user can have written it, and it never says what a file should
hash to. The first ALWAYS_HASHED_BYTES are hashed at each launch, whatever the cache says.
"""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bench.base import atomic
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import MIB, format_bytes

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_BYTES = 2
MAX_TOKENS = 2**31 - 1  # the header holds the count as int32
SCAN_BYTES = 1 << 22  # bytes read at a time when a whole shard is scanned
TOKEN_DTYPE = "<u2"
HEADER = struct.Struct(f"<{HEADER_INTS}i")
LLAMA_MAGIC = 20240801  # the magic of llm.c's other format
FACTS_FILE = ".checked.json"
SLOW_BYTES = 100 * MIB  # larger files are announced, because reading them takes long
ALWAYS_HASHED_BYTES = 32 * MIB  # hashed at each launch: 0.02 to 0.1 s of sha256


if TYPE_CHECKING:  # imported only to handle tokens: a launcher checks headers alone
    import numpy as np


class CheckFailed(ValueError):
    """Raised if data are missing, damaged or unexpected; the user's settings are not at fault."""


@dataclass(frozen=True)
class Shard:
    """A file whose header and size agree."""

    path: Path
    num_tokens: int
    num_bytes: int

    def tokens(self) -> "np.memmap":
        """Returns a read-only uint16 view of the file, which takes no memory until it is read."""
        import numpy as np

        return np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r", offset=HEADER_BYTES, shape=(self.num_tokens,))


def num_bytes(num_tokens: int) -> int:
    """Returns the size of a shard with that many tokens."""
    return HEADER_BYTES + TOKEN_BYTES * num_tokens


def write(path: Path | str, tokens: "np.ndarray | Sequence[int]") -> Shard:
    """Writes 1-D integers below 65536 as a shard, which gets its final name only when complete. Returns its Shard."""
    import numpy as np

    path, tokens = Path(path), np.asarray(tokens)
    assert tokens.ndim == 1 and tokens.dtype.kind in "iu", f"{path.name}: tokens must be 1-D integers"
    assert 0 < len(tokens) <= MAX_TOKENS, f"{path.name}: a shard cannot hold {len(tokens)} tokens"
    assert tokens.min() >= 0 and tokens.max() < 2**16, f"{path.name}: tokens must be in [0, 65536) to fit uint16"
    header = HEADER.pack(MAGIC, VERSION, len(tokens), *[0] * (HEADER_INTS - 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, TOKEN_DTYPE).data)
    return Shard(path, len(tokens), num_bytes(len(tokens)))


def check(path: Path | str) -> Shard:
    """Checks a file's header and size. Raises CheckFailed, which names the file, what is wrong and what to try."""
    path = Path(path)
    try:
        with plain_file.opened(path) as file:
            size, header = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    except Damaged as error:
        raise CheckFailed(f"{error}; check the name and the permissions") from error
    magic, version, num_tokens, *_ = HEADER.unpack(header.ljust(HEADER_BYTES, b"\0"))
    if magic != MAGIC:
        kind = "llm.c's format for llama, with uint32 tokens" if magic == LLAMA_MAGIC else "no shard of this format"
        raise CheckFailed(f"{path}: magic {magic} instead of {MAGIC}: {kind}; make one: ./run.sh data make text")
    if version != VERSION:
        raise CheckFailed(f"{path}: version {version}, and only {VERSION} is known here: make it again in that version")
    if num_tokens <= 0 or size != num_bytes(num_tokens):
        how = "truncated" if size < num_bytes(num_tokens) else "empty, or longer than its header says"
        need = f"its header counts {num_tokens} tokens, which need {num_bytes(num_tokens)}"
        raise CheckFailed(f"{path}: {size} bytes, but {need}: it is {how}; make or get it again")
    return Shard(path, num_tokens, size)


def check_hash(path: Path | str, digest: str, wanted: str | None, remedy: str) -> None:
    """Raises CheckFailed if a file's sha256 is not the one that it must have; None: any."""
    if wanted not in (None, digest):
        raise CheckFailed(f"{path}: sha256 {digest} instead of {wanted}: damaged or changed; {remedy}")


def check_val_tokens(num_tokens: int, val_tokens: int, multiple: int = 1) -> None:
    """Raises ValueError if val shards of num_tokens hold too few: val_tokens targets need one token more."""
    if val_tokens + 1 > num_tokens:
        most = (num_tokens - 1) // multiple * multiple
        raise ValueError(f"goal.val_tokens={val_tokens}: the val shards hold {num_tokens} tokens: use {most} or fewer")


def max_token(shard: Shard) -> int:
    """Returns a shard's largest token. Reads pieces, because a mapped file would count as this process's memory."""
    import numpy as np

    largest = 0
    with open(shard.path, "rb") as file:
        file.seek(HEADER_BYTES)
        while piece := file.read(SCAN_BYTES):
            largest = max(largest, int(np.frombuffer(piece, TOKEN_DTYPE).max()))
    return largest


def sha256(path: Path | str) -> str:
    """Returns the hex digest of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(path: Path) -> list[int]:
    """Returns the size, times and inode of a file, which change if it is written to or replaced."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]  # ctime, because mtime can be reset


class Facts:
    """Use as `with Facts(root) as facts: digest, max_token = facts.of(shard)`."""

    def __init__(self, root: Path) -> None:
        self._path, self._new = root / FACTS_FILE, False
        self._known: dict[str, dict[str, Any]] = {}
        self._left_bytes = ALWAYS_HASHED_BYTES  # of ALWAYS_HASHED_BYTES
        self._read: set[Path] = set()  # files that are hashed whatever the cache says

    def __enter__(self) -> Self:
        with contextlib.suppress(Damaged), plain_file.opened(self._path) as file:
            self._known = atomic.read_json(self._path, {}) if plain_file.is_own(file) else {}
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._new:
            with contextlib.suppress(OSError):  # a read-only root costs only time
                atomic.write_own(self._path, json.dumps(self._known, indent=1).encode())

    def sha256(self, path: Path, say: Callable[[str], None] = lambda text: None) -> str:
        """Returns the hash of the file's current content."""
        path = path.resolve()
        stamp = stamp_of(path)
        if path not in self._read and stamp[0] <= self._left_bytes:
            self._left_bytes -= stamp[0]
            self._read.add(path)
        if path in self._read:
            return sha256(path)
        entry = self._known.get(str(path))
        if not isinstance(entry, dict) or entry.get("stamp") != stamp or "sha256" not in entry:
            if stamp[0] > SLOW_BYTES:
                say(f"checking {path.name}, {format_bytes(stamp[0])}")
            entry = self._known[str(path)] = {"stamp": stamp, "sha256": sha256(path)}
            self._new = True
        return str(entry["sha256"])

    def of(self, shard: Shard, say: Callable[[str], None] = lambda text: None) -> tuple[str, int]:
        """Returns (sha256, largest token) of the file's current content."""
        digest = self.sha256(shard.path, say)
        entry = self._known.setdefault(digest, {})  # known by the content, wherever the file is
        if not isinstance(entry.get("max_token"), int):
            entry["max_token"], self._new = max_token(shard), True
        return digest, entry["max_token"]
