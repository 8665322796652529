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
    result = Timeline(
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
            result.initial[name] = result.initial.get(name, 0) + life.size
        else:
            count = result.allocated.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += life.size
            result.changes.append((life.start, name, life.size))
        if life.stop is not None:
            result.changes.append((life.stop, name, -life.size))
    result.changes.sort(key=lambda change: (change[0], change[2] > 0))  # what makes room first
    result.end_bytes = sum(result.initial.values()) + sum(change for _, _, change in result.changes)
    result.unexplained_bytes = 0 if lives.final_bytes is None else result.end_bytes - lives.final_bytes
    _find_peak(result)
    return result


def _find_peak(result):
    total = result.peak_bytes = sum(result.initial.values())
    for number, _, change in result.changes:
        total += change
        if total > result.peak_bytes:
            result.peak_bytes, result.peak_entry = total, number
    result.at_peak = held_at(result, result.peak_entry)


def held_at(result, entry):
    """{site: bytes} once that entry of the trace has happened; sites that hold nothing are omitted."""
    held = dict(result.initial)
    for number, site, change in result.changes:
        if number > entry:
            break
        held[site] = held.get(site, 0) + change
    return {site: size for site, size in held.items() if size}


def sampled(result, sites, max_points):
    """Bytes over time at no more than max_points moments: [(entry, {site: bytes}, bytes of all, reserved)].

    Of each segment of changes the moments of its largest and smallest sum are kept, so that no peak is lost.
    sites: those listed; the rest is under None.
    """
    changes = sorted(
        [(number, site, change, 0) for number, site, change in result.changes]
        + [(number, None, 0, change) for number, change in result.reserved_changes],
        key=lambda one: one[0],
    )
    length = max(1, -(-len(changes) // max(1, max_points // 2 - 1)))
    held = {site: result.initial.get(site, 0) for site in sites}
    total, reserved = sum(result.initial.values()), result.reserved_initial
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
    points.append((max(0, result.num_entries - 1), dict(held), total, reserved))
    return points


def segment_totals(snapshot: dict, device: int) -> dict[str, int]:
    """{"num_segments", and bytes: "reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", ...}."""
    sizes = ("reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", "largest_free")
    result = dict.fromkeys(("num_segments", *sizes), 0)
    for segment in _segments(snapshot, device):
        result["num_segments"] += 1
        result["reserved"] += segment["total_size"]
        is_used = any(block["state"] in ALIVE for block in segment["blocks"])
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "active_allocated":
                asked = block.get("requested_size", size)
                result["used"] += asked
                result["rounding"] += size - asked
            elif block["state"] in ALIVE:
                result["waiting"] += size
            else:
                result["free"] += size
                result["largest_free"] = max(result["largest_free"], size)
                if is_used:
                    result["in_gaps"] += size
                    result["largest_gap"] = max(result["largest_gap"], size)
    return result


def largest_segments(snapshot, device, count):
    """The count largest segments, largest first, and how many there are."""
    result = sorted(
        _segments(snapshot, device), key=lambda segment: (-segment["total_size"], segment.get("address") or 0)
    )
    return result[:count], len(result)


def _segments(snapshot, device):
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
