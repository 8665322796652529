"""Ranks the largest possible savings: what each thing above the limit could gain at most, with its evidence.

A gain is an upper bound: how much shorter the step would be if that time were zero.  On a device the graph of
dependencies (bench/analysis/explain/retimed.py) says what then takes its place; elsewhere, and for waiting for a late
rank, the gain is all of that time.  It is a mean over the ranks, for waiting over the ranks that wait.  Pieces of one
origin share a line: kernels of a name, gaps at a line of Python, waiting for a rank; what a product's shape costs and
what lies above that; a collective at its bandwidth, which could be hidden, and what lies above.  Lines without a known
bound come last, as most of their time may be needed.

A line names the records of models/ladder/ that gained at such a place, by the part of the account and by the name of
its kernel or operator, if attention and a loss are among these: the ladder trained a language model.  Records that
shared work among ranks are not named for a single rank.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench.analysis.explain import parts
from bench.analysis.explain.retimed import Graph
from bench.analysis.trace import categories, formulas
from bench.base.units import ms_from_ns
from models import ladder

RUNG = re.compile(r"^  (r\d\d) +([\d.]+ min) +(.*)$", re.M)
TILE = 8  # a size that is not a multiple of it keeps 16-bit tensor cores from their full rate (NVIDIA's matmul guide)
VOCABULARY = 32_000  # sizes from here on are a vocabulary's, not a layer's
SHAPES = re.compile(r"\[([\d, ]+)\]")
ACTIVATION = re.compile(r"^triton_.*(?:relu|gelu|silu|threshold_backward)")  # an MLP's, whatever is fused with it
MUON = re.compile(r"muon|newton_?schulz|polar|^xxt_|ba_plus", re.I)
BY_KERNEL = (parts.SLOWER, parts.UNBOUND)
NUM_LINES = 15
ALONE_FRAC = 0.8  # share of the time of all ranks: a rank that has more of it is named
BY_LINE = (parts.HOST, parts.SYNC, parts.LOADER, parts.GARBAGE, parts.COMPILATION)
WITH = {parts.SHAPE: parts.SLOWER, parts.WIRE: parts.EXPOSED, parts.LATENCY: parts.LAUNCH}  # parts that share a line
NO_GAIN = (parts.ARITHMETIC, parts.BANDWIDTH)
ADVICE = {
    parts.SLOWER: "use a faster kernel, or one larger product instead of several small ones",
    parts.SEEN: "the device's peak is unknown: ./run.sh doctor --passport measures it",
    parts.OPTIMIZER: "shard it across ranks, fuse it, or do less of it",
    parts.UNBOUND: "fuse it; its bound is unknown, and recorded shapes or ./run.sh doctor --passport may give one",
    parts.WAITING: "make that rank as fast as the others",
    parts.EXPOSED: "overlap it with computation, or send less",
    parts.COPIES: "copy earlier, on a separate stream, or not at all",
    parts.BETWEEN: "run fewer kernels: fuse them, or use a CUDA graph",
    parts.DEPENDENCY: "make streams wait for fewer events",
    parts.LAUNCH: "launch fewer kernels or launch them earlier, with torch.compile or a CUDA graph",
    parts.HOST: "use torch.compile or a CUDA graph for many small operators; move other code out of the step",
    parts.SYNC: "do not read from the device, or wait for a thread, within the step",
    parts.COMPILATION: "keep shapes and arguments as they were in warm-up, or mark them dynamic",
    parts.GARBAGE: "freeze or disable the collector, and collect between steps",
    parts.LOADER: "prepare batches ahead of time, in a separate thread or process",
    parts.UNKNOWN: "record a trace with Python's stacks: look=on, or with_stack=true of torch.profiler",
}
ADVICE_ON_LONG_CALLS = (  # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading
    "the first launch of a kernel loads its code, which can take milliseconds: "
    "warm up before the steps that count, or set CUDA_MODULE_LOADING=EAGER"
)

Origin = tuple[str, str | None, int | None]
Share = tuple[int, parts.Piece, float, float]  # rank, its piece, ms of a mean step, how often the piece is in one


def of(pieces_by_rank: Mapping[int, parts.Pieces], step_ms: float, graph: Graph | None = None) -> list[dict[str, Any]]:
    """Returns [{"part", "what", "where", "rank", "gain_ms", "gain_pct", "most_ms", "of_rank", "count", "advice",
    "ladder"}], the largest gain first, lines without a known bound last.

    most_ms: the line's time, mean over the ranks; gain_ms: by how much the graph's step is shorter without it, most_ms
    without a graph; of_rank: (rank, ms) of the rank with most of it: a gain above most_ms is that of ranks that wait
    for this one; rank: the rank that is waited for, or that alone has it, else None; count: mean number per step;
    ladder: the records that gained at such a place.
    """
    shares = collections.defaultdict[Origin, list[Share]](list)
    changes = collections.defaultdict[Origin, dict[int, list[parts.Change]]](dict)
    for number, pieces in pieces_by_rank.items():
        for piece, ns in pieces.total().items():
            if piece.part not in NO_GAIN:
                origin, count = origin_of(piece), pieces.count[piece] / len(pieces.steps)
                shares[origin].append((number, piece, pieces.mean_ms(ns), count))
                changes[origin].setdefault(number, []).extend(pieces.changes[piece])
    names = {piece.what for pieces in pieces_by_rank.values() for piece in pieces.count if piece.what}
    is_like_ladder = {categories.ATTENTION, categories.LOSS} <= set(map(_kind, names))
    lines = [(_line(origin, own, len(pieces_by_rank)), changes[origin]) for origin, own in shares.items()]
    lines.sort(key=lambda item: -item[0]["most_ms"])
    groups = ([item for item in lines if (item[0]["part"] in parts.NO_BOUND) == unbound] for unbound in (False, True))
    bounded, unbounded = (group[: 2 * NUM_LINES] for group in groups)
    if graph is not None:
        num_steps = [len(pieces.steps) for pieces in pieces_by_rank.values()]
        all_saved_ns = graph.saved_ns([changes for _, changes in bounded + unbounded]).T.tolist()
        for (line, _), saved_ns in zip(bounded + unbounded, all_saved_ns):
            if line["part"] != parts.WAITING:  # the graph cannot say how to make a rank as fast
                line["gain_ms"] = sum(ms_from_ns(ns) / num for ns, num in zip(saved_ns, num_steps)) / len(num_steps)
    ranked = []
    for group in (bounded, unbounded):
        ranked += sorted((line for line, _ in group), key=lambda line: -line["gain_ms"])[:NUM_LINES]
    for line in ranked:
        line["ladder"] = records_for(line["part"], line["what"], len(pieces_by_rank)) if is_like_ladder else []
        line["gain_pct"] = 100 * line["gain_ms"] / step_ms if step_ms else 0.0
    return ranked


def _line(origin: Origin, shares: Sequence[Share], num_ranks: int) -> dict[str, Any]:
    part, _, late = origin
    rank_ms, what_ms, where_ms = (collections.defaultdict[Any, float](float) for _ in range(3))
    counts = collections.defaultdict[str, float](float)
    for rank, piece, ms, per_step in shares:
        rank_ms[rank] += ms
        what_ms[piece.what] += ms
        where_ms[piece.where] += ms
        counts[piece.part] += per_step
    what, most = max(what_ms, key=what_ms.__getitem__), max(rank_ms, key=rank_ms.__getitem__)
    places = sorted(where_ms, key=lambda name: -where_ms[name])
    all_ms = sum(rank_ms.values())
    alone = most if num_ranks > 1 and rank_ms[most] > ALONE_FRAC * all_ms else None
    most_ms = all_ms / (max(1, num_ranks - 1) if part == parts.WAITING else num_ranks)
    return {
        "part": part,
        "what": what,
        "where": next((name for name in places if name not in (None, what)), None),
        "rank": alone if late is None else late,
        "gain_ms": most_ms,
        "gain_pct": 0.0,
        "most_ms": most_ms,
        "of_rank": (most, rank_ms[most]),
        "count": max(counts.values()) / num_ranks,
        "advice": ADVICE_ON_LONG_CALLS if part == parts.LAUNCH and parts.LONG_CALL in (what or "") else ADVICE[part],
    }


def origin_of(piece: parts.Piece) -> Origin:
    """Returns what the pieces of one line of the ranking have in common: (part, name or None, late rank or None)."""
    part = WITH.get(piece.part, piece.part)
    if part in (parts.WAITING, parts.BETWEEN):
        return part, None, piece.late_rank
    if part in BY_LINE and piece.where is not None and ".py(" in piece.where:
        return part, piece.where, None
    return part, piece.what, None


def records_for(part: str, what: str | None, num_ranks: int) -> list[str]:
    """Returns the records that gained at such a place, such as ["r05"].  what: of a parts.Piece."""
    what = what or ""
    several = num_ranks > 1
    if part == parts.EXPOSED:
        return ["r26", "r37", "r45"] if several else []  # records 22 to 25, 36 and 44
    if part not in BY_KERNEL and part != parts.OPTIMIZER:
        return []
    if part == parts.OPTIMIZER or MUON.search(what):
        return ["r06"] * several + (["r38"] if MUON.search(what) else ["r39"])
    name = what.split(" ")[0]
    if name.split("::")[-1] in formulas.PRODUCTS:
        sizes = [int(size) for dims in SHAPES.findall(what) for size in dims.split(",") if size.strip()]
        is_odd = any(size > 4 * TILE and size % TILE for size in sizes)
        is_head = max(sizes, default=0) >= VOCABULARY and "float8" not in what
        return ["r10"] * what.endswith("float32") + ["r05"] * is_odd + ["r19"] * is_head
    if ACTIVATION.search(name):
        return ["r28"]  # and record 27
    kind = _kind(what)
    if kind == categories.ATTENTION:
        return ["r12", "r13", "r20", "r29"]
    if kind == categories.LOSS:
        return [] if what.endswith("bfloat16") else ["r37"]
    return ["r10"] if part == parts.SLOWER and what.endswith("float32") else []


def _kind(what: str) -> str:
    name = what.split(" ")[0]
    return categories.category(name if name.startswith("aten::") else what)


def legend(lines: list[dict[str, Any]]) -> list[str]:
    """Returns what each record that is named in these lines brought, without repetition."""
    names = {name for line in lines for name in line["ladder"]}
    brought = sorted(RUNG.findall(ladder.__doc__ or "")) if names else []
    return [f"{name} ({took}): {idea}" for name, took, idea in brought if name in names]
