"""CPU operators: their own time, the kernels they launched, FLOPs and bytes from their recorded shapes, and the roofline."""

import functools
import json

import numpy as np

from bench.trace import attribution, events, window

US = 1000
BYTES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "c10::bfloat16": 2, "bfloat16": 2, "c10::half": 2, "half": 2, "float16": 2,
    "long int": 8, "int64": 8, "long": 8, "int": 4, "int32": 4, "unsigned char": 1, "signed char": 1, "bool": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip
PRECISIONS = {"c10::bfloat16": "bfloat16", "c10::half": "float16", "float": "float32", "c10::float8_e4m3fn": "float8"}


def table(rank, rows, until_ns=None):
    """[{"name", "shapes", "count", "cpu_us", "self_cpu_us", "device_us", "num_kernels", "flop", "bytes"}] by device, then own CPU time.

    device_us: of the kernels that the operator itself launched.  self_cpu_us: without the operators inside it.  flop and
    bytes: of all calls, from the shapes; None where the formula or the shapes are unknown.
    """
    ops = window.host_rows(rank, events.CPU_OP, until_ns)
    if not len(ops):
        return []
    own_ns = _own_time(rank, ops)
    launched_by = attribution.operators(rank, rows)
    device_ns, num_kernels = np.zeros(len(rank.ts), np.int64), np.zeros(len(rank.ts), np.int64)
    known = launched_by >= 0
    np.add.at(device_ns, launched_by[known], rank.dur[rows[known]])
    np.add.at(num_kernels, launched_by[known], 1)
    key = rank.name[ops].astype(np.int64) * (len(rank.extras) + 1) + rank.extra[ops] + 1
    found, place = np.unique(key, return_inverse=True)
    sums = [_sum(place, len(found), values) for values in (rank.dur[ops], own_ns, device_ns[ops], num_kernels[ops])]
    count = np.bincount(place, minlength=len(found))
    lines = []
    for num, one in enumerate(found):
        name = rank.names[one // (len(rank.extras) + 1)]
        extra = rank.extras[one % (len(rank.extras) + 1) - 1] if one % (len(rank.extras) + 1) else None
        dims, types = _shapes(extra)
        flop, num_bytes = flops(name, dims), traffic_bytes(name, dims, types)
        lines.append({
            "name": name, "shapes": dims, "precision": next((PRECISIONS[kind.lower()] for kind in types or () if kind.lower() in PRECISIONS), None), "count": int(count[num]),
            "cpu_us": sums[0][num] / US, "self_cpu_us": sums[1][num] / US, "device_us": sums[2][num] / US, "num_kernels": int(sums[3][num]),
            "flop": None if flop is None else flop * int(count[num]), "bytes": None if num_bytes is None else num_bytes * int(count[num]),
        })  # fmt: skip
    return sorted(lines, key=lambda line: (-line["device_us"], -line["self_cpu_us"]))


def _sum(place, size, values):
    total = np.zeros(size, np.int64)
    np.add.at(total, place, values)
    return [int(value) for value in total]


def _own_time(rank, ops):
    """Nanoseconds of each operator without those directly inside it, on its thread."""
    own = rank.dur[ops].copy()
    where = np.full(len(rank.ts), -1)
    where[ops] = np.arange(len(ops))
    for thread in np.unique(rank.track[ops]):
        nest = attribution.Nest(rank, ops[rank.track[ops] == thread])
        inside = (nest.parent >= 0) & (nest.end[np.maximum(nest.parent, 0)] >= nest.end)
        np.subtract.at(own, where[nest.rows[nest.parent[inside]]], rank.dur[nest.rows[inside]])
    return np.maximum(own, 0)


def _shapes(extra):
    """An extra -> (dims, types), None where not recorded."""
    if extra is None or not extra[1]:
        return None, None
    return _parsed(extra[1]), _parsed(extra[2])


@functools.lru_cache(maxsize=65536)
def _parsed(raw):
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def flops(name, dims):
    """FLOPs of one call of a matrix multiplication or attention, 2 a multiply-add; None for any other or without shapes.

    mm [m,k] [k,n]: 2 m n k.  Attention forward: 4 B H T S K, its mask not counted; backward 2.5 times that (five
    multiplications for two), as FlashAttention's authors count (Dao et al. 2022).
    """
    dims = [dim for dim in dims or () if isinstance(dim, list) and dim and all(isinstance(size, int) for size in dim)]
    op = name.removeprefix("aten::")
    if op in ("mm", "bmm", "matmul", "_scaled_mm") and len(dims) >= 2:
        return _product(dims[0], dims[1])
    if op in ("addmm", "baddbmm", "addmm_") and len(dims) >= 2:
        return _product(dims[-2], dims[-1])
    if "scaled_dot_product" in op or op in ("_flash_attention_forward", "_flash_attention_backward"):
        shapes = [dim for dim in dims if len(dim) == 4]
        if len(shapes) >= 2 and "backward" not in op:
            (batch, heads, num_q, head), num_k = shapes[0], shapes[1][2]
            return 4 * batch * heads * num_q * num_k * head
        if len(shapes) >= 3:  # the gradient of the output comes first
            (batch, heads, num_q, head), num_k = shapes[1], shapes[2][2]
            return 10 * batch * heads * num_q * num_k * head
    return None


def _product(a, b):
    """[..., m, k] by [..., k, n]; None if they do not fit."""
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    batch = 1
    for size in a[:-2]:
        batch *= size
    return 2 * batch * a[-2] * a[-1] * b[-1]


def traffic_bytes(name, dims, types):
    """Bytes that a matrix multiplication must move at least: both inputs and the output once; None for any other."""
    if name.removeprefix("aten::") not in ("mm", "bmm", "addmm", "baddbmm") or not dims or not types:
        return None
    pairs = [(dim, kind) for dim, kind in zip(dims, types) if isinstance(dim, list) and len(dim) >= 2 and all(isinstance(size, int) for size in dim)]
    if len(pairs) < 2 or _product(pairs[-2][0], pairs[-1][0]) is None or pairs[-1][1].lower() not in BYTES:
        return None
    (a, kind), (b, _) = pairs[-2], pairs[-1]
    batch = 1
    for size in a[:-2]:
        batch *= size
    return BYTES[kind.lower()] * batch * (a[-2] * a[-1] + b[-2] * b[-1] + a[-2] * b[-1])


def achieved(lines, peak_of, mem_bytes_per_s=None):
    """Operators with known FLOPs -> [{"name", "shapes", "tflop_per_s", "pct_of_peak", "flop_per_byte", "bound"}], and coverage.

    peak_of(precision) -> FLOP/s or None.  bound: compute or memory, by which side of the roofline's ridge it lies on
    (Williams, Waterman and Patterson 2009).  Returns (lines, share of device time whose FLOPs are known, 0 to 1 or None).
    """
    total_us = sum(line["device_us"] for line in lines)
    found, known_us = [], 0.0
    for line in lines:
        if line["flop"] is None or not line["device_us"]:
            continue
        known_us += line["device_us"]
        rate, peak = line["flop"] / (line["device_us"] / 1e6), peak_of(line["precision"]) if line["precision"] else None
        intensity = line["flop"] / line["bytes"] if line["bytes"] else None
        ridge = peak / mem_bytes_per_s if peak and mem_bytes_per_s else None
        found.append({
            "name": line["name"], "shapes": line["shapes"], "device_us": line["device_us"], "tflop_per_s": rate / 1e12,
            "pct_of_peak": 100 * rate / peak if peak else None, "flop_per_byte": intensity,
            "bound": None if ridge is None or intensity is None else "compute" if intensity > ridge else "memory",
        })  # fmt: skip
    return found, known_us / total_us if total_us else None
