"""Measures what the device did, and for how long: tables of kernels, busy, idle, exposed and hidden time.

Types are HolisticTraceAnalysis' division: computation, communication, memory.  Categories (categories.py) are finer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.analysis.trace import events, window
from bench.analysis.trace.categories import RULES, Rule, category, is_communication
from bench.analysis.trace.columns import US, Intervals, groups, merged_intervals, ns_by_combination
from bench.analysis.trace.rank import Rank

TYPES = ("COMPUTATION", "COMMUNICATION", "MEMORY")
COMPUTATION, COMMUNICATION, MEMORY = range(3)
COPY_NAMES = ("Memcpy", "Memset", "hipMemcpy", "hipMemset", "Copy", "FillBuffer")
KERNEL_WAIT_BELOW_NS = 30_000  # HolisticTraceAnalysis' effective limit: its constant 30 is compared with microseconds
PARTS = ("idle", "compute", "non_compute")
TIMES = ("span_us", *(f"{part}_us" for part in PARTS), *(f"{part}_pct" for part in PARTS))


def types(rank: Rank, rows: np.ndarray, rules: tuple[Rule, ...] = RULES) -> np.ndarray:
    """Returns an index into TYPES for each device row: copies and memsets are memory, other transfers communication."""
    kinds = rank.is_named(lambda name: is_communication(name, rules), rows).astype(np.int8)
    is_copy = np.isin(rank.kind[rows], (events.MEMCPY, events.MEMSET))
    is_copy |= rank.is_named(lambda name: name.startswith(COPY_NAMES), rows)
    return np.where(is_copy & (kinds == COMPUTATION), MEMORY, kinds)


def unions(rank: Rank, rows: np.ndarray, kinds: np.ndarray) -> list[Intervals]:
    """Returns the merged intervals of each of TYPES."""
    return [merged_intervals(rank.ts[mine], rank.end[mine]) for mine in (rows[kinds == kind] for kind in range(3))]


def by_type(rank: Rank, rows: np.ndarray, kinds: np.ndarray) -> list[dict[str, Any]]:
    """Returns [{"type", "sum_us", "pct"}], the longest first: types alone and overlapping, pct of all busy time."""
    by_mask = ns_by_combination(unions(rank, rows, kinds))
    total, lines = sum(by_mask.values()), []
    for mask, ns in by_mask.items():
        name = " overlapping ".join(kind for bit, kind in enumerate(TYPES) if mask >> bit & 1)
        lines.append({"type": name, "sum_us": ns / US, "pct": 100 * ns / total})
    return sorted(lines, key=lambda line: -line["sum_us"])


def by_name(rank: Rank, rows: np.ndarray, kinds: np.ndarray, rules: tuple[Rule, ...] = RULES) -> list[dict[str, Any]]:
    """Returns a line for each kernel's name and type, with count and durations, the longest first."""
    lines = []
    for key, mine in groups(rank.name[rows].astype(np.int64) * len(TYPES) + kinds):
        name, kind = rank.names[key // len(TYPES)], TYPES[key % len(TYPES)]
        line = {"name": name, "type": kind, "category": category(name, rules=rules)}
        lines.append(line | _durations(rank.dur[rows[mine]]))
    return sorted(lines, key=lambda line: -line["sum_us"])


def _durations(dur: np.ndarray) -> dict[str, Any]:
    """Returns count, sum, mean, min, max and sample standard deviation (n - 1; 0 for one) of durations in ns."""
    std_ns = dur.std(ddof=1) if len(dur) > 1 else np.zeros(1)
    ns = {"sum": dur.sum(), "mean": dur.sum() / len(dur), "min": dur.min(), "max": dur.max(), "std": std_ns}
    return {"count": len(dur)} | {f"{name}_us": value.item() / US for name, value in ns.items()}


def by_category(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the table of kernels by category, [{"category", "count", "sum_us", "pct"}], the longest first."""
    total_us = sum(line["sum_us"] for line in table)
    lines: dict[str, dict[str, Any]] = {}
    for line in table:
        name = line["category"]
        summed = lines.setdefault(name, {"category": name, "count": 0, "sum_us": 0.0})
        summed["count"] += line["count"]
        summed["sum_us"] += line["sum_us"]
    longest_first = sorted(lines.values(), key=lambda line: -line["sum_us"])
    return [line | {"pct": 100 * line["sum_us"] / total_us if total_us else 0.0} for line in longest_first]


def breakdown(rank: Rank, rows: np.ndarray, kinds: np.ndarray) -> dict[str, Any]:
    """Returns {TIMES, "comm_us", "exposed_comm_us", "overlap_pct"} of one device, all None if it did nothing.

    span: first start to last end; compute: time in which a computation kernel runs; non_compute: the rest of the busy
    time; idle + compute + non_compute = span.  overlap_pct: share of communication hidden under computation, None
    without communication.
    """
    if not len(rows):
        return dict.fromkeys((*TIMES, "comm_us", "exposed_comm_us", "overlap_pct"))
    span_ns = int(rank.end[rows].max() - rank.ts[rows].min())
    busy_ns, compute_ns, comm_ns, hidden_ns = _busy(rank, rows, kinds)
    parts_ns = dict(zip(PARTS, (span_ns - busy_ns, compute_ns, busy_ns - compute_ns)))
    times = {"span_us": span_ns / US} | {f"{part}_us": ns / US for part, ns in parts_ns.items()}
    times |= {f"{part}_pct": 100 * times[f"{part}_us"] / times["span_us"] if span_ns else 0.0 for part in PARTS}
    times |= {"comm_us": comm_ns / US, "exposed_comm_us": (comm_ns - hidden_ns) / US}
    return times | {"overlap_pct": 100 * hidden_ns / comm_ns if comm_ns else None}


def _busy(rank: Rank, rows: np.ndarray, kinds: np.ndarray) -> tuple[int, int, int, int]:
    """Returns the nanoseconds in which these rows ran, computed, communicated, and did both of these at once."""
    by_mask = ns_by_combination(unions(rank, rows, kinds))
    wanted = (0, 1 << COMPUTATION, 1 << COMMUNICATION, 1 << COMPUTATION | 1 << COMMUNICATION)
    busy, compute, comm, both = (sum(ns for mask, ns in by_mask.items() if mask & bits == bits) for bits in wanted)
    return busy, compute, comm, both


def idle(rank: Rank, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns why each stream waited: [{"device", "stream", "host_wait_us", "kernel_wait_us", "other_us"}].

    A gap before a row is a host wait if the host launched it only after the stream had run dry; else a kernel wait if
    it is shorter than 30 us; else other.
    """
    lines = []
    launched = window.launch_times(rank, rows)
    for track, mine in groups(rank.track[rows]):
        order = mine[np.argsort(rank.ts[rows[mine]], kind="stable")]
        start, end, call = rank.ts[rows[order]], rank.end[rows[order]], launched[order]
        before = np.maximum.accumulate(end)[:-1]
        gap = np.maximum(start[1:] - before, 0)
        is_host = (call[1:] != window.NOT_LAUNCHED) & (call[1:] > before)
        is_kernel = ~is_host & (gap < KERNEL_WAIT_BELOW_NS)
        gaps = {"host_wait_us": gap[is_host], "kernel_wait_us": gap[is_kernel], "other_us": gap[~is_host & ~is_kernel]}
        line = dict(zip(("device", "stream"), rank.tracks[track][1:]))
        lines.append(line | {name: int(values.sum()) / US for name, values in gaps.items()})
    return lines


def steps(rank: Rank, rows: np.ndarray, kinds: np.ndarray, counted: Sequence[window.Step]) -> list[dict[str, Any]]:
    """Returns a line for each ProfilerStep: {"step", "step_us", "host_us", "busy_us", "compute_us", "comm_us",
    "exposed_comm_us", "num_kernels"}.

    counted: of window.steps().  Device rows belong to the step in which the host launched them; step_us is that of
    window.device_spans(), None without device rows; host_us is the annotation's, None if only the GPU shows the step.
    """
    on_host, lines, kind_of = bool(rank.steps()), [], np.full(len(rank.ts), -1, np.int8)
    kind_of[rows] = kinds
    spans = window.device_spans(rank, include_last_step=True) if len(rank.device_rows()) else []
    step_us = {number: (end - begin) / US for number, begin, end in spans}
    for (number, start, end), mine in window.rows_of_steps(rank, rows, counted):
        busy_ns, compute_ns, comm_ns, hidden_ns = _busy(rank, mine, kind_of[mine])
        line = {"step": number, "step_us": step_us.get(number)}
        line |= {"host_us": (end - start) / US if on_host else None, "busy_us": busy_ns / US}
        line |= {"compute_us": compute_ns / US, "comm_us": comm_ns / US}
        lines.append(line | {"exposed_comm_us": (comm_ns - hidden_ns) / US, "num_kernels": len(mine)})
    return lines


def annotations(rank: Rank, kind: int = events.ANNOTATION, until_ns: int | None = None) -> list[dict[str, Any]]:
    """Returns [{"name", "count", "sum_us", "mean_us", "min_us", "max_us", "std_us"}] of the host's (or GPU's) named
    ranges that count (see window), the longest first."""
    rows = window.annotation_rows(rank, kind, until_ns)
    lines = [{"name": rank.names[name]} | _durations(rank.dur[rows[mine]]) for name, mine in groups(rank.name[rows])]
    return sorted(lines, key=lambda line: -line["sum_us"])
