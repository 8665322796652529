"""Charts of a device's memory over time."""

from collections.abc import Sequence
from typing import Any

from bench.analysis.memory.lives import OTHER, Timeline, sampled
from bench.analysis.memory.uses import USES
from bench.base.units import GIB, MIB, format_bytes
from bench.web.chart import chart, mark_of, series_of

NUM_SITES = 6  # with an area each; the rest is one area
MAX_POINTS = 1600  # moments; each is drawn as a step of two points
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
