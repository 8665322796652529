"""Timelines of an analysis of traces (its "pictures"): ranks around a collective, the largest gap, a critical path."""

from bench.analysis.trace.text import plain, short
from bench.web.lanes import Bar, Lane, Panel

US_PER_MS = 1000
COMPUTE, COMMUNICATION, COPY, IDLE, HOST = "series-0", "series-1", "series-2", "line", "series-6"
TYPES = ("computation", "communication", "copies", "host calls")  # by the index in a timeline's bar
TYPE_COLOURS = (COMPUTE, COMMUNICATION, COPY, HOST)
PATH = (  # kinds of a critical path's links, in their order
    ("compute", COMPUTE),
    ("communication", COMMUNICATION),
    ("memory", COPY),
    ("launch", "series-5"),
    ("host", "series-6"),
    ("wait", "series-3"),
)


def ms_from_us(us: float | None) -> float:
    """None is 0: nothing to draw."""
    return (us or 0.0) / US_PER_MS


def of_collective(overall, id):
    """Yields the drawing of ranks side by side; nothing for one rank or without a collective."""
    result = overall["pictures"]["collective"]
    if result:
        late = result["late_rank"]
        lanes = [(f"rank {lane['rank']}", "came last" * (lane["rank"] == late)) for lane in result["lanes"]]
        about = (
            f"{short(result['name'])}: rank {late} came last, another waited {ms_from_us(result['wait_us']):.2f} ms "
            "for it.  Each rank's clock is set by the end of this collective; the lower row of a rank is communication"
        )
        yield _timeline(f"{id}collective", "Ranks around the slowest collective", about, result, lanes)


def of_gap(one, of_rank, id):
    """Yields the drawing of the device's largest gap; of_rank: which rank it is, "" of one alone."""
    result = one["pictures"]["gap"]
    if result:
        lanes = [
            ("the host's launching thread", "calls") if lane["stream"] == "host" else (f"stream {lane['stream']}", "")
            for lane in result["lanes"]
        ]
        gap = one["gaps"][0]
        host, after = plain(gap["host"] or "nothing recorded"), short(gap["after"])
        about = (
            f"{of_rank}{': ' * bool(of_rank)}{ms_from_us(gap['us']):.3f} ms, the host was in {host}; then came {after}"
        )
        marks = [(ms_from_us(result["start_us"]), "the dashed lines are where the gap begins and ends")]
        marks += [(ms_from_us(result["start_us"] + result["gap_us"]), "")]
        yield _timeline(f"{id}gap", "The device's largest gap", about, result, lanes, marks)


def of_links(one, of_rank, id):
    """Yields the drawing of a critical path link by link, a lane a kind."""
    links = one["pictures"]["critical_path"]
    if links:
        drawn = []
        for kind, (name, colour) in enumerate(PATH):
            bars = [
                Bar(ms_from_us(start), ms_from_us(start + us), colour, f"{short(links['names'][index])}: {us:,.1f} us")
                for start, us, of_kind, index in links["bars"]
                if of_kind == kind
            ]
            if bars:
                drawn.append(Lane(name, f"{sum(bar.end - bar.start for bar in bars):.2f} ms", bars))
        what = "of the whole trace" if links["step"] is None else f"of step {links['step']}, the longest"
        about = f"{of_rank}{': ' * bool(of_rank)}what the device's end waited for at each moment"
        title, end_ms = f"Critical path {what}", ms_from_us(links["us"])
        yield Panel(f"{id}critical-links", title, about, "ms", drawn, end=end_ms, is_wide=True)


def _timeline(id, title, about, result, lanes, marks=()):
    """Bars of result["lanes"]; lanes: (label, words) of each.  Communication, and the host, have a row of their own."""
    drawn, seen = [], set()
    for (label, words), lane in zip(lanes, result["lanes"]):
        bars = []
        for start_us, us, kind, name in lane["bars"]:
            hint = f"{short(result['names'][name])}: {us:,.1f} us"
            bars.append(Bar(ms_from_us(start_us), ms_from_us(start_us + us), TYPE_COLOURS[kind], hint, int(kind == 1)))
            seen.add(kind)
        drawn.append(Lane(label, words, bars))
    names = [(TYPE_COLOURS[kind], TYPES[kind]) for kind in sorted(seen)]
    return Panel(
        id, title, about, "ms", drawn, names, ms_from_us(result["us"]), marks, 2 if 1 in seen else 1, is_wide=True
    )
