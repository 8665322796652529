"""Shows what a thread of the host did at every moment, and divides the steps of a trace without a device into pieces.

Where nothing ran on the device, the thread shows what the time went to; without a device, operators of the main thread
take the place of kernels.  Ranges of one thread are nested: calls, operators, annotations, and frames of Python where
they were recorded.  The innermost says what was done, and those around it what it belongs to.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.analysis.explain import parts
from bench.analysis.explain.ceilings import Ceilings, Operators
from bench.analysis.trace import attribution, categories, events
from bench.analysis.trace.columns import Nest, take
from bench.analysis.trace.rank import STEP, Rank
from bench.analysis.trace.window import steps as counted_steps

MIN_GAP_NS = 1_000_000  # shorter gaps outside any operator, call or frame are the thread's own work
HANDED_OVER_NS = 100_000  # a woken thread goes on within this time after the range of the thread that woke it
READS_FILE = re.compile(r"built-in method (?:read\w*|p?readv?|open|recv\w*) of ")
ADDRESS = re.compile(r" (?:object )?at 0x[0-9a-f]+")
KINDS = (events.RUNTIME, events.CPU_OP, events.ANNOTATION, events.PYTHON)


WAITS_FOR_DEVICE = re.compile(r"Synchronize|hipMemcpy(?!.*Async)|cudaMemcpy(?!.*Async)|^cuMemcpy(?!.*Async)")
COLLECTION, COMPILATION = "garbage collection", "recompilation"  # names of the ranges that come from the record
READS_DEVICE = "aten::_local_scalar_dense"  # .item(): its copy waits until the device has caught up
COLLECTS = re.compile(r"built-in (?:function|method) collect\b|(?:^|\W)gc\.collect\b|^garbage collection", re.I)
WAITS_FOR_THREAD = re.compile(r"built-in method acquire of _thread\.|threading\.py\(\d+\): \w+$")
# Dynamo's annotations and frames, and the range that is added for a recorded compilation
COMPILES = re.compile(r"\(dynamo_timed\)$|torch/_dynamo/convert_frame\.py|^recompilation\b")
LOADS = re.compile(r"^data$|^enumerate\(DataLoader\)|DataLoader\w*\.__next__")
COMMUNICATES = re.compile(r"^(?:gloo|nccl|c10d|mpi|ucc)::?|record_param_comms|_functional_collectives")


class Property(NamedTuple):
    """A property of ranges: a test of the name, and a kind, None for any.  outermost: only the outermost has it."""

    test: Callable[[str], object]
    kind: int | None = None
    outermost: bool = False
    is_step: bool = False


ANYTHING = Property(lambda name: True)
IS_STEP = Property(STEP.search, is_step=True)  # a step's range encloses everything and explains nothing
IS_LINE = Property(lambda name: attribution.is_source(name) and not WAITS_FOR_THREAD.search(name), events.PYTHON)
IS_ANNOTATION = Property(lambda name: not COMPILES.search(name), events.ANNOTATION)
IS_OPERATOR = Property(lambda name: True, events.CPU_OP)
IS_OUTERMOST_OPERATOR = IS_OPERATOR._replace(outermost=True)
IS_OPTIMIZER = Property(lambda name: categories.category("", name) == categories.OPTIMIZER, events.ANNOTATION)
IS_COMMUNICATION = Property(COMMUNICATES.search)
IS_READ = Property(READS_DEVICE.__eq__)
IS_COMPILATION = Property(COMPILES.search, outermost=True)
IS_COLLECTION = Property(COLLECTS.search)
IS_WAIT = Property(WAITS_FOR_DEVICE.search)
IS_LOADER = Property(LOADS.search)
IS_WAIT_FOR_THREAD = Property(WAITS_FOR_THREAD.search)
EXPLAINED_BY = (
    *(ANYTHING, IS_LINE, IS_COMPILATION, IS_COLLECTION, IS_WAIT, IS_READ, IS_LOADER, IS_WAIT_FOR_THREAD),
    *(IS_ANNOTATION, IS_OUTERMOST_OPERATOR),
)


class Thread:
    """What a thread of a rank did at each moment: segments() gives time by innermost range, explained() its piece.

    For each property an array holds, for every range of the thread, the nearest enclosing range that has it, so that
    the ranges around a range are found without a search.
    """

    def __init__(self, rank: Rank, track: int | None) -> None:
        rows = np.flatnonzero(rank.is_kind(*KINDS) & (rank.track == track) & (rank.dur > 0))
        added = rank.is_named(lambda name: name.startswith((COLLECTION, COMPILATION)), rows)
        self.rank, self.nest, collections = rank, Nest(rank, rows[~added]), Nest(rank, rows[added])
        edges = np.sort(np.concatenate((rank.ts[rows], rank.end[rows])))
        self._edges = edges[np.concatenate(([True], edges[1:] != edges[:-1]))] if len(edges) else edges
        collecting = collections.innermost(self._edges)  # their clock may differ: they cut what is around them
        self._rows = np.where(collecting >= 0, collecting, self.nest.innermost(self._edges))
        self._index = {row: index for index, row in enumerate(self.nest.rows.tolist())}
        within = self.nest.innermost(rank.ts[collections.rows])
        self._within = dict(zip(collections.rows.tolist(), within.tolist()))
        self._known: dict[int, parts.Piece | None] = {}  # by row
        self._names: tuple[np.ndarray, np.ndarray] | None = None  # distinct names of .nest, index of each range's
        self._nearest: dict[Property, list[int]] = {}
        ops = rows[np.isin(rank.kind[rows], (events.CPU_OP, events.RUNTIME))]
        self._by_end, self._by_start = (ops[np.argsort(of[ops], kind="stable")] for of in (rank.end, rank.ts))
        others = np.flatnonzero(rank.is_kind(events.CPU_OP, events.PYTHON) & (rank.track != track) & (rank.dur > 0))
        self._others = others[np.argsort(rank.end[others], kind="stable")]
        is_step, parent = self._has(IS_STEP), self.nest.parent
        tops = self.nest.rows[~is_step & ((parent < 0) | (is_step[parent] if len(parent) else False))]
        self._tops = tops[np.argsort(rank.end[tops], kind="stable")]
        self._top_ends, self._other_ends = rank.end[self._tops], rank.end[self._others]
        self._ends, self._starts = rank.end[self._by_end], rank.ts[self._by_start]

    def segments(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Returns [(begin ns, end ns, row of the innermost range or -1)], which tile [begin, end]."""
        first = int(np.searchsorted(self._edges, begin, side="right"))
        last = int(np.searchsorted(self._edges, end, side="left"))
        stamps = [begin, *self._edges[first:last].tolist(), end]
        rows = self._rows[max(first - 1, 0) : last].tolist() if len(self._edges) else []
        if first == 0:
            rows = [-1, *self._rows[:last].tolist()]
        return [(low, high, row) for low, high, row in zip(stamps[:-1], stamps[1:], rows) if high > low]

    def name(self, row: int) -> str:
        """Returns the name of a range."""
        return self.rank.names[self.rank.name[row]]

    def around(self, row: int, wanted: Property) -> int:
        """Returns the row of the range itself, or of the nearest around it, that has the property; -1 if none has."""
        if row in self._within:
            if wanted.test(self.name(row)) and (wanted.kind is None or wanted.kind == self.rank.kind[row]):
                return row
            row = self._within[row]
        index = self._index.get(row, -1)
        place = self._nearest_of(wanted)[index] if index >= 0 else -1
        return int(self.nest.rows[place]) if place >= 0 else -1

    def operators(self, row: int) -> Iterator[int]:
        """Yields the rows of the CPU operators around a range, the range itself included, the innermost first."""
        while (row := self.around(row, IS_OPERATOR)) >= 0:
            yield row
            parent = int(self.nest.parent[self._index[row]])
            if parent < 0:
                return
            row = int(self.nest.rows[parent])

    def _has(self, wanted: Property) -> np.ndarray:
        """Returns a mask over .nest.rows of the ranges with the property."""
        if self._names is None:
            self._names = np.unique(self.nest.name, return_inverse=True)
        names, index = self._names
        has = np.array([bool(wanted.test(self.rank.names[name])) for name in names.tolist()] or [False])[index]
        return has if wanted.kind is None else has & (self.rank.kind[self.nest.rows] == wanted.kind)

    def _nearest_of(self, wanted: Property) -> list[int]:
        """Returns the index of the nearest range with the property, for each of .nest.rows; itself counts; -1: none."""
        if wanted not in self._nearest:
            has = self._has(wanted)
            if not wanted.is_step:
                has &= ~self._has(IS_STEP)
            nearest = self.nest.nearest(has)
            if wanted.outermost:
                nearest = self.nest.nearest(has & (take(nearest, self.nest.parent) < 0))
            self._nearest[wanted] = nearest.tolist()
        return self._nearest[wanted]

    def gap(self, low: int, high: int, row: int) -> parts.Piece | None:
        """Returns the piece of a long segment without operators, None for any other.  row: its innermost range or -1.

        Its edges explain it: where another thread's range ends just before it does, this thread waited for that one, at
        a lock or a queue; else the piece names the operators before and after it.
        """
        if high - low < MIN_GAP_NS or row >= 0 and self.rank.kind[row] != events.ANNOTATION:
            return None
        if row >= 0 and self.explained(row, low).part != parts.HOST:
            return None
        where = self.name(row) if row >= 0 and not STEP.search(self.name(row)) else None
        woke = int(np.searchsorted(self._other_ends, high, side="right")) - 1
        if woke >= 0 and self._other_ends[woke] > max(low, high - HANDED_OVER_NS):
            return parts.Piece(parts.SYNC, f"waits for a thread: {self.name(self._others[woke])}", where)
        before = int(np.searchsorted(self._ends, low, side="right")) - 1
        after = int(np.searchsorted(self._starts, high))
        edges = [f"after {self.name(self._by_end[before])}"] if before >= 0 else []
        edges += [f"before {self.name(self._by_start[after])}"] if after < len(self._by_start) else []
        part = parts.HOST if where else parts.UNKNOWN
        return parts.Piece(part, f"no operator {', '.join(edges)}", where) if edges else None

    def explained(self, row: int, moment: int) -> parts.Piece:
        """Returns the piece to which time in an innermost range belongs.  row: -1 for time in no range.

        moment: ns; time in no range is named after the range that ended last before it.  If the next one begins soon
        after that, it is the thread's own work, else unknown.
        """
        self._known = self._known or dict(zip(self.nest.rows.tolist(), self._explain_all()))
        if (known := self._known.get(row) or self._added(row)) is not None:
            return known
        index = int(np.searchsorted(self._top_ends, moment, side="right")) - 1
        if index < 0:
            return parts.Piece(parts.UNKNOWN, None, None)
        before, after = self._tops[index], self._tops[index + 1 : index + 2]
        is_short = len(after) and self.rank.ts[after[0]] - self.rank.end[before] < MIN_GAP_NS
        part, where = (parts.HOST, "outside operators, ") if is_short else (parts.UNKNOWN, "")
        return parts.Piece(part, f"{where}after {self.name(before)}", None)

    def _added(self, row: int) -> parts.Piece | None:
        """Returns the piece of a collection or compilation that was added from the record, None for any other range."""
        if row not in self._within:
            return None
        around, name = self._known.get(self._within[row]), self.name(row)
        if around is not None and around.part == parts.COMPILATION:
            return around
        kind = parts.COMPILATION if COMPILES.search(name) else parts.GARBAGE
        return parts.Piece(kind, name, around and around.where)

    def _explain_all(self) -> list[parts.Piece | None]:
        """Returns, for each of .nest.rows, the piece to which its own time belongs, None if nothing is known.

        where: the innermost line of Python that is neither torch's nor threading's, else the innermost annotation, else
        the outermost operator; an annotation or operator only if it is not the innermost range itself.
        """
        index = {wanted: np.array(self._nearest_of(wanted), np.int64) for wanted in EXPLAINED_BY}
        innermost, where = index[ANYTHING], index[IS_LINE]
        for place in (index[IS_ANNOTATION], index[IS_OUTERMOST_OPERATOR]):
            where = np.where((where < 0) & (place != innermost), place, where)
        is_call = take(self.rank.kind[self.nest.rows], innermost) == events.RUNTIME
        index |= {IS_READ: np.where(is_call, index[IS_READ], -1), IS_LINE: where}
        columns = [take(self.nest.name, index[wanted]).tolist() for wanted in EXPLAINED_BY]
        pieces = {names: self._piece(*names) for names in set(zip(*columns))}
        return [pieces[names] for names in zip(*columns)]

    def _piece(self, *indices: int) -> parts.Piece | None:
        """Returns a range's piece.  indices: names of the nearest ranges that have each of EXPLAINED_BY, -1: none."""
        names = [None if index < 0 else self.rank.names[index] for index in indices]
        innermost, where, compilation, collection, wait, read, loader, thread, *_ = names
        if innermost is None:
            return None
        for part, what in (
            (parts.COMPILATION, compilation),
            (parts.GARBAGE, collection),
            (parts.SYNC, wait),
            (parts.SYNC, read and f"{READS_DEVICE}: {innermost}"),
            (parts.LOADER, loader and ADDRESS.sub("", innermost if READS_FILE.search(innermost) else loader)),
            (parts.SYNC, thread),
        ):
            if what is not None:
                return parts.Piece(part, what, where)
        return parts.Piece(parts.HOST, innermost, where)

    def is_optimizer(self, row: int) -> bool:
        """Returns whether an annotation around a range is the optimizer's."""
        return self.around(row, IS_OPTIMIZER) >= 0


def main_track(rank: Rank) -> int | None:
    """Returns the thread of the steps, else the one with most operators and calls; None without a host."""
    is_step = rank.names_that(STEP.search)[rank.name] & rank.is_kind(events.ANNOTATION, events.CPU_OP)
    rows = np.flatnonzero(is_step)
    if not len(rows):
        rows = np.flatnonzero(rank.is_kind(events.CPU_OP, events.RUNTIME))
    return int(np.bincount(rank.track[rows]).argmax()) if len(rows) else None


def host_spans(rank: Rank, include_last_step: bool = False) -> list[parts.Step]:
    """Returns [(number or None, begin ns, end ns)]: the counted ProfilerSteps, else the recording; may be empty."""
    if rank.steps() and (spans := counted_steps(rank, include_last_step)):
        return list(spans)
    track = main_track(rank)
    mine = rank.is_kind(events.CPU_OP, events.RUNTIME) & (rank.track == track)
    return [(None, int(rank.ts[mine].min()), int(rank.end[mine].max()))] if mine.any() else []


def host_pieces(rank: Rank, counted: Sequence[parts.Step], ceilings: Ceilings) -> parts.Pieces:
    """Returns the pieces of the main thread's steps.  counted: of host_spans()."""
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
    piece = thread.gap(*span, row) or thread.explained(row, span[0])
    collective, operator = thread.around(row, IS_COMMUNICATION), thread.around(row, IS_OPERATOR)
    if collective >= 0:
        pieces.add(index, parts.Piece(parts.EXPOSED, thread.name(collective), piece.where), ns)
    elif piece.part in (parts.GARBAGE, parts.SYNC, parts.LOADER, parts.COMPILATION) or operator < 0:
        pieces.add(index, piece, ns)
    elif product := next(((op, key) for op in thread.operators(row) if (key := known.key(op))), None):
        known.add(index, *product, piece.where, ns)
    else:
        part = parts.OPTIMIZER if thread.is_optimizer(row) else parts.UNBOUND
        pieces.add(index, parts.Piece(part, thread.name(operator), piece.where), ns)
