"""What an allocator's trace and its final segments say together: from when to when each piece of memory was held.

1. An alloc begins a life, a free_completed ends it (memory that is only free_requested still waits for another stream
   and cannot be used yet).
2. What was freed without having been allocated in the trace was there before it began; so was what is still there at
   the end without having been allocated in the trace.
3. So the sum at the beginning is known, and the sum at the end is that of the final blocks, to the byte.
Sizes are those asked for; the allocator rounds up, which bench/analysis/memory/timeline.py shows.
"""

import re
from dataclasses import dataclass, field

INSIDE_TORCH = re.compile(r"(^|/)torch/|^<(?!eval_with_key)")
PYTHON = re.compile(r"\.py$|^<")  # the rest is C++, where stacks=all recorded it
INDUCTOR = re.compile(r"torchinductor[^/]*/")
NO_STACK = "no Python stack"
BEFORE = "before the recording"
OTHER = "all other places"
MAX_STACK_FRAMES = 60
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
ALIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
BEFORE_ALL = -1  # a life's start: before the first entry


@dataclass(slots=True)
class Life:
    """start, stop: numbers of entries, BEFORE_ALL and None (alive at the end) where they are not in the trace.

    frames: the stack, innermost first; None where it began before the trace and nothing says where.
    """

    size: int
    start: int
    stop: int | None
    frames: list | None


@dataclass
class Lives:
    """One device.  An entry is a number in its trace."""

    device: int
    num_entries: int
    times_us: list[float] | None  # of each entry; None where the snapshot has no times
    found: list[Life] = field(default_factory=list)
    reserved_initial: int = 0
    reserved_changes: list[tuple[int, int]] = field(default_factory=list)  # (entry, bytes)
    ooms: list[dict] = field(default_factory=list)  # {"entry", "size", "device_free", "stack"}
    final_bytes: int | None = None  # of the final blocks; None: a snapshot without segments


def of_device(snapshot: dict, device: int) -> Lives:
    """Snapshot, number of the device -> Lives, in the order in which they ended, those that did not end last."""
    traces = snapshot["device_traces"]
    entries = traces[device] if device < len(traces) else []
    has_times = entries and all("time_us" in entry for entry in entries)
    lives = Lives(device, len(entries), [entry["time_us"] for entry in entries] if has_times else None)
    alive = _walk(entries, lives)
    blocks, reserved = _final(snapshot, device)
    lives.found += [Life(size, BEFORE_ALL, None, frames) for at, (size, frames) in blocks.items() if at not in alive]
    lives.found += alive.values()
    lives.reserved_initial = reserved - sum(change for _, change in lives.reserved_changes)
    lives.final_bytes = sum(size for size, _ in blocks.values()) if snapshot["segments"] else None
    return lives


def devices(snapshot: dict) -> list[int]:
    """Numbers of the devices that the snapshot says something about."""
    with_trace = {number for number, trace in enumerate(snapshot["device_traces"]) if trace}
    return sorted(with_trace | {segment.get("device", 0) for segment in snapshot["segments"]})


def _final(snapshot, device):
    """{address: (bytes asked for, stack or None)} of the blocks alive at the end, and the bytes reserved."""
    blocks, reserved = {}, 0
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        reserved += segment["total_size"]
        address = segment.get("address") or 0
        for block in segment["blocks"]:
            if block["state"] in ALIVE:
                size = block.get("requested_size", block["size"])
                blocks[block.get("address", address)] = (size, block.get("frames") or None)
            address += block["size"]
    return blocks, reserved


def _walk(entries, lives):
    """Fills in found, reserved_changes and ooms -> {address: Life} of what is alive at the end."""
    alive = {}
    ends_life = "free_completed" if any(entry["action"] == "free_completed" for entry in entries) else "free_requested"

    def end(life, number):
        life.stop = number
        lives.found.append(life)

    for number, entry in enumerate(entries):
        action, size, address = entry["action"], entry["size"], entry.get("addr")
        if action == "alloc":
            if address in alive:  # its free was not recorded
                end(alive.pop(address), number)
            alive[address] = Life(size, number, None, entry.get("frames") or [])
        elif action == ends_life:
            end(alive.pop(address, None) or Life(size, BEFORE_ALL, None, None), number)
        elif action in GROWS:
            lives.reserved_changes.append((number, size))
        elif action in SHRINKS:
            lives.reserved_changes.append((number, -size))
        elif action == "oom":
            stack = [line_of(frame) for frame in entry.get("frames") or ()]
            lives.ooms.append({"entry": number, "size": size, "device_free": entry.get("device_free"), "stack": stack})
    return alive


class Sites:
    """Names of stacks.  It remembers what each source file is: a snapshot has millions of frames, but few files."""

    def __init__(self):
        self._kinds = {}  # file -> "ours", "torch" or "native"
        self.stacks = {}  # name -> one stack that led there, innermost first, as lines of text

    def of(self, frames):
        """[{"filename", "line", "name"}, ...innermost first] -> "models/gpt2.py:45 forward".

        The innermost frame outside of torch; else the innermost of Python; else NO_STACK.
        """
        inside = None
        for frame in frames:
            kind = self._kind(frame.get("filename"))
            if kind == "ours":
                return self._named(line_of(frame, short=True), frames)
            if kind == "torch" and inside is None:
                inside = frame
        return NO_STACK if inside is None else self._named(f"{line_of(inside, short=True)} (torch)", frames)

    def _named(self, name, frames):
        if name not in self.stacks:
            self.stacks[name] = [line_of(frame) for frame in frames[:MAX_STACK_FRAMES]]
        return name

    def _kind(self, filename):
        filename = str(filename)
        if filename not in self._kinds:
            python, torch = PYTHON.search(filename), INSIDE_TORCH.search(filename)
            self._kinds[filename] = "native" if not python else "torch" if torch else "ours"
        return self._kinds[filename]


def line_of(frame, short=False):
    path = str(frame.get("filename", "?"))
    if short:
        path = "compiled " + path.rpartition("/")[2] if INDUCTOR.search(path) else "/".join(path.split("/")[-2:])
    return f"{path}:{frame.get('line', '?')} {frame.get('name', '?')}"
