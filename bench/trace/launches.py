"""How the host fed the device: launch delays, queue lengths, copies and their bandwidth."""

import numpy as np

from bench.trace import events, window

US = 1000
SLOW_CALL_NS = 50_000  # HolisticTraceAnalysis' cut-offs
LONG_DELAY_NS = 100_000


def statistics(rank, rows):
    """{"num_launches", "num_unlinked", mean and p95 of call and delay, "num_short_kernels", "num_slow_calls", "num_long_delays"}.

    call: the host's launching call; delay: from its end to the kernel's start, not below 0.  A short kernel ran for less
    time than its call took.  None for every time where no launch was recorded.
    """
    calls = window.launches(rank, rows)
    linked = calls >= 0
    found = {"num_launches": int(linked.sum()), "num_unlinked": int((~linked).sum())}
    if not linked.any():
        return found | dict.fromkeys(("call_us_mean", "call_us_p95", "delay_us_mean", "delay_us_p95", "num_short_kernels", "num_slow_calls", "num_long_delays"))
    call_ns = rank.dur[calls[linked]]
    delay_ns = np.maximum(0, rank.ts[rows[linked]] - rank.end[calls[linked]])
    return found | {
        "call_us_mean": float(call_ns.mean()) / US, "call_us_p95": float(np.percentile(call_ns, 95)) / US,
        "delay_us_mean": float(delay_ns.mean()) / US, "delay_us_p95": float(np.percentile(delay_ns, 95)) / US,
        "num_short_kernels": int((rank.dur[rows[linked]] < call_ns).sum()),
        "num_slow_calls": int((call_ns > SLOW_CALL_NS).sum()), "num_long_delays": int((delay_ns > LONG_DELAY_NS).sum()),
    }  # fmt: skip


def queues(rank, rows):
    """[{"device", "stream", "max", "mean", "empty_pct"}]: launched and not yet started, the mean over time.

    A row joins its stream's queue when its launching call begins and leaves when it starts.
    """
    launched = window.launch_times(rank, rows)
    found = []
    for track in np.unique(rank.track[rows]):
        mine = (rank.track[rows] == track) & (launched != window.NOT_LAUNCHED)
        if not mine.any():
            continue
        start = np.maximum(rank.ts[rows[mine]], launched[mine])
        at = np.concatenate((launched[mine], start))
        change = np.concatenate((np.ones(mine.sum(), int), -np.ones(mine.sum(), int)))
        order = np.lexsort((-change, at))  # at one time: first those that join
        at, queued = at[order], np.cumsum(change[order])
        lasting = np.diff(at)
        total = int(lasting.sum())
        _, device, stream = rank.tracks[track]
        mean = float((queued[:-1] * lasting).sum() / total) if total else 0.0
        empty = 100 * float(lasting[queued[:-1] == 0].sum()) / total if total else 0.0
        found.append({"device": device, "stream": stream, "max": int(queued.max()), "mean": mean, "empty_pct": empty})
    return found


def copies(rank, rows):
    """[{"name", "count", "gib", "sum_us", "gib_per_s"}] of copies and memsets; GiB None where the sizes are not recorded."""
    mine = rows[np.isin(rank.kind[rows], (events.MEMCPY, events.MEMSET))]
    sizes = np.array([_bytes(extra) for extra in rank.extras] + [-1], np.int64)[rank.extra[mine]]
    found = []
    for name in np.unique(rank.name[mine]):
        one = rank.name[mine] == name
        sum_ns, known = int(rank.dur[mine[one]].sum()), sizes[one]
        gib = float(known.sum()) / 2**30 if (known >= 0).all() else None
        rate = gib / (sum_ns / 1e9) if gib is not None and sum_ns > 0 else None
        found.append({"name": rank.names[name], "count": int(one.sum()), "gib": gib, "sum_us": sum_ns / US, "gib_per_s": rate})
    return sorted(found, key=lambda line: -line["sum_us"])


def _bytes(extra):
    return extra[0] if isinstance(extra[0], int) and 0 <= extra[0] < 2**62 else -1
