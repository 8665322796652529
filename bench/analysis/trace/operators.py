"""CPU operators: their own time, the kernels they launched, what they allocated, FLOPs and bytes from their shapes."""

import functools
import json

import numpy as np

from bench.analysis.trace import attribution, events, window
from bench.analysis.trace.columns import US, Nest, groups, index_of, sums
from bench.analysis.trace.events import whole
from bench.analysis.trace.flops import flops, precision, traffic_bytes
from bench.analysis.trace.load import Rank

COUNTS = ("num_kernels", "allocated_bytes", "net_bytes")
MAX_BYTES = 2**50  # an allocation that says more is not believed


def table(rank: Rank, rows: np.ndarray, until_ns: int | None = None) -> list[dict]:
    """[{"name", "shapes", "precision", "count", times and bytes}], by device, then own CPU time.

    cpu_us, self_cpu_us: without the operators inside it.  device_us, num_kernels: of what the operator itself
    launched.  flop and bytes: of all calls, from the shapes; None where the formula or the shapes are unknown, and
    where an operator inside has them: nothing counts twice.  flop_us: CPU time of these calls, with what they called.
    allocated_bytes: what the operator itself asked for, net_bytes: less what it freed; of the device where the
    trace has one, else of the host; None where memory was not recorded.
    """
    ops = window.host_rows(rank, events.CPU_OP, until_ns)
    if not len(ops):
        return []
    launcher = index_of(attribution.operators(rank, rows), ops)  # first: what it needs meanwhile is much
    key = rank.name[ops].astype(np.int64) * (len(rank.extras) + 1) + rank.extra[ops] + 1
    keys, index = np.unique(key, return_inverse=True)
    facts = [facts_of(rank, one // (len(rank.extras) + 1), one % (len(rank.extras) + 1) - 1) for one in keys.tolist()]
    nests = [Nest(rank, ops[mine]) for _, mine in groups(rank.track[ops])]  # one a thread
    is_leaf = _leaves(ops, nests, np.array([fact["flop"] is not None for fact in facts])[index])
    own_ns = _own_time(rank, ops, nests)
    del nests, key
    columns_ns = {
        "cpu_us": rank.dur[ops],
        "self_cpu_us": own_ns,
        "device_us": sums(launcher, len(ops), rank.dur[rows]),
        "flop_us": np.where(is_leaf, rank.dur[ops], 0),
    }
    columns = {"num_kernels": sums(launcher, len(ops), 1)} | _memory(rank, rows, ops)
    times_ns, counts = (
        {name: sums(index, len(keys), values).tolist() for name, values in some.items()}
        for some in (columns_ns, columns)
    )
    count, num_leaves = np.bincount(index, minlength=len(keys)).tolist(), sums(index, len(keys), is_leaf).tolist()
    lines = []
    for number, fact in enumerate(facts):
        calls = num_leaves[number]
        line = (
            {key: fact[key] for key in ("name", "shapes", "precision", "flop", "bytes")}
            | {"count": count[number]}
            | {name: ns[number] / US for name, ns in times_ns.items()}
        )
        line |= {name: fact[name] * calls if calls and fact[name] is not None else None for name in ("flop", "bytes")}
        lines.append(line | {name: counts[name][number] if name in counts else None for name in COUNTS})
    return sorted(lines, key=lambda line: (-line["device_us"], -line["self_cpu_us"]))


def facts_of(rank: Rank, name_index: int, extra_index: int) -> dict:
    """{"name", "shapes", "types", "precision", "flop", "bytes"} of one call with this name and these arguments.

    name_index, extra_index: into rank.names and rank.extras, the latter -1 for none.
    """
    name = rank.names[name_index]
    extra = rank.extras[extra_index] if extra_index >= 0 else (None, None, None)
    dims, types = map(_parsed, extra[1:3]) if extra[1] else (None, None)
    line = {"name": name, "shapes": dims, "types": types, "precision": precision(types)}
    return line | {"flop": flops(name, dims), "bytes": traffic_bytes(name, dims, types)}


def collective_of(rank: Rank, row: int) -> tuple[str, int, str | None, int] | None:
    """(name, elements that this rank sends, their type, ranks in the group) of a collective's row, as the trace says.

    None for a row of which it says nothing; a number that it does not say is -1.
    """
    extra = rank.extras[rank.extra[row]] if rank.extra[row] >= 0 else None
    if extra is None or extra[3] is None:
        return None
    return str(extra[3]), whole(extra[4]), None if extra[8] is None else str(extra[8]), whole(extra[7])


def _own_time(rank, ops, nests):
    """Nanoseconds of each operator without those directly inside it, on its thread."""
    own = np.zeros(len(ops), np.int64)
    for nest in nests:
        left = rank.dur[nest.rows] - sums(nest.parent, len(nest.rows), rank.dur[nest.rows])
        own[np.searchsorted(ops, nest.rows)] = np.maximum(left, 0)
    return own


def _leaves(ops, nests, known):
    """Which operators have FLOPs and no operator inside that has some: aten::mm in aten::matmul in aten::linear."""
    is_leaf = np.zeros(len(ops), bool)
    for nest in nests:
        index = np.searchsorted(ops, nest.rows)
        has_inside = np.zeros(len(nest.rows), bool)
        around = np.unique(nest.parent[known[index]])
        while len(around := around[around >= 0]):
            has_inside[around] = True
            around = np.unique(nest.parent[around])
            around = around[(around < 0) | ~has_inside[around]]
        is_leaf[index] = known[index] & ~has_inside
    return is_leaf


def leaves_with_flops(rank: Rank) -> np.ndarray:
    """Mask over all rows: operators whose FLOPs are known and that hold no operator inside whose FLOPs are."""
    ops, is_leaf = window.host_rows(rank, events.CPU_OP), np.zeros(len(rank.ts), bool)
    keys, index = np.unique(np.stack((rank.name[ops], rank.extra[ops])), axis=1, return_inverse=True)
    known = np.array([facts_of(rank, *key)["flop"] is not None for key in keys.T.tolist()] or [False])
    if len(ops):
        nests = [Nest(rank, ops[mine]) for _, mine in groups(rank.track[ops])]
        is_leaf[ops] = _leaves(ops, nests, known[index.ravel()])
    return is_leaf


def _memory(rank, rows, ops):
    """{"allocated_bytes": asked for by each operator itself, "net_bytes": less what it freed}; {}: not recorded."""
    moments = np.flatnonzero(rank.is_kind(events.MEMORY) & (rank.extra >= 0))
    if not len(moments):
        return {}
    facts = [[_believed(extra[0]), _believed(extra[6])] for extra in rank.extras]
    num_bytes, device_type = np.array(facts, np.int64)[rank.extra[moments]].T  # type 0 is the host
    mine = (device_type > 0) == bool(len(rows))
    moments, num_bytes = moments[mine], num_bytes[mine]
    index = index_of(attribution.by_thread(rank, moments, rank.ts[moments], events.CPU_OP), ops)
    asked_for = np.maximum(num_bytes, 0)
    return {"allocated_bytes": sums(index, len(ops), asked_for), "net_bytes": sums(index, len(ops), num_bytes)}


def _believed(value):
    number = whole(value)
    return number if abs(number) < MAX_BYTES else 0


@functools.lru_cache(maxsize=65536)
def _parsed(raw):
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None
