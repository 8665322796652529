"""Loads batches from shards onto the device: the same global stream of tokens for every world size.

bench/data/course.py decides which tokens of the joined shards, which start over at the end, are in a rank's
micro-batch; a target is the next token. A thread reads ahead, so that next() only copies to the device. Legend: B
sequences of one micro-batch, T tokens of one sequence.
"""

import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench.data.course import BatchShape, Course, DocumentStarts, Stream
from bench.data.shards import Shard, check_val_tokens

# Small steps are read several at a time, because passing them on would cost more than reading them.
BLOCK_TOKENS = 1 << 16
MAX_BLOCK_STEPS = 64
CLOSE_S = 30.0
Queue = queue.SimpleQueue[Any]  # holds free buffers, or read blocks and the error that ended the thread


class Loader:
    """Endless micro-batches of one rank, of the given shapes in order. Reads at least depth blocks ahead.

    eos_token: every sequence begins at a document (bench/data/course.py); None: the stream is read without gaps.
    wait_ns is the time that next() has waited for the thread since load_state_dict().
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        shapes: Sequence[BatchShape],
        rank: int,
        world_size: int,
        device: torch.device | str,
        depth: int = 2,
        eos_token: int | None = None,
    ) -> None:
        self._stream = Stream(shards)
        self._course = Course(shapes, rank, world_size)
        self._documents = None if eos_token is None else DocumentStarts(self._stream, eos_token, shapes)
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._num_at_once = {}  # {shape: micro-batches in a block}
        for shape in shapes:
            step_tokens = shape.num_micro_steps * self._course.micro_tokens(shape)  # of this rank
            num_steps = min(max(1, BLOCK_TOKENS // step_tokens), MAX_BLOCK_STEPS)
            self._num_at_once[shape] = shape.num_micro_steps * num_steps
        num_elements = max(num * 2 * self._course.micro_tokens(shape) for shape, num in self._num_at_once.items())
        # depth, and the block that next() returns from. Pinned, because copies to the GPU would block otherwise.
        self._buffers = [
            torch.empty(num_elements, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(depth + 1)
        ]
        if self._on_gpu:
            self._copies = torch.cuda.Stream(self._device)
            self._copied = torch.cuda.Event()
        self._error: BaseException | None = None
        self._start(0)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (tokens_BT, targets_BT), int64 on the device. They are not reused, so the caller may keep them."""
        if self._left == 0:
            self._next_block()
        pair = self._block[len(self._block) - self._left]
        pair = self._to_gpu(pair) if self._on_gpu else pair.clone()
        self._left -= 1
        self._micro += 1
        tokens_BT, targets_BT = pair.view(2, -1, self._shape.seq_len).unbind(0)
        return tokens_BT, targets_BT

    def state_dict(self) -> dict[str, int]:
        """Returns the place of the next batch."""
        place = self._course.at(self._micro)
        return {"step": place.step, "micro_step": place.micro_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues there. Returns when the first batch is ready, so that the first step does not start late."""
        self._stop()
        self._start(self._course.micro_of(state["step"], state["micro_step"]))
        self._next_block()
        self.wait_ns = 0

    def close(self) -> None:
        """Ends the thread; next() fails afterwards."""
        self._stop()
        self._error = ValueError("the loader is closed: make a new one")

    def _start(self, micro: int) -> None:
        self._micro, self._left, self._error = micro, 0, None
        self._block: Any = None  # the block that next() returns from, then its buffer and its shape
        self._buffer: Any = None
        self._shape: Any = None
        self.wait_ns = 0
        self._free: Queue = queue.SimpleQueue()
        self._ready: Queue = queue.SimpleQueue()
        self._stopping = threading.Event()
        for buffer in self._buffers:
            self._free.put(buffer)
        read_ahead = (micro, self._free, self._ready, self._stopping)
        thread = threading.Thread(target=self._read_ahead, args=read_ahead, name="loader", daemon=True)
        thread.start()
        self._thread: threading.Thread | None = thread  # None: stopped

    def _stop(self) -> None:
        if self._thread is not None:
            self._stopping.set()
            self._free.put(None)  # wakes the thread if it waits for a buffer
            self._thread.join(CLOSE_S)
            assert not self._thread.is_alive(), f"the loader's thread did not end in {CLOSE_S} s"
            self._thread = None
        self._wait_for_copies()
        self._buffer, self._block, self._left = None, None, 0

    def _next_block(self) -> None:
        if self._error is not None:
            raise self._error
        if self._buffer is not None:
            self._wait_for_copies()
            self._free.put(self._buffer)
            self._buffer = self._block = None
        try:
            handed = self._ready.get_nowait()
        except queue.Empty:
            started_ns = time.perf_counter_ns()
            handed = self._ready.get()
            self.wait_ns += time.perf_counter_ns() - started_ns
        if isinstance(handed, BaseException):
            self._error = handed
            raise handed
        self._buffer, self._block, self._shape = handed
        self._left = len(self._block)

    def _to_gpu(self, pair: torch.Tensor) -> torch.Tensor:
        """Copies on a separate stream, which waits for no compute; the host waits for neither."""
        with torch.cuda.stream(self._copies):
            pair = pair.to(self._device, non_blocking=True)
            self._copied.record()
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(self._copied)
        pair.record_stream(compute)  # its memory belongs to the other stream
        return pair

    def _wait_for_copies(self) -> None:
        """Waits before a pinned block is overwritten. Its last copy was issued a step ago and waited for no compute."""
        if self._on_gpu:
            self._copied.synchronize()

    def _read_ahead(self, micro: int, free: Queue, ready: Queue, stopping: threading.Event) -> None:
        """Runs in the thread: fills free buffers until stopped. It makes no CUDA calls, so it disturbs none."""
        try:
            while (buffer := free.get()) is not None:
                place = self._course.at(micro)
                shape = place.shape
                shape_of_block = (min(self._num_at_once[shape], place.num_left), 2, self._course.micro_tokens(shape))
                block = buffer[: math.prod(shape_of_block)].view(shape_of_block)
                for pair in block.numpy():
                    if stopping.is_set():
                        return
                    place = self._course.at(micro)
                    if self._documents is None:
                        _read_pair(self._stream, place.first_token, pair)
                    else:
                        starts = self._documents.of(place.first_seq, pair.shape[1] // shape.seq_len)
                        seqs = pair.reshape(2, -1, shape.seq_len).swapaxes(0, 1)
                        for start, seq_pair in zip(starts, seqs, strict=True):
                            _read_pair(self._stream, start, seq_pair)
                    micro += 1
                ready.put((buffer, block, shape))
        except BaseException as error:
            ready.put(error)


def _read_pair(stream: Stream, start: int, pair: np.ndarray) -> None:
    """Reads the stream's tokens from start on into pair[0], and their targets into pair[1]."""
    span = stream.read(start, pair.shape[1] + 1)
    pair[0] = span[:-1]
    pair[1] = span[1:]


class ValRows:
    """One rank's batches of a validation: places, the position of each batch's first token, and their shape_BT.

    The val_tokens / seq_len rows are divided among the ranks in equal blocks, and the rows of a rank into equal batches
    of at most micro_batch_seqs rows, so that a compiled graph sees one shape. num_tokens counts all val shards; tokens
    beyond val_tokens are not part of a validation. Raises ValueError if val_tokens cannot be divided like this.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        val_tokens: int,
        seq_len: int,
        micro_batch_seqs: int,
        rank: int,
        world_size: int,
        device: torch.device | str,
    ) -> None:
        self._stream, self._device = Stream(shards), torch.device(device)
        self.num_tokens = self._stream.num_tokens
        row_of_seqs = world_size * seq_len  # tokens of one row on each rank
        if val_tokens <= 0 or val_tokens % row_of_seqs:
            raise ValueError(f"goal.val_tokens={val_tokens}: use a multiple of world_size * seq_len = {row_of_seqs}")
        check_val_tokens(self.num_tokens, val_tokens, row_of_seqs)
        rank_seqs = val_tokens // row_of_seqs
        num_seqs = next(num for num in range(min(micro_batch_seqs, rank_seqs), 0, -1) if rank_seqs % num == 0)
        self.shape_BT = num_seqs, seq_len
        self.places = range(rank * rank_seqs * seq_len, (rank + 1) * rank_seqs * seq_len, num_seqs * seq_len)

    def at(self, places: Iterable[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (tokens_BT, targets_BT), int64 on the device, of the batches that begin at these places."""
        num_tokens = self.shape_BT[0] * self.shape_BT[1]
        for place in places:
            pair = torch.empty((2, num_tokens), dtype=torch.int64, pin_memory=self._device.type == "cuda")
            _read_pair(self._stream, place, pair.numpy())
            # torch keeps the memory of a pinned tensor until its copies are done
            tokens_BT, targets_BT = pair.to(self._device, non_blocking=True).view(2, *self.shape_BT).unbind(0)
            yield tokens_BT, targets_BT
