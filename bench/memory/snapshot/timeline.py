"""What an allocator's trace and its final segments say together: how many bytes each site held, at every moment.

1. Each alloc adds its bytes to the site that asked, each free_completed takes them away (memory that is only
   free_requested still waits for another stream and cannot be used yet).
2. What was freed without having been allocated in the trace was there before it began; so was what is still there at
   the end without having been allocated in the trace.
3. So the sum at the beginning is known, and the sum at the end is that of the final blocks, to the byte.
Sizes are those asked for; the allocator rounds up, which bench/memory/snapshot/segments.py shows.
"""

from dataclasses import dataclass, field

from bench.memory.snapshot.sites import BEFORE, Sites, line_of

GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
ALIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


@dataclass
class Timeline:
    """One device.  Changes are (entry, site, bytes); an entry is a number in the trace."""

    device: int
    num_entries: int
    times_us: list[float] | None  # of each entry; None where the snapshot has no times
    initial: dict[str, int]  # site -> bytes before the first entry
    changes: list[tuple[int, str, int]] = field(default_factory=list)
    reserved_initial: int = 0
    reserved_changes: list[tuple[int, int]] = field(default_factory=list)  # (entry, bytes)
    ooms: list[dict] = field(default_factory=list)  # {"entry", "size", "device_free", "stack"}
    end_bytes: int = 0  # by the walk
    unexplained_bytes: int = 0  # by the walk, minus by the final blocks: 0 in a whole snapshot
    allocated: dict[str, list[int]] = field(default_factory=dict)  # site -> [allocations, bytes] during the recording
    peak_bytes: int = 0
    peak_entry: int = -1  # -1: before the first entry
    at_peak: dict[str, int] = field(default_factory=dict)  # site -> bytes


def of_device(snapshot: dict, device: int, sites: Sites | None = None) -> Timeline:
    """Snapshot, number of the device -> Timeline.  sites: names stacks and remembers them; None: one of its own."""
    sites = sites or Sites()
    traces = snapshot["device_traces"]
    entries = traces[device] if device < len(traces) else []
    blocks, reserved = _final(snapshot, device, sites)
    has_times = entries and all("time_us" in entry for entry in entries)
    times_us = [entry["time_us"] for entry in entries] if has_times else None
    found = Timeline(device, len(entries), times_us, {})
    alive = _walk(entries, sites, found)
    for address, (size, site) in blocks.items():
        if address not in alive:
            found.initial[site] = found.initial.get(site, 0) + size
    found.reserved_initial = reserved - sum(change for _, change in found.reserved_changes)
    found.end_bytes = sum(found.initial.values()) + sum(change for _, _, change in found.changes)
    found.unexplained_bytes = found.end_bytes - sum(size for size, _ in blocks.values()) if snapshot["segments"] else 0
    _find_peak(found)
    return found


def devices(snapshot: dict) -> list[int]:
    """Numbers of the devices that the snapshot says something about."""
    with_trace = {number for number, trace in enumerate(snapshot["device_traces"]) if trace}
    return sorted(with_trace | {segment.get("device", 0) for segment in snapshot["segments"]})


def _final(snapshot, device, sites):
    """{address: (bytes asked for, site)} of the blocks alive at the end, and the bytes reserved."""
    blocks, reserved = {}, 0
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        reserved += segment["total_size"]
        address = segment.get("address") or 0
        for block in segment["blocks"]:
            if block["state"] in ALIVE:
                frames = block.get("frames") or ()
                site = sites.of(frames) if frames else BEFORE
                blocks[block.get("address", address)] = (block.get("requested_size", block["size"]), site)
            address += block["size"]
    return blocks, reserved


def _walk(entries, sites, found):
    """Fills in changes, initial, reserved_changes, ooms and allocated -> {address: ...} of what is alive at the end."""
    alive = {}
    ends_life = "free_completed" if any(entry["action"] == "free_completed" for entry in entries) else "free_requested"
    for number, entry in enumerate(entries):
        action, size = entry["action"], entry["size"]
        if action == "alloc":
            site = sites.of(entry.get("frames") or ())
            _forget(alive.pop(entry.get("addr"), None), number, found)  # its free was not recorded
            alive[entry.get("addr")] = (size, site)
            found.changes.append((number, site, size))
            count = found.allocated.setdefault(site, [0, 0])
            count[0] += 1
            count[1] += size
        elif action == ends_life:
            known = alive.pop(entry.get("addr"), None)
            if known is None:
                known = (size, BEFORE)
                found.initial[BEFORE] = found.initial.get(BEFORE, 0) + size
            _forget(known, number, found)
        elif action in GROWS:
            found.reserved_changes.append((number, size))
        elif action in SHRINKS:
            found.reserved_changes.append((number, -size))
        elif action == "oom":
            stack = [line_of(frame) for frame in entry.get("frames") or ()]
            found.ooms.append({"entry": number, "size": size, "device_free": entry.get("device_free"), "stack": stack})
    return alive


def _forget(known, number, found):
    if known is not None:
        size, site = known
        found.changes.append((number, site, -size))


def _find_peak(found):
    total = found.peak_bytes = sum(found.initial.values())
    for number, _, change in found.changes:
        total += change
        if total > found.peak_bytes:
            found.peak_bytes, found.peak_entry = total, number
    found.at_peak = held_at(found, found.peak_entry)


def held_at(found, entry):
    """{site: bytes} once that entry of the trace has happened; sites that hold nothing are omitted."""
    held = dict(found.initial)
    for number, site, change in found.changes:
        if number > entry:
            break
        held[site] = held.get(site, 0) + change
    return {site: size for site, size in held.items() if size}


def sampled(found, sites, max_points):
    """Bytes over time at no more than max_points moments: [(entry, {site: bytes}, bytes of all, reserved)].

    Of each segment of changes the moments of its largest and smallest sum are kept, so that no peak is lost.
    sites: those listed; the rest is under None.
    """
    changes = sorted(
        [(number, site, change, 0) for number, site, change in found.changes]
        + [(number, None, 0, change) for number, change in found.reserved_changes],
        key=lambda one: one[0],
    )
    length = max(1, -(-len(changes) // max(1, max_points // 2 - 1)))
    held = {site: found.initial.get(site, 0) for site in sites}
    total, reserved = sum(found.initial.values()), found.reserved_initial
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
    points.append((max(0, found.num_entries - 1), dict(held), total, reserved))
    return points
