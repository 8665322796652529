"""CPU operators: their own time, the kernels they launched, what they allocated, their FLOPs and bytes from recorded shapes."""

import functools
import json

import numpy as np

from bench.trace import attribution, events, window
from bench.trace.flops import flops, precision, traffic_bytes
from bench.trace.nest import Nest, groups

US = 1000


def table(rank, rows, until_ns=None):
    """[{"name", "shapes", "precision", "count", "cpu_us", "self_cpu_us", "device_us", "num_kernels", "flop", "flop_us", "bytes", "allocated_bytes", "net_bytes"}]

    By device, then own CPU time.  device_us: of the kernels that the operator itself launched.  self_cpu_us: without the
    operators inside it.  flop and bytes: of all calls, from the shapes; None where the formula or the shapes are unknown,
    and where an operator inside has them: nothing counts twice.  flop_us: CPU time of these calls, with what they called.
    allocated_bytes: what the operator itself asked for, net_bytes: less what it gave back; of the device where the trace
    has one, else of the host; None where memory was not recorded.
    """
    ops = window.host_rows(rank, events.CPU_OP, until_ns)
    if not len(ops):
        return []
    key = rank.name[ops].astype(np.int64) * (len(rank.extras) + 1) + rank.extra[ops] + 1
    keys, place = np.unique(key, return_inverse=True)
    facts = [_facts(rank, int(one)) for one in keys]
    nests = [Nest(rank, ops[mine]) for _, mine in groups(rank.track[ops])]  # one a thread
    is_leaf = _leaves(ops, nests, np.array([fact["flop"] is not None for fact in facts])[place])
    device_ns, num_kernels = _launched(rank, rows, ops)
    allocated, net = _memory(rank, rows, ops)
    values = {
        "cpu": rank.dur[ops],
        "self_cpu": _own_time(rank, ops, nests),
        "device": device_ns,
        "kernels": num_kernels,
        "leaves": is_leaf,
        "flop": np.where(is_leaf, rank.dur[ops], 0),
        "allocated": allocated,
        "net": net,
    }
    sums = {name: None if column is None else _sum(place, len(keys), column) for name, column in values.items()}
    count = np.bincount(place, minlength=len(keys))
    lines = []
    for num, fact in enumerate(facts):
        calls = sums["leaves"][num]
        lines.append(
            fact
            | {
                "count": int(count[num]),
                "cpu_us": sums["cpu"][num] / US,
                "self_cpu_us": sums["self_cpu"][num] / US,
                "device_us": sums["device"][num] / US,
                "num_kernels": sums["kernels"][num],
                "flop_us": sums["flop"][num] / US,
                "flop": fact["flop"] * calls if calls else None,
                "bytes": fact["bytes"] * calls if calls and fact["bytes"] is not None else None,
                "allocated_bytes": sums["allocated"] and sums["allocated"][num],
                "net_bytes": sums["net"] and sums["net"][num],
            }
        )
    return sorted(lines, key=lambda line: (-line["device_us"], -line["self_cpu_us"]))


def _facts(rank, key):
    """What the calls of one name and one set of arguments share: {"name", "shapes", "precision", "flop", "bytes"} of one call."""
    name, extra = rank.names[key // (len(rank.extras) + 1)], key % (len(rank.extras) + 1) - 1
    dims, types = _shapes(rank.extras[extra] if extra >= 0 else None)
    return {
        "name": name,
        "shapes": dims,
        "precision": precision(types),
        "flop": flops(name, dims),
        "bytes": traffic_bytes(name, dims, types),
    }


def _sum(place, size, values):
    total = np.zeros(size, np.int64)
    np.add.at(total, place, values)
    return [int(value) for value in total]


def _own_time(rank, ops, nests):
    """Nanoseconds of each operator without those directly inside it, on its thread."""
    own = np.zeros(len(ops), np.int64)
    for nest in nests:
        left = rank.dur[nest.rows].copy()
        inside = nest.parent >= 0
        np.subtract.at(left, nest.parent[inside], rank.dur[nest.rows[inside]])
        own[np.searchsorted(ops, nest.rows)] = np.maximum(left, 0)
    return own


def _leaves(ops, nests, known):
    """Which operators have FLOPs and no operator inside that has some: aten::mm in aten::matmul in aten::linear."""
    found = np.zeros(len(ops), bool)
    for nest in nests:
        places = np.searchsorted(ops, nest.rows)
        has_inside = np.zeros(len(nest.rows), bool)
        around = np.unique(nest.parent[known[places]])
        while len(around := around[around >= 0]):
            has_inside[around] = True
            around = np.unique(nest.parent[around])
            around = around[(around < 0) | ~has_inside[around]]
        found[places] = known[places] & ~has_inside
    return found


def _launched(rank, rows, ops):
    """(nanoseconds, number) of the device rows that each operator itself launched."""
    by = attribution.operators(rank, rows)
    place = np.minimum(np.searchsorted(ops, by), len(ops) - 1)
    known = (by >= 0) & (ops[place] == by)
    device_ns, num = np.zeros(len(ops), np.int64), np.zeros(len(ops), np.int64)
    np.add.at(device_ns, place[known], rank.dur[rows[known]])
    np.add.at(num, place[known], 1)
    return device_ns, num


def _memory(rank, rows, ops):
    """(bytes asked for, these less what was given back) by each operator itself; (None, None) where none were recorded."""
    moments = np.flatnonzero(rank.is_kind(events.MEMORY) & (rank.extra >= 0))
    if not len(moments):
        return None, None
    facts = np.array(
        [
            [value if abs(value) < 2**50 else 0 for value in map(events.whole, (extra[0], extra[6]))]
            for extra in rank.extras
        ],
        np.int64,
    )
    num_bytes, device_type = facts[rank.extra[moments]].T  # type 0 is the host
    mine = (device_type > 0) == bool(len(rows))
    moments, num_bytes = moments[mine], num_bytes[mine]
    by = attribution.by_thread(rank, moments, rank.ts[moments], events.CPU_OP)
    place = np.minimum(np.searchsorted(ops, by), len(ops) - 1)
    known = (by >= 0) & (ops[place] == by)
    allocated, net = np.zeros(len(ops), np.int64), np.zeros(len(ops), np.int64)
    np.add.at(allocated, place[known], np.maximum(num_bytes[known], 0))
    np.add.at(net, place[known], num_bytes[known])
    return allocated, net


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
