"""Decides which rows of a trace count: those of its whole steps.

With two or more ProfilerSteps the last one does not count, as its kernels may be cut off: a device row counts if the
host launched it before the last step began.  A row whose launch was not recorded, as it was launched before the
recording or its call was lost, belongs to no known step and does not count.  With fewer steps everything counts.
(HolisticTraceAnalysis' rule, without its faults: the last step is the host's own, and no row counts twice.)
"""

from collections.abc import Sequence

import numpy as np

from bench.analysis.trace import events
from bench.analysis.trace.columns import index_of, take
from bench.analysis.trace.rank import Rank

Step = tuple[int, int, int]  # number, start ns, end ns
NOT_LAUNCHED = np.iinfo(np.int64).max


def until(rank: Rank, include_last_step: bool = False) -> int | None:
    """Returns the time in ns from which the host's rows no longer count; None if all count."""
    steps = rank.steps()
    return steps[-1][1] if len(steps) >= 2 and not include_last_step else None


def steps(rank: Rank, include_last_step: bool = False) -> list[Step]:
    """Returns [(number, start ns, end ns)] of the ProfilerSteps that count, of the GPU's if the host has none."""
    host_steps = rank.steps()
    if counted := host_steps[:-1] if len(host_steps) >= 2 and not include_last_step else host_steps:
        return counted
    spans: dict[int, tuple[int, int]] = {}  # on the GPU, from the first to the last kernel that a step launched there
    for number, start, end in rank.step_ranges(events.GPU_ANNOTATION):  # one per stream
        low, high = spans.get(number, (start, end))
        spans[number] = (min(low, start), max(high, end))
    return sorted(((number, *span) for number, span in spans.items()), key=lambda step: step[1])


def step_times(rank: Rank, rows: np.ndarray) -> np.ndarray:
    """Returns the time in ns that says to which step each of these device rows belongs.

    It is the row's launch, or its start if the steps are the GPU's or no launch was recorded at all.
    """
    launched = launch_times(rank, rows)
    return rank.ts[rows] if not rank.steps() or (launched == NOT_LAUNCHED).all() else launched


def device_rows(rank: Rank, include_last_step: bool = False) -> np.ndarray:
    """Returns the indices of the device rows that count, by start."""
    rows = rank.device_rows()
    if len(rank.steps()) >= 2:
        until_ns = until(rank, include_last_step)
        rows = rows[step_times(rank, rows) < (NOT_LAUNCHED if until_ns is None else until_ns)]
    return rows[np.argsort(rank.ts[rows], kind="stable")]


def host_rows(rank: Rank, kind: int, until_ns: int | None = None) -> np.ndarray:
    """Returns the indices of the host's rows of a kind that count."""
    mine = rank.is_kind(kind)
    return np.flatnonzero(mine if until_ns is None else mine & (rank.ts < until_ns))


def rows_of_steps(rank: Rank, rows: np.ndarray, counted: Sequence[Step]) -> list[tuple[Step, np.ndarray]]:
    """Returns [((number, start ns, end ns), indices of these device rows in the step)] for the steps in counted."""
    moments = step_times(rank, rows)
    order = np.argsort(moments, kind="stable")
    first, last = (np.searchsorted(moments[order], [step[side] for step in counted]) for side in (1, 2))
    return [(step, rows[np.sort(order[low:high])]) for step, low, high in zip(counted, first, last)]


def device_spans(rank: Rank, include_last_step: bool = False) -> list[tuple[int | None, int, int]]:
    """Returns [(number or None, begin ns, end ns)] of the steps of a device; of all rows if no step launched anything.

    A step ends when the host has left it and the device has finished all that it launched; the next one begins there.
    So steps tile the time, and a device that lags behind its host is measured at its own pace.
    """
    rows = rank.device_rows()
    launching = [step for step in rows_of_steps(rank, rows, steps(rank, include_last_step)) if len(step[1])]
    if not launching:
        return [(None, int(rank.ts[rows].min()), int(rank.end[rows].max()))]
    on_host = bool(rank.steps())
    first = int(rank.ts[launching[0][1]].min())
    before = rank.end[rows[rank.ts[rows] < first]].max(initial=-NOT_LAUNCHED)
    begin = max(min(int(before), first), launching[0][0][1] if on_host else first)
    spans: list[tuple[int | None, int, int]] = []
    for (number, _, host_end), mine in launching:
        end = max(begin, int(rank.end[mine].max()), host_end if on_host else begin)
        spans.append((number, begin, end))
        begin = end
    return spans


def annotation_rows(rank: Rank, kind: int, until_ns: int | None = None) -> np.ndarray:
    """Returns the indices of the annotations that count; one on the GPU by the host's that it mirrors, or its start."""
    if kind != events.GPU_ANNOTATION or until_ns is None:
        return host_rows(rank, kind, until_ns)
    rows, hosts = host_rows(rank, kind), np.flatnonzero(rank.is_kind(events.ANNOTATION) & (rank.external > 0))
    hosts = hosts[np.argsort(rank.external[hosts], kind="stable")]
    host = take(hosts, index_of(rank.external[rows], rank.external[hosts]))
    is_same = (host >= 0) & (take(rank.name, host) == rank.name[rows])
    return rows[np.where(is_same, take(rank.ts, host), rank.ts[rows]) < until_ns]


def launches(rank: Rank, rows: np.ndarray) -> np.ndarray:
    """Returns the row of the host call that launched each device row, the last in file order; -1 if there is none."""
    calls = np.flatnonzero(rank.is_kind(events.RUNTIME) & (rank.correlation > 0))[::-1]
    calls = calls[np.argsort(rank.correlation[calls], kind="stable")]
    return take(calls, index_of(rank.correlation[rows], rank.correlation[calls]))


def launch_times(rank: Rank, rows: np.ndarray) -> np.ndarray:
    """Returns the start of the launching call of each device row, ns; NOT_LAUNCHED if there is none."""
    return take(rank.ts, launches(rank, rows), NOT_LAUNCHED)
