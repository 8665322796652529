"""Who launched what: for a moment on a thread, the innermost range around it."""

import re

import numpy as np

from bench.trace import events, window
from bench.trace.nest import Nest, groups

PHASES = ("data", "forward", "backward", "optimizer", "validation")
MODULE = "nn.Module: "
LIBRARY = re.compile(r"(?:^|/)torch/")  # torch's own files: the line of the user's that called them says more
US = 1000


def by_thread(rank, rows, times, kind, wanted=None):
    """Row of the innermost range of a kind around each time, on the thread of the row beside it; -1: none.

    rows: host rows (calls), -1 where there is none.  wanted: a predicate on names; ranges outwards are tried until it holds.
    """
    found = np.full(len(rows), -1)
    ranges = np.flatnonzero(rank.is_kind(kind))
    is_wanted = None if wanted is None else np.array([bool(wanted(name)) for name in rank.names] or [False])
    on_thread = {thread: ranges[places] for thread, places in groups(rank.track[ranges])}
    asking = np.flatnonzero(rows >= 0)
    for thread, places in groups(rank.track[rows[asking]]):
        if thread in on_thread:
            nest, mine = Nest(rank, on_thread[thread]), asking[places]
            places = nest.place(times[mine])
            if is_wanted is not None:
                places = nest.climb(places, is_wanted[rank.name[nest.rows]])
            found[mine] = np.where(places >= 0, nest.rows[np.maximum(places, 0)], -1)
    return found


def operators(rank, rows):
    """Row of the CPU operator that launched each device row, the innermost around the call; -1: unknown.

    Where no call was recorded, or none of an operator, the profiler's own External id tells it.
    """
    calls = window.launches(rank, rows)
    found = by_thread(rank, calls, _starts(rank, calls), events.CPU_OP)
    missing = np.flatnonzero((found < 0) & (rank.external[rows] > 0))
    ops = np.flatnonzero(rank.is_kind(events.CPU_OP) & (rank.external > 0)) if len(missing) else missing
    if len(ops):
        ops = ops[np.argsort(rank.external[ops], kind="stable")]
        place = np.minimum(np.searchsorted(rank.external[ops], rank.external[rows[missing]]), len(ops) - 1)
        same = rank.external[ops[place]] == rank.external[rows[missing]]
        found[missing[same]] = ops[place[same]]
    return found


def annotations(rank, rows):
    """Row of the innermost annotation, but no ProfilerStep, in which each device row was launched; -1: unknown.

    On the launching thread, or else by time on the thread with the most annotated time: backward kernels are launched by
    autograd's own thread while the main thread stands in "backward".
    """
    calls = window.launches(rank, rows)
    found = by_thread(rank, calls, _starts(rank, calls), events.ANNOTATION, _no_step)
    ranges = np.flatnonzero(rank.is_kind(events.ANNOTATION))
    missing = (found < 0) & (calls >= 0)
    if missing.any() and len(ranges):
        threads, place = np.unique(rank.track[ranges], return_inverse=True)
        main = threads[np.bincount(place, weights=rank.dur[ranges]).argmax()]
        nest = Nest(rank, ranges[rank.track[ranges] == main])
        wanted = np.array([_no_step(name) for name in rank.names])[rank.name[nest.rows]]
        places = nest.climb(nest.place(rank.ts[calls[missing]]), wanted)
        found[missing] = np.where(places >= 0, nest.rows[np.maximum(places, 0)], -1)
    return found


def _no_step(name):
    return not name.startswith("ProfilerStep")


def _starts(rank, calls):
    return np.where(calls >= 0, rank.ts[np.maximum(calls, 0)], 0) if len(rank.ts) else np.zeros(len(calls), np.int64)


def phases(rank, rows):
    """Name of the phase in which each device row was launched, None where no annotation says so; by time, see annotations."""
    launched = window.launch_times(rank, rows)
    wanted = {num: name for num, name in enumerate(rank.names) if name in PHASES}
    ranges = np.flatnonzero(rank.is_kind(events.ANNOTATION) & np.isin(rank.name, list(wanted)))
    nest = Nest(rank, ranges)
    found = nest.innermost(launched)
    return [wanted[int(rank.name[row])] if row >= 0 else None for row in found]


def phase_times(rank, rows, until_ns=None):
    """[{"phase", "host_us", "device_us", "num_kernels"}]: the annotations' time and that of the kernels they launched."""
    launched = np.array([phase or "" for phase in phases(rank, rows)])
    ranges = window.host_rows(rank, events.ANNOTATION, until_ns)
    found = []
    for phase in PHASES:
        named = [num for num, name in enumerate(rank.names) if name == phase]
        of_phase = ranges[np.isin(rank.name[ranges], named)]
        mine = launched == phase
        if len(of_phase):
            found.append(
                {
                    "phase": phase,
                    "host_us": int(rank.dur[of_phase].sum()) / US,
                    "device_us": int(rank.dur[rows[mine]].sum()) / US if len(rows) else 0.0,
                    "num_kernels": int(mine.sum()),
                }
            )
    return found


def launchers(rank, rows, limit=100):
    """Who launched what: [{"kernel", "operator", "annotation", "module", "source", "count", "device_us"}], longest first.

    The innermost of each around the launch, None where there is none or it was not recorded.  module and source need
    with_stack.
    """
    calls = window.launches(rank, rows)
    places = [operators(rank, rows), annotations(rank, rows)]
    places += [
        by_thread(rank, calls, _starts(rank, calls), events.PYTHON, wanted) for wanted in (_is_module, _is_source)
    ]
    names = (
        np.stack([rank.name[rows], *(np.where(place >= 0, rank.name[np.maximum(place, 0)], -1) for place in places)])
        if len(rows)
        else np.empty((5, 0), int)
    )
    found, place = np.unique(names, axis=1, return_inverse=True)
    place, sum_ns = place.ravel(), np.zeros(found.shape[1], np.int64)
    np.add.at(sum_ns, place, rank.dur[rows])
    count, lines = np.bincount(place, minlength=found.shape[1]), []
    for num in np.argsort(-sum_ns, kind="stable")[:limit]:
        words = [rank.names[name] if name >= 0 else None for name in found[:, num]]
        words[3] = words[3] and words[3].removeprefix(MODULE)
        lines.append(
            dict(zip(("kernel", "operator", "annotation", "module", "source"), words))
            | {"count": int(count[num]), "device_us": int(sum_ns[num]) / US}
        )
    return lines


def modules(rank, rows, until_ns=None):
    """[{"module", "device_us", "num_kernels"}] by the innermost nn.Module around the launch; only with_stack.

    Without device rows [{"module", "cpu_us", "num_calls"}]: the modules' own time, without the modules inside them.
    """
    return _by_python(rank, rows, until_ns, _is_module, "module", lambda name: name.removeprefix(MODULE))


def sources(rank, rows, until_ns=None):
    """The same by the innermost line of Python around the launch that is not torch's own; only with_stack."""
    return _by_python(rank, rows, until_ns, _is_source, "source", lambda name: name)


def _is_module(name):
    return name.startswith(MODULE)


def _is_source(name):
    return ".py(" in name and LIBRARY.search(name) is None


def _by_python(rank, rows, until_ns, wanted, label, shown):
    if not rank.is_kind(events.PYTHON).any():
        return []
    keys = ("device_us", "num_kernels") if len(rows) else ("cpu_us", "num_calls")
    if len(rows):
        calls = window.launches(rank, rows)
        found, time_ns = by_thread(rank, calls, _starts(rank, calls), events.PYTHON, wanted), rank.dur[rows]
    else:
        found, time_ns = _own_ranges(rank, until_ns, wanted)
    names = np.where(found >= 0, rank.name[np.maximum(found, 0)], -1)
    lines = []
    for name, mine in groups(names):
        word = shown(rank.names[name]) if name >= 0 else "unknown"
        lines.append({label: word, keys[0]: int(time_ns[mine].sum()) / US, keys[1]: len(mine)})
    return sorted(lines, key=lambda line: -line[keys[0]])


def _own_ranges(rank, until_ns, wanted):
    """(rows, own nanoseconds) of the Python ranges that are wanted, each without those directly inside it."""
    is_wanted = np.array([wanted(name) for name in rank.names])
    ranges = window.host_rows(rank, events.PYTHON, until_ns)
    ranges = ranges[is_wanted[rank.name[ranges]]]
    own = rank.dur.copy()
    for _, places in groups(rank.track[ranges]):
        nest = Nest(rank, ranges[places])
        inside = nest.parent >= 0
        np.subtract.at(own, nest.rows[nest.parent[inside]], rank.dur[nest.rows[inside]])
    return ranges, np.maximum(own[ranges], 0)
