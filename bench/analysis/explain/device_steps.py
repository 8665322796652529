"""Divides the steps of a trace with a device into pieces, on the device's clock.

Steps are those of window.device_spans(), which tile the time.  Where several rows run at once, the time belongs to
computation before communication before copies; where none runs, to what the device waited for.
"""

import bisect
import collections
import heapq
import os.path
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.analysis.explain import parts, serving
from bench.analysis.explain.ceilings import Ceilings, Operators, label
from bench.analysis.explain.host import Thread, main_track
from bench.analysis.trace import attribution, categories, device_time, events, launches, operators, window
from bench.analysis.trace.device_time import KERNEL_WAIT_BELOW_NS
from bench.analysis.trace.rank import Rank
from bench.base.units import NS_PER_S

LONG_CALL_NS = 1_000_000  # a launching call that holds the device up for longer does more than to launch
LAUNCH_BELOW_NS = 200_000  # a kernel that begins later than this after its call returned waits for something else
IN_ORDER_NS = 100_000  # calls of several threads that begin within this time may have their numbers swapped
TEMPLATE = "at::native::"  # in the names of templates such as elementwise_kernel<128, 4, ...>
BOUNDED = "computation with a bound"  # in the timeline, where the roofline time of a single call is not known
PART_OF_LAYER = {device_time.COMMUNICATION: parts.EXPOSED, device_time.MEMORY: parts.COPIES}
MAX_MISSING = 3  # consecutive launches that only the capture or only the graph has: memsets may run as kernels


class Operator(NamedTuple):
    """A CPU operator: its row in rank, and the row of the launching call within it; -1 if not known."""

    rank: Rank
    row: int
    call: int = -1


class _Capture(NamedTuple):
    """The launches of a capture as rows (operator, call), -1 for none; kernels: their names, None if not recorded."""

    rank: Rank
    launches: list[tuple[int, int]]
    kernels: list[str] | None


def counted_rows(
    rank: Rank, rules: tuple[categories.Rule, ...] = categories.RULES, include_last_step: bool = False
) -> tuple[Rank, np.ndarray, np.ndarray]:
    """Returns (rank, device rows of the counted steps, their device_time.types), as skew.waits() takes them."""
    rows = rank.device_rows()
    rows_by_step = [mine for _, mine in window.rows_of_steps(rank, rows, window.steps(rank, include_last_step))]
    rows = np.concatenate(rows_by_step) if any(map(len, rows_by_step)) else rows
    return rank, rows, device_time.types(rank, rows, rules)


class Device:
    """Facts about each device row of a rank: its call, its operator, where it was launched and how long it waited.

    waits: {device row: (waiting ns, late rank, call)}; captured: traces in which the rank's CUDA graphs were captured.
    """

    def __init__(
        self,
        rank: Rank,
        rules: tuple[categories.Rule, ...] = categories.RULES,
        waits: parts.Waits | None = None,
        captured: Sequence[Rank] = (),
    ) -> None:
        rows, self.waits = rank.device_rows(), waits or {}
        self.rank, self.rules = rank, rules
        rows = rows[np.argsort(rank.ts[rows], kind="stable")]
        self.kinds: list[int] = device_time.types(rank, rows, rules).tolist()
        calls, ops = window.launches(rank, rows), attribution.operators(rank, rows)
        self.captured = operators_of_graphs(rank, rows, captured)
        annotations = attribution.annotations(rank, rows)
        sources = attribution.around_launch(rank, calls, events.PYTHON, attribution.is_source)
        self.names = [rank.names[name] for name in rank.name[rows].tolist()]
        self.annotations = rank.names_of(annotations)
        named = np.where(sources >= 0, sources, np.where(annotations >= 0, annotations, ops))
        self.where = rank.names_of(named)
        self.phases = attribution.phases(rank, rows)
        lengths = attribution.around_launch(rank, calls, events.ANNOTATION, serving.Lengths.from_name)
        self.lengths = [serving.Lengths.from_name(name or "") for name in rank.names_of(lengths)]
        columns = (rows, rank.ts[rows], rank.end[rows], calls, ops)
        self.rows, self.starts, self.ends, self.calls, self.operators = (column.tolist() for column in columns)
        self.reached = np.maximum.accumulate(rank.end[rows]).tolist()  # up to each row, the end of the last that ends
        self.launched_by: list[int] = _launched_by(rank, rows).tolist()
        with_calls = np.where(calls >= 0, np.arange(len(calls)), len(calls))
        nearest = np.minimum.accumulate(with_calls[::-1])[::-1]
        self.next_calls = np.append(calls, -1)[nearest].tolist()  # of each row or the first after it that has one

    def title(self, number: int) -> str:
        """Returns a row's name, or if the kernel is a template that many operators share, that of its operator."""
        name = self.names[number]
        if TEMPLATE not in name:
            return name
        rank, row, _ = self.operator(number)
        return name if row < 0 else rank.names[rank.name[row]]

    def operator(self, number: int) -> Operator:
        """Returns the operator that launched a row, also one within a graph; its row is -1 if not known."""
        captured = self.captured.get(self.rows[number])
        return captured or Operator(self.rank, self.operators[number], self.calls[number])

    def wire_frac(self, number: int, ceilings: Ceilings) -> float:
        """Returns the share of a collective's time, without waiting, that its bytes need; 0 if not known."""
        row, collective = self.rows[number], operators.collective_of(self.rank, self.rows[number])
        own_ns = int(self.rank.dur[row]) - self.waits.get(row, (0,))[0]
        needed_s = ceilings.collective_s(*collective) if collective and own_ns > 0 else None
        return min(1.0, needed_s * NS_PER_S / own_ns) if needed_s else 0.0


class _Range(NamedTuple):
    """A time range of a device row.  layer: index into device_time.TYPES; wait: set if the row waited in this range."""

    start: int
    end: int
    layer: int
    number: int  # index of the row in Device.rows
    wait: tuple[int, int, int] | None = None


class Division:
    """Divides the steps of a device into .pieces.  counted: of window.device_spans()."""

    def __init__(self, device: Device, counted: Sequence[parts.Step], ceilings: Ceilings) -> None:
        self.device, self.ceilings = device, ceilings
        self.pieces, self.main = parts.Pieces(counted), main_track(device.rank)
        # By thread: (step, begin ns, end ns, index into .late or -1) of spans in which the device waited for the host.
        self.on_host: dict[int, list[tuple[int, int, int, int]]] = collections.defaultdict(list)
        self.late: list[tuple[parts.Piece, parts.Change]] = []  # of rows that begin too late for their launch
        ranks = {id(of.rank): of.rank for of in device.captured.values()} | {id(device.rank): device.rank}
        self.known = {key: Operators(rank, ceilings) for key, rank in ranks.items()}
        for index, (_, begin, end) in enumerate(counted):
            ranges, seen = self._ranges(begin, end), set()
            for low, high, owner in owners([ranged[:3] for ranged in ranges], begin, end):
                if owner < 0:
                    self._idle(index, low, high)
                else:
                    self._running(index, ranges[owner], low, high - low, int(owner not in seen))
                    seen.add(owner)
        self._add_host()
        for operators_of_rank in self.known.values():
            operators_of_rank.into(self.pieces)

    def _add_host(self) -> None:
        """Adds what threads did in the spans of .on_host, or where one was idle, what the main thread did.

        A row that is late waits for work that was not recorded if the host waits for the device, else for a stream.
        """
        main = Thread(self.device.rank, self.main)
        others = [track for track in self.on_host if track != self.main]
        for track in (*others, self.main):  # which may get spans of the others
            if track is None or not self.on_host[track]:
                continue
            thread = main if track == self.main else Thread(self.device.rank, track)
            steps, lows, highs, late = np.array(self.on_host[track], np.int64).T
            span, begin, end, place = thread.segments(lows, highs)
            columns = (steps[span], begin, end, thread.pieces(begin, end, place), late[span])
            if self.main is not None and track != self.main:
                is_own = np.array([piece.part == parts.HOST for piece in thread.distinct])[columns[3]]
                idle = (place < 0) & ~(is_own & main.is_outside(begin))
                self.on_host[self.main] += zip(*(columns[index][idle].tolist() for index in (0, 1, 2, 4)))
                columns = tuple(column[~idle] for column in columns)
            step, begin, end, number, late = columns
            self.pieces.add_host(thread.distinct, *(column[late < 0] for column in columns[:4]))
            for index in np.flatnonzero(late >= 0).tolist():
                piece, (otherwise, change) = thread.distinct[number[index]], self.late[late[index]]
                piece, ns = piece if piece.part == parts.SYNC else otherwise, int(end[index] - begin[index])
                self.pieces.add(int(step[index]), piece, ns, 1, change, int(begin[index]))

    def _ranges(self, begin: int, end: int) -> list[_Range]:
        """Returns the ranges of rows that run between begin and end; a row that waited has two, waiting first."""
        device, ranges = self.device, []
        for number in range(bisect.bisect_right(device.reached, begin), bisect.bisect_left(device.starts, end)):
            row, low, high = device.rows[number], device.starts[number], device.ends[number]
            if high <= begin:
                continue
            layer, wait = device.kinds[number], device.waits.get(row)
            if wait is not None and wait[0]:
                ranges.append(_Range(low, low + wait[0], layer, number, wait))
                low += wait[0]
            ranges.append(_Range(low, high, layer, number))
        return ranges

    def _running(self, index: int, ranged: _Range, low: int, ns: int, count: int) -> None:
        """Adds ns of a step from low on, in which a device row ran or waited, to its pieces."""
        device, pieces, number = self.device, self.pieces, ranged.number
        rank, operator, call = device.operator(number)
        bounds, where, name = self.known[id(rank)], device.where[number], device.names[number]
        change = parts.Change(device.rows[number], 0)
        if ranged.wait is not None:
            pieces.add(index, parts.Piece(parts.WAITING, name, where, ranged.wait[1]), ns, count, None, low)
        elif ranged.layer in PART_OF_LAYER:
            is_message = ranged.layer == device_time.COMMUNICATION
            wire_ns = round(ns * device.wire_frac(number, self.ceilings)) if is_message else 0
            pieces.add(index, parts.Piece(parts.WIRE, name, where), wire_ns, count, change, low)
            piece = parts.Piece(PART_OF_LAYER[ranged.layer], name, where)
            pieces.add(index, piece, ns - wire_ns, count, change, low + wire_ns)
        elif operator >= 0 and (key := bounds.key(operator, name, call, device.lengths[number])):
            bounds.add(index, operator, key, where, ns, change)
            pieces.timeline.append((low, low + ns, parts.Piece(BOUNDED, label(bounds.facts(key)), where)))
        else:
            category = categories.category(name, device.annotations[number], device.rules)
            part = parts.OPTIMIZER if categories.OPTIMIZER in (category, device.phases[number]) else parts.UNBOUND
            pieces.add(index, parts.Piece(part, device.title(number), where), ns, count, change, low)

    def _idle(self, index: int, low: int, high: int) -> None:
        """Explains an idle range by the host until the next row's launch, then by the launch or the row's waiting."""
        device, rank, pieces = self.device, self.device.rank, self.pieces
        following = bisect.bisect_left(device.starts, high)
        is_end = following == len(device.rows) or device.starts[following] != high  # the step's end
        number = None if is_end else following
        call = -1 if number is None else device.calls[number]
        is_launched = call < 0 and number is not None and device.launched_by[number] <= low
        caller = call  # by whose thread the device waited; a row that names no launch waited for that of the next row
        if call < 0 and not is_end and rank.correlation[device.rows[following]] <= 0:
            number, caller = None, device.next_calls[following]
        track = int(rank.track[caller]) if caller >= 0 else self.main
        if track is None or number is not None and call < 0 and not is_launched:
            what = None if is_end else f"before {device.names[following]}, whose launch was not recorded"
            pieces.add(index, parts.Piece(parts.UNKNOWN, what, None), high - low, at_ns=low)
            return
        called = low if is_launched else high if number is None else min(max(int(rank.ts[call]), low), high)
        if called > low:
            self.on_host[track].append((index, low, called, -1))
        if number is None or called == high:
            return
        returned = int(rank.end[call]) if call >= 0 else low
        is_short = high - low < KERNEL_WAIT_BELOW_NS
        is_launching = called > low or returned > low and not is_short
        part = parts.LAUNCH if is_launching else parts.BETWEEN if is_short else parts.DEPENDENCY
        what = f"before {device.title(number)}"
        if is_launching and min(returned, high) - called > LONG_CALL_NS:
            what = f"{rank.names[rank.name[call]]} {parts.LONG_CALL}, {what}"
        names = what, device.where[number]
        change = parts.Change(device.rows[number], 0, is_start=True)
        until, needed_ns = high, 0
        if part == parts.LAUNCH:
            until = min(high, max(called, returned) + LAUNCH_BELOW_NS)
            needed_ns = min(self.ceilings.launch_ns(), until - called)
        pieces.add(index, parts.Piece(parts.LATENCY, *names), needed_ns, 1, change, called)
        pieces.add(index, parts.Piece(part, *names), until - called - needed_ns, 1, change, called + needed_ns)
        if part == parts.LAUNCH and (held_ns := min(until, returned) - called) > 0:  # the host, in its call
            held = parts.Piece(parts.LATENCY if needed_ns else part, *names)
            pieces.changes[held].append(parts.Change(None, held_ns, False, called))
        if until < high:
            self.on_host[track].append((index, until, high, len(self.late)))
            self.late.append((parts.Piece(parts.DEPENDENCY, *names), change))


def _launched_by(rank: Rank, rows: np.ndarray) -> np.ndarray:
    """Returns when each device row was launched at the latest, ns; NOT_LAUNCHED if nothing says so.

    Calls are numbered as they begin (to 5 us in 59 public traces), so one that is missing began before the next number.
    """
    calls = np.flatnonzero(rank.is_kind(events.RUNTIME) & (rank.correlation > 0))
    calls = calls[np.argsort(rank.correlation[calls], kind="stable")]
    first_later = np.minimum.accumulate(rank.ts[calls][::-1])[::-1]
    if (rank.ts[calls] - first_later > IN_ORDER_NS).any():
        return np.full(len(rows), window.NOT_LAUNCHED)
    following = np.searchsorted(rank.correlation[calls], rank.correlation[rows], side="right")
    latest = np.append(first_later, window.NOT_LAUNCHED)[following]
    return np.where(rank.correlation[rows] > 0, latest, window.NOT_LAUNCHED)


def owners(ranges: Sequence[tuple[int, int, int]], low: int, high: int) -> list[tuple[int, int, int]]:
    """Returns [(begin ns, end ns, index of the owning range, -1 if none runs)], which tile [low, high].

    ranges: [(start ns, end ns, layer)].  The lowest layer that runs owns a moment, in it the range that began first.
    """
    coming = sorted((max(start, low), num) for num, (start, end, _) in enumerate(ranges) if end > low and start < high)
    running: list[tuple[int, int, int]] = []
    segments: list[tuple[int, int, int]] = []
    moment, at = low, 0
    while moment < high:
        while at < len(coming) and coming[at][0] <= moment:
            num = coming[at][1]
            start, _, layer = ranges[num]
            heapq.heappush(running, (layer, start, num))
            at += 1
        while running and ranges[running[0][2]][1] <= moment:
            heapq.heappop(running)
        until = coming[at][0] if at < len(coming) else high
        owner = running[0][2] if running else -1
        until = min(until, high, ranges[owner][1] if running else high)
        if segments and segments[-1][2] == owner:
            segments[-1] = (segments[-1][0], until, owner)
        else:
            segments.append((moment, until, owner))
        moment = until
    return segments


def operators_of_graphs(rank: Rank, rows: np.ndarray, others: Sequence[Rank] = ()) -> dict[int, Operator]:
    """Returns {device row: its operator} for kernels of CUDA graphs, where known; others: further traces of captures.

    A graph is launched by one call, so a trace of its replay does not say which operator launched a kernel.  The
    capture's launches are calls between BeginCapture and EndCapture on one thread, in the order in which the graph runs
    them, each inside its operator with its shapes.  They are in the same trace, or in others that were recorded while
    the graphs were captured.  A graph for other shapes may have as many kernels as the captured one, so the captures
    must be those of the graphs that ran, in the same order if several are alike; where ROCm recorded the kernel's name
    with the launching call, the names must be the same.
    """
    calls = window.launches(rank, rows)
    is_graph = launches.are_graph_launches(rank, calls) & (rank.kind[rows] == events.KERNEL)
    graphs = [rows[is_graph & (calls == call)] for call in np.unique(calls[is_graph])]
    graphs = sorted(
        (graph[np.argsort(rank.ts[graph], kind="stable")] for graph in graphs), key=lambda graph: rank.ts[graph[0]]
    )
    captures = [capture for source in (rank, *others) for capture in _captures(source)] if graphs else []
    fits: dict[tuple[str, ...], list[tuple[_Capture, list[tuple[int, int]]]]] = {}
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    found: dict[int, Operator] = {}
    for graph in graphs:
        names = tuple(rank.names[name] for name in rank.name[graph])
        if names not in fits:
            fits[names] = [(capture, pairs) for capture in captures if (pairs := _fitted(capture, names))]
        if fits[names]:
            capture, pairs = fits[names][seen[names] % len(fits[names])]
            found |= {row: Operator(capture.rank, *of) for row, of in zip(graph.tolist(), pairs) if of[0] >= 0}
        seen[names] += 1
    return found


def _captures(rank: Rank) -> Iterator[_Capture]:
    """Yields the captures in a trace, in order."""
    calls = np.flatnonzero(rank.is_kind(events.RUNTIME))
    patterns = (*launches.CAPTURE, launches.LAUNCH)
    begins, ends, are_launches = (calls[rank.is_named(pattern.search, calls)] for pattern in patterns)
    for begin in begins[np.argsort(rank.ts[begins])].tolist():
        track = rank.track[begin]
        closing = ends[(rank.track[ends] == track) & (rank.ts[ends] >= rank.end[begin])]
        until = rank.ts[closing].min(initial=np.iinfo(np.int64).max)
        mine = are_launches[(rank.ts[are_launches] >= rank.ts[begin]) & (rank.ts[are_launches] < until)]
        mine = mine[rank.track[mine] == track]
        mine = mine[np.argsort(rank.ts[mine], kind="stable")]
        extras = [rank.extras[extra] if extra >= 0 else None for extra in rank.extra[mine]]
        names = [str(extra[9]) for extra in extras if extra is not None and extra[9] is not None]
        around = attribution.around_launch(rank, mine, events.CPU_OP)
        launched = list(zip(around.tolist(), mine.tolist()))
        yield _Capture(rank, launched, names if len(names) == len(mine) else None)


def _fitted(capture: _Capture, names: Sequence[str]) -> list[tuple[int, int]] | None:
    """Returns (operator, call) of each kernel of a graph, -1 where none fits; None for another graph's capture."""
    if capture.kernels is None or capture.kernels == list(names):
        return capture.launches if len(capture.launches) == len(names) else None
    if abs(len(capture.launches) - len(names)) > MAX_MISSING:
        return None
    num_alike = len(os.path.commonprefix([capture.kernels, list(names)]))
    captured, wanted = capture.kernels[num_alike:], list(names[num_alike:])
    num_last = len(os.path.commonprefix([captured[::-1], wanted[::-1]]))
    if max(len(captured), len(wanted)) - num_last > MAX_MISSING:
        return None
    missing = [(-1, -1)] * (len(wanted) - num_last)
    return capture.launches[:num_alike] + missing + capture.launches[len(capture.launches) - num_last :]
