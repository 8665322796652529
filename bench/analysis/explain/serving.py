"""Recovers what inference servers leave out of an operator's arguments: sequence lengths and the weights of experts.

Attention over a cache of keys has the whole cache among its arguments but reads only what the batch's sequences hold.
With TraceLens' patches, vLLM, SGLang and ATOM annotate each step with sums over its sequences: of new tokens (sq, tok),
of new and cached tokens together (sk), of sq * sq and of sq * sk.

vLLM's mixture of experts has the tokens and the scores of its router as arguments.  The weights of each product are the
stack of matrices, one per expert, that the operator used last before it launched the product.
"""

import math
import re
from typing import Any, NamedTuple

import numpy as np

from bench.analysis.explain import traffic
from bench.analysis.trace import events, operators
from bench.analysis.trace.launches import LAUNCH
from bench.analysis.trace.rank import Rank

SUMS = re.compile(r"sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)")  # a group for prompts, one for sequences in generation
FIELD = re.compile(r"\b(?:[cg]_)?(sq|tok|sk|sqsq|sqsk)=(\d+)")
FIELDS = ("sq", "sk", "sqsq", "sqsk")
EXPERTS = re.compile(r"moe|experts")
PACKED = re.compile(r"fp4|e2m1|int4", re.I)  # a kernel whose weights are packed, two to a byte
Needs = tuple[int | None, int | None]  # FLOPs and bytes


class Lengths(NamedTuple):
    """Sums over the sequences of a batch: new tokens, all tokens, sq * sq, sq * sk."""

    sq: int
    sk: int
    sqsq: int
    sqsk: int

    @classmethod
    def from_name(cls, name: str) -> "Lengths | None":
        """Reads the sums from the name of an annotation; None if it has none."""
        if not (groups := SUMS.findall(name)):
            sums = dict.fromkeys(FIELDS, 0)
            for field, number in FIELD.findall(name):
                sums["sq" if field == "tok" else field] += int(number)
            groups = [sums.values()] if sums["sqsk"] else []
        return cls(*(sum(map(int, numbers)) for numbers in zip(*groups))) if groups else None

    def needs(self, facts: dict[str, Any]) -> Needs:
        """Returns FLOPs and bytes; a token sees the cache and new ones up to it, sq * sk - sq * (sq - 1) / 2 pairs."""
        tensors = [tensor for tensor in traffic.tensors(facts["shapes"], facts["types"]) if len(tensor.dims) > 2]
        query = next((tensor for tensor in tensors if len(tensor.dims) == 3), None)
        if query is None or query.dims[0] < self.sq:
            return None, None
        size = query.dims[-1]
        keys = [tensor for tensor in tensors if tensor.dims[-1] == size and tensor.dims != query.dims] or [query]
        key, value = keys[0], keys[min(1, len(keys) - 1)]
        num_pairs = self.sqsk - (self.sqsq - self.sq) // 2
        cached_bytes = self.sk * (key.bytes // math.prod(key.dims[:-2]) + value.bytes // math.prod(value.dims[:-2]))
        new_bytes = 2 * self.sq * (query.bytes // query.dims[0])
        return 2 * query.dims[1] * num_pairs * (size + value.dims[-1]), cached_bytes + new_bytes


class Experts(NamedTuple):
    """The weights of one product.  num_chosen: experts per token; num_weights, num_bytes: of one expert's matrix."""

    num_chosen: int
    num_weights: int
    num_bytes: int

    def needs(self, facts: dict[str, Any]) -> Needs:
        """Returns FLOPs and bytes; as few experts are read as possible, those of one token."""
        num_tokens = facts["shapes"][0][0]
        return 2 * num_tokens * self.num_chosen * self.num_weights, self.num_chosen * self.num_bytes


Evidence = Lengths | Experts


class Inside:
    """The operators of a rank's threads, to find what an operator did before it launched a kernel."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by track: its operators and launches, by start

    def experts(self, row: int, call: int, kernel: str | None, facts: dict[str, Any]) -> Experts | None:
        """Returns the experts behind an operator's product; None if it has none or their weights are not recorded."""
        if call < 0 or kernel is None or not EXPERTS.search(facts["name"]):
            return None
        matrices = [dims for dims in (facts["shapes"] or ())[:2] if isinstance(dims, list) and len(dims) == 2]
        if len(matrices) < 2:
            return None
        rank, num_experts, num_chosen, weights = self._rank, matrices[1][1], None, None
        ops, launches = self._launches_of_track(int(rank.track[row]))
        begin, end = np.searchsorted(rank.ts[ops], (rank.ts[row] + 1, rank.ts[call]))
        earlier = int(np.searchsorted(rank.ts[launches], rank.ts[call])) - 1
        since = rank.ts[launches[earlier]] if earlier >= 0 else 0
        for op in ops[begin:end].tolist():
            inner = operators.facts_of(rank, int(rank.name[op]), int(rank.extra[op]))
            if re.search("topk", inner["name"], re.I) and inner["concrete"] and str(inner["concrete"][1]).isdigit():
                num_chosen = int(inner["concrete"][1])
            stack = next(iter(traffic.tensors(inner["shapes"], inner["types"])), None)
            if stack and rank.ts[op] > since and len(stack.dims) == 3 and stack.dims[0] == num_experts:
                weights = stack
        if not num_chosen or weights is None or not weights.element_bytes:
            return None
        num_numbers = math.prod(weights.dims[1:])
        per_byte = 2 if weights.element_bytes == 1 and PACKED.search(kernel) else 1
        return Experts(num_chosen, num_numbers * per_byte, num_numbers * weights.element_bytes)

    def _launches_of_track(self, track: int) -> tuple[np.ndarray, np.ndarray]:
        if track not in self._rows:
            rank, mine = self._rank, self._rank.track == track
            calls = np.flatnonzero(rank.is_kind(events.RUNTIME) & mine)
            chosen = np.flatnonzero(rank.is_kind(events.CPU_OP) & mine), calls[rank.is_named(LAUNCH.search, calls)]
            ops, launches = (rows[np.argsort(rank.ts[rows], kind="stable")] for rows in chosen)
            self._rows[track] = ops, launches
        return self._rows[track]
