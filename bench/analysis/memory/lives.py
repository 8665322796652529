"""Derives from an allocator's trace and its final segments when each piece of memory was held.

1. An alloc begins a life, a free_completed ends it (memory that is only free_requested still waits for another stream
   and cannot be reused yet).
2. Memory that is freed, or still held at the end, without an alloc in the trace was allocated before the trace began.
3. So the sum at the beginning is known, and the sum at the end is that of the final blocks, to the byte.

A Timeline groups lives by name and gives the bytes that each name held at every moment.  Sizes are those requested.
Segments show how full the reserved memory is, and what is lost to rounding and to gaps:
    reserved = used + rounding + waiting + free;  free = in gaps (of segments that are partly used) + whole segments
Gaps cannot be freed and serve only what fits into them; empty_cache() frees whole free segments.
"""

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

INSIDE_TORCH = re.compile(r"(^|/)torch/|^<(?!eval_with_key)")
PYTHON = re.compile(r"\.py$|^<")  # other frames are C++, recorded with stacks=all
INDUCTOR = re.compile(r"torchinductor[^/]*/")
NO_STACK = "no Python stack"
BEFORE = "before the recording"
OTHER = "all other places"
MAX_STACK_FRAMES = 60
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
ALIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
BEFORE_ALL = -1  # a life's start: before the first entry
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARY, OTHER_USE = "activations", "temporary", "other"
USES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARY, OTHER_USE)
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
KEPT: dict[str | None, str] = {FORWARD: ACTIVATIONS, BACKWARD: GRADIENTS, OPTIMIZER: STATE}
OPTIMIZER_FILE = re.compile(r"optim", re.I)  # torch/optim, and those of other projects by their file's name
AUTOGRAD_FILE = re.compile(r"(^|/)torch/autograd/|(^|/)torch/_tensor\.py$|(^|/)torch/utils/checkpoint\.py$")
BUILDERS = ("__init__", "_apply", "reset_parameters", "_init_weights", "init_weights")


@dataclass(slots=True)
class Life:
    """Memory from its allocation (start) to its release (stop), as numbers of entries.

    start is BEFORE_ALL, stop None if not in the trace.  frames: the stack, innermost first; None if not known.
    """

    size: int
    start: int
    stop: int | None
    frames: list[Any] | None


@dataclass
class Lives:
    """The lives of memory on one device.  An entry stands for the number of an entry in its trace."""

    device: int
    num_entries: int
    times_us: list[float] | None  # of each entry; None if the snapshot has no times
    marks_us: list[tuple[float, str]] = field(default_factory=list)  # (time, phase) each; empty without times
    all: list[Life] = field(default_factory=list)
    reserved_initial: int = 0
    reserved_changes: list[tuple[int, int]] = field(default_factory=list)  # (entry, bytes)
    ooms: list[dict[str, Any]] = field(default_factory=list)  # {"entry", "size", "device_free", "stack"}
    final_bytes: int | None = None  # of the final blocks; None if the snapshot has no segments

    @functools.cached_property
    def x(self) -> list[float]:
        """Milliseconds of each entry since the first, never decreasing; the entry's number if there are no times."""
        if self.times_us is None:
            return list(range(max(1, self.num_entries)))
        x_ms = ((time_us - self.times_us[0]) / 1e3 for time_us in self.times_us)
        return list(itertools.accumulate(x_ms, max))

    @property
    def marks(self) -> list[tuple[float, str]]:
        """The marks as [(x, phase)]."""
        first_us = self.times_us[0] if self.times_us else 0.0
        return [((time_us - first_us) / 1e3, name) for time_us, name in self.marks_us]


def from_snapshot(snapshot: dict[str, Any], device: int) -> Lives:
    """Returns the lives on a device, in the order in which they ended; those that did not end come last."""
    traces = snapshot["device_traces"]
    entries = traces[device] if device < len(traces) else []
    has_times = entries and all("time_us" in entry for entry in entries)
    lives = Lives(device, len(entries), [entry["time_us"] for entry in entries] if has_times else None)
    marks = about(snapshot).get("marks") if has_times else None
    pairs = [mark for mark in marks if isinstance(mark, (list, tuple))] if isinstance(marks, list) else []
    lives.marks_us = [(mark[0], str(mark[1])) for mark in pairs if len(mark) == 2 and isinstance(mark[0], (int, float))]
    alive = _walk(entries, lives)
    blocks: dict[int, tuple[int, list[dict[str, Any]] | None]] = {}  # alive at the end, by address: (bytes, stack)
    segments = segments_of(snapshot, device)
    for segment in segments:
        address = segment.get("address") or 0
        for block in segment["blocks"]:
            if block["state"] in ALIVE:
                size = block.get("requested_size", block["size"])
                blocks[block.get("address", address)] = (size, block.get("frames") or None)
            address += block["size"]
    lives.all += [Life(size, BEFORE_ALL, None, frames) for at, (size, frames) in blocks.items() if at not in alive]
    lives.all += alive.values()
    reserved = sum(segment["total_size"] for segment in segments)
    lives.reserved_initial = reserved - sum(change for _, change in lives.reserved_changes)
    lives.final_bytes = sum(size for size, _ in blocks.values()) if snapshot["segments"] else None
    return lives


def about(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Returns what a recording of this project says of itself; {} for a foreign snapshot."""
    return snapshot["speedrun"] if isinstance(snapshot.get("speedrun"), dict) else {}


def devices(snapshot: dict[str, Any]) -> list[int]:
    """Returns the numbers of the devices that have a trace or segments in the snapshot."""
    with_trace = {number for number, trace in enumerate(snapshot["device_traces"]) if trace}
    return sorted(with_trace | {segment.get("device", 0) for segment in snapshot["segments"]})


def segments_of(snapshot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    """Returns the segments of one device."""
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]


def _walk(entries: list[dict[str, Any]], lives: Lives) -> dict[int | None, Life]:
    """Fills in found, reserved_changes and ooms of lives; returns {address: Life} of what is alive at the end."""
    alive: dict[int | None, Life] = {}
    ends_life = "free_completed" if any(entry["action"] == "free_completed" for entry in entries) else "free_requested"

    def end(life: Life, number: int) -> None:
        life.stop = number
        lives.all.append(life)

    for number, entry in enumerate(entries):
        action, size, address = entry["action"], entry["size"], entry.get("addr")
        if action == "alloc":
            if address in alive:  # its free was not recorded
                end(alive.pop(address), number)
            alive[address] = Life(size, number, None, entry.get("frames") or [])
        elif action == ends_life:
            end(alive.pop(address) if address in alive else Life(size, BEFORE_ALL, None, None), number)
        elif action in GROWS:
            lives.reserved_changes.append((number, size))
        elif action in SHRINKS:
            lives.reserved_changes.append((number, -size))
        elif action == "oom":
            stack = [line_of(frame) for frame in entry.get("frames") or ()]
            lives.ooms.append({"entry": number, "size": size, "device_free": entry.get("device_free"), "stack": stack})
    return alive


class Sites:
    """Names stacks."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[str]] = {}  # name -> one stack that led there, innermost first, as lines of text

    def of(self, frames: list[dict[str, Any]]) -> str:
        """Returns the name of a stack, such as "models/gpt2.py:45 forward".  frames: innermost first.

        It is the innermost frame outside of torch, else the innermost one of Python, else NO_STACK.
        """
        inside = None
        for frame in frames:
            kind = _kind(str(frame.get("filename")))
            if kind == "ours":
                name = line_of(frame, short=True)
                break
            if kind == "torch" and inside is None:
                inside = frame
        else:
            if inside is None:
                return NO_STACK
            name = f"{line_of(inside, short=True)} (torch)"
        if name not in self.stacks:
            self.stacks[name] = [line_of(frame) for frame in frames[:MAX_STACK_FRAMES]]
        return name


@functools.lru_cache(maxsize=4096)  # a snapshot has millions of frames, but few files
def _kind(filename: str) -> str:
    return "native" if not PYTHON.search(filename) else "torch" if INSIDE_TORCH.search(filename) else "ours"


def line_of(frame: dict[str, Any], short: bool = False) -> str:
    path = str(frame.get("filename", "?"))
    if short:
        path = "compiled " + path.rpartition("/")[2] if INDUCTOR.search(path) else "/".join(path.split("/")[-2:])
    return f"{path}:{frame.get('line', '?')} {frame.get('name', '?')}"


# ---- who held how much, when


@dataclass
class Timeline:
    """The bytes held on one device over time, by name: a place in the code, or a use.

    Changes are (entry, name, bytes); an entry is a number in the trace.
    """

    lives: Lives
    initial: dict[str, int] = field(default_factory=dict)  # name -> bytes before the first entry
    changes: list[tuple[int, str, int]] = field(default_factory=list)
    allocated: dict[str, list[int]] = field(default_factory=dict)  # name -> [allocations, bytes] during the recording
    end_bytes: int = 0  # according to the trace
    peak_bytes: int = 0
    peak_entry: int = BEFORE_ALL
    at_peak: dict[str, int] = field(default_factory=dict)  # name -> bytes

    @property
    def unexplained_bytes(self) -> int:
        """The bytes that the trace leaves allocated minus those of the final blocks: 0 in a complete snapshot."""
        return 0 if self.lives.final_bytes is None else self.end_bytes - self.lives.final_bytes


def by_place(sites: Sites) -> Callable[[Life], str]:
    """Returns a function for held_by() that names a life by the line of code that allocated it."""
    return lambda life: BEFORE if life.frames is None else sites.of(life.frames)


def held_by(lives: Lives, name_of: Callable[[Life], str]) -> Timeline:
    """Returns the timeline of lives that name_of() names."""
    held = Timeline(lives)
    for life in lives.all:
        name = name_of(life)
        if life.start == BEFORE_ALL:
            held.initial[name] = held.initial.get(name, 0) + life.size
        else:
            count = held.allocated.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += life.size
            held.changes.append((life.start, name, life.size))
        if life.stop is not None:
            held.changes.append((life.stop, name, -life.size))
    held.changes.sort(key=lambda change: (change[0], change[2] > 0))  # releases first
    total = held.peak_bytes = sum(held.initial.values())
    for number, _, change in held.changes:
        total += change
        if total > held.peak_bytes:
            held.peak_bytes, held.peak_entry = total, number
    held.end_bytes, held.at_peak = total, held_at(held, held.peak_entry)
    return held


def held_at(timeline: Timeline, entry: int) -> dict[str, int]:
    """Returns {name: bytes} after an entry of the trace, without names that hold nothing."""
    held = dict(timeline.initial)
    for number, name, change in timeline.changes:
        if number > entry:
            break
        held[name] = held.get(name, 0) + change
    return {name: size for name, size in held.items() if size}


def sampled(
    timeline: Timeline, names: Iterable[str], max_points: int
) -> list[tuple[int, dict[str | None, int], int, int]]:
    """Returns [(entry, {name: bytes}, total bytes, reserved bytes)] at no more than max_points moments.

    In each stretch of changes the moments of the largest and smallest sum are kept, so that no peak is lost.  names:
    those that are listed; the rest is under None.
    """
    changes: list[tuple[int, str | None, int, int]]
    changes = [(number, name, change, 0) for number, name, change in timeline.changes]
    changes += [(number, None, 0, change) for number, change in timeline.lives.reserved_changes]
    changes.sort(key=lambda entry: entry[0])
    length = max(1, -(-len(changes) // max(1, max_points // 2 - 1)))
    held: dict[str | None, int] = {name: timeline.initial.get(name, 0) for name in names}
    total, reserved = sum(timeline.initial.values()), timeline.lives.reserved_initial
    held[None] = total - sum(held.values())
    points = [(0, dict(held), total, reserved)]
    for start in range(0, len(changes), length):
        extremes: dict[int, tuple[int, dict[str | None, int], int, int]] = {}
        for number, name, change, grown in changes[start : start + length]:
            held[name if name in held else None] += change
            total, reserved = total + change, reserved + grown
            for sign in (1, -1):
                if sign not in extremes or sign * total > sign * extremes[sign][2]:
                    extremes[sign] = (number, dict(held), total, reserved)
        points += sorted(extremes.values(), key=lambda point: point[0])
    points.append((max(0, timeline.lives.num_entries - 1), dict(held), total, reserved))
    return points


def segment_totals(snapshot: dict[str, Any], device: int) -> dict[str, int]:
    """Returns num_segments, and bytes: reserved, used, rounding, waiting, free, in_gaps, largest_gap, largest_free."""
    sizes = ("reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", "largest_free")
    totals = dict.fromkeys(("num_segments", *sizes), 0)
    for segment in segments_of(snapshot, device):
        totals["num_segments"] += 1
        totals["reserved"] += segment["total_size"]
        is_used = any(block["state"] in ALIVE for block in segment["blocks"])
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "active_allocated":
                requested_bytes = block.get("requested_size", size)
                totals["used"] += requested_bytes
                totals["rounding"] += size - requested_bytes
            elif block["state"] in ALIVE:
                totals["waiting"] += size
            else:
                totals["free"] += size
                totals["largest_free"] = max(totals["largest_free"], size)
                if is_used:
                    totals["in_gaps"] += size
                    totals["largest_gap"] = max(totals["largest_gap"], size)
    return totals


class Uses:
    """Judges what memory was used for: of(life) returns one of USES.

    An allocator knows stacks and times but no tensors, so a use is judged from when a life began and ended:

        in one phase only                               temporary
        begun in forward, ended later                   activations (kept for the backward pass)
        begun in backward, ended later                  gradients
        begun by an optimizer, ended later              optimizer state
        begun before the recording, or by a module's construction, and not ended    parameters (and buffers)

    Phases are the recording's marks, or without marks what the stacks of allocations show: an optimizer's file, the
    call of backward() or no Python stack at all (autograd's own thread), else forward.  A compiled backward pass on the
    calling thread cannot be told from forward; memory from before the recording without a stack counts as other.
    """

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
            return PARAMETERS if stack is not None and life.stop is None else OTHER_USE
        number, phase = self._segment(life.start)
        if stack == OPTIMIZER:
            phase = OPTIMIZER
        if life.stop is not None and self._segment(life.stop)[0] == number:
            return TEMPORARY
        is_built = any(str(frame.get("name")) in BUILDERS for frame in life.frames or ())  # or moved to the device
        return PARAMETERS if life.stop is None and is_built else KEPT.get(phase, OTHER_USE)

    def _segment(self, entry: int) -> tuple[int, str | None]:
        """Returns (number, phase) of the segment in which an entry lies."""
        number = bisect.bisect_right(self._entries, entry) - 1
        return number, self._edges[number][1] if number >= 0 else None


def _phase_of_stack(frames: list[dict[str, Any]]) -> str:
    kinds = set(map(_use_of_frame, frames))
    return OPTIMIZER if OPTIMIZER in kinds else BACKWARD if BACKWARD in kinds or not frames else FORWARD


def _use_of_frame(frame: dict[str, Any]) -> str | None:
    """Returns OPTIMIZER for a frame in an optimizer's file, BACKWARD for a call of backward(), else None."""
    kind, name = _use_of_file(str(frame.get("filename"))), str(frame.get("name"))
    return kind if kind != BACKWARD or "backward" in name or "recompute" in name or "unpack_hook" in name else None


@functools.lru_cache(maxsize=4096)  # a snapshot has millions of frames, but few files
def _use_of_file(filename: str) -> str | None:
    return OPTIMIZER if OPTIMIZER_FILE.search(filename) else BACKWARD if AUTOGRAD_FILE.search(filename) else None
