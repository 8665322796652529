"""Computes FLOPs and bytes of one call of an operator, from the shapes, types and numbers of its arguments.

A multiply-add is 2 FLOPs: a product of [m, k] and [k, n] is 2 m n k.  Attention over B batches, H heads, T queries and
S keys of K numbers and values of V: 2 B H T S (K + V) forward, not counting its mask; backward makes five products
instead of two, 2 B H T S (3 K + 2 V), including the scores again, as FlashAttention's authors (Dao et al. 2022) and
torch's own FLOP counter count.  Packed sequences, whose number a trace gives but not their lengths, count as equally
long and causal, which is the least that any lengths can need (the pairs grow faster than the length).  A convolution
counts as the direct algorithm, although Winograd's and FFT's need less.  A mixture of experts counts the products of
each token with its chosen experts.  An operator without a formula is unknown: None.
"""

import json
import math
import re
from typing import Any

BYTES = {
    name: size
    for size, names in {
        16: ("c10::complex<double>",),
        8: ("double", "float64", "long int", "int64", "long", "c10::complex<float>"),
        4: ("float", "float32", "int", "int32", "c10::complex<c10::half>"),
        2: ("c10::bfloat16", "bfloat16", "c10::half", "half", "float16", "short int"),
        1: ("unsigned char", "signed char", "bool", "c10::float8_e4m3fn", "c10::float8_e5m2")
        + ("c10::float8_e4m3fnuz", "c10::float8_e5m2fnuz", "c10::float8_e8m0fnu"),
    }.items()
    for name in names
}
PRECISIONS = {"c10::bfloat16": "bfloat16", "c10::half": "float16", "float": "float32"}
PRECISIONS |= {name: "float8" for name in BYTES if name.startswith("c10::float8_e") and "e8m0" not in name}
# Which arguments of an operator are the two factors.
PRODUCTS = dict.fromkeys(("mm", "bmm", "matmul", "_scaled_mm", "_int_mm"), (0, 1))
PRODUCTS |= dict.fromkeys(("addmm", "addmm_", "baddbmm", "_addmm_activation"), (1, 2))
# Products of other libraries take (result,) rows, weights as [k, n] or, like linear, as [n, k].
PRODUCT_OF_LIBRARY = re.compile(r"gemm|(?:^|_)(?:mm|matmul|linear)(?:_|$)")
# Attention: the axes of heads and of time.  torch's public forms are [B, H, T, K], FlashAttention's own [B, T, H, K].
HEADS_FIRST, TIME_FIRST = (1, 2), (2, 1)
# Attention over packed sequences: the arguments with the ends of the sequences and the window's size to the left.
PACKED = {
    "flash_attn_3::fwd": (7, 25),
    "flash_attn_3::_flash_attn_forward": (7, 25),
    "flash_attn_3::bwd": (9, 17),
    "flash_attn_3::_flash_attn_backward": (6, 14),
    "flash_attn::_flash_attn_varlen_forward": (3, 10),
    "flash_attn::_flash_attn_varlen_backward": (9, 16),
    "aten::_flash_attention_forward": (3, 11),
    "aten::_flash_attention_backward": (6, 13),
}
# A convolution's arguments with stride, padding, dilation and whether it is transposed; None: it never is.
CONVOLUTIONS: dict[str, tuple[int, int, int, int | None]] = dict.fromkeys(
    ("convolution", "_convolution", "convolution_overrideable"), (3, 4, 5, 6)
)
CONVOLUTIONS |= dict.fromkeys(("conv1d", "conv2d", "conv3d"), (3, 4, 5, None))
CONVOLUTIONS |= dict.fromkeys(("cudnn_convolution",), (3, 2, 4, None))
CONVOLUTIONS |= dict.fromkeys(
    ("miopen_convolution", "mkldnn_convolution", "miopen_depthwise_convolution"), (4, 3, 5, None)
)
CONVOLUTIONS |= dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d"), (4, 5, 6, None))
EXPERTS = re.compile(r"fused_(?:experts|moe)")

Shapes = list[Any] | None


def flops(name: str, dims: Shapes, concrete: list[Any] | None = None) -> int | None:
    """Returns the FLOPs of one call; None for an operator without a formula, without shapes, or with unfit shapes.

    concrete: the numbers and lists among its arguments as the trace writes them, or None.
    """
    if not dims:
        return None
    op = name.split("::")[-1]
    if (product := _product(name, dims)) is not None:
        first, second, num_columns = product
        return 2 * _num_rows(dims[first], dims[second]) * dims[first][-1] * num_columns
    if name in PACKED:
        is_packed = len(_sizes(dims, "backward" in op or op == "bwd")) == 3
        return _packed_attention(name, dims, concrete) if is_packed else _dense_attention(name, op, dims)
    if op in CONVOLUTIONS or op == "convolution_backward":
        shapes = _convolution(op, dims, concrete)
        return shapes and shapes[0]
    if op == "_grouped_mm":
        a, b = _sizes(dims, 0), _sizes(dims, 1)
        return 2 * math.prod(a) * b[2] if len(a) == 2 and len(b) == 3 and a[1] == b[1] else None
    if EXPERTS.search(op):
        experts = _experts(dims)
        return experts and experts[0]
    return _dense_attention(name, op, dims)


def traffic_bytes(name: str, dims: Shapes, types: list[Any] | None, concrete: list[Any] | None = None) -> int | None:
    """Returns the least bytes that a product, convolution or experts must move, factors and result once; else None."""
    op = name.split("::")[-1]
    if op == "matmul" or not dims or not types or flops(name, dims, concrete) is None:
        return None
    sizes = [BYTES.get(str(kind).lower()) for kind in types] + [None] * len(dims)
    if (product := _product(name, dims)) is not None:
        first, second, num_columns = product
        (a, size_a), (b, size_b) = ((dims[number], sizes[number]) for number in (first, second))
        if size_a is None or size_b is None:
            return None
        # the result of an 8-bit product is wider: 2 at least
        return size_a * math.prod(a) + size_b * math.prod(b) + max(2, size_a) * _num_rows(a, b) * num_columns
    if op in CONVOLUTIONS or op == "convolution_backward":
        shapes = _convolution(op, dims, concrete)
        return shapes and sizes[0] and sizes[0] * shapes[1]
    if EXPERTS.search(op):
        experts = _experts(dims)
        return experts and sizes[0] and sizes[0] * experts[1]
    return None


def precision(types: list[Any] | None) -> str | None:
    """Returns the name in bench.machine.peak_rates of the first type that has a peak, None without one."""
    return next((PRECISIONS[str(kind).lower()] for kind in types or () if str(kind).lower() in PRECISIONS), None)


def product_shape(name: str, dims: Shapes) -> tuple[int, int, int] | None:
    """Returns (m, k, n) of a product of a matrix, or rows of any number of axes, by a matrix; None for any other."""
    product = _product(name, dims) if dims else None
    if not dims or product is None or len(dims[product[1]]) != 2:
        return None  # many small products, whose rate that of a single one does not tell
    a = dims[product[0]]
    return math.prod(a[:-1]), a[-1], product[2]


# ---- products


def _product(name: str, dims: list[Any]) -> tuple[int, int, int] | None:
    """Returns (argument with the rows [..., m, k], argument with the factor [..., k, n] or its transpose, n) of a
    product; None for any other operator, and if the shapes do not fit."""
    namespace, _, op = name.rpartition("::")
    if op in PRODUCTS:
        first, second = PRODUCTS[op]
        a, b = _sizes(dims, first), _sizes(dims, second)
        return (first, second, b[-1]) if len(a) > 1 and len(b) > 1 and a[-1] == b[-2] else None
    if op == "linear":  # y = x W^T
        a, b = _sizes(dims, 0), _sizes(dims, 1)
        return (0, 1, b[0]) if a and len(b) == 2 and a[-1] == b[1] else None
    if namespace in ("", "aten") or not PRODUCT_OF_LIBRARY.search(op) or "backward" in op:
        return None
    tensors = [number for number in range(len(dims)) if len(_sizes(dims, number)) > 1]
    for places in (tensors[1:3], tensors[:2]):  # the result may come first
        if len(places) < 2 or len(dims[places[1]]) != 2:
            continue
        (a, b), out = (dims[number] for number in places), dims[tensors[0]]
        num_columns = b[0] if a[-1] == b[1] else b[1] if a[-1] == b[0] else None
        if num_columns is not None and (places[0] == tensors[0] or out == [*a[:-1], num_columns]):
            return places[0], places[1], num_columns
    return None


def _num_rows(a: list[int], b: list[int]) -> int:
    """Returns the number of rows of all products in a batch together."""
    return math.prod(a[:-1] if len(a) >= len(b) else [*b[:-2], a[-2]])


def _sizes(dims: list[Any], number: int) -> list[int]:
    """Returns the shape of an argument; [] if it has none (a number, a list of tensors) or an impossible one."""
    shape: Any = dims[number] if number < len(dims) else None
    is_shape = isinstance(shape, list) and len(shape) < 9
    return shape if is_shape and all(type(size) is int and 0 <= size < 2**40 for size in shape) else []


def _experts(dims: list[Any]) -> tuple[int, int] | None:
    """Returns (FLOPs, numbers moved) of tokens [T, D] in experts [E, 2 I or I, D] and [E, D, I], k for each token.

    At least as many experts are read as one token has.
    """
    shapes = [_sizes(dims, number) for number in range(len(dims))]
    stacks, matrices = ([shape for shape in shapes if len(shape) == num] for num in (3, 2))
    if len(stacks) < 2 or len(matrices) < 2:
        return None
    (up, down), (num_tokens, width) = stacks[:2], matrices[0]
    num_chosen = next((shape[1] for shape in matrices[1:] if shape[0] == num_tokens), 0)
    if not num_chosen or up[0] != down[0] or up[2] != width or down[1] != width:
        return None
    expert_size = up[1] * width + width * down[2]
    return 2 * num_tokens * num_chosen * expert_size, num_chosen * expert_size + 2 * num_tokens * width


# ---- attention


def _dense_attention(name: str, op: str, dims: list[Any]) -> int | None:
    if "scaled_dot_product" in op or op.startswith("_cudnn_attention"):
        axes = HEADS_FIRST
    elif op.startswith(("_flash_attention_", "_efficient_attention_")) or (
        name.startswith("flash_attn") and op.startswith(("_flash_attn_forward", "_flash_attn_backward"))
    ):
        axes = TIME_FIRST
    else:
        return None
    is_backward = "backward" in op
    # the first three shapes are queries, keys and values; in backward the output's gradient stands before them
    shapes = [_sizes(dims, number) for number in range(is_backward, is_backward + 3)]
    if any(len(shape) != 4 for shape in shapes):
        return None
    query, key, value = shapes
    heads, time = axes
    return _pairs_flop(query[0] * query[heads] * query[time] * key[time], query[3], value[3], is_backward)


def _pairs_flop(num_pairs: int, key_size: int, value_size: int, is_backward: bool) -> int:
    return 2 * num_pairs * (3 * key_size + 2 * value_size if is_backward else key_size + value_size)


def _packed_attention(name: str, dims: list[Any], concrete: list[Any] | None) -> int | None:
    """Returns FLOPs.  Queries, keys and values are [T, H, K]; the ends of B sequences are [B + 1]."""
    ends, window = PACKED[name]
    is_backward = name.endswith(("backward", "bwd"))
    query, key, value = (_sizes(dims, number) for number in range(is_backward, is_backward + 3))
    num_ends = _sizes(dims, ends)
    if len(key) != 3 or len(value) != 3 or len(num_ends) != 1 or num_ends[0] < 2 or query[0] != key[0]:
        return None  # with a cache, or queries that see other tokens: no shape says how many
    num_sequences = num_ends[0] - 1
    length, left = query[0] / num_sequences, _value(concrete, window)
    seen = length if type(left) is not int or left < 0 else min(length, left + 1)
    num_pairs = int(num_sequences * query[1] * (seen * length - seen * seen / 2))
    return _pairs_flop(num_pairs, query[2], value[2], is_backward)


# ---- convolutions


def _convolution(op: str, dims: list[Any], concrete: list[Any] | None) -> tuple[int, int] | None:
    """Returns (FLOPs, numbers moved); a backward pass counts for each gradient that it makes, of input and weight."""
    if op == "convolution_backward":
        out, data, weight = (_sizes(dims, number) for number in range(3))
        mask = _list(concrete, 10) or [False, True]
        num_products, is_transposed = max(1, sum(map(bool, mask[:2]))), _value(concrete, 7) is True
    else:
        data, weight, num_products = _sizes(dims, 0), _sizes(dims, 1), 1
        *places, transposed = CONVOLUTIONS[op]
        is_transposed = transposed is not None and _value(concrete, transposed) is True
        lists = [_list(concrete, place) for place in places]
        out = _out(data, weight, lists, is_transposed)
    if len(data) < 3 or len(weight) != len(data) or not out:
        return None
    points = data if is_transposed else out  # of [batch, channels, ...]: each meets a whole window of the weight
    flop = 2 * points[0] * math.prod(points[2:]) * math.prod(weight)
    moved = math.prod(data) + math.prod(weight) + math.prod(out)
    return num_products * flop, moved + (num_products - 1) * math.prod(data)


def _out(data: list[int], weight: list[int], lists: list[Any], is_transposed: bool) -> list[int]:
    """Returns the shape of the result, [] if not known; for a transposed one that of the input, which is no larger."""
    if is_transposed:
        return data
    if len(data) < 3 or len(weight) != len(data) or not all(lists):
        return []
    num = len(data) - 2
    stride, padding, dilation = (sizes * num if len(sizes) == 1 else sizes for sizes in lists)
    if any(len(sizes) != num for sizes in (stride, padding, dilation)) or min(stride) < 1:
        return []
    axes = zip(data[2:], weight[2:], stride, padding, dilation)
    return [
        data[0],
        weight[0],
        *((size + 2 * pad - far * (span - 1) - 1) // step + 1 for size, span, step, pad, far in axes),
    ]


def _value(concrete: list[Any] | None, number: int) -> Any:
    """Returns the value of an argument as the trace writes it, "[1, 1]", "3" or "True"; None if it has none."""
    try:
        return json.loads(str(concrete[number]).lower()) if concrete and number < len(concrete) else None
    except (ValueError, RecursionError):
        return None


def _list(concrete: list[Any] | None, number: int) -> list[int] | None:
    """Returns an argument that is a non-empty list of integers or booleans, None for any other."""
    value = _value(concrete, number)
    return value if isinstance(value, list) and value and all(type(item) in (int, bool) for item in value) else None
