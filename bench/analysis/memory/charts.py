"""Drawings of a device's memory: charts over time, and bars of its modules and segments."""

from collections.abc import Sequence
from typing import Any

from bench.analysis.memory.lives import OTHER, Timeline, sampled, segments_of
from bench.analysis.memory.uses import USES
from bench.base.units import GIB, MIB, format_bytes
from bench.web import lanes
from bench.web.chart import chart, mark_of, series_of

NUM_SITES = 6  # with an area each; the rest is one area
MAX_POINTS = 1600  # moments; each is drawn as a step of two points
MAX_SEGMENTS = 24
MAX_BARS = 4000  # of all segments
STATES = {  # of a block: its colour, what it is
    "active_allocated": ("series-0", "used"),
    "active_awaiting_free": ("series-4", "waiting for a stream"),
    "active_pending_free": ("series-4", "waiting for a stream"),
}
FREE = ("line", "free")
Spec = dict[str, Any]
Point = tuple[int, dict[Any, int], int, int]  # of lives.sampled()


def draw_places(held: Timeline, id: str) -> list[Spec]:
    """Who held how much, and what was used of what was reserved."""
    if not held.changes and not held.lives.reserved_changes:
        return []
    places = [place for place, _ in by_size(held.at_peak)[:NUM_SITES]]
    note = "; dashed lines are the marks of the table below" if held.lives.marks else ""
    about = f"largest {format_bytes(held.peak_bytes)}{note}"
    points, scale, common = _drawn(held, places, id)
    areas = _areas(points, places, scale)
    specs = [chart(f"{id}-held-{held.lives.device}", "Who held memory", about, series=areas, **common)]
    if any(reserved for *_, reserved in points):
        both = [series_of("used", [used / scale for _, _, used, _ in points], "line")]
        both += [series_of("reserved by the allocator", [reserved / scale for *_, reserved in points], "line")]
        between = "what lies between them is rounding, gaps and cache"
        specs.append(chart(f"{id}-reserved-{held.lives.device}", "Used and reserved", between, series=both, **common))
    return specs


def draw_uses(held: Timeline, id: str) -> list[Spec]:
    """How much of the memory was for what; [] where nothing changed."""
    if not held.changes:
        return []
    about = ", ".join(f"{use} {format_bytes(size)}" for use, size in by_size(held.at_peak))
    points, scale, common = _drawn(held, USES, id)
    areas, about = _areas(points, USES, scale), f"at the largest moment {about}"
    return [chart(f"{id}-{held.lives.device}", "What memory was for", about, series=areas, **common)]


def _drawn(held: Timeline, names: Sequence[str], id: str) -> tuple[list[Point], int, dict[str, Any]]:
    """(points of lives.sampled, bytes of the y axis' unit, what the charts of a device share).

    What is held stays held until it changes: each point is preceded by the values before it.
    """
    lives = held.lives
    points: list[Point] = []
    for point in sampled(held, names, MAX_POINTS):
        if points and point[0] > points[-1][0]:
            points.append((point[0], *points[-1][1:]))
        points.append(point)
    is_large = max(held.peak_bytes, *(reserved for *_, reserved in points)) >= 4 * GIB
    lines = [mark_of(where, label, "validation") for where, label in lives.marks]
    lines += [mark_of(lives.x[oom["entry"]], "out of memory", "stall") for oom in lives.ooms]
    common = {
        "x_label": "event" if lives.times_us is None else "ms since the recording's first event",
        "y_label": "GiB" if is_large else "MiB",
        "x": [lives.x[entry] for entry, *_ in points],
        "marks": lines,
        "sync": f"{id}-{lives.device}",
    }
    return points, GIB if is_large else MIB, common


def _areas(points: list[Point], names: Sequence[str], scale: float) -> list[dict[str, Any]]:
    shown = [(name, name) for name in names] + [(None, OTHER)] * any(held[None] for _, held, _, _ in points)
    return [series_of(label, [held[name] / scale for _, held, _, _ in points], "area") for name, label in shown]


def by_size(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """What holds something, the largest first."""
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1])


def draw_segments(snapshot: dict[str, Any], device: int) -> lanes.Panel:
    """The largest segments as bars of blocks, to one scale.  Blocks too thin to see join neighbours of their state."""
    segments = sorted(segments_of(snapshot, device), key=lambda segment: -segment["total_size"])
    thin_bytes = max((segment["total_size"] for segment in segments), default=0) / (2 * lanes.WIDTH)
    drawn: list[lanes.Lane] = []
    num_bars = 0
    for number, segment in enumerate(segments[:MAX_SEGMENTS], 1):
        stretches: list[tuple[int, int, str, int]] = []  # begin, end, state, number of blocks
        end = 0
        for block in segment["blocks"]:
            begin, end, state = end, end + block["size"], block["state"]
            last = stretches[-1] if stretches else None
            if last and last[2] == state and min(end - begin, last[1] - last[0]) < thin_bytes:
                stretches[-1] = (last[0], end, state, last[3] + 1)
            else:
                stretches.append((begin, end, state, 1))
        bars = []
        for begin, end, state, num_blocks in stretches:
            colour, what = STATES.get(state, FREE)
            blocks = f"{num_blocks} blocks, " if num_blocks > 1 else ""
            bars.append(lanes.Bar(begin / MIB, end / MIB, colour, f"{blocks}{format_bytes(end - begin)}, {what}"))
        num_bars += len(bars)
        if num_bars > MAX_BARS:
            break
        drawn.append(lanes.Lane(f"segment {number}", format_bytes(segment["total_size"]), bars))
    about = f"the largest {len(drawn)} of {len(segments)}, each from its first address to its last"
    names = [*dict.fromkeys(STATES.values()), FREE]
    return lanes.Panel("segments", "Segments", about, "MiB", drawn, names)
