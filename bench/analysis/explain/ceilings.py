"""Bounds the time of operators by the roofline of their FLOPs and bytes, and divides it into limit and excess.

A bound is the larger of FLOPs / peak and bytes / bandwidth (Williams, Waterman and Patterson 2009).  Peaks are those of
the machine's passport (bench/machine/passports.py), else of the data sheet (bench/machine/peak_rates.py).  For a device
with neither, the best rate that a product of the same precision reached in this trace stands in: the time that products
need at that rate is the part "best rate seen here", which is no limit and does not say how well the device is used.
"""

import collections
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.analysis.explain import parts, serving, traffic
from bench.analysis.trace import formulas, operators
from bench.analysis.trace.rank import Rank
from bench.base.units import NS_PER_S
from bench.machine import passports, peak_rates

MIN_SHARE = 0.02  # share of all operators' time: an operator that took less shows no rate
OBSERVED = "the best rate in this trace, because the device's peak is unknown"
COLLECTIVES = (  # a trace's name of a collective, the passport's, bytes of its message over those that a rank sends
    (re.compile("all_?reduce"), "all_reduce", lambda num_ranks: 1),
    (re.compile("all_?gather"), "all_gather", lambda num_ranks: num_ranks),
    (re.compile("reduce_?scatter"), "reduce_scatter", lambda num_ranks: 1),
)
Key = tuple[int, int, serving.Evidence | None]  # of calls that are alike: name, arguments, and evidence beyond these


class Bound(NamedTuple):
    """The bound of one call.  part: the kind of limit, ARITHMETIC, BANDWIDTH or SEEN; limit_s: the least time that the
    call needs; shape_s: the time at the rate that was measured for its shape, limit_s where none was."""

    part: str
    limit_s: float
    shape_s: float


class Rate(NamedTuple):
    """A rate that a device can reach, and the source of that figure."""

    per_s: float
    source: str


@dataclass
class Ceilings:
    """The highest rates of a device.  device: the driver's name of it, or None; measured: its passport's, or None.

    observed: {precision: FLOP/s}, see observe(); sources: {part: the sources of the rates in its bounds}.
    """

    device: str | None
    measured: passports.Ceilings | None = None
    observed: dict[str, float] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)

    def peak(self, precision: str | None) -> Rate | None:
        """Returns the peak FLOP/s of a precision, None if not known."""
        if self.measured is not None and (flop_per_s := self.measured.peak_flops(precision)):
            return Rate(flop_per_s, self.measured.source)
        if flop_per_s := peak_rates.peak_flops(self.device, precision):
            return self._data_sheet(flop_per_s)
        flop_per_s = None if precision is None else self.observed.get(precision)
        return Rate(flop_per_s, OBSERVED) if flop_per_s else None

    def bandwidth(self, num_bytes: float) -> Rate | None:
        """Returns the bytes per second at which memory moves about num_bytes, None if not known."""
        if self.measured is not None and (bytes_per_s := self.measured.bytes_per_s(num_bytes)):
            return Rate(bytes_per_s, self.measured.source)
        return self._data_sheet(peak_rates.mem_bytes_per_s(self.device))

    def _data_sheet(self, per_s: float | None) -> Rate | None:
        sheet = peak_rates.find(self.device)
        return Rate(per_s, f"data sheet: {sheet.source}") if per_s and sheet is not None else None

    @property
    def source(self) -> str | None:
        """The source of the peaks, None if no peak is known."""
        if self.measured is not None:
            return self.measured.source
        sheet = peak_rates.find(self.device)
        return f"data sheet: {sheet.source}" if sheet is not None else OBSERVED if self.observed else None

    def observe(self, lines: list[tuple[str | None, float, float]]) -> None:
        """Keeps the best rate of each precision, unless there is a data sheet.  lines: [(precision, FLOP, seconds)]."""
        if peak_rates.find(self.device) is not None:
            return
        all_s = math.fsum(seconds for _, _, seconds in lines)
        for precision, flop, seconds in lines:
            if flop and precision and seconds > MIN_SHARE * all_s:
                self.observed[precision] = max(self.observed.get(precision, 0.0), flop / seconds)

    def bound(self, facts: dict[str, Any], seconds: float) -> Bound | None:
        """Returns the bound of a call, None if not known.  facts: of Operators.facts(); seconds: what the call took."""
        flop, num_bytes, precision = facts["flop"] or 0, facts["moved_bytes"] or 0, facts["precision"]
        peak = self.peak(precision) if flop and seconds else None
        if flop and peak is None:
            return None
        if precision == "float32" and peak and flop / seconds > peak.per_s and (tf32 := self.peak("tf32")):
            precision, peak = "tf32", tf32  # faster than FP32 allows: on tensor cores
        memory = self.bandwidth(num_bytes) if num_bytes else None
        if peak is None and memory is None:
            return None
        arithmetic_s = flop / peak.per_s if peak else 0.0
        memory_s = num_bytes / memory.per_s if memory else 0.0
        if memory is not None and memory_s > arithmetic_s:
            self._is_from(parts.BANDWIDTH, memory.source)
            return Bound(parts.BANDWIDTH, memory_s, memory_s)
        if peak is None or peak.source == OBSERVED:
            self._is_from(parts.SEEN, OBSERVED)
            return Bound(parts.SEEN, arithmetic_s, arithmetic_s)
        self._is_from(parts.ARITHMETIC, peak.source)
        shape = formulas.product_shape(facts["name"], facts["shapes"])
        if self.measured is None or shape is None or peak.source != self.measured.source:
            return Bound(parts.ARITHMETIC, arithmetic_s, arithmetic_s)
        if shape_flops := self.measured.shape_flops(precision, shape):
            self._is_from(parts.SHAPE, self.measured.source)
        return Bound(parts.ARITHMETIC, arithmetic_s, max(arithmetic_s, flop / (shape_flops or peak.per_s)))

    def collective_s(self, collective: str, num_elements: int, dtype: str | None, num_ranks: int) -> float | None:
        """Returns the seconds that a message needs at the bus bandwidth measured for its size, else at that of the
        device's links; None if neither is known.

        collective: its name in the trace; num_elements: how many elements this rank sends.
        """
        if (sent := message(collective, num_elements, dtype, num_ranks)) is None:
            return None
        name, num_bytes = sent
        if self.measured and (bytes_per_s := self.measured.bus_bytes_per_s(name, num_bytes, num_ranks)):
            self._is_from(parts.WIRE, self.measured.source)
            return passports.bus_bytes(name, num_bytes, num_ranks) / bytes_per_s
        if (links := self._data_sheet(peak_rates.link_bytes_per_s(self.device))) is None:
            return None
        self._is_from(parts.WIRE, links.source)
        # The bytes that cross a device's links one way: all of an all-reduce's, even where the switch adds them up.
        return (num_bytes if name == "all_reduce" else num_bytes * (num_ranks - 1) / num_ranks) / links.per_s

    def launch_ns(self) -> int:
        """Returns the least time that a launch needs while the device waits for it; 0 if it was not measured."""
        if self.measured is None or not self.measured.launch_s:
            return 0
        self._is_from(parts.LATENCY, self.measured.source)
        return round(self.measured.launch_s * NS_PER_S)

    def _is_from(self, part: str, source: str) -> None:
        self.sources.setdefault(part, set()).add(source)


def message(collective: str, num_elements: int, dtype: str | None, num_ranks: int) -> tuple[str, int] | None:
    """Returns (the passport's name of a collective, bytes of the whole message), None if not known.  The arguments are
    what operators.collective_of() returns."""
    size = formulas.BYTES.get(str(dtype).lower(), formulas.BYTES.get(f"c10::{dtype}".lower()))
    for pattern, name, factor in COLLECTIVES:
        if pattern.search(collective.lower()) and size and num_elements > 0 and num_ranks > 1:
            return name, size * num_elements * factor(num_ranks)
    return None


class Operators:
    """Collects the time of operators' calls with add(); into() then divides all of it among Pieces."""

    def __init__(self, rank: Rank, ceilings: Ceilings) -> None:
        self._rank, self.ceilings = rank, ceilings
        self._facts: dict[Key, dict[str, Any]] = {}
        self._is_leaf = operators.leaves_with_flops(rank)
        self._inside = serving.Inside(rank)
        # {(step index, row of the operator, key): its ns in the account}
        self._ns: collections.Counter[tuple[int, int, Key]] = collections.Counter()
        self._changes: dict[tuple[int, int, Key], list[parts.Change]] = collections.defaultdict(list)
        self._where: dict[int, str | None] = {}

    def facts(self, key: Key, kernel: str | None = None) -> dict[str, Any]:
        """Returns trace.operators.facts_of() of calls that are alike, and "moved_bytes", the least that one must move.

        kernel: the name of a kernel that a call launched, which may tell what its arguments do not.
        """
        if key not in self._facts:
            name, extra, evidence = key
            facts = operators.facts_of(self._rank, name, extra)
            facts["moved_bytes"] = traffic.moved_bytes(facts, kernel)
            if evidence is not None:
                facts["flop"], facts["moved_bytes"] = evidence.needs(facts)
            self._facts[key] = facts
        return self._facts[key]

    def key(
        self, row: int, kernel: str | None = None, call: int = -1, lengths: serving.Lengths | None = None
    ) -> Key | None:
        """Returns what calls like this one share; None if an operator inside has its FLOPs, or if nothing is known.

        call: row of the launching call, -1 for none; lengths: of the sequences of the batch, None if not known.
        """
        key: Key = (int(self._rank.name[row]), int(self._rank.extra[row]), None)
        facts = self.facts(key, kernel)
        if facts["flop"]:
            return key if self._is_leaf[row] else None
        is_attention = facts["flop"] is None and traffic.ATTENTION.search(facts["name"].split("::")[-1])
        evidence: serving.Evidence | None = lengths if lengths and is_attention else None
        evidence = evidence or self._inside.experts(row, call, kernel, facts)
        if evidence and evidence.needs(facts)[1]:
            key = (*key[:2], evidence)
        num_bytes = self.facts(key, kernel)["moved_bytes"]
        return key if num_bytes and self.ceilings.bandwidth(num_bytes) else None

    def keys(self, rows: np.ndarray) -> tuple[list[Key | None], np.ndarray]:
        """Returns (what key() returns for different operators, the index of each row's in it)."""
        rank = self._rank
        packed = rank.name[rows].astype(np.int64) * (len(rank.extras) + 1) + rank.extra[rows] + 1
        _, first, index = np.unique(2 * packed + self._is_leaf[rows], return_index=True, return_inverse=True)
        return [self.key(row) for row in rows[first].tolist()], index

    def add(
        self, step: int, row: int, key: Key, where: str | None, ns: int, change: parts.Change | None = None
    ) -> None:
        """Adds ns of a step to a call of an operator.  key: of key(); change: as in Pieces.add()."""
        self._ns[step, row, key] += ns
        if change is not None:
            self._changes[step, row, key].append(change._replace(ns=ns))
        self._where[row] = where

    def into(self, pieces: parts.Pieces) -> None:
        """Divides the calls' time into the part within their bound, the part within their shape's bound, and the rest.

        All calls of a key are divided alike, by their mean time; without a bound everything is the rest.
        """
        by_line = collections.defaultdict(list)
        for (step, row, key), ns in self._ns.items():
            by_line[key].append((step, row, ns))
        self._without_windows(by_line)
        seconds = {key: sum(ns for *_, ns in calls) / NS_PER_S for key, calls in by_line.items()}
        num_calls = {key: len({row for _, row, _ in calls}) for key, calls in by_line.items()}
        of = {key: self.facts(key) for key in by_line}
        self.ceilings.observe(
            [(of[key]["precision"], (of[key]["flop"] or 0) * num_calls[key], seconds[key]) for key in by_line]
        )
        for key, calls in by_line.items():
            call_s = seconds[key] / num_calls[key]
            self._divide(pieces, key, calls, call_s, self.ceilings.bound(of[key], call_s))

    def _without_windows(self, by_line: dict[Key, list[tuple[int, int, int]]]) -> None:
        """Bounds attention by its arguments alone if it cannot have read all keys in its time: it has a window."""
        for key in [key for key in by_line if isinstance(key[2], serving.Lengths)]:
            bound = self.ceilings.bound(self.facts(key), float("inf"))
            is_windowed = [bound is not None and ns < bound.limit_s * NS_PER_S for *_, ns in by_line[key]]
            calls, plain = by_line.pop(key), (*key[:2], None)
            for call, windowed in zip(calls, is_windowed):
                by_line[plain if windowed else key].append(call)
                if windowed:
                    self._changes[call[0], call[1], plain] += self._changes.pop((call[0], call[1], key), [])

    def _divide(
        self, pieces: parts.Pieces, key: Key, calls: list[tuple[int, int, int]], call_s: float, bound: Bound | None
    ) -> None:
        what = label(self.facts(key))
        for step, row, ns in calls:
            where, limit_ns, shape_ns = self._where[row], 0, 0
            if bound is not None:
                bounds_s = (bound.limit_s, bound.shape_s)
                limit_ns, shape_ns = (round(ns * min(1.0, spent_s / call_s)) for spent_s in bounds_s)
                pieces.add(step, parts.Piece(bound.part, what, where), limit_ns)
            rest = parts.SLOWER if bound else parts.UNBOUND
            for part, part_ns in ((parts.SHAPE, shape_ns - limit_ns), (rest, ns - shape_ns)):
                piece = parts.Piece(part, what, where)
                pieces.add(step, piece, part_ns)
                if part_ns > 0:
                    changes = self._changes.get((step, row, key), ())
                    pieces.changes[piece] += [change._replace(ns=change.ns * part_ns // ns) for change in changes]


def label(facts: dict[str, Any]) -> str:
    """Returns an operator with the shapes of its tensors: "aten::mm [16384, 768] [768, 3072] bfloat16"."""
    shapes = [str(dims) for dims in facts["shapes"] or () if isinstance(dims, list) and dims]
    return " ".join((facts["name"], *shapes[:4], facts["precision"] or "")).strip()
