"""Which rows of a trace count: those of its whole steps.

With two or more ProfilerSteps the last one is left out, as its kernels may be cut off: a device row counts if the host
launched it before the last step began.  A row whose launch was not recorded, as it was launched before the recording or
its call was lost, is of no known step and does not count.  With fewer steps everything counts.  (HolisticTraceAnalysis'
rule, without its faults: the last step is the host's own, and no row counts twice.)
"""

import numpy as np

from bench.trace import events
from bench.trace.load import STEP

NOT_LAUNCHED = np.iinfo(np.int64).max


def until(rank, include_last_step=False):
    """Stamp from which the host's rows no longer count, ns; None: all count."""
    steps = rank.steps()
    return steps[-1][1] if len(steps) >= 2 and not include_last_step else None


def steps(rank, include_last_step=False):
    """[(number, start ns, end ns)] of the ProfilerSteps that count; where the host has none, of those the GPU shows."""
    found = rank.steps()
    return (found[:-1] if len(found) >= 2 and not include_last_step else found) or gpu_steps(rank)


def gpu_steps(rank):
    """The same of the annotations on the GPU: from the first to the last kernel that a step launched there."""
    numbers = {num: int(found.group(1)) for num, name in enumerate(rank.names) if (found := STEP.search(name))}
    rows = np.flatnonzero(rank.is_kind(events.GPU_ANNOTATION) & np.isin(rank.name, list(numbers)))
    found = {}
    for row in rows:  # one a stream
        number = numbers[int(rank.name[row])]
        start, end = found.get(number, (int(rank.ts[row]), int(rank.end[row])))
        found[number] = (min(start, int(rank.ts[row])), max(end, int(rank.end[row])))
    return sorted(((number, *times) for number, times in found.items()), key=lambda step: step[1])


def step_times(rank, rows):
    """Moment of each of these device rows that says to which step it belongs: its launch, or its own start where the steps
    are the GPU's or no launch was recorded at all."""
    launched = launch_times(rank, rows)
    return rank.ts[rows] if not rank.steps() or (launched == NOT_LAUNCHED).all() else launched


def device_rows(rank, include_last_step=False):
    """Indices of the device rows that count, by start."""
    rows = rank.device_rows()
    if len(rank.steps()) >= 2:
        until_ns = until(rank, include_last_step)
        rows = rows[step_times(rank, rows) < (NOT_LAUNCHED if until_ns is None else until_ns)]
    return rows[np.argsort(rank.ts[rows], kind="stable")]


def host_rows(rank, kind, until_ns=None):
    """Indices of the host's rows of a kind that count."""
    mine = rank.is_kind(kind)
    return np.flatnonzero(mine if until_ns is None else mine & (rank.ts < until_ns))


def rows_of_steps(rank, rows, counted):
    """[((number, start ns, end ns), indices of these device rows that belong to it)] of the steps in counted."""
    moments = step_times(rank, rows)
    order = np.argsort(moments, kind="stable")
    first, last = (np.searchsorted(moments[order], [step[side] for step in counted]) for side in (1, 2))
    return [(step, rows[np.sort(order[low:high])]) for step, low, high in zip(counted, first, last)]


def annotation_rows(rank, kind, until_ns=None):
    """Indices of the named ranges that count.  One on the GPU counts with the host's range that it mirrors, or by its own start."""
    if kind != events.GPU_ANNOTATION or until_ns is None:
        return host_rows(rank, kind, until_ns)
    rows, hosts = (
        np.flatnonzero(rank.is_kind(kind)),
        np.flatnonzero(rank.is_kind(events.ANNOTATION) & (rank.external > 0)),
    )
    start = rank.ts[rows]
    if len(hosts):
        hosts = hosts[np.argsort(rank.external[hosts], kind="stable")]
        place = np.minimum(np.searchsorted(rank.external[hosts], rank.external[rows]), len(hosts) - 1)
        same = (rank.external[hosts[place]] == rank.external[rows]) & (rank.name[hosts[place]] == rank.name[rows])
        start = np.where(same, rank.ts[hosts[place]], start)
    return rows[start < until_ns]


def launches(rank, rows):
    """Row of the host call that launched each of these device rows, -1 where there is none; the last in file order."""
    calls = np.flatnonzero(rank.is_kind(events.RUNTIME) & (rank.correlation > 0))
    if not len(calls) or not len(rows):
        return np.full(len(rows), -1)
    order = np.lexsort((calls, rank.correlation[calls]))
    known = rank.correlation[calls][order]
    place = np.searchsorted(known, rank.correlation[rows], side="right") - 1
    found = (place >= 0) & (known[np.maximum(place, 0)] == rank.correlation[rows]) & (rank.correlation[rows] > 0)
    return np.where(found, calls[order][np.maximum(place, 0)], -1)


def launch_times(rank, rows):
    """Start of the launching call of each device row, ns; NOT_LAUNCHED where there is none."""
    calls = launches(rank, rows)
    return np.where(calls >= 0, rank.ts[np.maximum(calls, 0)], NOT_LAUNCHED)


def devices(rank, rows):
    """{device: mask over rows}."""
    of_track = np.array([track[1] for track in rank.tracks] or [0])
    device = of_track[rank.track[rows]] if len(rows) else np.empty(0, int)
    return {one.item() if hasattr(one, "item") else one: device == one for one in np.unique(device)}
