"""How fast an operator could be at most: the roofline of its FLOPs and bytes.

A bound is the larger of FLOPs / peak and bytes / bandwidth (Williams, Waterman and Patterson 2009).  Peaks are those of
the data sheet (bench/machine/peak_rates.py).  A device without one, a CPU for example, is measured against itself: the
best rate that a product of the same precision reached in this trace, which is a rate it can do but not its limit.
"""

import math
import re
from dataclasses import dataclass, field

from bench.machine import peak_rates
from bench.trace import flops

MIN_SHARE = 0.02  # of all time with known FLOPs: an operator that took less shows no rate
# Operators that read each tensor among their arguments once and write one result.
POINTWISE = re.compile(
    r"^aten::(?:abs|add|clamp|cos|div|eq|exp|gelu|gt|lerp|log|lt|maximum|minimum|mul|neg|pow|relu|rsqrt|rsub|sigmoid|"
    r"silu|sin|sqrt|square|sub|tanh|where)_?$"
)
COMPARISONS = ("aten::eq", "aten::gt", "aten::lt")
# Inductor's kernels, whose names hold the operators fused into them.  Where one of these is, a tensor among the
# arguments may be touched in part, and its size says nothing.
GENERATED = re.compile(r"^triton_(?:poi|red|per)_fused_")
IN_PART = re.compile(r"index|embedding|gather|scatter|slice|select|pad|split|cat(?![a-z])|unfold|strided|nll_loss|topk")


@dataclass
class Ceilings:
    """device: name as the driver gives it, or None.  observed: precision -> FLOP/s, see observe()."""

    device: str | None
    observed: dict[str, float] = field(default_factory=dict)

    def peak(self, precision: str | None, flop_per_s: float) -> tuple[str | None, float | None]:
        """(precision, FLOP/s or None): of what an operator of this precision can have run at."""
        if precision in self.observed:
            return precision, self.observed[precision]
        return flops.peak_of_rate(precision, flop_per_s, lambda kind: peak_rates.peak_flops(self.device, kind))

    @property
    def bytes_per_s(self) -> float | None:
        """Memory bandwidth, None where it is not known."""
        return peak_rates.mem_bytes_per_s(self.device)

    @property
    def source(self) -> str | None:
        """Where the peaks are from; None: nothing is known."""
        known = peak_rates.find(self.device)
        if known is not None:
            return known.source
        return "the best rate in this trace, not a limit of the device" if self.observed else None

    def observe(self, lines: list[tuple[str | None, float, float]]) -> None:
        """(precision, FLOP, seconds) of each operator with known FLOPs; only for a device without a data sheet."""
        if peak_rates.find(self.device) is not None:
            return
        all_s = math.fsum(seconds for _, _, seconds in lines)
        for precision, flop, seconds in lines:
            if flop and precision and seconds > MIN_SHARE * all_s:
                self.observed[precision] = max(self.observed.get(precision, 0.0), flop / seconds)

    def bound(self, facts: dict, seconds: float) -> tuple[bool, float] | None:
        """facts: of trace.operators.facts, of one call; seconds: how long it took.

        (whether arithmetic bounds it, seconds it needs at least), or None where neither bound is known.
        """
        flop, num_bytes = facts["flop"], moved_bytes(facts)
        peak = self.peak(facts["precision"], flop / seconds)[1] if flop and seconds else None
        arithmetic_s = flop / peak if peak else None
        memory_s = num_bytes / self.bytes_per_s if num_bytes and self.bytes_per_s else None
        if arithmetic_s is None and memory_s is None or flop and peak is None:
            return None
        return (arithmetic_s or 0.0) >= (memory_s or 0.0), max(arithmetic_s or 0.0, memory_s or 0.0)


def moved_bytes(facts: dict) -> int | None:
    """facts: of trace.operators.facts_of() -> bytes that a call must move at least; None where that is not known.

    A product its factors and result; an operator of POINTWISE its tensors and a result of their common shape and widest
    type; a kernel that inductor generated each tensor among its arguments, the results among them, once.
    """
    name, tensors = facts["name"], _tensors(facts["shapes"], facts["types"])
    if facts["bytes"] or not tensors or any(size is None for _, size in tensors):
        return facts["bytes"]
    read_bytes = sum(size * math.prod(dims) for dims, size in tensors)
    if POINTWISE.match(name):
        out_shape = _broadcast([dims for dims, _ in tensors])
        out_bytes = 1 if name in COMPARISONS else max(size for _, size in tensors)
        return None if out_shape is None else read_bytes + out_bytes * math.prod(out_shape)
    if GENERATED.match(name) and (not IN_PART.search(name) or "log_softmax" in name):
        return read_bytes
    return None


def _tensors(shapes, types):
    """[(dims, bytes of an element or None)] of the arguments that have a shape."""
    return [
        (dims, flops.BYTES.get(str(kind).lower()))
        for dims, kind in zip(shapes or (), types or ())
        if isinstance(dims, list) and dims and all(type(size) is int and size >= 0 for size in dims)
    ]


def _broadcast(shapes):
    """The common shape, or None if they do not fit."""
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(dims)) + dims for dims in shapes]
    common = [max(sizes) for sizes in zip(*padded)]
    return common if all(size in (1, common[axis]) for dims in padded for axis, size in enumerate(dims)) else None
