"""Operations on columns of numbers that all analyses share: look-ups, groups, sets of intervals, nested ranges.

An index of -1 means no row.  Times are integer nanoseconds.  A set of intervals is two arrays, starts and ends, sorted
and merged: touching intervals are one, and intervals that are empty or run backwards hold no time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

US = 1000  # nanoseconds
Intervals = tuple[np.ndarray, np.ndarray]  # starts and ends: sorted, merged, none empty


def take(column: np.ndarray, index: np.ndarray, missing: int = -1) -> np.ndarray:
    """Returns column[index], and missing where the index is -1."""
    return np.where(index >= 0, column[np.maximum(index, 0)], missing) if len(column) else np.full(len(index), missing)


def index_of(keys: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns the index of each key in a sorted table, of the first of equal ones; -1 for a key that is not in it."""
    if not len(table):
        return np.full(len(keys), -1)
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[index] == keys, index, -1)


def groups(keys: np.ndarray) -> list[tuple[Any, ...]]:
    """Returns [(key, indices in order)] of equal keys, sorted by key."""
    keys = np.asarray(keys)
    order = np.argsort(keys, kind="stable")
    different, first = np.unique(keys[order], return_index=True)
    return list(zip(different, np.split(order, first[1:]))) if len(keys) else []


def sums(index: np.ndarray, size: int, values: np.ndarray | int) -> np.ndarray:
    """Returns the sums of integers by index, int64 [size], without those of index -1; exact: no float is involved."""
    total = np.zeros(size, np.int64)
    is_known = index >= 0
    np.add.at(total, index[is_known], values[is_known] if isinstance(values, np.ndarray) else values)
    return total


def merged_intervals(start: np.ndarray, end: np.ndarray) -> Intervals:
    """Returns the merged set of any intervals."""
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


def covered_ns(merged: Intervals) -> int:
    """Returns the nanoseconds that a merged set covers."""
    return int((merged[1] - merged[0]).sum())


def ns_by_combination(sets: Sequence[Intervals]) -> dict[int, int]:
    """Returns {bit mask: nanoseconds in which exactly these of the merged sets run}; bit 0 is the first set."""
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


class Nest:
    """Nested ranges.  rows: by start, the longest first; parent: index in rows of the range around each, -1 for none.

    Ranges that overlap without being nested are not within each other.
    """

    def __init__(self, rank: Any, rows: np.ndarray) -> None:
        order = np.lexsort((-rank.end[rows], rank.ts[rows]))
        self.rows = rows[order]
        self.start, self.end, self.name = rank.ts[self.rows], rank.end[self.rows], rank.name[self.rows]
        self.parent = _parents(self.end.tolist())

    def own_ns(self, durations: np.ndarray) -> np.ndarray:
        """Returns each range's duration without those directly inside it, not below 0.  durations: of the rank."""
        lasting = durations[self.rows]
        return np.maximum(lasting - sums(self.parent, len(lasting), lasting), 0)

    def innermost(self, times: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
        """Returns the row of the innermost range around each time, -1 if there is none.

        wanted: a mask over the rank's names; enclosing ranges are tried until it holds.
        """
        index = np.searchsorted(self.start, times, side="right") - 1  # the last range that began
        jumps = [self.parent]  # 1, 2, 4 ... ranges outwards
        while (jumps[-1] >= 0).any():
            jumps.append(take(jumps[-1], jumps[-1]))
        for jump in reversed(jumps):  # to the outermost that has ended: ranges further out end later
            outwards = take(jump, index)
            index = np.where((outwards >= 0) & (take(self.end, outwards) <= times), outwards, index)
        index = np.where((index >= 0) & (take(self.end, index) <= times), take(self.parent, index), index)
        return take(self.rows, index if wanted is None else take(self.nearest(wanted[self.name]), index))

    def nearest(self, has: np.ndarray) -> np.ndarray:
        """Returns, for each range, the index of the nearest one in the mask, from itself outwards; -1 for none.

        has: a mask over .rows.  Each round doubles the distance, so rounds are the logarithm of the depth.
        """
        nearest = np.where(has, np.arange(len(has)), self.parent)
        while not np.array_equal(further := take(nearest, nearest), nearest):
            nearest = further
        return nearest


def _parents(ends: list[int]) -> np.ndarray:
    """Returns, for ranges by start, the index of the nearest earlier one that does not end before it, or -1."""
    parent, stack = np.empty(len(ends), np.int64), list[int]()
    for number, end in enumerate(ends):
        while stack and ends[stack[-1]] < end:
            stack.pop()
        parent[number] = stack[-1] if stack else -1
        stack.append(number)
    return parent
