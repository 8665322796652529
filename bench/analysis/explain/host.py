"""Shows what a thread of the host did at every moment, and divides the steps of a trace without a device into pieces.

Where nothing ran on the device, the thread shows what the time went to; without a device, operators of the main thread
take the place of kernels.  Ranges of one thread are nested: calls, operators, annotations, and frames of Python where
they were recorded.  The innermost says what was done, and those around it what it belongs to.
"""

import collections
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.analysis.explain import parts
from bench.analysis.explain.ceilings import Ceilings, Operators
from bench.analysis.trace import attribution, categories, events
from bench.analysis.trace.columns import Nest, take
from bench.analysis.trace.device_time import COMMUNICATION
from bench.analysis.trace.rank import STEP, Rank
from bench.analysis.trace.window import steps as counted_steps

MIN_GAP_NS = 1_000_000  # shorter gaps outside any operator, call or frame are the thread's own work
HANDED_OVER_NS = 100_000  # a woken thread goes on within this time after the range of the thread that woke it
READS_FILE = re.compile(r"built-in method (?:read\w*|p?readv?|open|recv\w*) of ")
ADDRESS = re.compile(r" (?:object )?at 0x[0-9a-f]+")
KINDS = (events.RUNTIME, events.CPU_OP, events.ANNOTATION, events.PYTHON)


WAITS_FOR_DEVICE = re.compile(r"Synchronize|^synchronize(?:Stream)?$|(?:hip|cuda|^cu)Memcpy(?!.*Async)")
COLLECTION, COMPILATION = "garbage collection", "recompilation"  # names of the ranges that come from the record
READS_DEVICE = "aten::_local_scalar_dense"  # .item(): its copy waits until the device has caught up
COLLECTS = re.compile(r"built-in (?:function|method) collect\b|(?:^|\W)gc\.collect\b|^garbage collection", re.I)
WAITS_FOR_THREAD = re.compile(r"built-in method acquire of _thread\.|threading\.py\(\d+\): \w+$")
# Dynamo's annotations and frames, and the range that is added for a recorded compilation
COMPILES = re.compile(r"\(dynamo_timed\)$|torch/_dynamo/convert_frame\.py|^recompilation\b")
LOADS = re.compile(r"^data$|^enumerate\(DataLoader\)|DataLoader\w*\.__next__")
COMMUNICATES = re.compile(r"^(?:gloo|nccl|c10d|mpi|ucc)::?|record_param_comms|_functional_collectives")
MESSAGE = re.compile(r"^(?:gloo|mpi|ucc):(?!:)")  # a collective of the host, on a thread of the library's


class Property(NamedTuple):
    """A property of ranges: a test of the name, and a kind, None for any.  outermost: only the outermost has it."""

    test: Callable[[str], object]
    kind: int | None = None
    outermost: bool = False


ANYTHING = Property(lambda name: True)
IS_STEP = Property(STEP.search)  # a step's range encloses everything and explains nothing
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
GOES_ON_NS = {parts.HOST: np.iinfo(np.int64).max, parts.UNKNOWN: MIN_GAP_NS}  # after what a thread waited for
NOT_OF_OPERATORS = (parts.GARBAGE, parts.SYNC, parts.LOADER, parts.COMPILATION)  # whatever operator is around them
EXPLAINED_BY = (
    *(ANYTHING, IS_LINE, IS_COMPILATION, IS_COLLECTION, IS_WAIT, IS_READ, IS_LOADER, IS_WAIT_FOR_THREAD),
    *(IS_ANNOTATION, IS_OUTERMOST_OPERATOR),
)


class Thread:
    """What a thread of a rank did at each moment: segments() divides time by innermost range, pieces() explains it.

    .ranges: rows of its ranges, those that were added from the record last.  .distinct: what pieces() refers to.
    """

    def __init__(self, rank: Rank, track: int | None) -> None:
        rows = np.flatnonzero(rank.is_kind(*KINDS) & (rank.track == track) & (rank.dur > 0))
        is_added = rank.is_named(lambda name: name.startswith((COLLECTION, COMPILATION)), rows)
        self.rank, self.nest, added = rank, Nest(rank, rows[~is_added]), Nest(rank, rows[is_added])
        self.ranges = np.concatenate((self.nest.rows, added.rows))
        place_of = np.full(len(rank.ts) + 1, -1)  # by row; the last is for row -1
        place_of[self.ranges] = np.arange(len(self.ranges))
        edges = np.concatenate((rank.ts[rows], rank.end[rows]))
        self._edges = np.unique(edges, return_index=True)[0]  # sorted; alone they are hashed, 60 times as slow
        adding = added.innermost(self._edges)  # their clock may differ: they cut what is around them
        self._places = place_of[np.where(adding >= 0, adding, self.nest.innermost(self._edges))]
        self._within = place_of[self.nest.innermost(rank.ts[added.rows])]  # the place around each that was added
        self._names = np.unique(rank.name[self.ranges], return_inverse=True)  # the names, and the index of each range's
        self._nearest: dict[Property, np.ndarray] = {}
        ops = rows[np.isin(rank.kind[rows], (events.CPU_OP, events.RUNTIME))]
        self._by_end, self._by_start = (ops[np.argsort(of[ops], kind="stable")] for of in (rank.end, rank.ts))
        others = np.flatnonzero(rank.is_kind(events.CPU_OP, events.PYTHON) & (rank.track != track) & (rank.dur > 0))
        self._others = others[np.argsort(rank.end[others], kind="stable")]
        is_step, parent = self._has(IS_STEP)[: len(self.nest.rows)], self.nest.parent
        tops = self.nest.rows[~is_step & ((parent < 0) | take(is_step, parent, 0).astype(bool))]
        steps = self.nest.rows[is_step]
        self._tops = tops[np.argsort(rank.end[tops], kind="stable")]
        self._top_ends, self._other_ends = rank.end[self._tops], rank.end[self._others]
        self._left = np.sort(np.concatenate((rank.end[tops], rank.ts[steps])))  # a range was left, or a step begun
        self._ends, self._starts = rank.end[self._by_end], rank.ts[self._by_start]
        self.distinct: list[parts.Piece] = []
        self._outside: dict[int, int] = {}  # index into .distinct of time in no range, by what is around it
        self._explained = self._explain_all()

    def segments(self, lows: np.ndarray, highs: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns (span, begin ns, end ns, place) of the segments that tile these spans, by span and time.

        A segment is time in which one range is the innermost.  place: its index in .ranges, -1 in no range; span: index
        into lows.
        """
        first = np.searchsorted(self._edges, lows, side="right")
        count = np.maximum(np.searchsorted(self._edges, highs, side="left") - first, 0) + 1
        span = np.repeat(np.arange(len(lows)), count)
        nth = np.arange(len(span)) - (np.cumsum(count) - count)[span]
        edge = first[span] + nth  # at which a segment ends, unless it is the last of its span
        begin = np.where(nth == 0, lows[span], take(self._edges, edge - 1))
        is_last = nth == count[span] - 1
        end = np.where(is_last, highs[span], take(self._edges, np.where(is_last, -1, edge)))
        kept = end > begin
        return span[kept], begin[kept], end[kept], take(self._places, edge - 1)[kept]

    def is_outside(self, moments: np.ndarray) -> np.ndarray:
        """Returns a mask of the moments (ns) at which the thread is in no range."""
        return take(self._places, np.searchsorted(self._edges, moments, side="right") - 1) < 0

    def name(self, place: int) -> str:
        """Returns the name of a range."""
        return self.rank.names[self.rank.name[self.ranges[place]]]

    def _has(self, wanted: Property) -> np.ndarray:
        """Returns a mask over .ranges of those with the property."""
        names, index = self._names
        has = np.array([bool(wanted.test(self.rank.names[name])) for name in names.tolist()] or [False])[index]
        return has if wanted.kind is None else has & (self.rank.kind[self.ranges] == wanted.kind)

    def nearest(self, wanted: Property) -> np.ndarray:
        """Returns the place of the nearest range with the property, for each of .ranges; itself counts; -1: none."""
        if wanted not in self._nearest:
            has = self._has(wanted)
            if wanted is not IS_STEP:
                has &= ~self._has(IS_STEP)
            if wanted.outermost:
                has &= take(self.nearest_in(has), np.concatenate((self.nest.parent, self._within))) < 0
            self._nearest[wanted] = self.nearest_in(has)
        return self._nearest[wanted]

    def nearest_in(self, has: np.ndarray) -> np.ndarray:
        """Returns the same for the ranges in a mask over .ranges."""
        num_nested = len(self.nest.rows)
        nearest = self.nest.nearest(has[:num_nested])
        added = np.where(has[num_nested:], np.arange(num_nested, len(has)), take(nearest, self._within))
        return np.concatenate((nearest, added))

    def pieces(self, begins: np.ndarray, ends: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns the index into .distinct of the piece of each of these segments."""
        number = take(self._explained, places)
        outside = np.flatnonzero(number < 0)
        number[outside] = self._pieces_outside(begins[outside], ends[outside])
        is_gap = (ends - begins >= MIN_GAP_NS) & (
            take(self.rank.kind, take(self.ranges, places), events.ANNOTATION) == events.ANNOTATION
        )
        is_own = np.array([piece.part == parts.HOST for piece in self.distinct], bool)[number]
        gaps = np.flatnonzero(is_gap & (is_own | (take(self._explained, places) < 0)))
        for index, piece in zip(gaps.tolist(), self._gaps(begins[gaps], ends[gaps], places[gaps])):
            if piece is not None:
                number[index] = len(self.distinct)
                self.distinct.append(piece)
        return number

    def _gaps(self, lows: np.ndarray, highs: np.ndarray, places: np.ndarray) -> Iterator[parts.Piece | None]:
        """Yields the piece of each long segment without operators, None if the thread has no operators at all.

        places: of the innermost range, an annotation, or -1.  Where another thread's range ends just before a segment
        does, this thread waited for that one, at a lock or a queue; else the piece names the operators around it.
        """
        woke = np.searchsorted(self._other_ends, highs, side="right") - 1
        is_woken = (woke >= 0) & (take(self._other_ends, woke) > np.maximum(lows, highs - HANDED_OVER_NS))
        after = np.searchsorted(self._starts, highs)
        rows = (
            take(self._others, np.where(is_woken, woke, -1)),
            take(self._by_end, np.searchsorted(self._ends, lows, side="right") - 1),
            take(self._by_start, np.where(after < len(self._starts), after, -1)),
            take(self.ranges, places),
        )
        for waker, before, following, annotation in zip(*map(self.rank.names_of, rows)):
            where = annotation if annotation and not STEP.search(annotation) else None
            edges = ([f"after {before}"] if before else []) + ([f"before {following}"] if following else [])
            if waker is not None:
                yield parts.Piece(parts.SYNC, f"waits for a thread: {waker}", where)
            elif edges:
                yield parts.Piece(parts.HOST if where else parts.UNKNOWN, f"no operator {', '.join(edges)}", where)
            else:
                yield None

    def _pieces_outside(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the index into .distinct of the piece of each of these segments (ns) in no range.

        If the thread left a range, or began a step, shortly before the segment ends, where the thread that launches the
        next row enters a range, the time is its own work, else unknown.  The range that ended last names it.
        """
        before = np.searchsorted(self._top_ends, begins, side="right") - 1
        left = np.searchsorted(self._left, begins, side="right") - 1
        is_short = (left >= 0) & (ends - take(self._left, left, 0) < MIN_GAP_NS)
        keys, index = np.unique(2 * take(self.rank.name, take(self._tops, before)) + is_short, return_inverse=True)
        for key in keys.tolist():
            if key not in self._outside:
                part, what = (parts.HOST, "outside operators") if key % 2 else (parts.UNKNOWN, None)
                if key >= 0:
                    what = ", ".join(filter(None, (what, f"after {self.rank.names[key // 2]}")))
                self._outside[key] = len(self.distinct)
                self.distinct.append(parts.Piece(part, what, None))
        return np.array([self._outside[key] for key in keys.tolist()], np.int64)[index]

    def _explain_all(self) -> np.ndarray:
        """Returns, for each of .ranges, the index into .distinct of the piece of its time, -1 if nothing is known.

        where: the innermost line of Python that is neither torch's nor threading's, else the innermost annotation, else
        the outermost operator; an annotation or operator only if it is not the innermost range itself.
        """
        index = {wanted: self.nearest(wanted) for wanted in EXPLAINED_BY}
        innermost, where = index[ANYTHING], index[IS_LINE]
        for around in (index[IS_ANNOTATION], index[IS_OUTERMOST_OPERATOR]):
            where = np.where((where < 0) & (around != innermost), around, where)
        is_call = take(self.rank.kind[self.ranges], innermost) == events.RUNTIME
        index |= {IS_READ: np.where(is_call, index[IS_READ], -1), IS_LINE: where}
        names = self.rank.name[self.ranges]
        columns = [take(names, index[wanted]).tolist() for wanted in EXPLAINED_BY]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(zip(*columns)))}
        pieces = [self._piece(*key) for key in numbers]
        number = np.array([numbers[key] for key in zip(*columns)], np.int64)
        number[np.array([piece is None for piece in pieces] or [False])[number]] = -1
        self.distinct += [piece or parts.Piece(parts.UNKNOWN, None, None) for piece in pieces]
        return number

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


def main_track(rank: Rank) -> int | None:
    """Returns the thread of the steps, else the process's first, else the busiest; None without a host.

    The first thread has the number of its process.  It must have a tenth of the busiest one's operators and calls.
    """
    is_step = rank.names_that(STEP.search)[rank.name] & rank.is_kind(events.ANNOTATION, events.CPU_OP)
    has_steps = bool(is_step.any())
    rows = np.flatnonzero(is_step if has_steps else rank.is_kind(events.CPU_OP, events.RUNTIME))
    if not len(rows):
        return None
    count = np.bincount(rank.track[rows], minlength=len(rank.tracks))
    is_first = np.array([pid == tid for _, pid, tid in rank.tracks]) & (10 * count >= count.max()) & (not has_steps)
    return int(is_first.argmax() if is_first.any() else count.argmax())


def host_spans(rank: Rank, include_last_step: bool = False) -> list[parts.Step]:
    """Returns [(number or None, begin ns, end ns)]: the counted ProfilerSteps, else the recording; may be empty."""
    if rank.steps() and (spans := counted_steps(rank, include_last_step)):
        return list(spans)
    track = main_track(rank)
    mine = rank.is_kind(events.CPU_OP, events.RUNTIME) & (rank.track == track)
    return [(None, int(rank.ts[mine].min()), int(rank.end[mine].max()))] if mine.any() else []


def messages(rank: Rank, include_last_step: bool = False) -> tuple[Rank, np.ndarray, np.ndarray]:
    """Returns (rank, its collectives of the counted steps, their device_time.types), as skew.waits() takes them."""
    spans = host_spans(rank, include_last_step) or [(None, 0, 0)]
    rows = np.flatnonzero((rank.ts >= spans[0][1]) & (rank.ts < spans[-1][2]) & (rank.dur > 0))
    rows = rows[rank.is_named(MESSAGE.search, rows)]
    return rank, rows, np.full(len(rows), COMMUNICATION)


def host_pieces(rank: Rank, counted: Sequence[parts.Step], ceilings: Ceilings, waits: parts.Waits) -> parts.Pieces:
    """Returns the pieces of the main thread's steps.  counted: of host_spans(); waits: of rows of messages()."""
    thread, pieces = Thread(rank, main_track(rank)), parts.Pieces(counted)
    operators = Operators(rank, ceilings)
    keys, index = operators.keys(thread.ranges)
    is_known = np.array([key is not None for key in keys] or [False])[index]
    products = thread.nearest_in(is_known & (rank.kind[thread.ranges] == events.CPU_OP))
    steps, begin, end, place = thread.segments(*np.array([span for _, *span in counted], np.int64).T)
    numbers = thread.pieces(begin, end, place)
    goes_on_ns = [-1 if ".py(" in (of.what or "") else GOES_ON_NS.get(of.part, -1) for of in thread.distinct]
    waited = _waited(rank, waits, begin, end, np.array(goes_on_ns or [-1])[numbers])
    nearest = (products, *map(thread.nearest, (IS_COMMUNICATION, IS_OPERATOR, IS_OPTIMIZER)))
    columns = (steps, end - begin, numbers, *(take(of, place) for of in nearest))
    for segment, (step, ns, number, *places) in enumerate(zip(*(column.tolist() for column in columns))):
        piece, (product, collective, operator, optimizer) = thread.distinct[number], places
        is_message = collective >= max(operator, 0)  # an operator within a message that is under way computes
        if is_message:
            piece = parts.Piece(parts.EXPOSED, thread.name(collective), piece.where)
        if is_message or piece.part in NOT_OF_OPERATORS or operator < 0:
            for wait, waited_ns in waited[segment]:
                pieces.add(step, wait._replace(where=piece.where), waited_ns)
                ns -= waited_ns
            pieces.add(step, piece, ns)
        elif product >= 0:
            operators.add(step, int(thread.ranges[product]), keys[index[product]], piece.where, ns)
        else:
            part = parts.OPTIMIZER if optimizer >= 0 else parts.UNBOUND
            pieces.add(step, parts.Piece(part, thread.name(operator), piece.where), ns)
    operators.into(pieces)
    return pieces


def _waited(
    rank: Rank, waits: parts.Waits, begin: np.ndarray, end: np.ndarray, goes_on_ns: np.ndarray
) -> collections.defaultdict[int, list[tuple[parts.Piece, int]]]:
    """Returns {segment: [(piece, ns)]} of messages that a thread waited for: it went on within goes_on_ns of them."""
    waited, low = collections.defaultdict[int, list[tuple[parts.Piece, int]]](list), begin.copy()
    for row in sorted(waits, key=rank.end.__getitem__):
        done, (wait_ns, late, _), name = int(rank.end[row]), waits[row], rank.names[rank.name[row]]
        segment = int(np.searchsorted(end, done))
        if segment < len(end) and end[segment] - done <= min(done - low[segment], goes_on_ns[segment]):
            start = max(int(low[segment]), int(rank.ts[row]))
            arrived = min(max(int(rank.ts[row]) + wait_ns, start), done)
            waited[segment].append((parts.Piece(parts.WAITING, name, None, late), arrived - start))
            waited[segment].append((parts.Piece(parts.EXPOSED, name, None), done - arrived))
            low[segment] = done
    return waited
