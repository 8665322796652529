"""What a thread of the host was doing, at every moment, and the pieces of the steps of a trace of the CPU alone.

Where nothing ran on the device, the thread says what the time went to; without a device, operators of the main thread
stand in place of kernels.  Ranges of one thread are nested: calls, operators, annotations, and Python's frames where
they were recorded.  The innermost says what it was, and those around it what it belongs to.
"""

import functools
import re
from collections.abc import Sequence

import numpy as np

from bench.analysis.explain import parts
from bench.analysis.explain.ceilings import Ceilings, Operators
from bench.analysis.trace import attribution, categories, events
from bench.analysis.trace.columns import Nest
from bench.analysis.trace.rank import STEP, Rank
from bench.analysis.trace.window import steps as counted_steps

KINDS = (events.RUNTIME, events.CPU_OP, events.ANNOTATION, events.PYTHON)


class Known:
    """A pattern that is asked for the same names again and again: a trace has many ranges of few names."""

    def __init__(self, pattern: str, flags: int = 0):
        self.search = functools.lru_cache(maxsize=1 << 16)(re.compile(pattern, flags).search)


WAITS_FOR_DEVICE = Known(r"Synchronize|hipMemcpy(?!.*Async)|cudaMemcpy(?!.*Async)|^cuMemcpy(?!.*Async)")
COLLECTION, COMPILATION = "garbage collection", "recompilation"  # names of ranges that the record knows: recorded.py
READS_DEVICE = "aten::_local_scalar_dense"  # .item(): its copy waits until the device has caught up
COLLECTS = Known(r"built-in (?:function|method) collect\b|(?:^|\W)gc\.collect\b|^garbage collection", re.I)
WAITS_FOR_THREAD = Known(r"built-in method acquire of _thread\.|threading\.py\(\d+\): \w+$")
# Dynamo's own annotations and frames, and the range that the record of a run gives a compilation
COMPILES = Known(r"\(dynamo_timed\)$|torch/_dynamo/convert_frame\.py|^recompilation\b")
LOADS = Known(r"^data$|^enumerate\(DataLoader\)|DataLoader\w*\.__next__")
IS_STEP = Known(STEP.pattern)
COMMUNICATES = Known(r"^(?:gloo|nccl|c10d|mpi|ucc)::?|record_param_comms|_functional_collectives")


class Thread:
    """.pieces(begin, end) of one thread of a rank."""

    def __init__(self, rank: Rank, track: int | None) -> None:
        rows = np.flatnonzero(rank.is_kind(*KINDS) & (rank.track == track) & (rank.dur > 0))
        added = rank.is_named(lambda name: name.startswith((COLLECTION, COMPILATION)), rows)
        self.rank, self.nest, collections = rank, Nest(rank, rows[~added]), Nest(rank, rows[added])
        self._edges = np.unique(np.concatenate((rank.ts[rows], rank.end[rows])))
        collecting = collections.innermost(self._edges)  # of a clock that may differ a little: it cuts what is around
        self._rows = np.where(collecting >= 0, collecting, self.nest.innermost(self._edges))
        self._index = {row: index for index, row in enumerate(self.nest.rows.tolist())}
        within = self.nest.innermost(rank.ts[collections.rows])
        self._within = dict(zip(collections.rows.tolist(), within.tolist()))
        self._known: dict[int, parts.Piece | None] = {}
        self._chains: dict[int, list[int]] = {}
        is_step, parent = rank.is_named(STEP.search, self.nest.rows), self.nest.parent
        tops = self.nest.rows[~is_step & ((parent < 0) | (is_step[parent] if len(rows) else False))]
        self._tops = tops[np.argsort(rank.end[tops], kind="stable")]

    def segments(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(begin ns, end ns, row of the innermost range or -1), which tile [begin, end]."""
        first = int(np.searchsorted(self._edges, begin, side="right"))
        last = int(np.searchsorted(self._edges, end, side="left"))
        stamps = [begin, *self._edges[first:last].tolist(), end]
        rows = self._rows[max(first - 1, 0) : last].tolist() if len(self._edges) else []
        if first == 0:
            rows = [-1, *self._rows[:last].tolist()]
        return [(low, high, row) for low, high, row in zip(stamps[:-1], stamps[1:], rows) if high > low]

    def around(self, row: int) -> list[int]:
        """The range itself and those around it, the innermost first; without the step's own."""
        if row not in self._chains:
            self._chains[row] = self._around(row)
        return self._chains[row]

    def _around(self, row: int) -> list[int]:
        chain = [row] if row in self._within else []
        index = self._index.get(self._within.get(row, row), -1)
        while index >= 0:
            chain.append(int(self.nest.rows[index]))
            index = int(self.nest.parent[index])
        return [member for member in chain if not IS_STEP.search(self.name(member))]

    def name(self, row: int) -> str:
        """The name of a range."""
        return self.rank.names[self.rank.name[row]]

    def explained(self, row: int, moment: int) -> parts.Piece:
        """Innermost range, -1 for none -> the piece that the time in it belongs to.

        moment: ns, of time in no range: it is then known only by what was there last.
        """
        if row not in self._known:
            self._known[row] = self._explained(self.around(row))
        if known := self._known[row]:
            return known
        index = int(np.searchsorted(self.rank.end[self._tops], moment, side="right")) - 1
        return parts.Piece(parts.UNKNOWN, f"after {self.name(self._tops[index])}" if index >= 0 else None, None)

    def _explained(self, chain: list[int]) -> parts.Piece | None:
        """None where nothing is known."""
        if not chain:
            return None
        names = [self.name(member) for member in chain]
        where = self.where(chain)
        if what := next((name for name in reversed(names) if COMPILES.search(name)), None):
            return parts.Piece(parts.COMPILATION, what, where)
        for part, test in ((parts.GARBAGE, COLLECTS), (parts.SYNC, WAITS_FOR_DEVICE)):
            if what := next((name for name in names if test.search(name)), None):
                return parts.Piece(part, what, where)
        if READS_DEVICE in names and self.rank.kind[chain[0]] == events.RUNTIME:
            return parts.Piece(parts.SYNC, f"{READS_DEVICE}: {names[0]}", where)
        if what := next((name for name in names if LOADS.search(name)), None):
            return parts.Piece(parts.LOADER, what, where)
        if what := next((name for name in names if WAITS_FOR_THREAD.search(name)), None):
            return parts.Piece(parts.SYNC, what, where)
        return parts.Piece(parts.HOST, names[0], where)

    def where(self, chain: list[int]) -> str | None:
        """The innermost line of Python that is neither torch's nor threading's, else the innermost annotation, else the
        outermost operator; an annotation or operator only if it is not the innermost range itself."""
        of_kind = {kind: [member for member in chain if self.rank.kind[member] == kind] for kind in KINDS}
        lines = [
            member
            for member in of_kind[events.PYTHON]
            if attribution.is_source(self.name(member)) and not WAITS_FOR_THREAD.search(self.name(member))
        ]
        annotations = [member for member in of_kind[events.ANNOTATION] if not COMPILES.search(self.name(member))]
        candidates = (lines, annotations, of_kind[events.CPU_OP][::-1])
        place = next(
            (member for some in candidates for member in some[:1] if some is lines or member != chain[0]), None
        )
        return None if place is None else self.name(place)

    def is_optimizer(self, row: int) -> bool:
        """Whether an annotation around it is the optimizer's."""
        mine = (member for member in self.around(row) if self.rank.kind[member] == events.ANNOTATION)
        return any(categories.category("", self.name(member)) == categories.OPTIMIZER for member in mine)


def main_track(rank: Rank) -> int | None:
    """The thread of the steps; without steps the one with the most operators and calls; None without a host."""
    is_step = rank.names_that(STEP.search)[rank.name] & rank.is_kind(events.ANNOTATION, events.CPU_OP)
    rows = np.flatnonzero(is_step)
    if not len(rows):
        rows = np.flatnonzero(rank.is_kind(events.CPU_OP, events.RUNTIME))
    return int(np.bincount(rank.track[rows]).argmax()) if len(rows) else None


def host_spans(rank: Rank, include_last_step: bool = False) -> list[parts.Step]:
    """[(number or None, begin ns, end ns)]: the ProfilerSteps, of several without the last; else the whole recording.

    Empty without a host.
    """
    if rank.steps() and (spans := counted_steps(rank, include_last_step)):
        return list(spans)
    track = main_track(rank)
    mine = rank.is_kind(events.CPU_OP, events.RUNTIME) & (rank.track == track)
    return [(None, int(rank.ts[mine].min()), int(rank.end[mine].max()))] if mine.any() else []


def host_pieces(rank: Rank, counted: Sequence[parts.Step], ceilings: Ceilings) -> parts.Pieces:
    """counted: of spans() -> Pieces of the main thread."""
    thread, pieces = Thread(rank, main_track(rank)), parts.Pieces(counted)
    known = Operators(rank, ceilings)
    for index, (_, begin, end) in enumerate(counted):
        for low, high, row in thread.segments(begin, end):
            _segment(thread, known, pieces, index, (low, high), row)
    known.into(pieces)
    return pieces


def _segment(
    thread: Thread, known: Operators, pieces: parts.Pieces, index: int, span: tuple[int, int], row: int
) -> None:
    ns = span[1] - span[0]
    chain = thread.around(row) if row >= 0 else []
    operators = [member for member in chain if thread.rank.kind[member] == events.CPU_OP]
    piece = thread.explained(row, span[0])
    communicates = next((thread.name(member) for member in chain if COMMUNICATES.search(thread.name(member))), None)
    if communicates is not None:
        pieces.add(index, parts.Piece(parts.EXPOSED, communicates, piece.where), ns)
    elif piece.part in (parts.GARBAGE, parts.SYNC, parts.LOADER, parts.COMPILATION) or not operators:
        pieces.add(index, piece, ns)
    elif (product := next((member for member in operators if known.has(member)), None)) is not None:
        known.add(index, product, piece.where, ns)
    else:
        part = parts.OPTIMIZER if thread.is_optimizer(row) else parts.UNBOUND
        pieces.add(index, parts.Piece(part, thread.name(operators[0]), piece.where), ns)
