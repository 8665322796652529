"""What people did about a line of the ranking: the records of models/ladder/ that gained at such a place.

    ms     what                                       records
    1.712  no bound known: flash_attn ...             r12 r13 r20 r29

A place is a part of the account and what the name of its kernel or operator says; a record is named as
models/ladder/__init__.py lists it.  No record is named of one rank that shared its work among several.
"""

import functools
import re

from bench.analysis.explain import parts
from bench.analysis.trace import categories, flops
from models import ladder

RUNG = re.compile(r"^  (r\d\d) +([\d.]+ min) +(.*)$", re.M)
TILE = 8  # a factor that is not a multiple of it keeps 16-bit tensor cores from their full rate (NVIDIA's matmul guide)
VOCABULARY = 32_000  # a size from which on it is that of a vocabulary, not of a layer
SHAPES = re.compile(r"\[([\d, ]+)\]")
ACTIVATION = re.compile(r"^triton_.*(?:relu|gelu|silu|threshold_backward)")  # the MLP's, whatever is fused into it
MUON = re.compile(r"muon|newton_?schulz|polar|^xxt_|ba_plus", re.I)
BY_KERNEL = (parts.SLOWER, parts.UNBOUND)


def of(part: str, what: str | None, num_ranks: int) -> list[str]:
    """["r05", ...]; what: of a parts.Piece, a kernel or an operator with its shapes."""
    what = what or ""
    several = num_ranks > 1
    if part == parts.EXPOSED:
        return ["r26", "r37", "r45"] if several else []  # records 22 to 25, 36 and 44
    if part not in BY_KERNEL and part != parts.OPTIMIZER:
        return []
    if part == parts.OPTIMIZER or MUON.search(what):
        return ["r06"] * several + (["r38"] if MUON.search(what) else ["r39"])
    name = what.split(" ")[0]
    if name.split("::")[-1] in flops.PRODUCTS:
        return _of_product(what)
    if ACTIVATION.search(name):
        return ["r28"]  # and record 27
    kind = categories.category(name if name.startswith("aten::") else what)
    if kind == categories.ATTENTION:
        return ["r12", "r13", "r20", "r29"]
    if kind == categories.LOSS:
        return [] if what.endswith("bfloat16") else ["r37"]
    return ["r10"] if part == parts.SLOWER and what.endswith("float32") else []


def _of_product(what):
    result = ["r10"] if what.endswith("float32") else []
    sizes = [int(size) for dims in SHAPES.findall(what) for size in dims.split(",") if size.strip()]
    if any(size > 4 * TILE and size % TILE for size in sizes):
        result.append("r05")
    if max(sizes, default=0) >= VOCABULARY and "float8" not in what:
        result.append("r19")
    return result


@functools.cache
def words() -> dict[str, str]:
    """{"r05": "r05 (15.2 min): padded vocabulary, ..."} as the ladder's own docstring lists them."""
    return {name: f"{name} ({took}): {idea}" for name, took, idea in RUNG.findall(ladder.__doc__ or "")}


def legend(lines: list[dict]) -> list[str]:
    """What the records named in these lines of the ranking brought, each once."""
    names = sorted({name for line in lines for name in line["ladder"]})
    return [words()[name] for name in names]
