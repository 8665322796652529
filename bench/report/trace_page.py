"""Renders analyses of traces with their pictures, for separate pages and the page of a run.

The pictures are bars of summed times, and a timeline of the ranks around their slowest collective.  A picture of a
single rank shows the first one.  Times are in ms, shares of a span in %.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis.trace import text
from bench.analysis.trace.text import plain, short
from bench.base import atomic
from bench.base.paths import brief
from bench.web.document import Block, Document, Lines, Picture, Section
from bench.web.lanes import Bar, Lane, Panel, side_by_side, stacked
from bench.web.page import tiles

Answer = dict[str, Any]  # result of bench/analysis/trace/analysis.py, or a part of it
Panels = Iterator[Panel]
Ranked = tuple[str, float | None, float | None, str, str]  # (label, us, share in %, text after it, colour)

US_PER_MS = 1000
COMPUTE, COMMUNICATION, COPY, IDLE, HOST = "series-0", "series-1", "series-2", "line", "series-6"
TYPES = ("computation", "communication", "copies")  # by the type's number in a timeline's bar
TYPE_COLOURS = (COMPUTE, COMMUNICATION, COPY)
PATH = (  # (kind of a critical path's link, colour), in display order
    ("compute", COMPUTE),
    ("communication", COMMUNICATION),
    ("memory", COPY),
    ("launch", "series-5"),
    ("host", "series-6"),
    ("wait", "series-3"),
)
NUM_LINES = 12  # most kernels, operators and the like
MAX_STEPS = 24
MAX_RANKS = 32
OF_TYPE = {"COMPUTATION": COMPUTE, "COMMUNICATION": COMMUNICATION, "MEMORY": COPY}
CAUSES = (  # (key, text, colour)
    ("host_wait", "the host launched too late", "series-1"),
    ("kernel_wait", "between kernels, under 30 us", "series-5"),
    ("other", "launched, waiting for something else", "series-3"),
)
NOT_OURS = (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError)  # an old or damaged answer
RUN_PREFIX = "trace-"  # prefix of the drawings' ids on a run's page


def document(reports: Mapping[str, dict[str, Any]]) -> Document:
    """Returns the answer of ./run.sh analyze with its pictures.  reports: {title: analysis}."""
    (first, *others), blocks = reports, list[Block]()
    for number, (title, report) in enumerate(reports.items()):
        parts = _blocks(report, f"{number}-" if number else "")
        blocks += [Section(plain(brief(title), 200), parts)] if others else parts
    if not others:
        return Document(f"Trace analysis: {plain(brief(first), 200)}", [text.verdict(reports[first])], blocks)
    verdicts = [text.verdict(report, plain(brief(title), 200)) for title, report in reports.items()]
    return Document("Trace analysis", verdicts, blocks)


def section_of_run(folder: Path) -> Section:
    """Returns the section about a run folder's analysis.json for the run's page; empty without one."""
    report = atomic.read_json(folder / "analysis.json", {})
    try:
        return Section("Trace", _blocks(report, RUN_PREFIX, is_first_said=False))
    except NOT_OURS:
        again = "analysis.json is not of this version: ./run.sh analyze RUN makes it again."
        return Section("Trace", [Lines([again], is_soft=True)] if report else [])


def _blocks(report: Answer, id: str, is_first_said: bool = True) -> list[Block]:
    panels = panels_of(report, id)
    first = next(iter(report["ranks"].values()))
    return [
        Picture(tiles(_facts(first, report["overall"]))),
        *text.remarks(report, is_first_said),
        *side_by_side(panels),
        *text.tables(report),
    ]


def _facts(rank: Answer, overall: Answer) -> Iterable[tuple[str, object]]:
    times = rank["temporal"]
    facts = {"ranks": overall["num_ranks"], "device": plain(rank["device"] or "none or unnamed", 40)}
    facts["steps counted"] = len(rank["profiler_steps"])
    if times["span_us"]:
        facts |= {"device busy, %": f"{100 - times['idle_pct']:.1f}", "span, ms": f"{times['span_us'] / 1000:.2f}"}
    if rank["overlap_pct"] is not None:
        facts |= {"exposed communication, ms": f"{rank['exposed_comm_us'] / 1000:.2f}"}
    facts["events read"] = f"{rank['num_events']:,}"
    return facts.items()


# ---- the drawings and charts of an analysis


def panels_of(report: Answer, id: str) -> list[Panel]:
    """Returns the drawings in the order of the page.  id: prefix of their ids."""
    ranks = dict(list(report["ranks"].items())[:MAX_RANKS])
    number, rank = next(iter(ranks.items()))
    which = f"rank {number} of {len(report['ranks'])}" if len(report["ranks"]) > 1 else ""
    panels = [
        *_times(ranks, id),
        *_overlap(ranks, id),
        *_idle(ranks, id),
        *_collective(report["overall"], id),
        *_steps(rank, which, id),
        *_kernels(rank, which, id),
        *_host(rank, which, id),
        *_critical_path(rank, which, id),
    ]
    return [panel for panel in panels if panel.lanes]


def _lane(label: str, caption: str, parts: Iterable[tuple[str, float, str]]) -> Lane:
    """Returns a lane with the parts of a time, (name, ms, colour) each, end to end."""
    return Lane(label, caption, stacked([(ms, colour, f"{name} {ms:.3f} ms") for name, ms, colour in parts]))


def _times(ranks: Mapping[str, Answer], id: str) -> Panels:
    kinds = (("compute", "compute", COMPUTE), ("other work", "non_compute", COMMUNICATION), ("idle", "idle", IDLE))
    lanes = []
    for number, times in ((number, rank["temporal"]) for number, rank in ranks.items()):
        if times["span_us"]:
            shares = ", ".join(f"{name} {times[f'{key}_pct']:.1f} %" for name, key, _ in kinds)
            parts = [(name, ms_from_us(times[f"{key}_us"]), colour) for name, key, colour in kinds]
            lanes.append(_lane(f"rank {number}", f"{ms_from_us(times['span_us']):.2f} ms: {shares}", parts))
    names = [(COMPUTE, "compute"), (COMMUNICATION, "communication and copies alone"), (IDLE, "idle")]
    about = "from the first start to the last end on the device; the parts add up to it"
    yield Panel(f"{id}times", "Where the device's time went", about, "ms", lanes, names)


def _overlap(ranks: Mapping[str, Answer], id: str) -> Panels:
    lanes = []
    for number, rank in ranks.items():
        if rank["overlap_pct"] is not None:
            exposed_ms = ms_from_us(rank["exposed_comm_us"])
            hidden_ms = ms_from_us(rank["comm_us"]) - exposed_ms
            caption = f"{rank['overlap_pct']:.1f} % hidden, {exposed_ms:.2f} ms exposed"
            parts = [("hidden", hidden_ms, COMPUTE), ("exposed", exposed_ms, COMMUNICATION)]
            lanes.append(_lane(f"rank {number}", caption, parts))
    names = [(COMPUTE, "under a computation kernel"), (COMMUNICATION, "exposed")]
    yield Panel(f"{id}overlap", "Communication", "the time in which it runs", "ms", lanes, names)


def _idle(ranks: Mapping[str, Answer], id: str) -> Panels:
    """Yields a lane for each stream, or, with several ranks, one for the sum over each rank's streams."""
    groups = {f"rank {number}, all streams": rank["idle"] for number, rank in ranks.items()}
    if len(ranks) == 1:
        (streams,) = groups.values()
        groups = {f"device {line['device']}, stream {line['stream']}": [line] for line in streams}
    lanes = []
    for label, lines in groups.items():
        sums_ms = {key: sum(ms_from_us(line[f"{key}_us"]) for line in lines) for key, _, _ in CAUSES}
        caption = ", ".join(f"{key.replace('_', ' ')} {ms:.2f}" for key, ms in sums_ms.items())
        parts = [(f"{cause}:", sums_ms[key], colour) for key, cause, colour in CAUSES]
        lanes.append(_lane(label, f"{caption} ms", parts))
    lanes = [lane for lane in lanes if lane.bars]
    lanes = sorted(lanes, key=lambda lane: -lane.bars[-1].end)[:NUM_LINES] if len(ranks) == 1 else lanes
    names = [(colour, cause) for _, cause, colour in CAUSES]
    about = "the gaps between a stream's kernels; streams wait side by side, so that sums may exceed the span"
    yield Panel(f"{id}idle", "Idle time by its cause", about, "ms", lanes, names)


def _steps(rank: Answer, which: str, id: str) -> Panels:
    lanes = []
    for line in rank["steps"][:MAX_STEPS]:
        compute_ms, exposed_ms, busy_ms = (ms_from_us(line[f"{key}_us"]) for key in ("compute", "exposed_comm", "busy"))
        parts = [("compute", compute_ms, COMPUTE), ("exposed communication", exposed_ms, COMMUNICATION)]
        parts.append(("copies", max(0.0, busy_ms - compute_ms - exposed_ms), COPY))
        host = "" if line["host_us"] is None else f", {ms_from_us(line['host_us']):.2f} ms on the host"
        caption = f"device busy {busy_ms:.2f} ms{host}, {line['num_kernels']} kernels"
        lanes.append(_lane(f"step {line['step']}", caption, parts))
    lanes = [lane for lane in lanes if lane.bars]
    names = [(COMPUTE, "compute"), (COMMUNICATION, "exposed communication"), (COPY, "copies alone")]
    if len(lanes) > 1:
        yield Panel(f"{id}steps", "Steps", which or "what the host launched in each", "ms", lanes, names)


def _ranked(id: str, title: str, about: str, lines: Iterable[Ranked], names: Sequence[tuple[str, str]] = ()) -> Panels:
    """Yields a panel with a bar for each of the lines, the longest first."""
    lanes = []
    for label, us, pct, detail, colour in lines:
        share = "" if pct is None else f", {pct:.1f} %"
        lanes.append(Lane(label, f"{ms_from_us(us):.3f} ms{share}{detail}", [Bar(0.0, ms_from_us(us), colour, label)]))
    yield Panel(id, title, about, "ms", lanes, names)


def _kernels(rank: Answer, which: str, id: str) -> Panels:
    total_us = sum(line["sum_us"] for line in rank["kernels"]) or 1.0
    lines = [
        (short(k["name"]), k["sum_us"], 100 * k["sum_us"] / total_us, f", {k['count']:,} times", OF_TYPE[k["type"]])
        for k in rank["kernels"][:NUM_LINES]
    ]
    names = [(OF_TYPE[kind], name) for kind, name in zip(OF_TYPE, TYPES)]
    yield from _ranked(f"{id}kernels", "Kernels that take longest", which, lines, names)
    lines = [(c["category"], c["sum_us"], c["pct"], f", {c['count']:,} kernels", COMPUTE) for c in rank["categories"]]
    yield from _ranked(f"{id}categories", "Kernels by what they do", which, lines)


def _host(rank: Answer, which: str, id: str) -> Panels:
    """Yields operators by self time for a trace without a device, and phases and modules for any trace."""
    if not rank["num_device_rows"]:
        by_time = sorted(rank["operators"], key=lambda line: -line["self_cpu_us"])
        total_us = sum(line["self_cpu_us"] for line in by_time) or 1.0
        lines = []
        for o in by_time[:NUM_LINES]:
            shapes = f", {plain(o['shapes'], 40)}" if o["shapes"] else ""
            detail = f", {o['count']:,} times{shapes}"
            lines.append((plain(o["name"]), o["self_cpu_us"], 100 * o["self_cpu_us"] / total_us, detail, COMPUTE))
        yield from _ranked(f"{id}operators", "Operators by self time", which, lines)
    lines = []
    for phase in rank["phases"]:
        device = f", {ms_from_us(phase['device_us']):.2f} ms on the device" if rank["num_device_rows"] else ""
        lines.append((phase["phase"], phase["host_us"], None, device, HOST))
    yield from _ranked(f"{id}phases", "Phases on the host", which, lines)
    time = "device_us" if rank["num_device_rows"] else "cpu_us"
    lines = [(plain(line["module"]), line[time], None, "", COMPUTE) for line in rank["modules"][:NUM_LINES]]
    yield from _ranked(f"{id}modules", "By nn.Module", which, lines)


def _critical_path(rank: Answer, which: str, id: str) -> Panels:
    paths = rank["critical_path_of_steps"]
    mean = {key: sum(path[key] for path in paths) for key in (*(f"{name}_us" for name, _ in PATH), "span_us")}
    lanes = []
    for label, path, num in (("the whole trace", rank["critical_path"], 1), ("a step", mean, len(paths))):
        if path["span_us"]:
            shares = [(100 * path[f"{name}_us"] / path["span_us"], colour, name) for name, colour in PATH]
            caption = ", ".join(f"{name} {pct:.1f} %" for pct, _, name in shares if pct >= 0.05)
            bars = stacked([(pct, colour, f"{name} {pct:.1f} %") for pct, colour, name in shares])
            lanes.append(Lane(label, f"{ms_from_us(path['span_us'] / num):.2f} ms: {caption}", bars))
    about = "the chain of work that leads to the last kernel; it adds up to the time"
    names = [(colour, name) for name, colour in PATH]
    yield Panel(f"{id}critical-path", "Critical path", about, "%", lanes, names, 100.0)


def ms_from_us(us: float | None) -> float:
    """Converts us to ms; None becomes 0, which draws nothing."""
    return (us or 0.0) / US_PER_MS


def _collective(overall: Answer, id: str) -> Panels:
    """Yields the drawing of ranks side by side; nothing for one rank or without a collective."""
    picture = overall["pictures"]["collective"]
    if not picture:
        return
    late, lanes, seen = picture["late_rank"], [], set()
    for lane in picture["lanes"]:
        bars = []
        for start_us, us, kind, name in lane["bars"]:
            begin_ms, hint = ms_from_us(start_us), f"{short(picture['names'][name])}: {us:,.1f} us"
            bars.append(Bar(begin_ms, begin_ms + ms_from_us(us), TYPE_COLOURS[kind], hint, int(kind == 1)))
            seen.add(kind)
        lanes.append(Lane(f"rank {lane['rank']}", "came last" * (lane["rank"] == late), bars))
    about = (
        f"{short(picture['name'])}: rank {late} came last, another waited {ms_from_us(picture['wait_us']):.2f} ms "
        "for it.  Each rank's clock is set by the end of this collective; the lower row of a rank is communication"
    )
    names = [(TYPE_COLOURS[kind], TYPES[kind]) for kind in sorted(seen)]
    title, end_ms = "Ranks around the slowest collective", ms_from_us(picture["us"])
    yield Panel(f"{id}collective", title, about, "ms", lanes, names, end_ms, num_rows=2, is_wide=True)
