"""The memory of one recording as a page: a curve and what was alive at its peak.  One file, no script, no network.

Stands where torch's export_memory_timeline stood, which is deprecated and needs matplotlib.
"""

from html import escape

from bench.profiling.allocations import PHASES
from bench.units import MIB, NS_PER_MS, format_bytes

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1000, 300, 70, 14, 30
COLOURS = dict(zip(PHASES, ("#d9c2f0", "#bfe0c4", "#f6d7a7", "#f3b9b9", "#c6d8f2")))
NUM_GROUPS = 25
MAX_BANDS = 400
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1080px; padding: 0 1em; color: #222; background: #fff }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin-top: 2em } svg { width: 100%; height: auto }
table { border-collapse: collapse; width: 100% } td, th { padding: 2px 8px; text-align: left; border-bottom: 1px solid #ddd }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td { overflow-wrap: anywhere } .key { display: inline-block; width: 1em; height: 1em; vertical-align: -2px; margin: 0 4px 0 12px }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } td, th { border-color: #444 } svg text { fill: #ddd } }
"""


def page(title, about, timelines, phases):
    """timelines: {device: Timeline}, phases: [(name, start_ns, end_ns)], as allocations.read gives -> HTML text."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(about)}</p>"]
    if not timelines:
        parts.append("<p>Nothing was allocated or released while this was recorded.</p>")
    for timeline in timelines.values():
        parts += _section(timeline, phases)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{STYLE}</style></head>\n'
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _section(timeline, phases):
    before = f", {format_bytes(timeline.start_bytes)} of them from before" if timeline.start_bytes else ""
    rest = timeline.peak_bytes - timeline.start_bytes - sum(group[3] for group in timeline.at_peak)
    yield f"<h2>{escape(timeline.device)}: at most {format_bytes(timeline.peak_bytes)}{before}</h2>"
    yield _svg(timeline, phases)
    yield _legend(phases)
    yield f"<p>Alive at the peak, {len(timeline.points):,} allocations and releases in all:</p>"
    yield "<table><thead><tr><th>phase</th><th>operator</th><th>line</th>"
    yield '<th class="number">count</th><th class="number">MiB</th></tr></thead><tbody>'
    for phase, operator, source, num_bytes, count in timeline.at_peak[:NUM_GROUPS]:
        yield _row(phase, operator, source, count, num_bytes)
    hidden = timeline.at_peak[NUM_GROUPS:]
    if hidden:
        yield _row("", f"{len(hidden)} more", "", sum(group[4] for group in hidden), sum(group[3] for group in hidden))
    if rest < 0:
        yield _row("", "released, but allocated before", "", "", rest)
    yield "</tbody></table>"


def _row(phase, operator, source, count, num_bytes):
    cells = "".join(f"<td>{escape(str(text))}</td>" for text in (phase, operator, source))
    return f'<tr>{cells}<td class="number">{count}</td><td class="number">{num_bytes / MIB:,.3f}</td></tr>'


def _svg(timeline, phases):
    start_ns = min([timeline.points[0][0], *(begin for _, begin, _ in phases)])
    end_ns = max([timeline.points[-1][0], *(end for _, _, end in phases)])
    span_ns = max(1, end_ns - start_ns)
    high = max(timeline.peak_bytes, 1)

    def x_of(t_ns):
        return LEFT + (t_ns - start_ns) / span_ns * (WIDTH - LEFT)

    def y_of(alive):
        return TOP + (1 - alive / high) * (HEIGHT - TOP - BOTTOM)

    bands = [
        f'<rect x="{x_of(begin):.2f}" y="{TOP}" width="{max(0.3, x_of(end) - x_of(begin)):.2f}" height="{HEIGHT - TOP - BOTTOM}" '
        f'fill="{COLOURS[name]}" opacity="0.55"><title>{name}</title></rect>'
        for name, begin, end in phases[:MAX_BANDS]
    ]
    curve = [(LEFT, timeline.start_bytes), *_columns(timeline, x_of), (WIDTH, timeline.points[-1][1])]
    outline = " ".join(f"{x:.2f},{y_of(alive):.2f}" for x, alive in curve)
    peak_x, peak_y = x_of(timeline.peak_t_ns), y_of(timeline.peak_bytes)
    marks = [
        f'<text x="{LEFT - 6}" y="{y_of(alive) + 4:.2f}" text-anchor="end">{format_bytes(alive)}</text>'
        for alive in sorted({0, high // 2, high})
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time" font-size="11">{"".join(bands)}'
        f'<polygon points="{LEFT},{y_of(0):.2f} {outline} {WIDTH},{y_of(0):.2f}" fill="#4a76b8" opacity="0.6"/>'
        f'<circle cx="{peak_x:.2f}" cy="{peak_y:.2f}" r="4" fill="#c0392b"><title>peak</title></circle>{"".join(marks)}'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">0 ms</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 8}" text-anchor="end">{span_ns / NS_PER_MS:,.1f} ms</text></svg>'
    )


def _columns(timeline, x_of):
    """The curve's steps, at most a few per column of pixels: of many in one column the highest and the last."""
    drawn, column, level = [], None, timeline.start_bytes
    for t_ns, alive in timeline.points:
        x = x_of(t_ns)
        if column is None or int(x) != column:
            drawn += [(x, drawn[-1][1] if drawn else level), (x, alive)]  # level until here
            column, highest = int(x), alive
        elif alive > highest:
            drawn.append((x, alive))
            highest = alive
        else:
            drawn[-1:] = [drawn[-1], (x, alive)] if drawn[-1][1] == highest else [(x, alive)]
    return drawn


def _legend(phases):
    seen = dict.fromkeys(name for name, _, _ in phases)
    return "".join(f'<span class="key" style="background:{COLOURS[name]}"></span>{name}' for name in seen)
