"""Drawings of a device's memory: chart specs over time, and a map of its segments as SVG."""

from bench.memory.snapshot import segments, timeline
from bench.memory.snapshot.sites import OTHER
from bench.units import GIB, MIB, format_bytes
from bench.web.chart import chart, mark_of, series_of
from bench.web.page import Safe, join, tag

NUM_PLACES = 6  # told apart in the picture; the rest is one area
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


def charts(found, marks=(), id="memory"):
    """Timeline -> two specs: who held how much, and what was used of what was reserved.  marks: [(x, label)]."""
    if not found.changes and not found.reserved_changes:
        return []
    places = [place for place, _ in sorted(found.at_peak.items(), key=lambda one: -one[1])[:NUM_PLACES]]
    points = _stepped(timeline.sampled(found, places, MAX_POINTS))
    scale, unit = unit_of(max(found.peak_bytes, max(point[3] for point in points)))
    x, x_label = axis(found)
    at = [x[entry] for entry, _, _, _ in points]
    lines = [mark_of(where, label, "validation") for where, label in marks]
    lines += [mark_of(x[oom["entry"]], "out of memory", "stall") for oom in found.ooms]
    areas = [series_of(place, [held[place] / scale for _, held, _, _ in points], "area") for place in places]
    if any(held[None] for _, held, _, _ in points):
        areas.append(series_of(OTHER, [held[None] / scale for _, held, _, _ in points], "area"))
    peak = f"largest {format_bytes(found.peak_bytes)}" + (
        "; dashed lines are the marks of the table below" if marks else ""
    )
    first = chart(
        f"{id}-held-{found.device}", "Who held memory", peak, x_label, unit, at, areas, lines, f"{id}-{found.device}"
    )
    if not any(point[3] for point in points):
        return [first]
    used = series_of("used", [total / scale for _, _, total, _ in points], "line")
    reserved = series_of("reserved by the allocator", [grown / scale for _, _, _, grown in points], "line")
    second = chart(
        f"{id}-reserved-{found.device}",
        "Used and reserved",
        "what lies between them is rounding, gaps and cache",
        x_label,
        unit,
        at,
        [used, reserved],
        lines,
        f"{id}-{found.device}",
    )
    return [first, second]


def _stepped(points):
    """What is held stays held until it changes: each point is preceded by the values before it."""
    steps = points[:1]
    for before, point in zip(points, points[1:]):
        if point[0] > before[0]:
            steps.append((point[0], *before[1:]))
        steps.append(point)
    return steps


def axis(found):
    """(x of each entry, label): milliseconds since the first one, never backwards; without times their numbers."""
    if found.times_us is None:
        return list(range(max(1, found.num_entries))), "event"
    x, latest = [], 0.0
    for time_us in found.times_us:
        latest = max(latest, (time_us - found.times_us[0]) / 1e3)
        x.append(latest)
    return x, "ms since the recording's first event"


def segment_map(snapshot, device):
    """The largest segments as bars of blocks, drawn to one scale.  A block too thin to see joins its equal neighbours."""
    shown, num_all = segments.largest(snapshot, device, MAX_SEGMENTS)
    if not shown:
        return Safe("")
    scale = WIDTH / shown[0]["total_size"]
    rows, num_blocks = [], 0
    for number, segment in enumerate(shown):
        bars = _bars(segment, scale)
        num_blocks += len(bars)
        if num_blocks > MAX_BLOCKS:
            shown = shown[:number]
            break
        rows.append(_row(segment, bars, number, scale))
    height = ROW * max(1, len(shown))
    words = (
        f"{len(shown)} of {num_all} segments, the largest {format_bytes(shown[0]['total_size'])}"
        if shown
        else "too many blocks to draw"
    )
    drawing = tag(
        "svg",
        *rows,
        viewBox=f"0 0 {WIDTH} {height}",
        style="width:100%;display:block",
        role="img",
        aria_label=f"Map of {words}",
    )
    return tag("figure", tag("figcaption", tag("b", "Segments"), " ", tag("span", words + ". "), _key()), drawing)


def _key():
    words = (
        ("used", FILL["active_allocated"]),
        ("waiting for a stream", FILL["active_awaiting_free"]),
        ("free", "var(--card)"),
    )
    square = "display:inline-block;width:.8em;height:.8em;border:1px solid var(--soft);margin:0 .3em 0 .8em;background:"
    return join([join([tag("span", style=square + fill), word]) for word, fill in words])


def _row(segment, bars, number, scale):
    outline = tag(
        "rect",
        x=0,
        y=number * ROW + 1,
        width=_short(segment["total_size"] * scale),
        height=ROW - 3,
        style="fill:var(--card);stroke:var(--line)",
    )
    rects = [
        tag(
            "rect",
            tag("title", title),
            x=_short(x),
            y=number * ROW + 1,
            width=_short(width),
            height=ROW - 3,
            style=f"fill:{FILL[state]};stroke:var(--page);stroke-width:.4",
        )
        for x, width, state, title in bars
        if state in FILL
    ]
    return join([outline, *rects])


def _bars(segment, scale):
    """[(x, width, state, title)] of the blocks from left to right."""
    bars, address = [], 0
    for block in segment["blocks"]:
        width, x = block["size"] * scale, address * scale
        address += block["size"]
        if bars and bars[-1][2] == block["state"] and (width < 0.5 or bars[-1][1] < 0.5):
            x, width = bars[-1][0], bars[-1][1] + width
            bars[-1] = (x, width, block["state"], "several blocks")
        else:
            bars.append(
                (x, width, block["state"], f"{format_bytes(block['size'])}, {block['state'].replace('_', ' ')}")
            )
    return bars


def _short(value):
    return f"{value:.2f}"
