"""What memory was for: parameters, gradients, optimizer state, activations, temporary.

An allocator knows stacks and times, no tensors, so this is judged from when a life began and ended:

    in one phase only                               temporary
    begun in forward, ended later                   activations (kept for the backward pass)
    begun in backward, ended later                  gradients
    begun by an optimizer, ended later              optimizer state
    begun before the recording, or by a module's construction, and not ended    parameters (and buffers)

Phases are the recording's marks, or without marks what the stacks of the allocations show: torch's optimizers, the
backward call or no Python stack at all (autograd's own thread), else forward.  A compiled backward that runs on the
calling thread, and whatever began before the recording without a stack, cannot be distinguished: other.
"""

import bisect
import itertools
import re

from bench.analysis.memory.lives import BEFORE_ALL, Life, Lives

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARY, OTHER = "activations", "temporary", "other"
USES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARY, OTHER)
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
KEPT = {FORWARD: ACTIVATIONS, BACKWARD: GRADIENTS, OPTIMIZER: STATE}
OPTIMIZER_FILE = re.compile(r"optim", re.I)  # torch/optim, and those of other projects by their file's name
AUTOGRAD_FILE = re.compile(r"(^|/)torch/autograd/|(^|/)torch/_tensor\.py$|(^|/)torch/utils/checkpoint\.py$")
BUILDERS = ("__init__", "_apply", "reset_parameters", "_init_weights", "init_weights")


class Uses:
    """of(life) -> one of USES.  edges: [(entry, phase)] of the recording's marks in their order, () for none."""

    def __init__(self, lives: Lives, edges: list[tuple[int, str]] = ()):
        self._kinds = {}  # name of a file -> what it is: a snapshot has millions of frames, but few files
        self.has_marks = any(name in KEPT for _, name in edges)
        self._edges = edges if self.has_marks else self._by_stacks(lives)
        self._entries = [entry for entry, _ in self._edges]

    def of(self, life: Life) -> str:
        stack = None if life.frames is None else self._phase_of_stack(life.frames)
        if life.start == BEFORE_ALL:
            return self._before(life, stack)
        number, phase = self._segment(life.start)
        if stack == OPTIMIZER:
            phase = OPTIMIZER
        if life.stop is not None and self._segment(life.stop)[0] == number:
            return TEMPORARY
        if life.stop is None and _is_built(life.frames):
            return PARAMETERS
        return KEPT.get(phase, OTHER)

    def _before(self, life, stack):
        if stack is None:
            return OTHER
        if stack in (OPTIMIZER, BACKWARD):
            return KEPT[stack]
        return PARAMETERS if life.stop is None else OTHER

    def _segment(self, entry):
        """(number, phase) of the segment in which an entry lies."""
        number = bisect.bisect_right(self._entries, entry) - 1
        return number, self._edges[number][1] if number >= 0 else None

    def _by_stacks(self, lives):
        """[(entry, phase)] where the stacks of the allocations change from one phase to another."""
        begun = sorted(((life.start, life.frames) for life in lives.found if life.start >= 0), key=lambda one: one[0])
        phases = [(entry, self._phase_of_stack(frames)) for entry, frames in begun]
        return [next(group) for _, group in itertools.groupby(phases, key=lambda one: one[1])]

    def _phase_of_stack(self, frames):
        kinds = {self._kind(frame) for frame in frames}
        if OPTIMIZER in kinds:
            return OPTIMIZER
        return BACKWARD if BACKWARD in kinds or not frames else FORWARD

    def _kind(self, frame):
        """What one frame says: the optimizer's file, the call of backward(); None: nothing."""
        filename = str(frame.get("filename"))
        if filename not in self._kinds:
            is_autograd = BACKWARD if AUTOGRAD_FILE.search(filename) else None
            self._kinds[filename] = OPTIMIZER if OPTIMIZER_FILE.search(filename) else is_autograd
        kind = self._kinds[filename]
        name = str(frame.get("name"))
        return kind if kind != BACKWARD or "backward" in name or "recompute" in name or "unpack_hook" in name else None


def _is_built(frames):
    """Whether a module's construction, or its move to the device, asked."""
    return any(str(frame.get("name")) in BUILDERS for frame in frames or ())
