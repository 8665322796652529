"""What bounded a device: the chain of work that leads to its last kernel, and its largest gaps.

The chain is walked backwards from the end of the last row.  A row that began as soon as another one ended waited for
that one; a row that the host launched only after everything else had ended waited for the host.  Every nanosecond of
the span is in exactly one link, so the links add up to it.  It is a path through what was recorded: an event that a
stream waited for, without a row of its own, is not seen.
"""

import bisect
import itertools

import numpy as np

from bench.trace import attribution, events, intervals, window
from bench.trace.columns import US, groups

KINDS = ("compute", "communication", "memory", "launch", "host", "wait")
NUM_GAPS = 10


def path(rank, rows, kinds, launched=None):
    """{"compute_us", "communication_us", "memory_us", "launch_us", "host_us", "wait_us", "span_us", "num_links"} of a
    device.

    launch: from the launching call to the start of its row, where nothing else ran; host: the host had launched nothing
    yet; wait: launched, nothing running, and yet not started.  launched: window.launch_times of the rows, if at hand.
    """
    if not len(rows):
        return {f"{kind}_us": None for kind in KINDS} | {"span_us": None, "num_links": 0}
    launched = window.launch_times(rank, rows) if launched is None else launched
    order = np.argsort(rank.end[rows], kind="stable")
    columns = (rank.ts[rows], rank.end[rows], launched, kinds)
    start, end, launched, kinds = (column[order].tolist() for column in columns)
    spent, num_links = _walk(start, end, launched, kinds)
    times_us = {f"{kind}_us": ns / US for kind, ns in spent.items()}
    return times_us | {"span_us": (end[-1] - min(start)) / US, "num_links": num_links}


def _walk(start, end, launched, kinds):
    """Rows by their end, as lists -> ({kind of link: nanoseconds}, number of rows in the chain)."""
    spent, begun = dict.fromkeys(KINDS, 0), _Begun(start, end)
    row, moment, first, num_links = len(end) - 1, end[-1], min(start), 0
    while True:
        num_links += 1
        spent[KINDS[kinds[row]]] += max(0, moment - start[row])
        moment = min(moment, start[row])
        if moment <= first:
            break
        previous = bisect.bisect_right(end, moment) - 1
        while previous >= 0 and start[previous] >= moment:  # rows without a duration lead nowhere
            previous -= 1
        gap_from = end[previous] if previous >= 0 else None
        if gap_from != moment and (running := begun.running_at(moment)) is not None:
            row = running  # something still ran: that is what the time went to
            continue
        if gap_from is None:
            break
        if gap_from < moment:
            if gap_from < launched[row] != window.NOT_LAUNCHED:
                called = min(launched[row], moment)
                spent["host"] += called - gap_from
                spent["launch"] += moment - called
            else:
                spent["wait"] += moment - gap_from
            moment = gap_from
        row = previous
    return spent, num_links


def steps(rank, rows, kinds):
    """[{"step"} | path()] of each ProfilerStep that launched rows: the chain through the rows that its host launched.

    A step begins with the first of its rows, so what the host did before that is the end of the step before.
    """
    kind_of, launch_of = np.full(len(rank.ts), -1, np.int8), np.zeros(len(rank.ts), np.int64)
    kind_of[rows], launch_of[rows] = kinds, window.launch_times(rank, rows)
    of_steps = window.rows_of_steps(rank, rows, window.steps(rank, include_last_step=True))
    return [
        {"step": step[0]} | path(rank, mine, kind_of[mine], launch_of[mine]) for step, mine in of_steps if len(mine)
    ]


class _Begun:
    """Rows in order of their start, to find what ran at a moment."""

    def __init__(self, start, end):
        self._rows = sorted(range(len(start)), key=start.__getitem__)
        self._starts = [start[row] for row in self._rows]
        self._end = end
        self._latest_end = list(itertools.accumulate((end[row] for row in self._rows), max))

    def running_at(self, moment):
        """The row that began last of those that began before the moment and ended after it; None without one."""
        number = bisect.bisect_left(self._starts, moment) - 1
        while number >= 0 and self._latest_end[number] > moment:
            if self._end[self._rows[number]] > moment:
                return self._rows[number]
            number -= 1
        return None


def gaps(rank, rows, limit=NUM_GAPS):
    """The longest times in which a device did nothing: [{"start_us", "us", "before", "after", "host"}], longest first.

    start_us counts from the device's first row.  host: what the thread that launched the next row was doing in the
    middle of the gap: the innermost call, operator or annotation; None if nothing was recorded there.
    """
    if not len(rows):
        return []
    low, high = intervals.gaps(intervals.union(rank.ts[rows], rank.end[rows]))
    longest = np.argsort(low - high, kind="stable")[:limit]
    low, high, first = low[longest], high[longest], rank.ts[rows].min()
    by_start, by_end = (rows[np.argsort(side[rows], kind="stable")] for side in (rank.ts, rank.end))
    after = by_start[np.searchsorted(rank.ts[by_start], high)]
    before = by_end[np.searchsorted(rank.end[by_end], low, side="right") - 1]
    times = [{"start_us": int(begin - first) / US, "us": int(end - begin) / US} for begin, end in zip(low, high)]
    columns = (_names(rank, before), _names(rank, after), _doing(rank, window.launches(rank, after), (low + high) // 2))
    return [line | dict(zip(("before", "after", "host"), names)) for line, *names in zip(times, *columns)]


def _doing(rank, calls, moments):
    """What the thread of each call was in at the moment beside it: a call, else an operator, else an annotation."""
    around = np.full(len(calls), -1)
    for kind in (events.RUNTIME, events.CPU_OP, events.ANNOTATION):
        around = np.where(around >= 0, around, attribution.by_thread(rank, calls, moments, kind))
    return _names(rank, around)


def _names(rank, rows):
    return [rank.names[rank.name[row]] if row >= 0 else None for row in rows]


def synchronisations(rank, counted=()):
    """[{"name", "count", "sum_us"}] of host calls that wait for the device, longest first.

    counted: window.steps; with them only calls inside count, as the profiler itself waits for the device when it stops.
    """
    calls = window.host_rows(rank, events.RUNTIME)
    calls = calls[rank.is_named(lambda name: "Synchronize" in name, calls)]
    if counted and rank.steps():
        calls = calls[np.any([(rank.ts[calls] >= start) & (rank.ts[calls] < end) for _, start, end in counted], axis=0)]
    lines = []
    for name, mine in groups(rank.name[calls]):
        lines.append({"name": rank.names[name], "count": len(mine), "sum_us": int(rank.dur[calls[mine]].sum()) / US})
    return sorted(lines, key=lambda line: -line["sum_us"])


def items(rank, rows):
    """{"count", "sum_us"} of tensors of the device that the host read (.item(), float(), if): each waits for the
    device.

    Each is an aten::_local_scalar_dense that launched a copy; one that launched none read a tensor of the host.
    """
    is_item = "aten::_local_scalar_dense".__eq__
    if not rank.names_that(is_item).any():
        return {"count": 0, "sum_us": 0.0}
    by = attribution.operators(rank, rows[rank.kind[rows] == events.MEMCPY])
    by = np.unique(by[by >= 0])
    by = by[rank.is_named(is_item, by)]
    return {"count": len(by), "sum_us": int(rank.dur[by].sum()) / US}
