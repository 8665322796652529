"""Ranges of one thread, nested as calls are: for a moment the innermost, for a range the one around it.

Each question is answered in rounds over all that still ask, a round a level of depth; real stacks are a hundred deep.  A file
can be made that is a million deep, so after MAX_ROUNDS the rest is walked once from left to right instead.
"""

import numpy as np

MAX_ROUNDS = 200


def groups(keys):
    """[(key, places)] of equal keys, by key; the places of each in order."""
    keys = np.asarray(keys)
    order = np.argsort(keys, kind="stable")
    found, first = np.unique(keys[order], return_index=True)
    return list(zip(found, np.split(order, first[1:]))) if len(keys) else []


class Nest:
    """.rows by start, longest first; .parent: place in .rows of the range around each, -1 without one.

    Ranges that overlap without being nested are in none of each other.
    """

    def __init__(self, rank, rows):
        order = np.lexsort((-rank.end[rows], rank.ts[rows]))
        self.rows = rows[order]
        self.start, self.end = rank.ts[self.rows], rank.end[self.rows]
        self.parent = _parents(self.end)

    def place(self, times):
        """Index into .rows of the innermost range around each time, -1 where there is none."""
        if not len(self.rows):
            return np.full(len(times), -1)
        found = np.searchsorted(self.start, times, side="right") - 1
        asking = np.flatnonzero(found >= 0)
        for _ in range(MAX_ROUNDS):
            asking = asking[self.end[found[asking]] <= times[asking]]
            if not len(asking):
                return found
            found[asking] = self.parent[found[asking]]
            asking = asking[found[asking] >= 0]
        found[asking] = self._swept(times[asking])
        return found

    def _swept(self, times):
        """place() in one walk through ranges and times."""
        start, end, found, stack, begun = self.start.tolist(), self.end.tolist(), np.empty(len(times), np.int64), [], 0
        for place in np.argsort(times, kind="stable"):
            while begun < len(start) and start[begun] <= times[place]:
                while stack and end[stack[-1]] < end[begun]:
                    stack.pop()
                stack.append(begun)
                begun += 1
            while stack and end[stack[-1]] <= times[place]:
                stack.pop()
            found[place] = stack[-1] if stack else -1
        return found

    def innermost(self, times):
        found = self.place(times)
        return np.where(found >= 0, self.rows[np.maximum(found, 0)], -1) if len(self.rows) else found

    def climb(self, places, wanted):
        """The first range outwards from each place for which wanted (a mask over .rows) holds; -1: none."""
        found = places.copy()
        asking = np.flatnonzero(found >= 0)
        for _ in range(MAX_ROUNDS):
            asking = asking[~wanted[found[asking]]]
            if not len(asking):
                return found
            found[asking] = self.parent[found[asking]]
            asking = asking[found[asking] >= 0]
        nearest = []
        for place, (good, parent) in enumerate(zip(wanted.tolist(), self.parent.tolist())):
            nearest.append(place if good else nearest[parent] if parent >= 0 else -1)
        found[asking] = np.array(nearest)[found[asking]]
        return found


def _parents(end):
    """For ranges by start, the nearest earlier one that ends later."""
    parent = np.arange(len(end)) - 1
    asking = np.flatnonzero(parent >= 0)
    for _ in range(MAX_ROUNDS):
        asking = asking[end[parent[asking]] < end[asking]]
        if not len(asking):
            return parent
        parent[asking] = parent[parent[asking]]
        asking = asking[parent[asking] >= 0]
    stack = []
    for place, stop in enumerate(ends := end.tolist()):
        while stack and ends[stack[-1]] < stop:
            stack.pop()
        parent[place] = stack[-1] if stack else -1
        stack.append(place)
    return parent
