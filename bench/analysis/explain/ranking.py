"""Where the next millisecond is: what each thing above the limit could give at most, with its evidence.

A gain is an upper bound: what the step would lose if that time were zero and nothing else took its place.  It is the
mean over the ranks, of waiting that of the ranks that wait.  Lines of one origin are one: kernels of a name, gaps at a
line of Python, waiting for a rank; what a product's shape costs and what lies above that; a collective at its
bandwidth, which could be hidden, and what lies above.  Those whose bound is not known come last, as most of their time
may be needed.
"""

import collections

from bench.analysis.explain import parts, rungs
from bench.base.units import ms_from_ns

NUM_LINES = 15
BY_LINE = (parts.HOST, parts.SYNC, parts.LOADER, parts.GARBAGE, parts.COMPILATION)
WITH = {parts.SHAPE: parts.SLOWER, parts.WIRE: parts.EXPOSED, parts.LATENCY: parts.LAUNCH}  # one line of the same name
NO_GAIN = (parts.ARITHMETIC, parts.BANDWIDTH)
ADVICE = {
    parts.SLOWER: "the same operator at its bound; one larger product in place of small ones",
    parts.OPTIMIZER: "share it out among ranks, fuse it, or do less of it",
    parts.UNBOUND: "all of its time, as its bound is not known: fuse it, or record shapes",
    parts.WAITING: "make that rank as fast as the others",
    parts.EXPOSED: "overlap it with computation, or send less",
    parts.COPIES: "copy earlier, on a stream of its own, or not at all",
    parts.BETWEEN: "fewer kernels: fuse them, or a CUDA graph",
    parts.DEPENDENCY: "let the streams wait for less",
    parts.LAUNCH: "launch less or earlier: torch.compile, a CUDA graph",
    parts.HOST: "take it out of the step, or let the device have work meanwhile",
    parts.SYNC: "do not read from the device, or wait for a thread, within the step",
    parts.COMPILATION: "keep shapes and arguments as they were in warm-up, or mark them dynamic",
    parts.GARBAGE: "freeze or disable the collector, collect between steps",
    parts.LOADER: "prepare batches ahead, in a thread or process of their own",
    parts.UNKNOWN: "record Python's stack: with_stack=true",
}


def of(accounts: dict, step_ms: float) -> list[dict]:
    """{rank: account} and the mean step -> [{"part", "what", "where", "rank", "gain_ms", "gain_pct", "count",
    "advice", "ladder"}], the largest gain first.

    rank: for whom it waits, or where alone it is, else None; count: how often a step, mean; ladder: the records
    that gained at such a place (rungs.py).
    """
    result = {}
    for number, one in accounts.items():
        pieces, num_steps = one["pieces"], len(one["steps"])
        for piece, ns in pieces.total().items():
            if piece.part not in NO_GAIN:
                origin = result.setdefault(origin_of(piece), _Origin())
                origin.add(number, piece, ms_from_ns(ns) / num_steps, pieces.count[piece] / num_steps)
    lines = [_line(key, origin, len(accounts), step_ms) for key, origin in result.items()]
    bounded, unbounded = [], []
    for line in sorted(lines, key=lambda line: -line["gain_ms"]):
        (unbounded if line["part"] in parts.NO_BOUND else bounded).append(line)
    return bounded[:NUM_LINES] + unbounded[:NUM_LINES]


class _Origin:
    """What is one line: milliseconds by rank, and by the names that it had."""

    def __init__(self):
        self.by_rank, self.what, self.where, self.counts = (collections.Counter() for _ in range(4))

    def add(self, rank, piece, ms, count):
        self.by_rank[rank] += ms
        self.what[piece.what] += ms
        self.where[piece.where] += ms
        self.counts[piece.part] += count


def _line(key, origin, num_ranks, step_ms):
    part, _, late = key
    what = origin.what.most_common(1)[0][0]
    alone = next(iter(origin.by_rank)) if len(origin.by_rank) == 1 and num_ranks > 1 else None
    gain_ms = sum(origin.by_rank.values()) / (max(1, num_ranks - 1) if part == parts.WAITING else num_ranks)
    return {
        "part": part,
        "what": what,
        "where": next((name for name, _ in origin.where.most_common() if name not in (None, what)), None),
        "rank": alone if late is None else late,
        "gain_ms": gain_ms,
        "gain_pct": 100 * gain_ms / step_ms if step_ms else 0.0,
        "count": max(origin.counts.values()) / num_ranks,
        "advice": ADVICE[part],
        "ladder": rungs.of(part, what, num_ranks),
    }


def origin_of(piece: parts.Piece) -> tuple[str, str | None, int | None]:
    """What is one line of the ranking: (part, name or None, late rank or None)."""
    part = WITH.get(piece.part, piece.part)
    if part in (parts.WAITING, parts.BETWEEN):
        return part, None, piece.late_rank
    if part in BY_LINE and piece.where is not None and ".py(" in piece.where:
        return part, piece.where, None
    return part, piece.what, None
