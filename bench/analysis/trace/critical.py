"""Shows what bounded a device: the chain of work that leads to its last kernel, and its largest gaps.

The chain is walked backwards from the end of the last row.  A row that began as soon as another one ended waited for
that one; a row that the host launched only after everything else had ended waited for the host.  Every nanosecond of
the span is in exactly one link, so the links add up to it.  The path shows only what was recorded: a stream's wait for
an event that has no row is not seen.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.analysis.trace import attribution, events, window
from bench.analysis.trace.columns import US, groups, merged_intervals
from bench.analysis.trace.rank import Rank

KINDS = ("compute", "communication", "memory", "launch", "host", "wait")
LAUNCH, HOST, WAIT = 3, 4, 5
NUM_GAPS = 10


def path(rank: Rank, rows: np.ndarray, kinds: np.ndarray, launched: np.ndarray | None = None) -> dict[str, Any]:
    """Returns the times of a device's chain, {"span_us"} and those of KINDS, {"compute_us", "communication_us", ...}.

    launch: from the launching call to the start of its row, where nothing else ran; host: the host had launched nothing
    yet; wait: launched, nothing running, and yet not started.  launched: window.launch_times() of the rows, if at hand.
    """
    if not len(rows):
        return {f"{kind}_us": None for kind in KINDS} | {"span_us": None}
    spent = [0] * len(KINDS)
    for kind, begin, end, _ in walk(rank, rows, kinds, launched):
        spent[kind] += end - begin
    times_us = {f"{kind}_us": ns / US for kind, ns in zip(KINDS, spent)}
    return times_us | {"span_us": int(rank.end[rows].max() - rank.ts[rows].min()) / US}


def walk(
    rank: Rank, rows: np.ndarray, kinds: np.ndarray, launched: np.ndarray | None = None
) -> Iterator[tuple[int, int, int, int | None]]:
    """Yields the links, the last one first: (index into KINDS, start ns, end ns, row or None between rows)."""
    called_ns = window.launch_times(rank, rows) if launched is None else launched
    order = np.argsort(rank.end[rows], kind="stable")
    columns = (rows, rank.ts[rows], rank.end[rows], called_ns, kinds)
    # memoryviews give plain integers without holding them
    views: Iterator[Any] = (memoryview(np.ascontiguousarray(column[order]).data) for column in columns)
    row_of, start, end, called_at, kind_of = views
    begun, row, moment, first = _Begun(start, end), len(end) - 1, end[-1], int(rank.ts[rows].min())
    while True:
        yield kind_of[row], min(moment, start[row]), moment, row_of[row]
        moment = min(moment, start[row])
        if moment <= first:
            return
        previous = bisect.bisect_right(end, moment) - 1
        while previous >= 0 and start[previous] >= moment:  # rows without a duration lead nowhere
            previous -= 1
        gap_from = end[previous] if previous >= 0 else None
        if gap_from != moment and (running := begun.running_at(moment)) is not None:
            row = running  # something still ran: that is what the time went to
            continue
        if gap_from is None:
            return
        if gap_from < moment:
            if gap_from < called_at[row] != window.NOT_LAUNCHED:
                called = min(called_at[row], moment)
                yield LAUNCH, called, moment, None
                yield HOST, gap_from, called, None
            else:
                yield WAIT, gap_from, moment, None
            moment = gap_from
        row = previous


def steps(rank: Rank, rows: np.ndarray, kinds: np.ndarray) -> list[dict[str, Any]]:
    """Returns [{"step"} | path()] of each ProfilerStep that launched rows, of the chain through these rows.

    A step begins with the first of its rows, so what the host did before that belongs to the step before.
    """
    kind_of, launch_of = np.full(len(rank.ts), -1, np.int8), np.zeros(len(rank.ts), np.int64)
    kind_of[rows], launch_of[rows] = kinds, window.launch_times(rank, rows)
    rows_by_step = window.rows_of_steps(rank, rows, window.steps(rank, include_last_step=True))
    return [
        {"step": number} | path(rank, mine, kind_of[mine], launch_of[mine])
        for (number, _, _), mine in rows_by_step
        if len(mine)
    ]


class _Begun:
    """Rows in order of their start, to find what ran at a moment."""

    def __init__(self, start: Any, end: Any) -> None:
        start, end = np.asarray(start), np.asarray(end)
        rows = np.argsort(start, kind="stable")
        columns: tuple[Any, ...] = (rows, start[rows], end[rows], np.maximum.accumulate(end[rows]))
        self._rows, self._starts, self._ends, self._latest_end = (memoryview(column) for column in columns)

    def running_at(self, moment: int) -> int | None:
        """Returns the last row to begin among those that ran before and after the moment; None if none did."""
        number = bisect.bisect_left(self._starts, moment) - 1
        while number >= 0 and self._latest_end[number] > moment:
            if self._ends[number] > moment:
                return self._rows[number]
            number -= 1
        return None


def gaps(rank: Rank, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns the longest idle times of a device, [{"start_us", "us", "before", "after", "host"}], the longest first.

    start_us counts from the device's first row.  host: what the thread that launched the next row was doing in the
    middle of the gap: the innermost call, operator or annotation; None if nothing was recorded there.
    """
    if not len(rows):
        return []
    starts, ends = merged_intervals(rank.ts[rows], rank.end[rows])
    low, high = ends[:-1], starts[1:]
    longest = np.argsort(low - high, kind="stable")[:NUM_GAPS]
    low, high, first = low[longest], high[longest], rank.ts[rows].min()
    by_start, by_end = (rows[np.argsort(side[rows], kind="stable")] for side in (rank.ts, rank.end))
    after = by_start[np.searchsorted(rank.ts[by_start], high)]
    before = by_end[np.searchsorted(rank.end[by_end], low, side="right") - 1]
    times = [{"start_us": int(begin - first) / US, "us": int(end - begin) / US} for begin, end in zip(low, high)]
    calls, around = window.launches(rank, after), np.full(len(longest), -1)
    for kind in (events.RUNTIME, events.CPU_OP, events.ANNOTATION):
        around = np.where(around >= 0, around, attribution.by_thread(rank, calls, (low + high) // 2, kind))
    columns = (rank.names_of(rows) for rows in (before, after, around))
    return [line | dict(zip(("before", "after", "host"), names)) for line, *names in zip(times, *columns)]


def synchronisations(rank: Rank, counted: Sequence[window.Step]) -> list[dict[str, Any]]:
    """Returns [{"name", "count", "sum_us"}] of host calls that wait for the device, the longest first.

    counted: of window.steps(); only calls within count, as the profiler waits for the device when it stops.
    """
    calls = window.host_rows(rank, events.RUNTIME)
    calls = calls[rank.is_named(lambda name: "Synchronize" in name, calls)]
    if counted and rank.steps():
        calls = calls[np.any([(rank.ts[calls] >= start) & (rank.ts[calls] < end) for _, start, end in counted], axis=0)]
    lines = []
    for name, mine in groups(rank.name[calls]):
        lines.append({"name": rank.names[name], "count": len(mine), "sum_us": int(rank.dur[calls[mine]].sum()) / US})
    return sorted(lines, key=lambda line: -line["sum_us"])


def items(rank: Rank, rows: np.ndarray) -> dict[str, Any]:
    """Returns {"count", "sum_us"} of the host's reads of device tensors (.item(), float(), if): each waits for it.

    Each is an aten::_local_scalar_dense that launched a copy; one that launched none read a tensor of the host.
    """
    is_item = "aten::_local_scalar_dense".__eq__
    if not rank.names_that(is_item).any():
        return {"count": 0, "sum_us": 0.0}
    by = attribution.operators(rank, rows[rank.kind[rows] == events.MEMCPY])
    by = np.unique(by[by >= 0])
    by = by[rank.is_named(is_item, by)]
    return {"count": len(by), "sum_us": int(rank.dur[by].sum()) / US}
