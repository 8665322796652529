"""sha256 and largest token of files, remembered while a file stays the same, so that a launch need not read it all.

<data root>/.checked.json says what was found in a file, never what should be there.  It is believed where this user
alone can have written it, and for large files: ANEW_BYTES of others are read at each launch whatever it says.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from bench.base import atomic
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import MIB, format_bytes
from bench.data import shards

FILE = ".checked.json"
SLOW_BYTES = 100 * MIB  # from here on reading takes long enough to be announced
ANEW_BYTES = 32 * MIB  # 0.02 to 0.1 s of sha256, of each launch


def stamp_of(path: Path) -> list[int]:
    """Bytes, times and inode of a file, which stay while nobody writes to it or replaces it."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]  # ctime too: mtime can be put back


class Facts:
    """with Facts(root) as facts: digest, max_token = facts.of(shard)"""

    def __init__(self, root: Path):
        self._path, self._known, self._new = root / FILE, {}, False
        self._anew_bytes, self._read = ANEW_BYTES, set()  # left to be read; files that are

    def __enter__(self):
        with contextlib.suppress(Damaged), plain_file.opened(self._path) as file:
            self._known = atomic.read_json(self._path, {}) if plain_file.is_own(file) else {}
        return self

    def __exit__(self, *exc_info):
        if self._new:
            with contextlib.suppress(OSError):  # a read-only root only costs time
                atomic.write_own(self._path, json.dumps(self._known, indent=1))

    def sha256(self, path: Path, say: Callable[[str], None] = lambda text: None) -> str:
        """Of the file as it is now."""
        return self._fact(path, "sha256", lambda: shards.sha256(path), say)

    def of(self, shard: shards.Shard, say: Callable[[str], None] = lambda text: None) -> tuple[str, int]:
        """(sha256, largest token) of the file as it is now."""
        return self.sha256(shard.path, say), self._fact(shard.path, "max_token", lambda: shards.max_token(shard))

    def _fact(self, path, kind, find, say=lambda text: None):
        path = path.resolve()
        stamp = stamp_of(path)
        if path not in self._read and stamp[0] <= self._anew_bytes:
            self._anew_bytes -= stamp[0]
            self._read.add(path)
        if path in self._read:
            return find()
        known = self._known.get(str(path))
        if not isinstance(known, dict) or known.get("stamp") != stamp:
            known = self._known[str(path)] = {"stamp": stamp}
        if kind not in known:
            if stamp[0] > SLOW_BYTES:
                say(f"checking {path.name}, {format_bytes(stamp[0])}")
            known[kind], self._new = find(), True
        return known[kind]
