"""Drawings of a device's memory: chart specs over time, bars of modules, and a map of its segments as SVG."""

from collections.abc import Sequence
from typing import Any

from bench.analysis.memory.lives import OTHER, Name, Timeline, sampled, segments_of
from bench.analysis.memory.uses import USES
from bench.base.units import GIB, MIB, format_bytes
from bench.web import lanes
from bench.web.chart import chart, mark_of, series_of
from bench.web.page import Safe, join, tag

NUM_SITES = 6  # with an area each; the rest is one area
NUM_MODULES = 12
MAX_POINTS = 1600  # moments; each is drawn as a step of two points
MAX_SEGMENTS = 40
MAX_BLOCKS = 4000
WIDTH, ROW = 1000, 14  # of the map, in its own units
COLOURS = {use: f"series-{number}" for number, use in enumerate(USES)}  # as the chart has them
FILL = {
    "active_allocated": "var(--series-0)",
    "active_awaiting_free": "var(--series-4)",
    "active_pending_free": "var(--series-4)",
}
Spec = dict[str, Any]
Point = tuple[int, dict[Any, int], int, int]  # of lives.sampled()
Bar = tuple[float, float, str, str]  # x, width, state, title


def draw_places(held: Timeline[str], id: str) -> list[Spec]:
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


def draw_uses(held: Timeline[str], id: str) -> list[Spec]:
    """How much of the memory was for what; [] where nothing changed."""
    if not held.changes:
        return []
    about = ", ".join(f"{use} {format_bytes(size)}" for use, size in by_size(held.at_peak))
    points, scale, common = _drawn(held, USES, id)
    areas, about = _areas(points, USES, scale), f"at the largest moment {about}"
    return [chart(f"{id}-{held.lives.device}", "What memory was for", about, series=areas, **common)]


def _drawn(held: Timeline[str], names: Sequence[str], id: str) -> tuple[list[Point], int, dict[str, Any]]:
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


def draw_modules(held: Timeline[tuple[str, str]]) -> lanes.Panel:
    """Timeline by (module, use): at the fullest moment, each module's bytes by use."""
    by_module: dict[str, dict[str, int]] = {}
    for (module, use), size in held.at_peak.items():
        by_module.setdefault(module, {})[use] = size
    drawn = []
    for module, sizes in sorted(by_module.items(), key=lambda item: -sum(item[1].values()))[:NUM_MODULES]:
        known = [(use, sizes[use]) for use in USES if use in sizes]
        bars = lanes.stacked([(size / MIB, COLOURS[use], f"{use} {format_bytes(size)}") for use, size in known])
        caption = ", ".join(f"{use} {format_bytes(size)}" for use, size in by_size(sizes))
        drawn.append(lanes.Lane(module, caption, bars))
    names = [(COLOURS[use], use) for use in USES if any(use in sizes for sizes in by_module.values())]
    more = f"the largest {NUM_MODULES} of {len(by_module)}; " if len(by_module) > NUM_MODULES else ""
    about = f"{more}whose forward, or whose construction, asked"
    return lanes.Panel("modules", "By nn.Module at the largest moment", about, "MiB", drawn, names)


def by_size(sizes: dict[Name, int]) -> list[tuple[Name, int]]:
    """What holds something, the largest first."""
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1])


def segment_map(snapshot: dict[str, Any], device: int) -> Safe:
    """The largest segments as bars of blocks, to one scale.  A block too thin to see joins its equal neighbours."""
    segments = segments_of(snapshot, device)
    segments.sort(key=lambda segment: (-segment["total_size"], segment.get("address") or 0))
    if not segments:
        return Safe("")
    largest = segments[0]["total_size"]
    rows: list[Safe] = []
    num_blocks = 0
    for segment in segments[:MAX_SEGMENTS]:
        bars = _bars(segment, WIDTH / largest)
        num_blocks += len(bars)
        if num_blocks > MAX_BLOCKS:
            break
        rows.append(_row(segment, bars, len(rows), WIDTH / largest))
    caption = f"{len(rows)} of {len(segments)} segments, the largest {format_bytes(largest)}"
    caption = caption if rows else "too many blocks to draw"
    box = {"viewBox": f"0 0 {WIDTH} {ROW * max(1, len(rows))}", "style": "width:100%;display:block"}
    drawing = tag("svg", *rows, **box, role="img", aria_label=f"Map of {caption}")
    used, waiting = FILL["active_allocated"], FILL["active_awaiting_free"]
    square = "display:inline-block;width:.8em;height:.8em;border:1px solid var(--soft);margin:0 .3em 0 .8em;background:"
    keys = (("used", used), ("waiting for a stream", waiting), ("free", "var(--card)"))
    key = join(join([tag("span", style=square + fill), word]) for word, fill in keys)
    return tag("figure", tag("figcaption", tag("b", "Segments"), " ", tag("span", caption + ". "), key), drawing)


def _row(segment: dict[str, Any], bars: list[Bar], number: int, scale: float) -> Safe:
    outline = _rect(0, segment["total_size"] * scale, number, "fill:var(--card);stroke:var(--line)")
    rects = [
        _rect(x, width, number, f"fill:{FILL[state]};stroke:var(--page);stroke-width:.4", tag("title", title))
        for x, width, state, title in bars
        if state in FILL
    ]
    return join([outline, *rects])


def _rect(x: float, width: float, number: int, style: str, *title: Safe) -> Safe:
    return tag("rect", *title, x=f"{x:.2f}", y=number * ROW + 1, width=f"{width:.2f}", height=ROW - 3, style=style)


def _bars(segment: dict[str, Any], scale: float) -> list[Bar]:
    """[(x, width, state, title)] of the blocks from left to right."""
    bars: list[Bar] = []
    address = 0
    for block in segment["blocks"]:
        width, x, state = block["size"] * scale, address * scale, block["state"]
        address += block["size"]
        if bars and bars[-1][2] == state and (width < 0.5 or bars[-1][1] < 0.5):
            bars[-1] = (bars[-1][0], bars[-1][1] + width, state, "several blocks")
        else:
            bars.append((x, width, state, f"{format_bytes(block['size'])}, {state.replace('_', ' ')}"))
    return bars
