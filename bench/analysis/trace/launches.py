"""Measures how the host fed the device: launch delays, launches queued on each stream, copies and their bandwidth.

A row joins its stream's queue when its launching call begins and leaves when it starts; the rows of a graph, which one
call launched on a stream, count as one in its queue until the first of them starts.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.analysis.trace import events, window
from bench.analysis.trace.columns import US, covered_ns, groups, merged_intervals, ns_by_combination, take
from bench.analysis.trace.events import whole
from bench.analysis.trace.rank import Rank
from bench.base import text_table

SLOW_CALL_NS = 50_000  # this and the next are HolisticTraceAnalysis' limits
LONG_DELAY_NS = 100_000
MAX_NAME_CHARS = 60
EARLY_NS = 10_000  # a kernel that begins by more before its launch; no public trace among 25 has one at all
ROUNDING_NS = 1_000  # by which rounded stamps of two consecutive ranges may overlap
HOST_TO_DEVICE = re.compile(r"memcpy HtoD|copyHostToDevice", re.I)
LAUNCH = re.compile(r"Launch(?:Cooperative)?Kernel")  # calls of the runtimes and drivers of CUDA and HIP
CAPTURE = re.compile("BeginCapture"), re.compile("EndCapture")
TIMES = (
    *("call_us_sum", "call_us_mean", "call_us_p95", "run_us_sum"),
    *("delay_us_sum", "delay_us_mean", "delay_us_p50", "delay_us_p95", "delay_us_max"),
)
COUNTS = ("num_short_kernels", "num_slow_calls", "num_long_delays")


def statistics(rank: Rank, rows: np.ndarray) -> dict[str, Any]:
    """Returns num_launches, num_graph_launches, num_graph_rows, num_unlinked; TIMES and COUNTS, None without launches.

    call: the host's launching call; delay: from its end to the kernel's start, not below 0; run: the kernel itself.  A
    short kernel ran for less time than its call took, and the call was not slow.  Kernels of a graph share one call, so
    they are counted apart and in no statistic.
    """
    calls = window.launches(rank, rows)
    is_graph = are_graph_launches(rank, calls)
    linked = (calls >= 0) & ~is_graph
    counts = {
        "num_launches": int(linked.sum()),
        "num_graph_launches": len(np.unique(calls[is_graph])),
        "num_graph_rows": int(is_graph.sum()),
        "num_unlinked": int((calls < 0).sum()),
    }
    if not linked.any():
        return counts | dict.fromkeys((*TIMES, *COUNTS))
    call_ns, run_ns = rank.dur[calls[linked]], rank.dur[rows[linked]]
    delay_ns = np.maximum(0, rank.ts[rows[linked]] - rank.end[calls[linked]])
    calls_ns = (call_ns.sum(), call_ns.mean(), np.percentile(call_ns, 95), run_ns.sum())
    delays_ns = (delay_ns.sum(), delay_ns.mean(), np.median(delay_ns), np.percentile(delay_ns, 95), delay_ns.max())
    is_slow, is_late = call_ns > SLOW_CALL_NS, delay_ns > LONG_DELAY_NS
    flagged = ((run_ns < call_ns) & ~is_slow, is_slow, is_late)
    times_us = {name: value.item() / US for name, value in zip(TIMES, (*calls_ns, *delays_ns))}
    return counts | times_us | {name: int(mask.sum()) for name, mask in zip(COUNTS, flagged)}


def without_kernel(rank: Rank, until_ns: int | None = None) -> tuple[int, int]:
    """Returns the number of launching calls that end before until_ns, and of those of them without a device row.

    Both are 0 for a trace without device rows.  What a graph's capture launches does not count.  CUPTI before 13.1
    gives kernels at the start of a profile wrong times, and libkineto drops those: pytorch#192021.
    """
    on_device = rank.device_rows()
    calls = np.flatnonzero(rank.is_kind(events.RUNTIME))
    begun, ended = (np.sort(rank.ts[calls[rank.is_named(edge.search, calls)]]) for edge in CAPTURE)
    calls = calls[rank.is_named(LAUNCH.search, calls) & (rank.correlation[calls] > 0)]
    calls = calls[np.searchsorted(begun, rank.ts[calls]) <= np.searchsorted(ended, rank.ts[calls])]
    if until_ns is not None:
        calls = calls[rank.end[calls] < until_ns]
    if not len(on_device) or not len(calls):
        return 0, 0
    return len(calls), int((~np.isin(rank.correlation[calls], rank.correlation[on_device])).sum())


def doubts(rank: Rank, until_ns: int | None = None) -> Iterator[str]:
    """Yields a sentence on each damage of a file by which its times may be wrong.  until_ns is of without_kernel()."""
    if rank.cut or rank.num_bad:
        how = rank.cut or "the file is whole"
        yield f"{how}; {rank.num_events} events were read, {rank.num_bad} could not be or have impossible times"
    if rank.unread:
        which = text_table.middle(", ".join(rank.unread), MAX_NAME_CHARS)
        why = "their category is not known here, so what they did on a device is in no figure"
        yield f"not read: {text_table.counted(sum(rank.unread.values()), 'event')} ({which}): {why}"
    num_calls, num_lost = without_kernel(rank, until_ns)
    if num_lost:
        lost = f"{num_lost} of {num_calls} launches have no kernel in the trace"
        yield f"{lost}: the profiler lost them, so sums are too low by them, and their time seems idle"
    rows = rank.device_rows()
    calls = window.launches(rank, rows)
    early_ns = np.where(calls >= 0, take(rank.ts, calls) - rank.ts[rows], 0)
    if num_early := int((early_ns > EARLY_NS).sum()):
        early = f"{num_early} of {len(rows)} device rows begin before the host launches them"
        why = "the clocks of host and device differ, so why the device was idle is not known"
        yield f"{early}, by up to {early_ns.max() / 1e6:.3f} ms: {why}"
    order = rows[np.lexsort((rank.correlation[rows], rank.track[rows], rank.ts[rows]))]
    is_same = [np.diff(column[order]) == 0 for column in (rank.ts, rank.dur, rank.track, rank.name, rank.correlation)]
    if num_twice := int(np.all(is_same, axis=0).sum()):
        yield f"{num_twice} of {len(rows)} device rows are there twice: counts and sums hold them twice"
    steps = itertools.pairwise(rank.steps())
    if overlapping := [(first[0], second[0]) for first, second in steps if second[1] < first[2] - ROUNDING_NS]:
        marks = f"{text_table.counted(len(overlapping), 'pair')} of ProfilerSteps overlap, first #{{}} and #{{}}"
        yield f"{marks.format(*overlapping[0])}: their times, and so the mean, are not those of single steps"
    if len(rows) and len(rank.ts) > 1:
        longest = rows[rank.dur[rows].argmax()]
        others = np.arange(len(rank.ts)) != longest
        span_ns = rank.end[others].max() - rank.ts[others].min()
        if rank.dur[longest] > span_ns:
            name = text_table.middle(rank.names[rank.name[longest]], MAX_NAME_CHARS)
            took = f"{rank.dur[longest] / 1e6:.6g} ms, longer than all else in the trace ({span_ns / 1e6:.6g} ms)"
            yield f"{name} takes {took}: its duration is damaged, and so is its step"


def are_graph_launches(rank: Rank, calls: np.ndarray) -> np.ndarray:
    """Returns a mask of the calls (-1: none) that launched a graph."""
    return take(rank.names_that(lambda name: "GraphLaunch" in name), take(rank.name, calls), False)


def copies(rank: Rank, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns [{"name", "count", "gib", "sum_us", "gib_per_s"}] of copies and memsets; None without recorded sizes."""
    mine = rows[np.isin(rank.kind[rows], (events.MEMCPY, events.MEMSET))]
    sizes = [size if 0 <= (size := whole(extra[0])) < 2**62 else -1 for extra in rank.extras]
    sizes_of_rows = np.array([*sizes, -1], np.int64)[rank.extra[mine]]
    lines = []
    for name, members in groups(rank.name[mine]):
        sum_ns, own_sizes = int(rank.dur[mine[members]].sum()), sizes_of_rows[members]
        gib = float(own_sizes.sum()) / 2**30 if (own_sizes >= 0).all() else None
        rate = gib / (sum_ns / 1e9) if gib is not None and sum_ns > 0 else None
        line = {"name": rank.names[name], "count": len(members), "gib": gib}
        lines.append(line | {"sum_us": sum_ns / US, "gib_per_s": rate})
    return sorted(lines, key=lambda line: -line["sum_us"])


def host_copies(rank: Rank, rows: np.ndarray) -> dict[str, Any]:
    """Returns {"sum_us", "exposed_us", "pageable_us"} of copies from host to device; exposed: nothing else ran."""
    is_mine = rank.is_named(HOST_TO_DEVICE.search, rows)
    mine, others = rows[is_mine], rows[~is_mine]
    copied, rest = (merged_intervals(rank.ts[group], rank.end[group]) for group in (mine, others))
    return {
        "sum_us": covered_ns(copied) / US,
        "exposed_us": ns_by_combination((copied, rest)).get(1, 0) / US,
        "pageable_us": int(rank.dur[mine[rank.is_named(lambda name: "ageable" in name, mine)]].sum()) / US,
    }


def queues(rank: Rank, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns [{"device", "stream", "max", "mean", "empty_pct"}] of launches not yet started, the mean over time."""
    calls, track = window.launches(rank, rows), rank.track[rows]
    later = np.zeros(len(rows), bool)  # rows of a graph after its first on a stream
    graph = np.flatnonzero(are_graph_launches(rank, calls))
    order = graph[np.lexsort((rank.ts[rows[graph]], calls[graph], track[graph]))]
    later[order[1:]] = (calls[order[1:]] == calls[order[:-1]]) & (track[order[1:]] == track[order[:-1]])
    queued = np.flatnonzero((calls >= 0) & ~later)
    lines = []
    for number, members in groups(track[queued]):
        mine = queued[members]
        launched = rank.ts[calls[mine]]
        moments = np.concatenate((launched, np.maximum(rank.ts[rows[mine]], launched)))
        change = np.repeat((1, -1), len(mine))
        order = np.lexsort((-change, moments))  # at equal times, those that join come first
        lasting, waiting = np.diff(moments[order]), np.cumsum(change[order])
        total = int(lasting.sum())
        mean = float((waiting[:-1] * lasting).sum() / total) if total else 0.0
        empty_pct = 100 * float(lasting[waiting[:-1] == 0].sum()) / total if total else 0.0
        line = dict(zip(("device", "stream"), rank.tracks[number][1:]))
        lines.append(line | {"max": int(waiting.max()), "mean": mean, "empty_pct": empty_pct})
    return lines
