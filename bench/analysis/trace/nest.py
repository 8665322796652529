"""Ranges of one thread, nested as calls are: for a moment the innermost, for a range the one around it.

Each question is answered in rounds over all that still ask, a round a level of depth; real stacks are a hundred deep.
A file can be made that is a million deep, so after MAX_ROUNDS the rest is walked once from left to right instead.
"""

import numpy as np

from bench.analysis.trace.columns import take

MAX_ROUNDS = 200


class Nest:
    """.rows by start, longest first; .parent: index in .rows of the range around each, -1 without one.

    Ranges that overlap without being nested are in none of each other.
    """

    def __init__(self, rank, rows):
        order = np.lexsort((-rank.end[rows], rank.ts[rows]))
        self.rows = rows[order]
        self.start, self.end, self.name = rank.ts[self.rows], rank.end[self.rows], rank.name[self.rows]
        self.parent = _parents(self.end)

    def innermost(self, times, wanted=None):
        """Row of the innermost range around each time, -1 where there is none.

        wanted: a mask over the rank's names; ranges outwards are tried until it holds.
        """
        index = self._around(times)
        return take(self.rows, index if wanted is None else self._climb(index, wanted[self.name]))

    def _around(self, times):
        """Index into .rows of the innermost range around each time, -1 where there is none."""
        index = np.searchsorted(self.start, times, side="right") - 1
        asking = _outwards(index, self.parent, lambda asked, inside: self.end[inside] <= times[asked])
        if len(asking):
            index[asking] = self._swept(times[asking])
        return index

    def _swept(self, times):
        """_around() in one walk through ranges and times."""
        start, end, index, stack, begun = self.start.tolist(), self.end.tolist(), np.empty(len(times), np.int64), [], 0
        for number in np.argsort(times, kind="stable"):
            while begun < len(start) and start[begun] <= times[number]:
                while stack and end[stack[-1]] < end[begun]:
                    stack.pop()
                stack.append(begun)
                begun += 1
            while stack and end[stack[-1]] <= times[number]:
                stack.pop()
            index[number] = stack[-1] if stack else -1
        return index

    def _climb(self, index, wanted):
        """The first range outwards from each index for which wanted (a mask over .rows) holds; -1: none."""
        index = index.copy()
        asking = _outwards(index, self.parent, lambda asked, inside: ~wanted[inside])
        if len(asking):
            nearest = []
            for number, (good, parent) in enumerate(zip(wanted.tolist(), self.parent.tolist())):
                nearest.append(number if good else nearest[parent] if parent >= 0 else -1)
            index[asking] = np.array(nearest)[index[asking]]
        return index


def _outwards(index, parent, goes_on):
    """Replace each index by its parent while goes_on(which ask, their indices).  Returns who asks after MAX_ROUNDS."""
    asking = np.flatnonzero(index >= 0)
    for _ in range(MAX_ROUNDS):
        asking = asking[goes_on(asking, index[asking])]
        if not len(asking):
            break
        index[asking] = parent[index[asking]]
        asking = asking[index[asking] >= 0]
    return asking


def _parents(end):
    """For ranges by start, the nearest earlier one that ends later."""
    parent = np.arange(len(end)) - 1
    if len(_outwards(parent, parent, lambda asked, inside: end[inside] < end[asked])):
        stack = []
        for number, stop in enumerate(ends := end.tolist()):
            while stack and ends[stack[-1]] < stop:
                stack.pop()
            parent[number] = stack[-1] if stack else -1
            stack.append(number)
    return parent
