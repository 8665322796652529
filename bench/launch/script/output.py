"""Reads from outside what a script's ranks print.

Every rank prints into its own pipe, where each line is stamped with its time of arrival.  rank 0's metric lines are
kept with their times; logs/rankN.log gets the beginning, every metric line and the end of a rank's output, so that a
script that prints a gigabyte does not fill the disk.
"""

import collections
import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from bench.base.units import KIB, MIB
from bench.machine import stamped_pipes
from bench.record.importers import consoles, dialects

HEAD_BYTES = MIB  # limit of a rank's log, and of rank 0's other lines; metric lines are kept beyond it
TAIL_LINES = 200
# of a longer line both ends are kept: they have more characters than any dialect reads
MAX_LINE_BYTES = 64 * KIB
CUT = b"[cut]"
LINE_END = re.compile(rb"\r\n?|\n")  # a progress bar overwrites its line
MAX_METRIC_BYTES = 32 * MIB  # 400,000 lines; those after them are not read, and counted


class Output:
    """with Output(folder, num_ranks, dialect) as output: ... ; .lines: [(t_ns, text)] of rank 0 that may be metrics.

    .late_ns: {t_ns: by how much its lines may have arrived earlier}, without zeros; .gaps_ns: as in
    stamped_pipes.StampedPipes.

    dialect: None: any of dialects.NAMES.
    """

    def __init__(self, folder: Path, num_ranks: int, dialect: dialects.Dialect | None):
        self.pipes = [str(folder.absolute() / f".rank{rank}.pipe.tmp") for rank in range(num_ranks)]
        names: Iterable[dialects.Dialect] = dialects.NAMES if dialect is None else (dialect,)
        self.looks_like = re.compile("|".join(f"(?:{dialects.reader_of(name).looks_like.pattern})" for name in names))
        self.lines: list[tuple[int, str]] = []
        self.late_ns: dict[int, int] = {}
        self.gaps_ns: list[tuple[int, int]] = []
        self._ranks: list[_Rank] = []
        self._folder = folder

    @property
    def num_unkept_lines(self) -> int:
        """Number of rank 0's lines that its log omits."""
        return self._ranks[0].num_unkept if self._ranks else 0

    @property
    def num_unread_lines(self) -> int:
        """Number of rank 0's metric lines that are not in .lines."""
        return self._ranks[0].num_unread if self._ranks else 0

    def __enter__(self) -> Self:
        for rank, pipe in enumerate(self.pipes):
            log = self._folder / "logs" / f"rank{rank}.log"
            self._ranks.append(_Rank(stamped_pipes.opened(pipe), log, self.looks_like, self if rank == 0 else None))
        self._reader = stamped_pipes.StampedPipes(self._ranks)
        self._reader.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends the reading, after which everything that was printed has been read."""
        self._reader.__exit__(*exc_info)
        self.gaps_ns = self._reader.gaps_ns
        for rank in self._ranks:
            rank.close()


class _Rank:
    """One rank's pipe and log.  kept: the Output whose lines get its metric lines and its beginning, if any."""

    def __init__(self, fd: int, log: Path, looks_like: re.Pattern[str], kept: Output | None):
        self.fd = fd
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._looks_like, self._kept = looks_like, kept
        self._num_bytes = self._metric_bytes = self._came_late_ns = 0
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self.num_unkept = self.num_unread = 0
        self._rest, self._rest_ns = bytearray(), 0

    def take(self, data: bytes, t_ns: int, late_ns: int = 0) -> None:
        """Receives bytes that arrived at t_ns.  A line's time is that of its end."""
        self._came_late_ns = late_ns
        kept = bytearray()
        if data[:1] == b"\r":  # overwrites a line that was complete when it arrived, such as autoresearch's steps
            if self._rest:
                self._line(self._rest, self._rest_ns, kept)
            data, self._rest = data[1:], bytearray()
        for number, part in enumerate(LINE_END.split(data)):
            if number:  # the part before has ended
                self._line(self._rest, t_ns, kept)
                self._rest = bytearray()
            self._rest += part
            if len(self._rest) > 2 * MIB:
                del self._rest[MIB:-MIB]
        self._rest_ns = t_ns
        self._write(kept)

    def _line(self, line: bytearray, t_ns: int, kept: bytearray) -> None:
        if len(line) > MAX_LINE_BYTES:
            line = line[: MAX_LINE_BYTES // 2] + CUT + line[-MAX_LINE_BYTES // 2 :]
        text = line.decode("utf-8", "replace")
        is_head = self._num_bytes + len(kept) < HEAD_BYTES
        if looks_like := consoles.looks_like(self._looks_like, text):
            self._metric_bytes += len(line)
        is_metric = looks_like and self._metric_bytes <= MAX_METRIC_BYTES
        if not (is_head or is_metric):
            self.num_unread += looks_like
            if len(self._tail) == TAIL_LINES:
                self.num_unkept += 1
            self._tail.append(bytes(line))
            return
        kept += line + b"\n"
        if self._kept is not None:
            self._kept.lines.append((t_ns, text))
            if self._came_late_ns:
                self._kept.late_ns[t_ns] = self._came_late_ns

    def _write(self, data: bytes | bytearray) -> None:
        self._num_bytes += len(data)
        if data:
            with contextlib.suppress(OSError):  # a full disk: the lines are still in memory, and others report it
                os.write(self._log, data)

    def close(self) -> None:
        if self._rest:
            self.take(b"\n", time.perf_counter_ns())
        if self.num_unkept:
            self._write(f"[{self.num_unkept} lines more were printed here]\n".encode())
        self._write(b"".join(line + b"\n" for line in self._tail))
        os.close(self.fd)
        os.close(self._log)
