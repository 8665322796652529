"""How the host fed the device: launch delays, queue lengths, copies and their bandwidth."""

import re

import numpy as np

from bench.trace import events, intervals, window
from bench.trace.nest import groups

US = 1000
SLOW_CALL_NS = 50_000  # HolisticTraceAnalysis' cut-offs
LONG_DELAY_NS = 100_000
HOST_TO_DEVICE = re.compile(r"memcpy HtoD|copyHostToDevice", re.I)
LAUNCH = re.compile(r"(?:cuda|cu|hip)Launch(?:Cooperative)?Kernel")
STATISTICS = (
    "call_us_sum",
    "call_us_mean",
    "call_us_p95",
    "run_us_sum",
    "delay_us_sum",
    "delay_us_mean",
    "delay_us_p50",
    "delay_us_p95",
    "delay_us_max",
    "num_short_kernels",
    "num_slow_calls",
    "num_long_delays",
)


def statistics(rank, rows):
    """What STATISTICS names, None where no launch was recorded, and "num_launches", "num_graph_launches", "num_graph_rows", "num_unlinked".

    call: the host's launching call; delay: from its end to the kernel's start, not below 0; run: the kernel itself.  A short
    kernel ran for less time than its call took, and the call was not slow.  Kernels of a graph share one call, so they are
    counted apart and in no statistic.
    """
    calls = window.launches(rank, rows)
    of_graph = _of_graph(rank, calls)
    linked = (calls >= 0) & ~of_graph
    found = {
        "num_launches": int(linked.sum()),
        "num_graph_launches": len(np.unique(calls[of_graph])),
        "num_graph_rows": int(of_graph.sum()),
        "num_unlinked": int((calls < 0).sum()),
    }
    if not linked.any():
        return found | dict.fromkeys(STATISTICS)
    call_ns, run_ns = rank.dur[calls[linked]], rank.dur[rows[linked]]
    delay_ns = np.maximum(0, rank.ts[rows[linked]] - rank.end[calls[linked]])
    short = (run_ns < call_ns) & (call_ns <= SLOW_CALL_NS)
    values = (
        int(call_ns.sum()) / US,
        float(call_ns.mean()) / US,
        float(np.percentile(call_ns, 95)) / US,
        int(run_ns.sum()) / US,
        int(delay_ns.sum()) / US,
        float(delay_ns.mean()) / US,
        float(np.median(delay_ns)) / US,
        float(np.percentile(delay_ns, 95)) / US,
        int(delay_ns.max()) / US,
        int(short.sum()),
        int((call_ns > SLOW_CALL_NS).sum()),
        int((delay_ns > LONG_DELAY_NS).sum()),
    )
    return found | dict(zip(STATISTICS, values))


def without_kernel(rank, until_ns=None):
    """(launching calls that end before until_ns, how many of them have no device row); (0, 0) for a trace without device rows.

    CUPTI before 13.1 gives kernels at the start of a profile wrong times, and libkineto drops those: pytorch#192021.
    """
    on_device = rank.device_rows()
    is_launch = np.array([bool(LAUNCH.match(name)) for name in rank.names] or [False])
    calls = (
        np.flatnonzero(rank.is_kind(events.RUNTIME) & is_launch[rank.name] & (rank.correlation > 0))
        if len(rank.name)
        else np.empty(0, int)
    )
    if until_ns is not None:
        calls = calls[rank.end[calls] < until_ns]
    if not len(on_device) or not len(calls):
        return 0, 0
    return len(calls), int((~np.isin(rank.correlation[calls], rank.correlation[on_device])).sum())


def _of_graph(rank, calls):
    """Which of these calls (-1: none) launched a graph."""
    is_graph = np.array(["GraphLaunch" in name for name in rank.names] or [False])
    return (calls >= 0) & is_graph[rank.name[np.maximum(calls, 0)]] if len(rank.name) else calls >= 0


def queues(rank, rows):
    """[{"device", "stream", "max", "mean", "empty_pct"}]: launched and not yet started, the mean over time.

    A row joins its stream's queue when its launching call begins and leaves when it starts; what one call launched on a
    stream, a graph, is one thing in its queue until the first of it starts.
    """
    calls = window.launches(rank, rows)
    launched = np.where(calls >= 0, rank.ts[np.maximum(calls, 0)], window.NOT_LAUNCHED) if len(rank.ts) else calls
    later = np.zeros(len(rows), bool)
    of_graph = np.flatnonzero(_of_graph(rank, calls))
    order = of_graph[np.lexsort((rank.ts[rows[of_graph]], calls[of_graph], rank.track[rows[of_graph]]))]
    later[order[1:]] = (calls[order[1:]] == calls[order[:-1]]) & (
        rank.track[rows[order[1:]]] == rank.track[rows[order[:-1]]]
    )
    found = []
    queued = np.flatnonzero((calls >= 0) & ~later)
    for track, places in groups(rank.track[rows[queued]]):
        mine = queued[places]
        start = np.maximum(rank.ts[rows[mine]], launched[mine])
        at = np.concatenate((launched[mine], start))
        change = np.repeat((1, -1), len(mine))
        order = np.lexsort((-change, at))  # at one time: first those that join
        at, waiting = at[order], np.cumsum(change[order])
        lasting = np.diff(at)
        total = int(lasting.sum())
        _, device, stream = rank.tracks[track]
        mean = float((waiting[:-1] * lasting).sum() / total) if total else 0.0
        empty = 100 * float(lasting[waiting[:-1] == 0].sum()) / total if total else 0.0
        found.append({"device": device, "stream": stream, "max": int(waiting.max()), "mean": mean, "empty_pct": empty})
    return found


def copies(rank, rows):
    """[{"name", "count", "gib", "sum_us", "gib_per_s"}] of copies and memsets; GiB None where the sizes are not recorded."""
    mine = rows[np.isin(rank.kind[rows], (events.MEMCPY, events.MEMSET))]
    sizes = np.array([_bytes(extra) for extra in rank.extras] + [-1], np.int64)[rank.extra[mine]]
    found = []
    for name, one in groups(rank.name[mine]):
        sum_ns, known = int(rank.dur[mine[one]].sum()), sizes[one]
        gib = float(known.sum()) / 2**30 if (known >= 0).all() else None
        rate = gib / (sum_ns / 1e9) if gib is not None and sum_ns > 0 else None
        found.append(
            {"name": rank.names[name], "count": len(one), "gib": gib, "sum_us": sum_ns / US, "gib_per_s": rate}
        )
    return sorted(found, key=lambda line: -line["sum_us"])


def host_copies(rank, rows):
    """{"sum_us", "exposed_us", "pageable_us"} of copies from the host to one device; exposed: while nothing else ran there."""
    mine = np.array([HOST_TO_DEVICE.search(name) is not None for name in rank.names] or [False])[rank.name[rows]]
    copied = intervals.union(rank.ts[rows[mine]], rank.end[rows[mine]])
    others = intervals.union(rank.ts[rows[~mine]], rank.end[rows[~mine]])
    pageable = np.array(["ageable" in name for name in rank.names] or [False])[rank.name[rows]] & mine
    sum_ns, pageable_ns = intervals.length(copied), int(rank.dur[rows[pageable]].sum())
    return {
        "sum_us": sum_ns / US,
        "exposed_us": (sum_ns - intervals.intersection_length(copied, others)) / US,
        "pageable_us": pageable_ns / US,
    }


def _bytes(extra):
    num_bytes = events.whole(extra[0])
    return num_bytes if 0 <= num_bytes < 2**62 else -1
