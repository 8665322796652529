"""Finds who launched what: the innermost range around a moment on a thread."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.analysis.trace import events, window
from bench.analysis.trace.columns import US, Nest, groups, index_of, sums, take
from bench.analysis.trace.rank import Rank

PHASES = ("data", "forward", "backward", "optimizer", "validation")
MODULE = "nn.Module: "
LIBRARY = re.compile(r"(?:^|/)torch/")  # torch's own files: the user's line that called them says more
MAX_LAUNCHERS = 100
LAUNCHER = ("kernel", "operator", "annotation", "module", "source")


def by_thread(
    rank: Rank, calls: np.ndarray, times: np.ndarray, kind: int, wanted: Callable[[str], object] | None = None
) -> np.ndarray:
    """Returns the row of the innermost range of a kind around each time, on the thread of the call beside it; -1: none.

    calls: host rows, -1 for none.  wanted: a predicate on names; enclosing ranges are tried until it holds.
    """
    around = np.full(len(calls), -1)
    is_wanted = None if wanted is None else rank.names_that(wanted)
    asking, on_thread = np.flatnonzero(calls >= 0), nests(rank, kind)
    for thread, members in groups(rank.track[calls[asking]]):
        if thread in on_thread:
            mine = asking[members]
            around[mine] = on_thread[thread].innermost(times[mine], is_wanted)
    return around


def nests(rank: Rank, kind: int) -> dict[int, Nest]:
    """Returns {thread: its ranges of a kind}, which are built once for all analyses of a rank."""
    if kind not in rank.nests:
        ranges = np.flatnonzero(rank.is_kind(kind))
        rank.nests[kind] = {thread: Nest(rank, ranges[members]) for thread, members in groups(rank.track[ranges])}
    return rank.nests[kind]


def around_launch(
    rank: Rank, calls: np.ndarray, kind: int, wanted: Callable[[str], object] | None = None
) -> np.ndarray:
    """Returns by_thread() at the start of each of these launching calls."""
    return by_thread(rank, calls, take(rank.ts, calls, 0), kind, wanted)


def operators(rank: Rank, rows: np.ndarray) -> np.ndarray:
    """Returns the row of the CPU operator that launched each device row, the innermost around the call; -1: unknown.

    If no call, or none within an operator, was recorded, the profiler's own External id tells the operator.
    """
    launcher = around_launch(rank, window.launches(rank, rows), events.CPU_OP)
    missing = np.flatnonzero((launcher < 0) & (rank.external[rows] > 0))
    if len(missing):
        ops = np.flatnonzero(rank.is_kind(events.CPU_OP) & (rank.external > 0))
        ops = ops[np.argsort(rank.external[ops], kind="stable")]
        launcher[missing] = take(ops, index_of(rank.external[rows[missing]], rank.external[ops]))
    return launcher


def annotations(rank: Rank, rows: np.ndarray) -> np.ndarray:
    """Returns the row of the innermost annotation, but no ProfilerStep, around each device row's launch; -1: unknown.

    It is on the launching thread, or else, by time, on the thread with the most annotated time: backward kernels are
    launched by autograd's own thread while the main thread is in "backward".
    """
    calls = window.launches(rank, rows)
    around = around_launch(rank, calls, events.ANNOTATION, _is_no_step)
    missing, on_thread = (around < 0) & (calls >= 0), nests(rank, events.ANNOTATION).values()
    if missing.any() and on_thread:
        main = max(on_thread, key=lambda nest: rank.dur[nest.rows].sum())
        around[missing] = main.innermost(rank.ts[calls[missing]], rank.names_that(_is_no_step))
    return around


def _is_no_step(name: str) -> bool:
    return not name.startswith("ProfilerStep")


def phases(rank: Rank, rows: np.ndarray) -> list[str | None]:
    """Returns the phase in which each device row was launched, by time (see annotations); None if none is known."""
    ranges = np.flatnonzero(rank.is_kind(events.ANNOTATION))
    nest = Nest(rank, ranges[rank.is_named(PHASES.__contains__, ranges)])
    return rank.names_of(nest.innermost(window.launch_times(rank, rows)))


def phase_times(rank: Rank, rows: np.ndarray, until_ns: int | None = None) -> list[dict[str, Any]]:
    """Returns [{"phase", "host_us", "device_us", "num_kernels"}]: time of the annotations and of what they launched."""
    launched = np.array([phase or "" for phase in phases(rank, rows)])
    ranges = window.host_rows(rank, events.ANNOTATION, until_ns)
    lines = []
    for phase in PHASES:
        ranged, mine = ranges[rank.is_named(phase.__eq__, ranges)], rows[launched == phase] if len(rows) else rows
        if len(ranged):
            times = {"host_us": int(rank.dur[ranged].sum()) / US, "device_us": int(rank.dur[mine].sum()) / US}
            lines.append({"phase": phase} | times | {"num_kernels": len(mine)})
    return lines


def launchers(rank: Rank, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns who launched what, [{"kernel", "operator", "annotation", "module", "source", "count", "device_us"}].

    The longest come first.  Each is the innermost around the launch, None if there is none or it was not recorded;
    module and source need with_stack.
    """
    calls, around = window.launches(rank, rows), [rows, operators(rank, rows), annotations(rank, rows)]
    around += [around_launch(rank, calls, events.PYTHON, wanted) for wanted in (is_module, is_source)]
    names, index = np.unique(np.stack([take(rank.name, of) for of in around]), axis=1, return_inverse=True)
    index, lines = index.ravel(), []
    device_ns, count = sums(index, names.shape[1], rank.dur[rows]), np.bincount(index, minlength=names.shape[1])
    for number in np.argsort(-device_ns, kind="stable")[:MAX_LAUNCHERS]:
        line = dict(zip(LAUNCHER, (rank.names[name] if name >= 0 else None for name in names[:, number])))
        line["module"] = line["module"] and line["module"].removeprefix(MODULE)
        lines.append(line | {"count": int(count[number]), "device_us": int(device_ns[number]) / US})
    return lines


def is_module(name: str) -> bool:
    """Returns whether a range of Python is the call of an nn.Module."""
    return name.startswith(MODULE)


def is_source(name: str) -> bool:
    """Returns whether a range of Python is a line outside torch's own files."""
    return ".py(" in name and LIBRARY.search(name) is None


def by_python(
    rank: Rank, rows: np.ndarray, until_ns: int | None, wanted: Callable[[str], bool], label: str
) -> list[dict[str, Any]]:
    """Returns [{label, "device_us", "num_kernels"}] by the innermost range of Python with a wanted name at the launch.

    Without device rows it is [{label, "cpu_us", "num_calls"}], the ranges' time without that of ranges inside them.  It
    is empty for a trace without Python's stack (with_stack).
    """
    if not rank.is_kind(events.PYTHON).any():
        return []
    if len(rows):
        time, count, time_ns = "device_us", "num_kernels", rank.dur[rows]
        ranges = around_launch(rank, window.launches(rank, rows), events.PYTHON, wanted)
    else:
        time, count, own = "cpu_us", "num_calls", rank.dur.copy()
        ranges = window.host_rows(rank, events.PYTHON, until_ns)
        ranges = ranges[rank.is_named(wanted, ranges)]
        for _, members in groups(rank.track[ranges]):
            nest = Nest(rank, ranges[members])
            own[nest.rows] = nest.own_ns(rank.dur)
        time_ns = own[ranges]
    lines = []
    for name, mine in groups(take(rank.name, ranges)):
        shown = rank.names[name].removeprefix(MODULE) if name >= 0 else "unknown"
        lines.append({label: shown, time: int(time_ns[mine].sum()) / US, count: len(mine)})
    return sorted(lines, key=lambda line: -line[time])
