"""Memory over time from a trace: who allocated what and when, how much was alive, and what was alive at the peak.

torch's profiler records what is allocated and freed while it runs.  Of earlier allocations only the sum is known on a
GPU; on a CPU they are assumed to be the least with which the bytes alive never fall below 0.
"""

import bisect
import gzip
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.base.units import MIB, NS_PER_MS, NS_PER_US, format_bytes
from bench.training.instruments.base import PHASES
from bench.web.chart import chart, series_of
from bench.web.document import Chart, Document, Lines, Section, Table

NO_PHASE = "outside of phases"
NUM_GROUPS = 25
Phase = tuple[str, int, int]  # name, start_ns, end_ns


@dataclass(frozen=True)
class Allocation:
    """An allocation, or a release if num_bytes is negative."""

    t_ns: int
    num_bytes: int
    address: int
    operator: str
    source: str  # the innermost line of Python outside torch; "" without stacks
    phase: str  # the phase in which it happened; "" outside of phases


@dataclass(frozen=True)
class Timeline:
    """A device's (t_ns, bytes alive) after each change, and the groups of allocations alive at the peak."""

    device: str
    points: list[tuple[int, int]]
    peak_t_ns: int
    peak_bytes: int
    start_bytes: int  # bytes alive when the recording began; on a CPU a lower bound
    at_peak: list[tuple[str, str, str, int, int]]  # phase, operator, source, bytes, count; largest first


class _Event(msgspec.Struct):
    """An event of a Chrome trace."""

    ts: float = 0.0  # microseconds
    dur: float = 0.0
    name: Any = ""
    cat: Any = ""
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]


def read(text: bytes) -> tuple[dict[str, Timeline], list[Phase]]:
    """Reads the JSON of a Chrome trace recorded with profile_memory.  Returns ({device: Timeline}, phases in order).

    A change's operator and source are those of the calls around it in its thread; its phase is found by time, because
    a range that is opened in one Python call and closed in another encloses neither.
    """
    by_device: dict[str, list[Allocation]] = {}
    start_bytes: dict[str, int] = {}
    calls: dict[Any, list[_Event]] = {}  # {thread: the calls that have begun, innermost last}
    events = msgspec.json.decode(text, type=_Trace).traceEvents
    phases = [
        (event.name, round(event.ts * NS_PER_US), round((event.ts + event.dur) * NS_PER_US))
        for event in events
        if event.cat == "user_annotation" and event.name in (*PHASES, "validation")
    ]
    phases.sort(key=lambda phase: phase[1])
    starts_ns = [start_ns for _, start_ns, _ in phases]
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        around = calls.setdefault(event.tid, [])
        while around and around[-1].ts + around[-1].dur < event.ts:
            around.pop()
        if event.cat in ("cpu_op", "python_function"):
            around.append(event)
        elif event.name == "[memory]":
            fields = msgspec.json.decode(event.args)
            device = f"cuda:{fields['Device Id']}" if fields["Device Type"] else "cpu"
            operators = (call.name for call in around if call.cat == "cpu_op" and "::" in call.name)
            sources = (call.name for call in reversed(around) if call.cat == "python_function" and ".py(" in call.name)
            # the outermost operator: aten::linear says more than aten::empty
            operator = next(operators, "").removeprefix("autograd::engine::evaluate_function: ")
            source = next((name for name in sources if not name.startswith("torch/")), "")
            t_ns = round(event.ts * NS_PER_US)
            before = bisect.bisect_right(starts_ns, t_ns) - 1
            phase = phases[before][0] if before >= 0 and t_ns <= phases[before][2] else ""
            change = Allocation(t_ns, fields["Bytes"], fields["Addr"], operator, source, phase)
            by_device.setdefault(device, []).append(change)
            start_bytes.setdefault(device, fields.get("Total Allocated", 0) - fields["Bytes"])
    timelines = {
        device: _timeline(device, changes, None if device == "cpu" else max(0, start_bytes[device]))
        for device, changes in sorted(by_device.items())
    }
    return timelines, phases


def _timeline(device: str, allocations: list[Allocation], start_bytes: int | None) -> Timeline:
    if start_bytes is None:
        start_bytes = max(0, -min(itertools.accumulate(change.num_bytes for change in allocations)))
    alive_bytes, points = start_bytes, []
    peak_t_ns, peak_bytes = allocations[0].t_ns, start_bytes
    for change in allocations:
        alive_bytes += change.num_bytes
        points.append((change.t_ns, alive_bytes))
        if alive_bytes > peak_bytes:
            peak_t_ns, peak_bytes = points[-1]
    at_peak: dict[int, Allocation] = {}  # by address
    for change in itertools.takewhile(lambda change: change.t_ns <= peak_t_ns, allocations):
        if change.num_bytes > 0:
            at_peak[change.address] = change
        else:
            at_peak.pop(change.address, None)  # absent if it was allocated before the recording began
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for change in at_peak.values():
        key = (change.phase, change.operator, change.source)
        num_bytes, count = sums.get(key, (0, 0))
        sums[key] = (num_bytes + change.num_bytes, count + 1)
    groups = sorted(((*key, *group) for key, group in sums.items()), key=lambda group: group[3], reverse=True)
    return Timeline(device, points, peak_t_ns, peak_bytes, start_bytes, groups)


def page_of_trace(path: Path, title: str, about: str) -> tuple[str, dict[str, Timeline]]:
    """Returns (HTML, {device: Timeline}) of a trace file, gzipped or not, up to where max_mib cut it."""
    content = path.read_bytes()
    timelines, phases = read(gzip.decompress(content) if path.suffix == ".gz" else content)
    return page_of(title, about, timelines, phases), timelines


def page_of(title: str, about: str, timelines: dict[str, Timeline], phases: list[Phase]) -> str:
    """Returns the HTML page of what read() returns."""
    devices = [_device_section(timeline, phases) for timeline in timelines.values()]
    nothing = Lines(["Nothing was allocated or released while this was recorded."])
    return Document(title, [], devices or [nothing], about=[about]).html()


def _alive_chart(timeline: Timeline, phases: list[Phase]) -> dict[str, Any]:
    """Charts the bytes alive over time, with each phase as a separate series in its own colour."""
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


def _points(timeline: Timeline, phases: list[Phase]) -> list[tuple[int, str, int]]:
    """Returns [(t_ns, phase, bytes alive)] with two points at each edge: the values before it, and those after it."""
    edges: list[tuple[int, str | None, int | None]] = [(t_ns, None, alive) for t_ns, alive in timeline.points]
    for name, start_ns, end_ns in phases:
        edges += [(start_ns, name, None), (end_ns, NO_PHASE, None)]
    phase, alive = NO_PHASE, timeline.start_bytes
    points = []
    for t_ns, new_phase, new_alive in sorted(edges, key=lambda edge: edge[0]):
        points.append((t_ns, phase, alive))
        phase, alive = new_phase or phase, alive if new_alive is None else new_alive
        points.append((t_ns, phase, alive))
    return points


def _device_section(timeline: Timeline, phases: list[Phase]) -> Section:
    before = f", {format_bytes(timeline.start_bytes)} of them from before" if timeline.start_bytes else ""
    shown, hidden = timeline.at_peak[:NUM_GROUPS], timeline.at_peak[NUM_GROUPS:]
    rows: list[list[Any]] = [[*names, count, _mib(num_bytes)] for *names, num_bytes, count in shown]
    if hidden:
        num_bytes, count = sum(group[3] for group in hidden), sum(group[4] for group in hidden)
        rows.append(["", f"{len(hidden)} more", "", count, _mib(num_bytes)])
    rest = timeline.peak_bytes - timeline.start_bytes - sum(group[3] for group in timeline.at_peak)
    if rest < 0:
        rows.append(["", "released, but allocated before", "", "", _mib(rest)])
    caption = f"Alive at the peak, {len(timeline.points):,} allocations and releases in all"
    groups = Table(("phase", "operator", "line", "count", "MiB"), rows, caption=caption)
    title = f"{timeline.device}: at most {format_bytes(timeline.peak_bytes)}{before}"
    return Section(title, [Chart(_alive_chart(timeline, phases)), groups])


def _mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 3)
