"""Operators whose FLOPs or bytes are known: what of their time the device's limit explains, and what lies above it."""

import collections

from bench.analysis.explain import parts
from bench.analysis.explain.ceilings import Ceilings, moved_bytes
from bench.analysis.trace import operators
from bench.analysis.trace.load import Rank
from bench.base.units import NS_PER_S


class Operators:
    """add() the time of each call; into() puts the parts of all into Pieces, when every call is known."""

    def __init__(self, rank: Rank, ceilings: Ceilings):
        self._rank, self.ceilings, self._facts = rank, ceilings, {}
        self._is_leaf = operators.leaves_with_flops(rank)
        self._ns = collections.Counter()  # (step index, row of the operator): ns that it has in the account
        self._where = {}

    def facts(self, row: int) -> dict:
        """trace.operators.facts_of() of an operator's call."""
        key = int(self._rank.name[row]), int(self._rank.extra[row])
        if key not in self._facts:
            self._facts[key] = operators.facts_of(self._rank, *key)
        return self._facts[key]

    def has(self, row: int) -> bool:
        """Whether FLOPs or bytes of a call are known, and are not those of an operator inside it."""
        facts = self.facts(row)
        if facts["flop"]:
            return bool(self._is_leaf[row])
        num_bytes = moved_bytes(facts)
        return bool(num_bytes and self.ceilings.bytes_per_s(num_bytes))

    def add(self, step: int, row: int, where: str | None, ns: int) -> None:
        """ns of a step that belong to an operator for which has() holds."""
        self._ns[step, row] += ns
        self._where[row] = where

    def into(self, pieces: parts.Pieces) -> None:
        """The time of an operator's calls together is at most their bound below, at most its shape's above that, then
        the rest, in each call in proportion; without a bound all.  Together, as rates are means over calls too.
        """
        by_line = collections.defaultdict(list)
        for (step, row), ns in self._ns.items():
            by_line[int(self._rank.name[row]), int(self._rank.extra[row])].append((step, row, ns))
        seconds = {key: sum(ns for *_, ns in calls) / NS_PER_S for key, calls in by_line.items()}
        num_calls = {key: len({row for _, row, _ in calls}) for key, calls in by_line.items()}
        of = {key: self._facts[key] for key in by_line}
        self.ceilings.observe(
            [(of[key]["precision"], (of[key]["flop"] or 0) * num_calls[key], seconds[key]) for key in by_line]
        )
        for key, calls in by_line.items():
            call_s = seconds[key] / num_calls[key]
            self._divide(pieces, label(of[key]), calls, call_s, self.ceilings.bound(of[key], call_s))

    def _divide(self, pieces, what, calls, call_s, bound):
        for step, row, ns in calls:
            where = self._where[row]
            if bound is None:
                pieces.add(step, parts.Piece(parts.UNBOUND, what, where), ns)
                continue
            limit_ns, shape_ns = (round(ns * min(1.0, spent_s / call_s)) for spent_s in (bound.limit_s, bound.shape_s))
            pieces.add(step, parts.Piece(bound.part, what, where), limit_ns)
            pieces.add(step, parts.Piece(parts.SHAPE, what, where), shape_ns - limit_ns)
            pieces.add(step, parts.Piece(parts.SLOWER, what, where), ns - shape_ns)


def label(facts: dict) -> str:
    """An operator with the shapes of its tensors: "aten::mm [16384, 768] [768, 3072] bfloat16"."""
    shapes = [str(dims) for dims in facts["shapes"] or () if isinstance(dims, list) and dims]
    return " ".join((facts["name"], *shapes[:4], facts["precision"] or "")).strip()
