"""How many bytes each name held, at every moment: lives (bench/analysis/memory/lives.py) grouped by what names them.

Segments say how full the memory is that the allocator holds, what is lost to rounding and to gaps:
    reserved = used + rounding + waiting + free;  free = in gaps (of segments that are partly used) + whole segments
Gaps cannot be freed and serve only what fits into them; empty_cache() frees whole free segments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.analysis.memory import lives as lives_of
from bench.analysis.memory.lives import ALIVE, BEFORE, BEFORE_ALL, Life, Lives, Sites


@dataclass
class Timeline:
    """One device.  Changes are (entry, name, bytes); an entry is a number in the trace.  A name is what
    of() was given, a place in the code by of_device().
    """

    device: int
    num_entries: int
    times_us: list[float] | None  # of each entry; None where the snapshot has no times
    initial: dict[str, int]  # name -> bytes before the first entry
    changes: list[tuple[int, str, int]] = field(default_factory=list)
    reserved_initial: int = 0
    reserved_changes: list[tuple[int, int]] = field(default_factory=list)  # (entry, bytes)
    ooms: list[dict] = field(default_factory=list)  # {"entry", "size", "device_free", "stack"}
    end_bytes: int = 0  # by the walk
    unexplained_bytes: int = 0  # by the walk, minus by the final blocks: 0 in a whole snapshot
    allocated: dict[str, list[int]] = field(default_factory=dict)  # name -> [allocations, bytes] during the recording
    peak_bytes: int = 0
    peak_entry: int = -1  # -1: before the first entry
    at_peak: dict[str, int] = field(default_factory=dict)  # name -> bytes


def of_device(snapshot: dict, device: int, sites: Sites | None = None) -> Timeline:
    """Snapshot, number of the device -> Timeline by place.  sites: names stacks and remembers them; None: its own."""
    return of(lives_of.of_device(snapshot, device), by_place(sites or Sites()))


def by_place(sites: Sites) -> Callable[[Life], str]:
    """The line of code that asked, for of()."""
    return lambda life: BEFORE if life.frames is None else sites.of(life.frames)


def of(lives: Lives, name_of: Callable[[Life], str]) -> Timeline:
    """Lives, what each is called -> Timeline."""
    timeline = Timeline(
        lives.device,
        lives.num_entries,
        lives.times_us,
        initial={},
        reserved_initial=lives.reserved_initial,
        reserved_changes=lives.reserved_changes,
        ooms=lives.ooms,
    )
    for life in lives.found:
        name = name_of(life)
        if life.start == BEFORE_ALL:
            timeline.initial[name] = timeline.initial.get(name, 0) + life.size
        else:
            count = timeline.allocated.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += life.size
            timeline.changes.append((life.start, name, life.size))
        if life.stop is not None:
            timeline.changes.append((life.stop, name, -life.size))
    timeline.changes.sort(key=lambda change: (change[0], change[2] > 0))  # what makes room first
    timeline.end_bytes = sum(timeline.initial.values()) + sum(change for _, _, change in timeline.changes)
    timeline.unexplained_bytes = 0 if lives.final_bytes is None else timeline.end_bytes - lives.final_bytes
    _find_peak(timeline)
    return timeline


def _find_peak(timeline):
    total = timeline.peak_bytes = sum(timeline.initial.values())
    for number, _, change in timeline.changes:
        total += change
        if total > timeline.peak_bytes:
            timeline.peak_bytes, timeline.peak_entry = total, number
    timeline.at_peak = held_at(timeline, timeline.peak_entry)


def held_at(timeline, entry):
    """{site: bytes} once that entry of the trace has happened; sites that hold nothing are omitted."""
    held = dict(timeline.initial)
    for number, site, change in timeline.changes:
        if number > entry:
            break
        held[site] = held.get(site, 0) + change
    return {site: size for site, size in held.items() if size}


def sampled(timeline, sites, max_points):
    """Bytes over time at no more than max_points moments: [(entry, {site: bytes}, bytes of all, reserved)].

    Of each segment of changes the moments of its largest and smallest sum are kept, so that no peak is lost.
    sites: those listed; the rest is under None.
    """
    changes = sorted(
        [(number, site, change, 0) for number, site, change in timeline.changes]
        + [(number, None, 0, change) for number, change in timeline.reserved_changes],
        key=lambda one: one[0],
    )
    length = max(1, -(-len(changes) // max(1, max_points // 2 - 1)))
    held = {site: timeline.initial.get(site, 0) for site in sites}
    total, reserved = sum(timeline.initial.values()), timeline.reserved_initial
    held[None] = total - sum(held.values())
    points = [(0, dict(held), total, reserved)]
    for start in range(0, len(changes), length):
        largest = smallest = None
        for number, site, change, grown in changes[start : start + length]:
            held[site if site in held else None] += change
            total, reserved = total + change, reserved + grown
            if largest is None or total > largest[2]:
                largest = (number, dict(held), total, reserved)
            if smallest is None or total < smallest[2]:
                smallest = (number, dict(held), total, reserved)
        points += sorted({id(one): one for one in (largest, smallest)}.values(), key=lambda one: one[0])
    points.append((max(0, timeline.num_entries - 1), dict(held), total, reserved))
    return points


def segment_totals(snapshot: dict, device: int) -> dict[str, int]:
    """{"num_segments", and bytes: "reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", ...}."""
    sizes = ("reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", "largest_free")
    totals = dict.fromkeys(("num_segments", *sizes), 0)
    for segment in _segments(snapshot, device):
        totals["num_segments"] += 1
        totals["reserved"] += segment["total_size"]
        is_used = any(block["state"] in ALIVE for block in segment["blocks"])
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "active_allocated":
                asked = block.get("requested_size", size)
                totals["used"] += asked
                totals["rounding"] += size - asked
            elif block["state"] in ALIVE:
                totals["waiting"] += size
            else:
                totals["free"] += size
                totals["largest_free"] = max(totals["largest_free"], size)
                if is_used:
                    totals["in_gaps"] += size
                    totals["largest_gap"] = max(totals["largest_gap"], size)
    return totals


def largest_segments(snapshot, device, count):
    """The count largest segments, largest first, and how many there are."""
    segments = sorted(
        _segments(snapshot, device), key=lambda segment: (-segment["total_size"], segment.get("address") or 0)
    )
    return segments[:count], len(segments)


def _segments(snapshot, device):
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
