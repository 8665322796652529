"""Finds the operators of a CUDA graph's kernels in the trace in which the graph was captured.

A graph is launched by one call, so a trace of its replay does not say which operator launched a kernel.  The capture's
launches are calls between BeginCapture and EndCapture on one thread, in the order in which the graph runs them, each
inside its operator with its shapes.  They are in the same trace, or in others that were recorded while the graphs were
captured.  A graph for other shapes may have as many kernels as the captured one, so the captures must be those of the
graphs that ran, in the same order if several are alike; where ROCm recorded the kernel's name with the launching call,
the names must be the same.
"""

import collections
import os.path
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.analysis.trace import attribution, events, launches, window
from bench.analysis.trace.rank import Rank

MAX_MISSING = 3  # consecutive launches that only the capture or only the graph has: memsets may run as kernels


class Operator(NamedTuple):
    """A CPU operator: its row in rank, and the row of the launching call within it; -1 if not known."""

    rank: Rank
    row: int
    call: int = -1


class _Capture(NamedTuple):
    """The launches of a capture as rows (operator, call), -1 for none; kernels: their names, None if not recorded."""

    rank: Rank
    launches: list[tuple[int, int]]
    kernels: list[str] | None


def operators(rank: Rank, rows: np.ndarray, others: Sequence[Rank] = ()) -> dict[int, Operator]:
    """Returns {device row: its operator} for kernels of graphs, where known; others: further traces of captures."""
    calls = window.launches(rank, rows)
    is_graph = launches.are_graph_launches(rank, calls) & (rank.kind[rows] == events.KERNEL)
    graphs = [rows[is_graph & (calls == call)] for call in np.unique(calls[is_graph])]
    graphs = sorted(
        (graph[np.argsort(rank.ts[graph], kind="stable")] for graph in graphs), key=lambda graph: rank.ts[graph[0]]
    )
    captures = [capture for source in (rank, *others) for capture in _captures(source)] if graphs else []
    fits: dict[tuple[str, ...], list[tuple[_Capture, list[tuple[int, int]]]]] = {}
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    found: dict[int, Operator] = {}
    for graph in graphs:
        names = tuple(rank.names[name] for name in rank.name[graph])
        if names not in fits:
            fits[names] = [(capture, pairs) for capture in captures if (pairs := _fitted(capture, names))]
        if fits[names]:
            capture, pairs = fits[names][seen[names] % len(fits[names])]
            found |= {row: Operator(capture.rank, *of) for row, of in zip(graph.tolist(), pairs) if of[0] >= 0}
        seen[names] += 1
    return found


def _captures(rank: Rank) -> Iterator[_Capture]:
    """Yields the captures in a trace, in order."""
    calls = np.flatnonzero(rank.is_kind(events.RUNTIME))
    patterns = (*launches.CAPTURE, launches.LAUNCH)
    begins, ends, are_launches = (calls[rank.is_named(pattern.search, calls)] for pattern in patterns)
    for begin in begins[np.argsort(rank.ts[begins])].tolist():
        track = rank.track[begin]
        closing = ends[(rank.track[ends] == track) & (rank.ts[ends] >= rank.end[begin])]
        until = rank.ts[closing].min(initial=np.iinfo(np.int64).max)
        mine = are_launches[(rank.ts[are_launches] >= rank.ts[begin]) & (rank.ts[are_launches] < until)]
        mine = mine[rank.track[mine] == track]
        mine = mine[np.argsort(rank.ts[mine], kind="stable")]
        extras = [rank.extras[extra] if extra >= 0 else None for extra in rank.extra[mine]]
        names = [str(extra[9]) for extra in extras if extra is not None and extra[9] is not None]
        around = attribution.around_launch(rank, mine, events.CPU_OP)
        launched = list(zip(around.tolist(), mine.tolist()))
        yield _Capture(rank, launched, names if len(names) == len(mine) else None)


def _fitted(capture: _Capture, names: Sequence[str]) -> list[tuple[int, int]] | None:
    """Returns (operator, call) of each kernel of a graph, -1 where none fits; None for another graph's capture."""
    if capture.kernels is None or capture.kernels == list(names):
        return capture.launches if len(capture.launches) == len(names) else None
    if abs(len(capture.launches) - len(names)) > MAX_MISSING:
        return None
    num_alike = len(os.path.commonprefix([capture.kernels, list(names)]))
    captured, wanted = capture.kernels[num_alike:], list(names[num_alike:])
    num_last = len(os.path.commonprefix([captured[::-1], wanted[::-1]]))
    if max(len(captured), len(wanted)) - num_last > MAX_MISSING:
        return None
    missing = [(-1, -1)] * (len(wanted) - num_last)
    return capture.launches[:num_alike] + missing + capture.launches[len(capture.launches) - num_last :]
