"""How far the host was ahead of each stream: what it had launched that had not started yet.

A row joins its stream's queue when its launching call begins and leaves when it starts; what one call launched on a
stream, a graph, is one thing in its queue until the first of it starts.
"""

import numpy as np

from bench.analysis.trace import window
from bench.analysis.trace.columns import US, groups
from bench.analysis.trace.launches import of_graph

MAX_POINTS = 600  # of a stream's depth over time
MAX_STREAMS = 6  # with a depth over time, those that most was launched on


def queues(rank, rows):
    """[{"device", "stream", "max", "mean", "empty_pct"}]: launched and not yet started, the mean over time."""
    return [_line(rank, *one) for one in _of_streams(rank, rows)]


def depth(rank, rows):
    """[{"device", "stream", "at_us", "depth"}]: how many waited from each moment on, the streams with most first.

    at_us counts from the device's first row; of many moments the fullest and the emptiest of each stretch are kept.
    """
    if not len(rows):
        return []
    first, lines = int(rank.ts[rows].min()), []
    for track, moments, waiting in sorted(_of_streams(rank, rows), key=lambda one: -len(one[1]))[:MAX_STREAMS]:
        kept = _kept(waiting)
        line = dict(zip(("device", "stream"), rank.tracks[track][1:]))
        at_us = ((moments[kept] - first) / US).round(1).tolist()
        lines.append(line | {"at_us": at_us, "depth": waiting[kept].tolist()})
    return lines


def _of_streams(rank, rows):
    """[(track, moments in order, how many wait from each on)]"""
    calls = window.launches(rank, rows)
    later = np.zeros(len(rows), bool)
    graph = np.flatnonzero(of_graph(rank, calls))
    track = rank.track[rows]
    order = graph[np.lexsort((rank.ts[rows[graph]], calls[graph], track[graph]))]
    later[order[1:]] = (calls[order[1:]] == calls[order[:-1]]) & (track[order[1:]] == track[order[:-1]])
    queued = np.flatnonzero((calls >= 0) & ~later)
    for number, members in groups(track[queued]):
        mine = queued[members]
        launched = rank.ts[calls[mine]]
        moments = np.concatenate((launched, np.maximum(rank.ts[rows[mine]], launched)))
        change = np.repeat((1, -1), len(mine))
        order = np.lexsort((-change, moments))  # at one time: first those that join
        yield number, moments[order], np.cumsum(change[order])


def _line(rank, track, moments, waiting):
    lasting = np.diff(moments)
    total = int(lasting.sum())
    mean = float((waiting[:-1] * lasting).sum() / total) if total else 0.0
    empty_pct = 100 * float(lasting[waiting[:-1] == 0].sum()) / total if total else 0.0
    line = dict(zip(("device", "stream"), rank.tracks[track][1:]))
    return line | {"max": int(waiting.max()), "mean": mean, "empty_pct": empty_pct}


def _kept(waiting):
    """Indices of at most MAX_POINTS moments, in order."""
    if len(waiting) <= MAX_POINTS:
        return np.arange(len(waiting))
    stretches = np.array_split(np.arange(len(waiting)), MAX_POINTS // 2)
    ends = [(one[waiting[one].argmin()], one[waiting[one].argmax()]) for one in stretches]
    return np.unique(ends)
