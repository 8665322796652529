"""What memory was for: parameters, gradients, optimizer state, activations, temporary; and which module asked for it.

An allocator knows stacks and times, no tensors, so this is judged from when a life began and ended:

    in one phase only                               temporary
    begun in forward, ended later                   activations (kept for the backward pass)
    begun in backward, ended later                  gradients
    begun by an optimizer, ended later              optimizer state
    begun before the recording, or by a module's construction, and not ended    parameters (and buffers)

Phases are the recording's marks, or without marks what the stacks of the allocations show: torch's optimizers, the
backward call or no Python stack at all (autograd's own thread), else forward.  A compiled backward that runs on the
calling thread, and whatever began before the recording without a stack, cannot be distinguished: other.

A stack has functions and lines, no objects.  torch calls every module's forward through Module._call_impl, so the frame
just inside it is that of a forward; its class is read from the source where that is this repository's and still has
such a function at that line, else the file stands for it.  Modules that share a class share a name.
"""

import ast
import bisect
import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.analysis.memory import charts, timeline
from bench.analysis.memory.lives import BEFORE_ALL, INSIDE_TORCH, Life, Lives
from bench.base.paths import REPO
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import MIB, format_bytes
from bench.web import lanes
from bench.web.page import Safe, figure, join, soft

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARY, OTHER = "activations", "temporary", "other"
USES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARY, OTHER)
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
KEPT = {FORWARD: ACTIVATIONS, BACKWARD: GRADIENTS, OPTIMIZER: STATE}
OPTIMIZER_FILE = re.compile(r"optim", re.I)  # torch/optim, and those of other projects by their file's name
AUTOGRAD_FILE = re.compile(r"(^|/)torch/autograd/|(^|/)torch/_tensor\.py$|(^|/)torch/utils/checkpoint\.py$")
BUILDERS = ("__init__", "_apply", "reset_parameters", "_init_weights", "init_weights")
CALLS = ("_call_impl", "_wrapped_call_impl")
MODULE_FILE = re.compile(r"(^|/)torch/nn/modules/module\.py$")
MAX_DEPTH = 3  # the innermost ones of a chain
OUTSIDE, UNKNOWN = "outside of modules", "before the recording"
NUM_MODULES = 12
COLOURS = {use: f"series-{number}" for number, use in enumerate(USES)}  # as the chart has them


class Uses:
    """of(life) -> one of USES.  edges: [(entry, phase)] of the recording's marks in their order, () for none."""

    def __init__(self, lives: Lives, edges: Sequence[tuple[int, str]] = ()):
        self._kinds: dict[
            str, str | None
        ] = {}  # name of a file -> what it is: a snapshot has millions of frames, but few files
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


def module_of(life: Life) -> str:
    """Life -> "GPT > Block > MLP"."""
    if life.frames is None:
        return UNKNOWN
    chain = _chain(tuple((str(f.get("filename")), f.get("line"), str(f.get("name"))) for f in life.frames))
    return " > ".join(chain[-MAX_DEPTH:]) if chain else OUTSIDE


@functools.lru_cache(maxsize=4096)
def _chain(frames):
    """Frames, innermost first -> names of modules, outermost first; torch's own (Linear) are not listed."""
    chain = []
    for inner, (filename, _, name) in zip(frames, frames[1:]):
        is_call = name in CALLS and MODULE_FILE.search(filename) and inner[2] not in CALLS
        if (is_call or inner[2] == "__init__") and not INSIDE_TORCH.search(inner[0]):
            chain.append(_class_at(*inner))
    if frames and frames[-1][2] == "__init__" and not INSIDE_TORCH.search(frames[-1][0]):
        chain.append(_class_at(*frames[-1]))
    return [name for name in reversed(chain) if name]


def _class_at(filename, line, function):
    """Name of the class whose function holds the line; without its source the file's name, None for no Python."""
    for first, last, class_name, name in _methods(filename):
        if name == function and isinstance(line, int) and first <= line <= last:
            return class_name
    return filename.rpartition("/")[2] if filename.endswith(".py") else None


@functools.lru_cache(maxsize=256)
def _methods(filename):
    """[(first line, last line, class, function)] of a file of this repository, () for any other."""
    path = (REPO / filename).resolve()
    if filename.startswith("/") or not path.is_relative_to(REPO.resolve()) or path.suffix != ".py":
        return ()
    try:
        tree = ast.parse(plain_file.text(path))
    except (Damaged, SyntaxError, ValueError, RecursionError):
        return ()
    return [
        (node.lineno, node.end_lineno, owner.name, node.name)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    ]


class UseSection(NamedTuple):
    """charts: specs whose slots stand in markup; "" where nothing was recorded."""

    charts: list[dict]
    markup: Safe


def use_section(lives: Lives, marks: list[tuple[float, str]], id: str) -> UseSection:
    """marks: [(ms since the first entry, phase)] of the recording; id: of the charts."""
    if not lives.found:
        return UseSection([], Safe(""))
    judged = Uses(lives, _edges(lives, marks))
    held = timeline.of(lives, judged.of)
    about = ", ".join(f"{use} {format_bytes(size)}" for use, size in _by_size(held.at_peak))
    specs = charts.of_names(held, USES, marks, id, "What memory was for", f"at the largest moment {about}")
    how = "the recording's phases" if judged.has_marks else "the stacks alone, as the recording marks no phases"
    words = soft(f"Judged from where each piece was asked for and in which phase it was freed, by {how}.")
    return UseSection(specs, join([*map(figure, specs), _by_module(lives, judged).markup, words]))


def use_facts(lives: Lives, marks: list[tuple[float, str]]) -> dict:
    """For programs: {"uses_at_peak": {use: bytes}, "modules_at_peak": {module: bytes}}."""
    judged = Uses(lives, _edges(lives, marks))
    by_use, by_module = (timeline.of(lives, name_of) for name_of in (judged.of, module_of))
    return {"uses_at_peak": dict(_by_size(by_use.at_peak)), "modules_at_peak": dict(_by_size(by_module.at_peak))}


def _edges(lives, marks):
    """[(entry, phase)]: the first entry at or after each mark."""
    if lives.times_us is None:
        return []
    x_ms, edges, entry = charts.axis(lives)[0], [], 0
    for at_ms, name in sorted(marks, key=lambda mark: mark[0]):
        while entry < len(x_ms) and x_ms[entry] < at_ms:
            entry += 1
        edges.append((entry, name))
    return edges


def _by_module(lives, judged):
    """At the fullest moment, each module's bytes by use."""
    both = timeline.of(lives, lambda life: (module_of(life), judged.of(life)))
    by_module = {}
    for (module, use), size in both.at_peak.items():
        by_module.setdefault(module, {})[use] = size
    drawn = []
    for module, sizes in sorted(by_module.items(), key=lambda one: -sum(one[1].values()))[:NUM_MODULES]:
        known = [(use, sizes[use]) for use in USES if use in sizes]
        parts = [(size / MIB, COLOURS[use], f"{use} {format_bytes(size)}") for use, size in known]
        words = ", ".join(f"{use} {format_bytes(size)}" for use, size in _by_size(sizes))
        drawn.append(lanes.Lane(module, words, lanes.stacked(parts)))
    names = [(COLOURS[use], use) for use in USES if any(use in sizes for sizes in by_module.values())]
    more = f"the largest {NUM_MODULES} of {len(by_module)}; " if len(by_module) > NUM_MODULES else ""
    about = f"{more}whose forward, or whose construction, asked"
    return lanes.Panel("modules", "By nn.Module at the largest moment", about, "MiB", drawn, names)


def _by_size(sizes):
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda one: -one[1])
