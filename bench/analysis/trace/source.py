"""A trace file -> chunks of whole events as bytes, in constant memory.

Kineto writes one object whose "traceEvents" is an array of a million small objects.  Nothing here parses them: a chunk
ends where an event ends and the next one begins, which BOUNDARY recognises.  In JSON those bytes cannot stand inside a
string: a quote there is escaped, and after the quote that ends a string no word follows.
"""

import collections
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path

from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged

BLOCK_BYTES = 2**20
MAX_EVENT_BYTES = 128 * 2**20  # no event is nearly as long, and the tail after the events is short
HEAD_BYTES = 64 * 2**20  # what comes before the events: device properties and the like, kilobytes as a rule
MAX_RATIO = 40  # of the bytes that a megabyte of gzip gives; 15 recorded traces give 13 to 21, a bomb up to 1,030
RATIO_FROM_BYTES = 64 * 2**20  # below, whatever it gives is soon read
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|ts|pid|tid|args|dur|id|bp|s)"\s*:)')
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
# A string that has no end goes to the end: the search would start again at each escaped quote in it.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.S)


class NoTrace(ValueError):
    """The file is not a trace: what, and what to try."""


class Source:
    """for chunk in source.chunks(): ...   then .head and .tail, the bytes around the events, and .cut.

    A chunk is the inside of a JSON array.  cut: a sentence if the file ends early, else None; then the last chunk may
    be damaged.  Plain files can be read in parts: chunks(part, num_parts) gives about its share of the events; a
    compressed one is read whole by every part, which then gives every num_parts-th chunk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.head, self.tail = b"", b""
        self.cut: str | None = None
        try:
            with plain_file.opened(path) as file:
                magic = file.read(4)
                self.num_bytes = os.fstat(file.fileno()).st_size
            self.is_gzip, self.is_zip = magic[:2] == GZIP_MAGIC, magic == ZIP_MAGIC
        except Damaged as error:
            raise NoTrace(f"{error}; name a trace, a run folder or a folder of traces") from None

    def chunks(self, part: int = 0, num_parts: int = 1) -> Iterator[bytes]:
        if self.is_gzip:
            for number, chunk in enumerate(self._whole(self._unzipped())):
                if number % num_parts == part:
                    yield chunk
        elif num_parts == 1:
            yield from self._whole(self._blocks(0, self.num_bytes))
        else:
            yield from self._part(part, num_parts)

    def _blocks(self, start: int, stop: int) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(BLOCK_BYTES, stop - start))
                if not block:
                    return
                start += len(block)
                yield block

    def _unzipped(self) -> Iterator[bytes]:
        """Blocks of the decompressed stream, several members too; a cut or damaged one ends with .cut."""
        from isal import isal_zlib  # twice as fast as zlib

        num_packed = num_bytes = 0
        with open(self.path, "rb") as file:
            engine = isal_zlib.decompressobj(31)
            while packed := file.read(BLOCK_BYTES // 4):
                num_packed += len(packed)
                while packed:
                    try:
                        block = engine.decompress(packed, BLOCK_BYTES)  # never more: a megabyte may hold a gigabyte
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

    def _whole(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Find the array, then give what lies between boundaries."""
        rest = yield from self._cut_up(self._after_head(blocks), blocks)
        if rest is not None:
            yield from self._last(rest)

    def _cut_up(self, rest: bytes, blocks: Iterator[bytes]) -> Generator[bytes, None, bytes | None]:
        """Chunks that end where an event ends.  Returns what follows the last one, None where an event has no end."""
        for block in blocks:
            rest += block
            if cut_at := _last_boundary(rest, len(rest) - len(block)):
                yield rest[: cut_at[0]]
                rest = rest[cut_at[1] :]
            elif len(rest) > MAX_EVENT_BYTES:
                self.cut = f"there is no end of an event in {MAX_EVENT_BYTES // 2**20} MiB"
                return None
        return rest

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
            why = f" ({self.cut})" if self.cut else ""
            raise NoTrace(f"{self.path}: the file is empty{why}; record the trace again")
        raise NoTrace(
            f'{self.path}: it is not a Kineto trace: it has no "traceEvents"; '
            "name a .json or .json.gz that torch.profiler wrote"
        )

    def _last(self, rest: bytes) -> Iterator[bytes]:
        """The end of the array lies in what follows the last boundary."""
        end = _end_of_array(rest)
        if end is None:
            self.cut = self.cut or "the file ends in the middle of the events"
            yield rest
        else:
            self.tail = rest[end + 1 :]
            yield rest[:end]

    def _part(self, part: int, num_parts: int) -> Iterator[bytes]:
        """Plain files: the head is read by all, then each part begins and ends at a boundary near its share."""
        blocks = self._blocks(0, self.num_bytes)
        first = self._after_head(blocks)
        base = self._offset_of_events(first, blocks)
        share = (self.num_bytes - base) / num_parts
        start = base if part == 0 else self._boundary_after(base + int(share * part))
        stop = self.num_bytes if part == num_parts - 1 else self._boundary_after(base + int(share * (part + 1)))
        if start is None or (stop is not None and start >= stop):
            return
        rest = yield from self._cut_up(b"", self._blocks(start, self.num_bytes if stop is None else stop))
        if rest is None:
            return
        if stop is None or stop == self.num_bytes:
            yield from self._last(rest)
        else:
            yield rest.rstrip().rstrip(b",")

    def _offset_of_events(self, first: bytes, blocks: Iterator[bytes]) -> int:
        with open(self.path, "rb") as file:
            data = file.read(len(self.head) + HEAD_BYTES // 64 + 64)
        match = EVENTS.search(data, len(self.head))
        return match.end() if match else data.index(b"[") + 1

    def _boundary_after(self, offset: int) -> int | None:
        """Offset of the first event that begins at or after offset; None: there is none."""
        rest, at = b"", offset
        for block in self._blocks(offset, self.num_bytes):
            rest += block
            if match := BOUNDARY.search(rest):
                return at + match.end()
            at, rest = at + max(0, len(rest) - 4096), rest[-4096:]
        return None


def _last_boundary(data: bytes, new_from: int) -> tuple[int, int] | None:
    """(end of an event, start of the next) of the last boundary, searched backwards in steps; None if there is none."""
    step = 1 << 14
    stop = len(data)
    while stop > 0:
        start = max(0, stop - step)
        boundaries = collections.deque(BOUNDARY.finditer(data, start, min(len(data), stop + 256)), maxlen=1)
        if boundaries:
            return boundaries[0].start() + 1, boundaries[0].end()
        if start == 0 or start < new_from - 4096:
            return None
        stop, step = start, step * 4
    return None


def _end_of_array(data: bytes) -> int | None:
    """Index of the ] that ends the array whose inside begins at 0; None if it never ends.  Strings are skipped."""
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
