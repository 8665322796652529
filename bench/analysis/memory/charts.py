"""Drawings of a device's memory: chart specs over time, and a map of its segments as SVG."""

import itertools

from bench.analysis.memory import timeline
from bench.analysis.memory.lives import OTHER
from bench.base.units import GIB, MIB, format_bytes
from bench.web.chart import chart, mark_of, series_of
from bench.web.page import Safe, join, tag

NUM_SITES = 6  # with an area each; the rest is one area
MAX_POINTS = 1600  # moments; each is drawn as a step of two points
MAX_SEGMENTS = 40
MAX_BLOCKS = 4000
WIDTH, ROW = 1000, 14  # of the map, in its own units
FILL = {
    "active_allocated": "var(--series-0)",
    "active_awaiting_free": "var(--series-4)",
    "active_pending_free": "var(--series-4)",
}


def unit_of(num_bytes):
    return (GIB, "GiB") if num_bytes >= 4 * GIB else (MIB, "MiB")


def charts(held, marks=(), id="memory"):
    """Timeline -> two specs: who held how much, and what was used of what was reserved.  marks: [(x, label)]."""
    if not held.changes and not held.reserved_changes:
        return []
    sites = [site for site, _ in sorted(held.at_peak.items(), key=lambda one: -one[1])[:NUM_SITES]]
    points, scale, common = _drawn(held, sites, marks, id)
    note = "; dashed lines are the marks of the table below" if marks else ""
    about = f"largest {format_bytes(held.peak_bytes)}{note}"
    areas = _areas(points, sites, scale)
    specs = [chart(f"{id}-held-{held.device}", "Who held memory", about, series=areas, **common)]
    if any(point[3] for point in points):
        both = [_series("used", points, lambda point: point[2], scale, "line")]
        both += [_series("reserved by the allocator", points, lambda point: point[3], scale, "line")]
        between, id = "what lies between them is rounding, gaps and cache", f"{id}-reserved-{held.device}"
        specs.append(chart(id, "Used and reserved", between, series=both, **common))
    return specs


def of_names(held, names, marks, id, title, about):
    """Timeline -> one spec: how much each of these names held, in their order; [] where nothing changed."""
    if not held.changes:
        return []
    points, scale, common = _drawn(held, names, marks, id)
    return [chart(f"{id}-{held.device}", title, about, series=_areas(points, names, scale), **common)]


def _drawn(held, names, marks, id):
    """(points of timeline.sampled, bytes of the y axis' unit, what the charts of a device share)."""
    points = _stepped(timeline.sampled(held, names, MAX_POINTS))
    scale, unit = unit_of(max(held.peak_bytes, max(point[3] for point in points)))
    x, x_label = axis(held)
    lines = [mark_of(where, label, "validation") for where, label in marks]
    lines += [mark_of(x[oom["entry"]], "out of memory", "stall") for oom in held.ooms]
    at = [x[entry] for entry, *_ in points]
    common = {"x_label": x_label, "y_label": unit, "x": at, "marks": lines, "sync": f"{id}-{held.device}"}
    return points, scale, common


def _areas(points, names, scale):
    areas = [_series(name, points, lambda point, name=name: point[1][name], scale, "area") for name in names]
    if any(by_name[None] for _, by_name, _, _ in points):
        areas.append(_series(OTHER, points, lambda point: point[1][None], scale, "area"))
    return areas


def _series(name, points, value_of, scale, kind):
    return series_of(name, [value_of(point) / scale for point in points], kind)


def _stepped(points):
    """What is held stays held until it changes: each point is preceded by the values before it."""
    steps = points[:1]
    for before, point in zip(points, points[1:]):
        if point[0] > before[0]:
            steps.append((point[0], *before[1:]))
        steps.append(point)
    return steps


def axis(held):
    """(x of each entry, label): milliseconds since the first one, never backwards; without times their numbers."""
    if held.times_us is None:
        return list(range(max(1, held.num_entries))), "event"
    x_ms = [(time_us - held.times_us[0]) / 1e3 for time_us in held.times_us]
    return list(itertools.accumulate(x_ms, max)), "ms since the recording's first event"


def segment_map(snapshot, device):
    """The largest segments as bars of blocks, to one scale.  A block too thin to see joins its equal neighbours."""
    largest, num_all = timeline.largest_segments(snapshot, device, MAX_SEGMENTS)
    if not largest:
        return Safe("")
    scale = WIDTH / largest[0]["total_size"]
    rows, num_blocks = [], 0
    for segment in largest:
        bars = _bars(segment, scale)
        num_blocks += len(bars)
        if num_blocks > MAX_BLOCKS:
            break
        rows.append(_row(segment, bars, len(rows), scale))
    caption = f"{len(rows)} of {num_all} segments, the largest {format_bytes(largest[0]['total_size'])}"
    caption = caption if rows else "too many blocks to draw"
    box = {"viewBox": f"0 0 {WIDTH} {ROW * max(1, len(rows))}", "style": "width:100%;display:block"}
    drawing = tag("svg", *rows, **box, role="img", aria_label=f"Map of {caption}")
    return tag("figure", tag("figcaption", tag("b", "Segments"), " ", tag("span", caption + ". "), _key()), drawing)


def _key():
    used, waiting = FILL["active_allocated"], FILL["active_awaiting_free"]
    words = (("used", used), ("waiting for a stream", waiting), ("free", "var(--card)"))
    square = "display:inline-block;width:.8em;height:.8em;border:1px solid var(--soft);margin:0 .3em 0 .8em;background:"
    return join([join([tag("span", style=square + fill), word]) for word, fill in words])


def _row(segment, bars, number, scale):
    outline = _rect(0, segment["total_size"] * scale, number, "fill:var(--card);stroke:var(--line)")
    rects = [
        _rect(x, width, number, f"fill:{FILL[state]};stroke:var(--page);stroke-width:.4", tag("title", title))
        for x, width, state, title in bars
        if state in FILL
    ]
    return join([outline, *rects])


def _rect(x, width, number, style, *title):
    return tag("rect", *title, x=f"{x:.2f}", y=number * ROW + 1, width=f"{width:.2f}", height=ROW - 3, style=style)


def _bars(segment, scale):
    """[(x, width, state, title)] of the blocks from left to right."""
    bars, address = [], 0
    for block in segment["blocks"]:
        width, x, state = block["size"] * scale, address * scale, block["state"]
        address += block["size"]
        if bars and bars[-1][2] == state and (width < 0.5 or bars[-1][1] < 0.5):
            bars[-1] = (bars[-1][0], bars[-1][1] + width, state, "several blocks")
        else:
            bars.append((x, width, state, f"{format_bytes(block['size'])}, {state.replace('_', ' ')}"))
    return bars
