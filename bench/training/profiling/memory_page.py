"""The memory of one recording as a page: a curve, coloured by phase, and what was alive at its peak.

Stands where torch's export_memory_timeline stood, which is deprecated and needs matplotlib.
"""

from bench.base.units import MIB, NS_PER_MS, format_bytes
from bench.web.chart import chart, series_of
from bench.web.page import figure, page, section, soft, table, tag

NO_PHASE = "outside of phases"
NUM_GROUPS = 25


def of_timelines(title: str, about: str, timelines: dict, phases: list[tuple[str, int, int]]) -> str:
    """timelines: {device: Timeline}, phases: [(name, start_ns, end_ns)], as allocations.read gives -> HTML text."""
    charts = [_chart(timeline, phases) for timeline in timelines.values()]
    parts = [_section(timeline, drawn) for timeline, drawn in zip(timelines.values(), charts, strict=True)]
    if not timelines:
        parts = [tag("p", "Nothing was allocated or released while this was recorded.")]
    return page(title, tag("h1", title), soft(about), *parts, data={"charts": charts})


def _chart(timeline, phases):
    """Bytes alive over time.  Each phase is a series of its own, so that the curve has its colour there."""
    points = _points(timeline, phases)
    start_ns = points[0][0]
    names = dict.fromkeys([*(name for name, _, _ in phases), NO_PHASE])
    series = [
        series_of(name, [alive / MIB if phase == name else None for _, phase, alive in points], "area")
        for name in names
        if any(phase == name for _, phase, _ in points)
    ]
    x_ms = [(t_ns - start_ns) / NS_PER_MS for t_ns, _, _ in points]
    caption = f"at most {format_bytes(timeline.peak_bytes)}"
    return chart(f"alive-{timeline.device}", "Memory alive", caption, "ms", "MiB", x_ms, series)


def _points(timeline, phases):
    """[(t_ns, phase, bytes alive)], two at each edge: what was until then, and what is from then on."""
    edges = [(t_ns, None, alive) for t_ns, alive in timeline.points]
    for name, start_ns, end_ns in phases:
        edges += [(start_ns, name, None), (end_ns, NO_PHASE, None)]
    phase, alive, points = NO_PHASE, timeline.start_bytes, []
    for t_ns, new_phase, new_alive in sorted(edges, key=lambda edge: edge[0]):
        points.append((t_ns, phase, alive))
        phase, alive = new_phase or phase, alive if new_alive is None else new_alive
        points.append((t_ns, phase, alive))
    return points


def _section(timeline, drawn):
    before = f", {format_bytes(timeline.start_bytes)} of them from before" if timeline.start_bytes else ""
    shown, hidden = timeline.at_peak[:NUM_GROUPS], timeline.at_peak[NUM_GROUPS:]
    rows = [[*names, count, _mib(num_bytes)] for *names, num_bytes, count in shown]
    if hidden:
        num_bytes, count = (sum(group[index] for group in hidden) for index in (3, 4))
        rows.append(["", f"{len(hidden)} more", "", count, _mib(num_bytes)])
    rest = timeline.peak_bytes - timeline.start_bytes - sum(group[3] for group in timeline.at_peak)
    if rest < 0:
        rows.append(["", "released, but allocated before", "", "", _mib(rest)])
    caption = f"Alive at the peak, {len(timeline.points):,} allocations and releases in all"
    groups = table(("phase", "operator", "line", "count", "MiB"), rows, caption=caption)
    title = f"{timeline.device}: at most {format_bytes(timeline.peak_bytes)}{before}"
    return section(title, figure(drawn), groups)


def _mib(num_bytes):
    return round(num_bytes / MIB, 3)
