"""Reads a trace file in chunks of whole events, as bytes, in constant memory.

Kineto writes one object whose "traceEvents" is an array of a million small objects.  Nothing here parses them: a chunk
ends where an event ends and the next one begins, which BOUNDARY recognises.  In JSON those bytes cannot stand inside a
string: a quote there is escaped, and after the quote that ends a string no word follows.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged

BLOCK_BYTES = 2**20
MAX_EVENT_BYTES = 128 * 2**20  # no event is nearly as long, and the tail after the events is short
HEAD_BYTES = 64 * 2**20  # what comes before the events: device properties and the like, kilobytes as a rule
MAX_RATIO = 40  # unpacked bytes per byte of gzip; 15 recorded traces have 13 to 21, a bomb up to 1,030
RATIO_FROM_BYTES = 64 * 2**20  # unpacked bytes below which the ratio does not matter
OVERLAP_BYTES = 4096  # of a block that is searched again with the next one: a boundary is shorter
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|ts|pid|tid|args|dur|id|bp|s)"\s*:)')
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
# A string without an end extends to the end of the data: else the search would restart at each escaped quote in it.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.S)


class NoTrace(ValueError):
    """The file is not a trace.  The message says what is wrong and what to try."""


class Source:
    """A trace file: iterate over chunks(), then .head and .tail hold the bytes around the events.

    A chunk is the inside of a JSON array.  cut: a sentence if the file ends early, else None; then the last chunk may
    be damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.head, self.tail = b"", b""
        self.cut: str | None = None
        try:
            with plain_file.opened(path) as file:
                magic = file.read(4)
        except Damaged as error:
            raise NoTrace(f"{error}; name a trace, a run folder or a folder of traces") from None
        if magic == ZIP_MAGIC:
            raise NoTrace(f"{path}: it is a zip archive: unpack it and name the .json in it")
        self.is_gzip = magic[:2] == GZIP_MAGIC

    def chunks(self) -> Iterator[bytes]:
        """Yields chunks that end where an event ends; the last one is what follows the last boundary."""
        blocks = self._unzipped() if self.is_gzip else self._plain()
        rest = self._after_head(blocks)
        for block in blocks:
            rest += block
            if boundary := _last_boundary(rest, len(rest) - len(block) - OVERLAP_BYTES):
                yield rest[: boundary.start() + 1]
                rest = rest[boundary.end() :]
            elif len(rest) > MAX_EVENT_BYTES:
                self.cut = f"there is no end of an event in {MAX_EVENT_BYTES // 2**20} MiB"
                return
        end = _end_of_array(rest)
        if end is None:
            self.cut = self.cut or "the file ends in the middle of the events"
            yield rest
        else:
            self.tail = rest[end + 1 :]
            yield rest[:end]

    def _plain(self) -> Iterator[bytes]:
        with plain_file.opened(self.path) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def _unzipped(self) -> Iterator[bytes]:
        """Yields blocks of the decompressed stream, of several members too; sets .cut if it is cut or damaged."""
        from isal import isal_zlib  # twice as fast as zlib

        num_packed = num_bytes = 0
        with plain_file.opened(self.path) as file:
            engine = isal_zlib.decompressobj(31)
            while packed := file.read(BLOCK_BYTES // 4):
                num_packed += len(packed)
                while packed:
                    try:
                        block = engine.decompress(packed, BLOCK_BYTES)  # bounded: a megabyte may hold a gigabyte
                    except isal_zlib.error as error:  # type: ignore[misc]  # its stubs take the class for an instance
                        self.cut = f"the compressed data are damaged ({error})"
                        return
                    num_bytes += len(block)
                    if num_bytes > max(RATIO_FROM_BYTES, MAX_RATIO * num_packed):
                        raise NoTrace(
                            f"{self.path}: its first {num_packed:,} bytes unpack to more than {num_bytes:,}, over "
                            f"{MAX_RATIO} times as many, as no trace does: gunzip it first, if it is yours"
                        )
                    if block:
                        yield block
                    packed = engine.unconsumed_tail
                    if engine.eof:
                        packed = engine.unused_data if engine.unused_data.strip(b"\0") else b""
                        engine = isal_zlib.decompressobj(31) if packed else engine
            if not engine.eof:
                self.cut = "the compressed data end early"

    def _after_head(self, blocks: Iterator[bytes]) -> bytes:
        head = b""
        for block in blocks:
            head += block
            if match := EVENTS.search(head):
                self.head = head[: match.start()]
                return head[match.end() :]
            if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") and (start := head.index(b"[")) >= 0:
                return head[start + 1 :]  # the format without an object around the events
            if len(head) > HEAD_BYTES:
                break
        if not head.strip():
            raise NoTrace(f"{self.path}: the file is empty ({self.cut or 'no bytes'}); record the trace again")
        raise NoTrace(
            f'{self.path}: it is not a Kineto trace: it has no "traceEvents"; '
            "name a .json or .json.gz that torch.profiler wrote"
        )


def _last_boundary(data: bytes, start: int) -> re.Match[bytes] | None:
    """Returns the last BOUNDARY that begins at start or later."""
    at = len(data)
    while (at := data.rfind(b"}", max(0, start), at)) >= 0:
        if match := BOUNDARY.match(data, at):
            return match
    return None


def _end_of_array(data: bytes) -> int | None:
    """Returns the index of the ] that ends the array whose inside begins at 0, outside strings; None if none does."""
    depth = 0
    for match in _TOKENS.finditer(data):
        token = match.group()
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            if depth == 0:
                return match.start() if token == b"]" else None
            depth -= 1
    return None
