"""Who launched what: for a moment on a thread, the innermost range around it."""

import numpy as np

from bench.trace import events, window

PHASES = ("data", "forward", "backward", "optimizer", "validation")
MODULE = "nn.Module: "


class Nest:
    """Ranges of one thread, nested as calls are.  innermost(times) -> row of the innermost range around each, or -1."""

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
        while True:
            outside = (found >= 0) & (self.end[np.maximum(found, 0)] <= times)
            if not outside.any():
                return found
            found[outside] = self.parent[found[outside]]

    def innermost(self, times):
        found = self.place(times)
        return np.where(found >= 0, self.rows[np.maximum(found, 0)], -1) if len(self.rows) else found

    def climb(self, places, wanted):
        """The first range outwards from each place for which wanted (a mask over .rows) holds; -1: none."""
        found = places.copy()
        while True:
            going = (found >= 0) & ~wanted[np.maximum(found, 0)]
            if not going.any():
                return found
            found[going] = self.parent[found[going]]


def _parents(end):
    """For ranges by start, the nearest earlier one that ends later: pointer jumping, a round a level of depth."""
    parent = np.arange(len(end)) - 1
    while True:
        short = (parent >= 0) & (end[np.maximum(parent, 0)] < end)
        if not short.any():
            return parent
        parent[short] = parent[parent[short]]


def by_thread(rank, rows, times, kind, wanted=None):
    """Row of the innermost range of a kind around each time, on the thread of the row beside it; -1: none.

    rows: host rows (calls), -1 where there is none.  wanted: a predicate on names; ranges outwards are tried until it holds.
    """
    found = np.full(len(rows), -1)
    ranges = np.flatnonzero(rank.is_kind(kind))
    is_wanted = None if wanted is None else np.array([bool(wanted(name)) for name in rank.names] or [False])
    threads = np.where(rows >= 0, rank.track[np.maximum(rows, 0)], -1)
    for thread in np.unique(threads[threads >= 0]):
        nest = Nest(rank, ranges[rank.track[ranges] == thread])
        mine = threads == thread
        if len(nest.rows):
            places = nest.place(times[mine])
            if is_wanted is not None:
                places = nest.climb(places, is_wanted[rank.name[nest.rows]])
            found[mine] = np.where(places >= 0, nest.rows[np.maximum(places, 0)], -1)
    return found


def operators(rank, rows):
    """Row of the CPU operator that launched each device row, the innermost around the call; -1: unknown."""
    calls = window.launches(rank, rows)
    return by_thread(rank, calls, np.where(calls >= 0, rank.ts[np.maximum(calls, 0)], 0), events.CPU_OP)


def phases(rank, rows):
    """Name of the phase in which each device row was launched, None where no annotation says so.

    By time alone: backward kernels are launched by autograd's own thread while the main thread stands in "backward".
    """
    launched = window.launch_times(rank, rows)
    wanted = {num: name for num, name in enumerate(rank.names) if name in PHASES}
    ranges = np.flatnonzero(rank.is_kind(events.ANNOTATION) & np.isin(rank.name, list(wanted)))
    nest = Nest(rank, ranges)
    found = nest.innermost(launched)
    return [wanted[int(rank.name[row])] if row >= 0 else None for row in found]


def phase_times(rank, rows):
    """[{"phase", "host_us", "device_us", "num_kernels"}]: the annotations' time and that of the kernels they launched."""
    launched = np.array([phase or "" for phase in phases(rank, rows)])
    found = []
    for phase in PHASES:
        named = [num for num, name in enumerate(rank.names) if name == phase]
        ranges = np.flatnonzero(rank.is_kind(events.ANNOTATION) & np.isin(rank.name, named))
        mine = launched == phase
        if len(ranges):
            found.append({"phase": phase, "host_us": int(rank.dur[ranges].sum()) / 1000, "device_us": int(rank.dur[rows[mine]].sum()) / 1000 if len(rows) else 0.0, "num_kernels": int(mine.sum())})
    return found


def modules(rank, rows):
    """[{"module", "device_us", "num_kernels"}] by the innermost nn.Module around the launch; only with_modules or with_stack."""
    return _by_python(rank, rows, lambda name: name.startswith(MODULE), "module", lambda name: name.removeprefix(MODULE))


def sources(rank, rows):
    """[{"source", "device_us", "num_kernels"}] by the innermost line of Python around the launch; only with_stack."""
    return _by_python(rank, rows, lambda name: ".py(" in name, "source", lambda name: name)


def _by_python(rank, rows, wanted, label, shown):
    if not rank.is_kind(events.PYTHON).any():
        return []
    calls = window.launches(rank, rows)
    found = by_thread(rank, calls, np.where(calls >= 0, rank.ts[np.maximum(calls, 0)], 0), events.PYTHON, wanted)
    names = np.where(found >= 0, rank.name[np.maximum(found, 0)], -1)
    lines = []
    for name in np.unique(names):
        mine = names == name
        word = shown(rank.names[name]) if name >= 0 else "unknown"
        lines.append({label: word, "device_us": int(rank.dur[rows[mine]].sum()) / 1000, "num_kernels": int(mine.sum())})
    return sorted(lines, key=lambda line: -line["device_us"])
