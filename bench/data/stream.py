"""Shards as one endless stream of tokens."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from bench.data.shards import Shard


class Stream:
    """The endless concatenation of shards.  Not for two threads at once."""

    def __init__(self, shards: Sequence[Shard]):
        if not shards:
            raise ValueError("there are no shards to read: make or fetch some with ./run.sh data")
        self._shards = list(shards)
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in self._shards)]
        self._mapped = (None, None)  # the shard being read; the others need no memory

    @property
    def num_tokens(self) -> int:
        """Of one epoch."""
        return self._starts[-1]

    def read(self, start: int, num_tokens: int) -> np.ndarray:
        """Tokens [start, start + num_tokens) as uint16, a view of the file where one shard holds them all."""
        pieces, start = [], start % self.num_tokens
        while num_tokens:
            index = bisect.bisect_right(self._starts, start) - 1
            first = start - self._starts[index]
            if self._mapped[0] != index:
                self._mapped = (index, np.asarray(self._shards[index].tokens()))
            piece = self._mapped[1][first : first + num_tokens]
            pieces.append(piece)
            num_tokens -= len(piece)
            start = (start + len(piece)) % self.num_tokens
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
