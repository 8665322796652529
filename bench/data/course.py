"""Decides which tokens of the stream each micro-batch of a rank holds, for batches whose shape changes during a run.

The sequences of all steps follow each other in the stream, those of step 0, then those of step 1 and so on, whatever
the world size. Rank r owns the r-th equal block of a step's sequences, micro-step m the m-th equal slice of that.
Without gaps, a step of batch_tokens reads the batch_tokens tokens that follow the previous step. With DocumentStarts,
each sequence begins at the first document that starts at or after the end of the previous sequence: modded-nanogpt's
record 26 (2025-07-12_BosAlign, find_batch_starts), but across the borders of shards and for any number of sequences.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.data.shards import Shard

SCAN_TOKENS = 1 << 20  # tokens searched for documents at a time


@dataclass(frozen=True)
class BatchShape:
    """The batch of num_steps consecutive steps; None in the last shape, which has no end."""

    num_steps: int | None
    batch_tokens: int
    seq_len: int
    num_micro_steps: int

    @property
    def num_seqs(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.batch_tokens // self.seq_len


class Place(NamedTuple):
    """The position of a rank's micro-batch in the run."""

    shape: BatchShape
    num_left: int | float  # micro-batches of that shape that are left, including this one
    step: int  # from 0
    micro_step: int  # within the step, from 0
    first_seq: int  # its first sequence, counted over the whole run
    first_token: int  # its first token in a stream without gaps


class Course:
    """Places of one rank's micro-batches, counted from the start of the run over all shapes: micro 0, 1, 2 ..."""

    def __init__(self, shapes: Sequence[BatchShape], rank: int, world_size: int) -> None:
        for shape in shapes:
            part = world_size * shape.num_micro_steps * shape.seq_len
            if shape.batch_tokens % part:
                factors = "world_size * num_micro_steps * seq_len"
                raise ValueError(f"batch_tokens={shape.batch_tokens}: use a multiple of {factors} = {part}")
        assert all((shape.num_steps is None) == (shape is shapes[-1]) for shape in shapes), shapes
        self._shapes, self._rank, self._world_size = list(shapes), rank, world_size
        self._steps = _before_each(shapes, lambda shape: 1)
        self._micros = _before_each(shapes, lambda shape: shape.num_micro_steps)
        self._seqs = _before_each(shapes, lambda shape: shape.num_seqs)
        self._tokens = _before_each(shapes, lambda shape: shape.batch_tokens)

    def micro_tokens(self, shape: BatchShape) -> int:
        """Returns the tokens of one micro-batch of this rank."""
        return shape.batch_tokens // (self._world_size * shape.num_micro_steps)

    def at(self, micro: int) -> Place:
        index = bisect.bisect_right(self._micros, micro) - 1
        shape, ends = self._shapes[index], [*self._micros[1:], math.inf]
        step, micro_step = divmod(micro - self._micros[index], shape.num_micro_steps)
        slices = self._rank * shape.num_micro_steps + micro_step
        seqs = step * shape.num_seqs + slices * (self.micro_tokens(shape) // shape.seq_len)  # sequences before it
        return Place(
            shape,
            num_left=ends[index] - micro,
            step=self._steps[index] + step,
            micro_step=micro_step,
            first_seq=self._seqs[index] + seqs,
            first_token=self._tokens[index] + seqs * shape.seq_len,
        )

    def micro_of(self, step: int, micro_step: int) -> int:
        """Returns the number of the micro-batch at that place."""
        index = bisect.bisect_right(self._steps, step) - 1
        return self._micros[index] + (step - self._steps[index]) * self._shapes[index].num_micro_steps + micro_step


class Stream:
    """The endless concatenation of shards. Not thread-safe."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in self._shards)]
        self._mapped_index, self._mapped = -1, np.empty(0, np.uint16)  # the shard being read

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return self._starts[-1]

    def read(self, start: int, num_tokens: int) -> np.ndarray:
        """Returns tokens [start, start + num_tokens) as uint16, a view of the file if one shard holds them all."""
        pieces, start = [], start % self.num_tokens
        while num_tokens:
            index = bisect.bisect_right(self._starts, start) - 1
            first = start - self._starts[index]
            if self._mapped_index != index:
                self._mapped_index, self._mapped = index, np.asarray(self._shards[index].tokens())
            piece = self._mapped[first : first + num_tokens]
            pieces.append(piece)
            num_tokens -= len(piece)
            start = (start + len(piece)) % self.num_tokens
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class DocumentStarts:
    """The positions at which the sequences of a run begin if each must begin at a document. Not thread-safe.

    Searches only as far as is needed, and remembers the positions: 8 bytes per sequence.
    """

    def __init__(self, stream: Stream, eos_token: int, shapes: Sequence[BatchShape]) -> None:
        self._stream, self._eos_token = stream, eos_token
        self._shapes = list(shapes)
        self._firsts = _before_each(shapes, lambda shape: shape.num_seqs)
        self._starts: list[int] = []
        self._scanned, self._documents = 0, np.empty(0, np.int64)  # documents before _scanned that are still ahead

    def of(self, first_seq: int, num_seqs: int) -> list[int]:
        """Returns positions in the endless stream. Raises ValueError if a whole epoch has no document."""
        while len(self._starts) < first_seq + num_seqs:
            end = 0  # the end of the previous sequence
            if self._starts:
                shape = self._shapes[bisect.bisect_right(self._firsts, len(self._starts) - 1) - 1]
                end = self._starts[-1] + shape.seq_len
            self._starts.append(self._first_from(end))
        return self._starts[first_seq : first_seq + num_seqs]

    def _first_from(self, position: int) -> int:
        """Returns the first document that begins at position or after it."""
        limit = position + self._stream.num_tokens
        while True:
            index = np.searchsorted(self._documents, position)
            if index < len(self._documents):
                return int(self._documents[index])
            self._scanned = max(self._scanned, position)
            if self._scanned >= limit:
                raise ValueError(f"data.bos_aligned=True: no token {self._eos_token} in all the training data")
            tokens = self._stream.read(self._scanned, min(SCAN_TOKENS, self._stream.num_tokens))
            self._documents = self._scanned + np.flatnonzero(tokens == self._eos_token)
            self._scanned += len(tokens)


def _before_each(shapes: Sequence[BatchShape], per_step: Callable[[BatchShape], int]) -> list[int]:
    """Returns, for each shape, the total over all steps before it. per_step: the amount in one step."""
    counts = ((shape.num_steps or 0) * per_step(shape) for shape in shapes[:-1])
    return list(itertools.accumulate(counts, initial=0))
