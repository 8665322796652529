"""The launcher's own clock for a run of ours: the pipe into which rank 0 reports each edge of its clock.

with EdgePipe(folder) as edges: ... around the ranks; then edges.clock(train_s) is run.json["referee"]["clock"].
"""

import contextlib
import os
from pathlib import Path

from bench.machine import stamped_pipes
from bench.record import outside_clock

MAX_EDGES = 200_000  # two a validation; more are no clock's


class EdgePipe:
    """path: where rank 0 writes, None where this file system has no pipes."""

    def __init__(self, folder: Path):
        self.path = str(folder.absolute() / ".clock.pipe.tmp")
        self._edges, self._rest, self._why = [], b"", None
        try:
            self.fd = stamped_pipes.opened(self.path)
        except OSError as error:
            self.path, self._why = None, f"the launcher could not create a pipe for its clock ({error.strerror})"

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        if self.path is not None:
            self._stack.callback(os.close, self.fd)
            self._reader = self._stack.enter_context(stamped_pipes.StampedPipes([self]))
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def take(self, data: bytes, t_ns: int, late_ns: int) -> None:
        """What rank 0 wrote, as of stamped_pipes.Sink."""
        *words, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:64]
        if len(self._edges) < MAX_EDGES:
            self._edges += [(t_ns, late_ns, word.decode("ascii", "replace")[:64]) for word in words]

    def clock(self, claimed_train_s: float | None) -> outside_clock.Clock:
        """After the block.  claimed_train_s: by rank 0's own clock; None: it left none."""
        if self.path is None:
            return outside_clock.unknown("none", self._why, claimed_train_s)
        return outside_clock.of_edges(self._edges, self._reader.gaps_ns, claimed_train_s)
