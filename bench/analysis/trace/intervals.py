"""Unions and intersections of intervals, in integer nanoseconds.

An interval set is two arrays, starts and ends, sorted and merged: touching intervals are one.  Intervals that are
empty or run backwards hold no time.
"""

import numpy as np


def union(start, end):
    """Any intervals -> their merged set."""
    start, end = np.asarray(start), np.asarray(end)
    good = end > start
    start, end = start[good], end[good]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reach[last]


def length(merged):
    """Nanoseconds that a merged set covers."""
    return int((merged[1] - merged[0]).sum())


def intersection_length(a, b):
    """Nanoseconds that two merged sets share."""
    return length(a) + length(b) - length(union(np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1]))))


def gaps(merged):
    """What lies between the intervals of a merged set: a merged set itself."""
    return merged[1][:-1], merged[0][1:]


def combinations(sets):
    """Merged sets -> {bit mask: nanoseconds in which exactly these sets run}; bit 0 is the first."""
    points, changes = [], []
    for bit, (start, end) in enumerate(sets):
        points += [start, end]
        changes += [np.full(len(start), 1 << bit), np.full(len(end), -(1 << bit))]
    if not points or not sum(map(len, points)):
        return {}
    at, change = np.concatenate(points), np.concatenate(changes)
    order = np.argsort(at, kind="stable")
    at, running = at[order], np.cumsum(change[order])
    lasting = np.diff(at)
    total_ns = {int(mask): int(lasting[running[:-1] == mask].sum()) for mask in np.unique(running[:-1]) if mask}
    return {mask: ns for mask, ns in total_ns.items() if ns}
