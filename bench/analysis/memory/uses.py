"""Judges what memory was used for: parameters, gradients, optimizer state, activations or temporary values.

An allocator knows stacks and times but no tensors, so a use is judged from when a life began and ended:

    in one phase only                               temporary
    begun in forward, ended later                   activations (kept for the backward pass)
    begun in backward, ended later                  gradients
    begun by an optimizer, ended later              optimizer state
    begun before the recording, or by a module's construction, and not ended    parameters (and buffers)

Phases are the recording's marks, or without marks what the stacks of allocations show: an optimizer's file, the call of
backward() or no Python stack at all (autograd's own thread), else forward.  A compiled backward pass on the calling
thread cannot be told from forward; memory from before the recording without a stack counts as other.
"""

import bisect
import functools
import itertools
import re
from typing import Any

from bench.analysis.memory.lives import BEFORE_ALL, Life, Lives

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARY, OTHER = "activations", "temporary", "other"
USES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARY, OTHER)
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
KEPT: dict[str | None, str] = {FORWARD: ACTIVATIONS, BACKWARD: GRADIENTS, OPTIMIZER: STATE}
OPTIMIZER_FILE = re.compile(r"optim", re.I)  # torch/optim, and those of other projects by their file's name
AUTOGRAD_FILE = re.compile(r"(^|/)torch/autograd/|(^|/)torch/_tensor\.py$|(^|/)torch/utils/checkpoint\.py$")
BUILDERS = ("__init__", "_apply", "reset_parameters", "_init_weights", "init_weights")


class Uses:
    """Judges lives: of(life) returns one of USES."""

    def __init__(self, lives: Lives) -> None:
        marks = sorted(lives.marks, key=lambda mark: mark[0])
        self.has_marks = any(name in KEPT for _, name in marks)
        self._edges: list[tuple[int, str]]  # (entry, the phase that begins there)
        if self.has_marks:
            self._edges = [(bisect.bisect_left(lives.x, at_ms), name) for at_ms, name in marks]
        else:
            begun = sorted(
                ((life.start, life.frames) for life in lives.all if life.start >= 0), key=lambda item: item[0]
            )
            phases = [(entry, _phase_of_stack(frames or [])) for entry, frames in begun]
            self._edges = [next(group) for _, group in itertools.groupby(phases, key=lambda item: item[1])]
        self._entries = [entry for entry, _ in self._edges]

    def of(self, life: Life) -> str:
        """Returns what a piece of memory was used for, one of USES."""
        stack = None if life.frames is None else _phase_of_stack(life.frames)
        if life.start == BEFORE_ALL:
            if stack in (OPTIMIZER, BACKWARD):
                return KEPT[stack]
            return PARAMETERS if stack is not None and life.stop is None else OTHER
        number, phase = self._segment(life.start)
        if stack == OPTIMIZER:
            phase = OPTIMIZER
        if life.stop is not None and self._segment(life.stop)[0] == number:
            return TEMPORARY
        is_built = any(str(frame.get("name")) in BUILDERS for frame in life.frames or ())  # or moved to the device
        return PARAMETERS if life.stop is None and is_built else KEPT.get(phase, OTHER)

    def _segment(self, entry: int) -> tuple[int, str | None]:
        """Returns (number, phase) of the segment in which an entry lies."""
        number = bisect.bisect_right(self._entries, entry) - 1
        return number, self._edges[number][1] if number >= 0 else None


def _phase_of_stack(frames: list[dict[str, Any]]) -> str:
    kinds = set(map(_kind, frames))
    return OPTIMIZER if OPTIMIZER in kinds else BACKWARD if BACKWARD in kinds or not frames else FORWARD


def _kind(frame: dict[str, Any]) -> str | None:
    """Returns OPTIMIZER for a frame in an optimizer's file, BACKWARD for a call of backward(), else None."""
    kind, name = _kind_of_file(str(frame.get("filename"))), str(frame.get("name"))
    return kind if kind != BACKWARD or "backward" in name or "recompute" in name or "unpack_hook" in name else None


@functools.lru_cache(maxsize=4096)  # a snapshot has millions of frames, but few files
def _kind_of_file(filename: str) -> str | None:
    return OPTIMIZER if OPTIMIZER_FILE.search(filename) else BACKWARD if AUTOGRAD_FILE.search(filename) else None
