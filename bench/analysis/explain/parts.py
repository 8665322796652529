"""The parts of a step in the order of the account: first those of the limit, then what lies above it.

Every nanosecond of a step is in exactly one piece, so the pieces add up to the step, however much of it is explained.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.analysis.trace import columns
from bench.base.units import ms_from_ns

ARITHMETIC, BANDWIDTH, WIRE = "arithmetic at peak", "memory at bandwidth", "communication at bandwidth"
LATENCY = "launch at its latency"
SHAPE, SEEN, PRODUCTS = "shape below the peak", "best rate seen here", "products, peak unknown"
SLOWER, OPTIMIZER, UNBOUND = "slower than their bound", "optimizer without a bound", "no bound known"
WAITING, EXPOSED, COPIES = "waiting for a late rank", "exposed communication", "exposed copies"
BETWEEN, DEPENDENCY, LAUNCH = "between kernels", "waiting for a stream or event", "launch"
HOST, SYNC, GARBAGE, LOADER, UNKNOWN = "host", "synchronisation", "garbage collection", "loader", "unknown"
COMPILATION = "compilation"
LONG_CALL = "over 1 ms"  # in the names of pieces of LAUNCH: the launching call itself took so long
LIMIT = (ARITHMETIC, BANDWIDTH, WIRE, LATENCY)
BY_HOST = (LATENCY, LAUNCH, HOST, SYNC, COMPILATION, GARBAGE, LOADER)  # an idle device waits for its host
NO_BOUND = (SEEN, PRODUCTS, OPTIMIZER, UNBOUND)
MEANING = {  # part: what it holds
    ARITHMETIC: "matrix products and attention, as if each ran at the device's peak rate for its precision",
    BANDWIDTH: "memory-bound operators, as if each moved its bytes at the memory's full bandwidth",
    WIRE: "exposed collectives, as if each ran at the bus bandwidth that was measured for its size",
    LATENCY: "the measured latency of a kernel launch, where the device waited for the launch",
    SHAPE: "extra time of products whose shape runs below the peak rate (tiles, waves, too little work)",
    SEEN: "products on a device whose peak is unknown, at the best rate in this trace, which is no limit",
    PRODUCTS: "products on a device whose peak is unknown; two traces share no best rate",
    SLOWER: "time of products and memory-bound operators beyond the parts above",
    OPTIMIZER: "optimizer kernels or operators whose FLOPs and bytes are unknown",
    UNBOUND: "other kernels or operators whose FLOPs and bytes are unknown; they are never guessed",
    WAITING: "exposed collectives, until the last rank arrived",
    EXPOSED: "exposed collectives after the last rank arrived, above their time at bandwidth where that is known",
    COPIES: "copies and memsets that overlap with no kernel",
    BETWEEN: "gaps below 30 us between kernels that were launched in time",
    DEPENDENCY: "longer gaps after the next kernel was launched: it waited for a stream, an event or the device",
    LAUNCH: "an idle device, from the launching call to its first kernel, or to 0.2 ms after the call; "
    "above the launch latency where that is known",
    HOST: "an idle device while the host ran other code; on a CPU, the time between operators",
    SYNC: "an idle device while the host waited for the device, for a copy from it or for another thread",
    COMPILATION: "torch.compile at work within the step",
    GARBAGE: "Python's garbage collection",
    LOADER: "waiting for data",
    UNKNOWN: "nothing in the trace says what happened",
}
ORDER = tuple(MEANING)
Waits = dict[int, tuple[int, int, int]]  # {row of a collective: (waiting ns, late rank, call)}


class Piece(NamedTuple):
    """Time of one part with its cause.  what: kernel, operator, call or collective; where: line of Python, operator or
    annotation; None if unknown.  late_rank: in pieces of WAITING, the rank that is waited for, else None."""

    part: str
    what: str | None
    where: str | None
    late_rank: int | None = None


class Change(NamedTuple):
    """Time that a step could do without: ns of a device row's duration or, with is_start, of its wait after the last
    thing that it needed; with row None, ns of the host's time from begin_ns on, or arrays of both."""

    row: int | None
    ns: Any
    is_start: bool = False
    begin_ns: Any = 0


Step = tuple[int | None, int, int]  # number, begin ns, end ns


class Pieces:
    """The pieces of all steps: add() fills .ns[step index][Piece], integer nanoseconds, and .count[Piece].

    .changes[Piece]: what would have to go for the piece to be zero, where that is known.  .timeline: [(begin ns, end
    ns, Piece)] of what has a place in time, in no order; what a bound divides later is one undivided piece there.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.ns: list[collections.Counter[Piece]] = [collections.Counter() for _ in steps]
        self.count: collections.Counter[Piece] = collections.Counter()
        self.changes: dict[Piece, list[Change]] = collections.defaultdict(list)
        self.timeline: list[tuple[int, int, Piece]] = []

    def add(
        self, step: int, piece: Piece, ns: int, count: int = 1, change: Change | None = None, at_ns: int | None = None
    ) -> None:
        """Adds ns to a piece of a step, unless they are 0, so that what took no time is not listed.

        change: what would have to go; its ns become those of the piece.  at_ns: where the piece is in the timeline.
        """
        if ns > 0:
            if at_ns is not None:
                self.timeline.append((at_ns, at_ns + ns, piece))
            if change is not None:
                self.changes[piece].append(change if change.ns == ns else change._replace(ns=int(ns)))
            self.ns[step][piece] += int(ns)
            self.count[piece] += count

    def add_host(
        self, distinct: Sequence[Piece], step: np.ndarray, begin: np.ndarray, end: np.ndarray, number: np.ndarray
    ) -> None:
        """Adds segments of the host's time that nothing hid: arrays of one length; number: index into distinct."""
        self.timeline += zip(begin.tolist(), end.tolist(), map(distinct.__getitem__, number.tolist()))
        for key, mine in columns.groups(step * len(distinct) + number):
            piece, ns = distinct[key % len(distinct)], end[mine] - begin[mine]
            self.ns[key // len(distinct)][piece] += int(ns.sum())
            self.count[piece] += len(mine)
            self.changes[piece].append(Change(None, ns, False, begin[mine]))

    @property
    def sum_ns(self) -> int:
        """The duration of all steps together."""
        return sum(end - begin for _, begin, end in self.steps)

    def mean_ms(self, ns: int) -> float:
        """Returns the mean per step, in ms, of a sum over all steps."""
        return ms_from_ns(ns) / len(self.steps)

    def total(self) -> collections.Counter[Piece]:
        """Returns {piece: nanoseconds over all steps}."""
        total_ns: collections.Counter[Piece] = collections.Counter()
        for step_ns in self.ns:
            total_ns.update(step_ns)
        return total_ns

    def by_part(self, step: int | None = None) -> dict[str, int]:
        """Returns {part: nanoseconds} of one step, or of all, for the parts that took time, in the account's order."""
        ns: collections.Counter[str] = collections.Counter()
        for piece, piece_ns in (self.total() if step is None else self.ns[step]).items():
            ns[piece.part] += piece_ns
        return {part: ns[part] for part in ORDER if ns[part]}

    def ms_by(self, key: Callable[[Piece], Any]) -> collections.Counter[Any]:
        """Returns {key(piece): milliseconds of a mean step}, without the pieces whose key is None."""
        ns: collections.Counter[Any] = collections.Counter()
        for piece, piece_ns in self.total().items():
            if (name := key(piece)) is not None:
                ns[name] += piece_ns
        return collections.Counter({name: self.mean_ms(name_ns) for name, name_ns in ns.items()})
