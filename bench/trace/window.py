"""Which rows of a trace count: those of its whole steps.

With two or more ProfilerSteps the last one is left out, as its kernels may be cut off: a device row counts if the host
launched it before the last step began.  With fewer steps everything counts.  (HolisticTraceAnalysis' rule, without its
faults: it takes the last step from the host alone, and no row counts twice.)
"""

import numpy as np

from bench.trace import events

NOT_LAUNCHED = np.iinfo(np.int64).max


def until(rank, include_last_step=False):
    """Stamp from which the host's rows no longer count, ns; None: all count."""
    steps = rank.steps()
    return steps[-1][1] if len(steps) >= 2 and not include_last_step else None


def device_rows(rank, include_last_step=False):
    """Indices of the device rows that count, by start."""
    rows, until_ns = rank.device_rows(), until(rank, include_last_step)
    if until_ns is not None:
        launched_ns = launch_times(rank, rows)
        rows = rows[(launched_ns != NOT_LAUNCHED) & (launched_ns < until_ns)]
    return rows[np.argsort(rank.ts[rows], kind="stable")]


def host_rows(rank, kind, until_ns=None):
    """Indices of the host's rows of a kind that count."""
    mine = rank.is_kind(kind)
    return np.flatnonzero(mine if until_ns is None else mine & (rank.ts < until_ns))


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
