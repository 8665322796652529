"""Computes the least bytes that one call of an operator must move, from the shapes and types of its arguments.

A call reads each tensor among its arguments once and writes its result; the rules say how large the result is, or which
arguments are touched only in part.  An operator without a rule has no bound: None, never a guess.
"""

import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from bench.analysis.trace import formulas

COMPARISONS = re.compile(r"^(?:eq|ne|gt|ge|lt|le|isnan|isinf|logical_\w+)$")  # their result is bool: a byte each
# Operators that compute each element of their result by one of each argument, by the number of tensors that they read.
ELEMENTWISE = {
    1: "abs|a?(?:cos|sin|tan)h?|bitwise_not|ceil|clamp(?:_min|_max)?|elu|erf|erfc|erfinv|exp|exp2|expm1|floor|frac|"
    "hard(?:sigmoid|swish|tanh)|isinf|isnan|leaky_relu|log|log10|log1p|log2|logical_not|logit|mish|nan_to_num|neg|"
    "gelu|reciprocal|relu|round|rsqrt|sgn|sigmoid|sign|silu|softplus|sqrt|square|threshold|trunc",
    2: "add|atan2|bitwise_(?:and|or|xor)|div|eq|floor_divide|fmod|ge|gt|le|logical_(?:and|or|xor)|lt|maximum|minimum|"
    "mul|ne|pow|remainder|rsub|sub|xlogy|(?:elu|gelu|hardsigmoid|hardswish|hardtanh|leaky_relu|mish|sigmoid|silu|"
    "softplus|tanh|threshold)_backward",
    3: "addcdiv|addcmul|lerp|masked_fill|where|"
    "(?:binary_cross_entropy|huber_loss|mse_loss|smooth_l1_loss|soft_margin_loss)_backward",
}
# Inductor's kernels, whose names hold the operators fused into them.  If one of those is IN_PART, a tensor among the
# arguments may be touched in part: each point that the kernel computes reads at most one element of it.
GENERATED = re.compile(r"^triton_(?:poi|red|per)_fused_")
# Attention of other libraries over a cache of keys.
ATTENTION = re.compile(r"(?<!backward_)(?:attention|attn|(?:^|_)mha(?:_|$))(?!\w*(?:backward|bwd))")
IN_PART = re.compile(r"index|embedding|gather|scatter|slice|select|pad|split|cat(?![a-z])|unfold|strided|nll_loss|topk")
# Only the name of the kernel that takes a list says the type of its tensors.
ELEMENT = re.compile(r"OpaqueType<(\d+)u?>|\b(float|double|c10::BFloat16|c10::Half|__half|__nv_bfloat16)\b")
KERNEL_BYTES = {"float": 4, "double": 8}  # 2 for any other name in ELEMENT


class Tensor(NamedTuple):
    """A tensor among the arguments: its shape, and the bytes of an element, None if the trace does not say."""

    dims: list[int]
    element_bytes: int | None
    is_in_list: bool

    @property
    def bytes(self) -> int:
        """The bytes of all its elements; 0 where their size is not known."""
        return (self.element_bytes or 0) * math.prod(self.dims)


def moved_bytes(facts: dict[str, Any], kernel: str | None = None) -> int | None:
    """Returns the bytes that a call must move, or None.  facts: of operators.facts_of(); kernel: one it launched."""
    name, known_bytes = facts["name"], facts["bytes"]
    args = tensors(facts["shapes"], facts["types"], kernel)
    if known_bytes or not args or any(tensor.element_bytes is None for tensor in args):
        return known_bytes
    if GENERATED.match(name):  # its results are among its arguments
        if not IN_PART.search(name) or "log_softmax" in name:
            return _all(name, args)
        num_points = _num_points(facts)
        read = [(tensor.element_bytes or 0) * min(num_points or 0, math.prod(tensor.dims)) for tensor in args]
        return num_points and sum(read)
    namespace, _, op = name.rpartition("::")
    op = op.rstrip("_")
    rules = RULES if namespace == "aten" else CUSTOM_RULES
    return next((rule(op, args) for pattern, rule in rules if pattern.search(op)), None)


def _num_points(facts: dict[str, Any]) -> int | None:
    """Returns how many points a kernel of inductor's computes: the product of the sizes that follow its tensors."""
    arguments = zip(facts["shapes"], facts.get("concrete") or ())
    tail = itertools.dropwhile(lambda argument: argument[0] or argument[1] == "", arguments)
    sizes = [text for shape, text in tail if not shape]
    return (
        math.prod(map(int, sizes)) or None if sizes and all(re.fullmatch(r"\d{1,12}", text) for text in sizes) else None
    )


def tensors(shapes: list[Any] | None, types: list[Any] | None, kernel: str | None = None) -> list[Tensor]:
    """Returns the tensors among the arguments, those inside lists included."""
    args = []
    for dims, kind in zip(shapes or (), types or ()):
        element_bytes = formulas.BYTES.get(str(kind).lower())
        if _is_shape(dims) and (dims or element_bytes):  # without axes: a tensor of one element, if typed
            args.append(Tensor(dims, element_bytes, False))
        elif isinstance(dims, list):
            match = ELEMENT.search(kernel or "")
            in_kernel = None if match is None else int(match[1]) if match[1] else KERNEL_BYTES.get(match[2], 2)
            args += [Tensor(sizes, in_kernel, True) for sizes in dims if sizes and _is_shape(sizes)]
    return args


def _is_shape(dims: object) -> bool:
    return isinstance(dims, list) and all(type(size) is int and size >= 0 for size in dims)


def _pointwise(op: str, args: list[Tensor], num_read: int) -> int | None:
    """Counts what is read, and a result of the broadcast shape and of the widest type among arguments with axes.

    num_read: number of tensors that are read; one beyond these is the result itself (out=).
    """
    rank = max(len(tensor.dims) for tensor in args)
    padded = [[1] * (rank - len(tensor.dims)) + tensor.dims for tensor in args]
    shape = [max(sizes) for sizes in zip(*padded)]
    if not all(size in (1, shape[axis]) for dims in padded for axis, size in enumerate(dims)):
        return None
    sizes = [tensor.element_bytes or 0 for tensor in args if tensor.dims] or [args[0].element_bytes or 0]
    element_bytes = 1 if COMPARISONS.match(op) else max(sizes)
    return _all(op, args[:num_read]) + element_bytes * math.prod(shape)


def _all(op: str, args: list[Tensor]) -> int:
    """Counts each argument once: for reductions, whose result is small, and kernels whose arguments include results."""
    return sum(tensor.bytes for tensor in args)


def _norm(op: str, args: list[Tensor]) -> int:
    """Counts each argument, and a result like the first unless another argument may be the result."""
    return _all(op, args) + args[0].bytes * all(tensor.dims != args[0].dims for tensor in args[1:])


def _rows(op: str, args: list[Tensor]) -> int | None:
    """Counts the indices, and what they select as read and written: at least the table's smallest slice for each."""
    if len(args) < 2:
        return None
    table, index = args[0], args[1]
    slice_numel = math.prod(table.dims) // max(1, *table.dims, 1)
    return 2 * math.prod(index.dims) * slice_numel * (table.element_bytes or 0) + index.bytes


def _by_index(op: str, args: list[Tensor], num: int) -> int | None:
    """Counts an index, and each element that it selects num times: a gather reads and writes it, a loss reads the
    prediction of each target, and its backward pass writes the gradient there (a kernel before it, the zeros)."""
    args = args[int(op.endswith("backward")) :]
    if len(args) < 2:
        return None
    return num * math.prod(args[1].dims) * (args[0].element_bytes or 0) + args[1].bytes


def _rotary(op: str, args: list[Tensor]) -> int | None:
    """Counts queries and keys as read and written; the rows that are read of the table are not counted."""
    num_tokens = args[0].dims[0] if args[0].dims else 0
    return 2 * sum(tensor.bytes for tensor in args[1:3] if tensor.dims[:1] == [num_tokens]) or None


def _into_cache(op: str, args: list[Tensor]) -> int | None:
    """Counts new keys and values as read, and as written into the caches in the caches' type."""
    new, caches = args[:2], args[2:4]
    written_bytes = sum(math.prod(a.dims) * (b.element_bytes or 0) for a, b in zip(new, caches))
    return _all(op, new) + written_bytes if caches else None


def _attention(op: str, args: list[Tensor]) -> int | None:
    """Counts the new tokens' queries, keys, values and results: no argument says how much of a cache is read."""
    query = next((tensor for tensor in args if len(tensor.dims) == 3), None)
    return query and sum(t.bytes for t in args if (t.dims[:1], t.dims[2:]) == (query.dims[:1], query.dims[2:]))


def _foreach(op: str, args: list[Tensor]) -> int | None:
    """Counts lists of equal length: each tensor is read, those of the first list are written, except by a norm."""
    num_lists = _num_lists(args)
    if not num_lists:
        return None
    written = 0 if op.startswith("_foreach_norm") else sum(t.bytes for t in args[: len(args) // num_lists])
    is_copy = op.startswith(("_foreach_copy", "_foreach_zero"))  # what is written was not read
    return _all(op, args) + (0 if is_copy else written)


def _fused_optimizer(op: str, args: list[Tensor]) -> int | None:
    """Counts parameters, gradients and moments as read, all but the gradients as written; step counts are too small."""
    large = [tensor for tensor in args if math.prod(tensor.dims) > 1]
    num_lists = _num_lists(large)
    return None if num_lists < 2 else 2 * _all(op, large) - _all(op, large) // num_lists


def _num_lists(args: list[Tensor]) -> int:
    """Returns how many lists of the same shapes there are, by how often the shapes repeat; 0 without lists."""
    shapes = [tensor.dims for tensor in args if tensor.is_in_list]
    for num_lists in range(min(len(shapes), 6), 0, -1):
        length, rest = divmod(len(shapes), num_lists)
        if not rest and shapes == shapes[:length] * num_lists:
            return num_lists
    return 0


Rule = Callable[[str, list[Tensor]], int | None]


def _rule(names: str, rule: Rule) -> tuple[re.Pattern[str], Rule]:
    return re.compile(rf"^(?:{names})$"), rule


# By the operator's name without aten:: and without the underscore of an in-place operator.
RULES = (
    _rule("fill|zero|normal|uniform|random|bernoulli|exponential", lambda op, args: args[0].bytes),  # only written
    _rule("copy", _all),  # its first argument is written, not read
    _rule("cat|stack", lambda op, args: 2 * _all(op, args)),  # each argument is read, and written somewhere else
    _rule("_foreach_\\w+", _foreach),
    _rule("_fused_(?:adam|adamw|sgd|adagrad)", _fused_optimizer),
    _rule("embedding|index_select|index", _rows),
    _rule("gather|take_along_dim", partial(_by_index, num=2)),
    _rule("nll_loss(?:2d)?_(?:forward|backward)", partial(_by_index, num=1)),
    _rule("scatter_add|index_add", lambda op, args: _all(op, args[1:])),  # the index, and what is added
    _rule("_?index_put(?:_impl)?", lambda op, args: 2 * args[-1].bytes),  # the values put into another tensor
    _rule(
        "_?softmax|_?log_softmax|_(?:log_)?softmax_backward_data|native_(?:layer|batch|group)_norm(?:_backward)?|"
        "(?:cudnn|miopen)_batch_norm(?:_backward)?|_?fused_rms_norm(?:_backward)?|rms_norm|native_dropout|"
        "_fused_dropout|cumsum|cumprod|flip|roll|tril|triu|sort|clone",
        lambda op, args: _all(op, args) + args[0].bytes,  # each argument, and a result like the first
    ),
    _rule(
        "sum|mean|amax|amin|max|min|argmax|argmin|any|all|prod|var|std|var_mean|norm|linalg_vector_norm|logsumexp|"
        "count_nonzero|topk|nonzero|embedding_dense_backward|_amp_foreach_non_finite_check_and_unscale|aminmax|"
        # of a pooling's backward pass the input is not read, but its gradient, of the same size, is written
        "(?:max_pool[23]d_with_indices|_?(?:adaptive_)?(?:avg|max)_pool[23]d)(?:_backward)?|"
        "(?:binary_cross_entropy|huber|mse|smooth_l1|soft_margin|multi_margin)(?:_loss)?",
        _all,
    ),
    *(_rule(names, partial(_pointwise, num_read=num_read)) for num_read, names in ELEMENTWISE.items()),
)
# Operators of other libraries that are known to touch all of each argument, their results among them.
CUSTOM_RULES = (
    _rule(r"(?:fused_)?(?:add_)?(?:rms_?norm|layer_?norm)(?:2d)?(?:_\w+)?", _norm),
    _rule(r"_?group_?norm\w*", _norm),
    _rule(r"(?:fused_)?rotary_(?:pos_)?emb\w*", _rotary),
    _rule(r"reshape_and_cache\w*|store_(?:kv_?)?cache", _into_cache),
    _rule(r"(?:silu|gelu|act)(?:_tanh)?_and_mul(?:_\w+)?", _all),
    _rule(r"(?:static|dynamic)_scaled_fp8_quant|sage_quant\w*|bounds_check_indices", _all),
    _rule(
        r"permute_[12]D_sparse_data|asynchronous_(?:complete|inclusive|exclusive)_cumsum",
        lambda op, args: 2 * _all(op, args),
    ),
    # FBGEMM's embedding bags: indices and offsets, of 8 bytes; which rows they select is in no argument
    _rule(
        r"(?:split|dense)_embedding\w*_lookup\w*",
        lambda op, args: sum(tensor.bytes for tensor in args if tensor.element_bytes == 8),
    ),
    _rule(r"CppNode<Split(?:NoBag)?LookupFunction\w*>", _all),  # their backward: the gradient of what was looked up
    (ATTENTION, _attention),
)
