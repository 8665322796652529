"""FLOPs and bytes of matrix multiplications and attention from recorded shapes, 2 FLOPs a multiply-add; and rates from them.

Formulas: a product of [m, k] and [k, n] is 2 m n k.  Attention over B batches, H heads, T queries and S keys of K numbers and
values of V: 2 B H T S (K + V) forward, its mask not counted; backward makes five products for two, 2 B H T S (3 K + 2 V),
the scores once more among them, as FlashAttention's authors count (Dao et al. 2022) and torch's own FLOP counter does.
Everything else is unknown, None, and counted in the share that is.
"""

import math

BYTES = {
    "float": 4,
    "float32": 4,
    "double": 8,
    "float64": 8,
    "c10::bfloat16": 2,
    "bfloat16": 2,
    "c10::half": 2,
    "half": 2,
    "float16": 2,
    "long int": 8,
    "int64": 8,
    "long": 8,
    "int": 4,
    "int32": 4,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
}
PRECISIONS = {"c10::bfloat16": "bfloat16", "c10::half": "float16", "float": "float32", "c10::float8_e4m3fn": "float8"}
# Where the two factors stand among an operator's arguments.
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),
    "_scaled_mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "_addmm_activation": (1, 2),
}
# Attention: the axes of heads and of time.  torch's public forms are [B, H, T, K], FlashAttention's own [B, T, H, K].
HEADS_FIRST, TIME_FIRST = (1, 2), (2, 1)


def flops(name, dims):
    """FLOPs of one call; None for an operator without a formula, without shapes, or with shapes that do not fit."""
    if not dims:
        return None
    op = name.split("::")[-1]
    if op in PRODUCTS:
        a, b = (_sizes(dims, place) for place in PRODUCTS[op])
        return _product(a, b)
    if op == "linear":  # y = x W^T
        a, b = _sizes(dims, 0), _sizes(dims, 1)
        return 2 * math.prod(a) * b[0] if a and len(b or ()) == 2 and a[-1] == b[1] else None
    if axes := _attention_axes(name, op):
        return _attention(dims, axes, "backward" in op)
    return None


def _attention_axes(name, op):
    if "scaled_dot_product" in op or op.startswith("_cudnn_attention"):
        return HEADS_FIRST
    if op.startswith(("_flash_attention_", "_efficient_attention_")) or (
        name.startswith("flash_attn") and op.startswith(("_flash_attn_forward", "_flash_attn_backward"))
    ):
        return TIME_FIRST
    return None


def _sizes(dims, place):
    """The shape at a place, None if there is none (a number, a list of tensors) or if no tensor has it."""
    found = dims[place] if place < len(dims) else None
    return (
        found
        if isinstance(found, list)
        and 0 < len(found) < 9
        and all(type(size) is int and 0 <= size < 2**40 for size in found)
        else None
    )


def _product(a, b):
    """[..., m, k] by [..., k, n]; None if they do not fit."""
    if a is None or b is None or len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    batch = a[:-2] if len(a) >= len(b) else b[:-2]
    return 2 * math.prod(batch) * a[-2] * a[-1] * b[-1]


def _attention(dims, axes, is_backward):
    """The first three shapes are queries, keys and values; in backward the output's gradient stands before them."""
    shapes = [_sizes(dims, place) for place in range(is_backward, is_backward + 3)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return None  # packed sequences: how long each is stands in no shape
    query, key, value = shapes
    heads, time = axes
    pairs = query[0] * query[heads] * query[time] * key[time]
    return 2 * pairs * (3 * query[3] + 2 * value[3]) if is_backward else 2 * pairs * (query[3] + value[3])


def traffic_bytes(name, dims, types):
    """Bytes that a product must move at least: both factors and the result once; None for any other operator."""
    op = name.split("::")[-1]
    if op not in PRODUCTS or op == "matmul" or not dims or not types or flops(name, dims) is None:
        return None
    first, second = PRODUCTS[op]
    a, b = dims[first], dims[second]
    kinds = [str(types[place]).lower() if place < len(types) else "" for place in (first, second)]
    if any(kind not in BYTES for kind in kinds):
        return None
    batch = math.prod(a[:-2])
    out_bytes = max(2, BYTES[kinds[0]])  # of an 8-bit product the result is wider: 2 at least
    return batch * (BYTES[kinds[0]] * a[-2] * a[-1] + BYTES[kinds[1]] * b[-2] * b[-1] + out_bytes * a[-2] * b[-1])


def precision(types):
    """The name in bench.machine.peak_rates of the first type that has a peak, None without one."""
    return next((PRECISIONS[str(kind).lower()] for kind in types or () if str(kind).lower() in PRECISIONS), None)


def achieved(lines, device_us, peak_of, mem_bytes_per_s=None):
    """Operators with known FLOPs -> (lines, whole): [{"name", "shapes", "time_us", "tflop_per_s", "pct_of_peak", "flop_per_byte", "bound"}].

    lines: of operators.table.  device_us: of all rows of the device together, None in a trace without one.  The time is that
    of the kernels that the operator launched, or without a device its own on the CPU, with what it called.
    peak_of(precision) -> FLOP/s or None.  bound: compute or memory, by which side of the roofline's ridge it lies on
    (Williams, Waterman and Patterson 2009).  whole: {"of": "device" | "cpu", "flop", "time_us", "tflop_per_s",
    "known_frac"}: all of these together, and their share of the device's or all operators' time, 0 to 1 or None.
    """
    of, time = ("cpu", "flop_us") if device_us is None else ("device", "device_us")
    total_us = sum(line["self_cpu_us"] for line in lines) if device_us is None else device_us
    found = []
    for line in lines:
        if not line["flop"] or not line[time]:
            continue
        rate, kind = line["flop"] / (line[time] / 1e6), line["precision"]
        peak = peak_of(kind) if kind and of == "device" else None
        if kind == "float32" and peak and rate > peak:  # more than FP32 can: on tensor cores, as TF32
            kind, peak = "tf32", peak_of("tf32")
        intensity = line["flop"] / line["bytes"] if line["bytes"] else None
        ridge = peak / mem_bytes_per_s if peak and mem_bytes_per_s else None
        found.append(
            {
                "name": line["name"],
                "shapes": line["shapes"],
                "precision": kind,
                "count": line["count"],
                "flop": line["flop"],
                "time_us": line[time],
                "tflop_per_s": rate / 1e12,
                "pct_of_peak": 100 * rate / peak if peak else None,
                "flop_per_byte": intensity,
                "bound": None if ridge is None or intensity is None else "compute" if intensity > ridge else "memory",
            }
        )
    flop, time_us = sum(one["flop"] for one in found), sum(one["time_us"] for one in found)
    whole = {
        "of": of,
        "flop": flop,
        "time_us": time_us,
        "tflop_per_s": flop / time_us / 1e6 if time_us else None,
        "known_frac": time_us / total_us if total_us else None,
    }
    return sorted(found, key=lambda one: -one["time_us"]), whole
