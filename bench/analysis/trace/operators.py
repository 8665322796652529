"""Analyses CPU operators: own time, launched kernels, allocated memory, FLOPs and bytes from their shapes.

FLOPs and bytes are those of bench/analysis/trace/formulas.py.  Without a formula they are None, and the operator's time
counts as unknown.
"""

import functools
import json
from typing import Any

import numpy as np

from bench.analysis.trace import attribution, events, formulas, window
from bench.analysis.trace.columns import US, index_of, sums
from bench.analysis.trace.events import whole
from bench.analysis.trace.rank import Rank
from bench.machine import peak_rates

# ---- rates from recorded shapes


def achieved(
    lines: list[dict[str, Any]], device_us: float | None, device: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (lines of operators with known FLOPs and with their rates, the longest first; whole).

    lines: of table(); they get "time_us", "tflop_per_s", "pct_of_peak", "flop_per_byte" and "bound".  device_us: of all
    rows of the device together, None in a trace without one.  The time is that of the kernels that the operator
    launched, or without a device its own on the CPU, with what it called.  device: the name by which its peaks are
    known, or None.  bound: compute or memory, by which side of the roofline's ridge it lies on (Williams, Waterman and
    Patterson 2009).  whole: {"of": "device" | "cpu", "flop", "time_us", "tflop_per_s", "known_frac"}: all of these
    together, and their share of the device's or all operators' time, 0 to 1 or None.
    """
    of, time, name = ("cpu", "flop_us", None) if device_us is None else ("device", "device_us", device)
    total_us = sum(line["self_cpu_us"] for line in lines) if device_us is None else device_us
    rates = [_rate(line, line[time], name) for line in lines if line["flop"] and line[time]]
    flop, time_us = sum(line["flop"] for line in rates), sum(line["time_us"] for line in rates)
    whole = {
        "of": of,
        "flop": flop,
        "time_us": time_us,
        "tflop_per_s": flop / time_us / 1e6 if time_us else None,
        "known_frac": time_us / total_us if total_us else None,
    }
    return sorted(rates, key=lambda line: -line["time_us"]), whole


def _rate(line: dict[str, Any], time_us: float, device: str | None) -> dict[str, Any]:
    rate, kind = line["flop"] / (time_us / 1e6), line["precision"]
    peak, mem_bytes_per_s = peak_rates.peak_flops(device, kind), peak_rates.mem_bytes_per_s(device)
    if kind == "float32" and peak and rate > peak:  # faster than FP32 allows: on tensor cores, as TF32
        kind, peak = "tf32", peak_rates.peak_flops(device, "tf32")
    intensity = line["flop"] / line["bytes"] if line["bytes"] else None
    ridge = peak / mem_bytes_per_s if peak and mem_bytes_per_s else None
    bound = None if ridge is None or intensity is None else "compute" if intensity > ridge else "memory"
    return {name: line[name] for name in ("name", "shapes", "count", "flop")} | {
        "precision": kind,
        "time_us": time_us,
        "tflop_per_s": rate / 1e12,
        "pct_of_peak": 100 * rate / peak if peak else None,
        "flop_per_byte": intensity,
        "bound": bound,
    }


COUNTS = ("num_kernels", "allocated_bytes", "net_bytes")
MAX_BYTES = 2**50  # a larger allocation is not believed


def table(rank: Rank, rows: np.ndarray, until_ns: int | None = None) -> list[dict[str, Any]]:
    """Returns [{"name", "shapes", "precision", "count", times and bytes}], by device time, then own CPU time.

    self_cpu_us: cpu_us without the operators inside it.  device_us, num_kernels: of what the operator itself launched.
    flop, bytes: of all calls, from the shapes; None if the formula or the shapes are unknown, or if an operator inside
    has them, so that nothing counts twice.  flop_us: CPU time of these calls, with what they called.  allocated_bytes:
    what the operator itself requested; net_bytes: less what it freed; of the device's memory, or without a device of
    the host's; None if memory was not recorded.
    """
    ops = window.host_rows(rank, events.CPU_OP, until_ns)
    if not len(ops):
        return []
    launcher = index_of(attribution.operators(rank, rows), ops)  # first, as it needs much memory
    facts, index = _facts_of_calls(rank, ops)
    is_leaf, own_ns = leaves_with_flops(rank)[ops], np.zeros(len(rank.ts), np.int64)
    for nest in attribution.nests(rank, events.CPU_OP).values():
        own_ns[nest.rows] = nest.own_ns(rank.dur)
    columns_ns = {
        "cpu_us": rank.dur[ops],
        "self_cpu_us": own_ns[ops],
        "device_us": sums(launcher, len(ops), rank.dur[rows]),
        "flop_us": np.where(is_leaf, rank.dur[ops], 0),
    }
    columns = {"num_kernels": sums(launcher, len(ops), 1)} | _memory(rank, rows, ops)
    times_ns, counts = (
        {name: sums(index, len(facts), values).tolist() for name, values in group.items()}
        for group in (columns_ns, columns)
    )
    count, num_leaves = np.bincount(index, minlength=len(facts)).tolist(), sums(index, len(facts), is_leaf).tolist()
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


def facts_of(rank: Rank, name_index: int, extra_index: int) -> dict[str, Any]:
    """Returns {"name", "shapes", "types", "concrete", "precision", "flop", "bytes"} of a call with these arguments.

    name_index, extra_index: into rank.names and rank.extras, the latter -1 for none.
    """
    name = rank.names[name_index]
    extra = rank.extras[extra_index] if extra_index >= 0 else (None,) * 10
    dims, types = map(_parsed, extra[1:3]) if extra[1] else (None, None)
    concrete = _parsed(extra[9]) if isinstance(extra[9], bytes) else None
    line = {"name": name, "shapes": dims, "types": types, "concrete": concrete, "precision": formulas.precision(types)}
    flop = formulas.flops(name, dims, concrete)
    return line | {"flop": flop, "bytes": formulas.traffic_bytes(name, dims, types, concrete)}


def collective_of(rank: Rank, row: int) -> tuple[str, int, str | None, int] | None:
    """Returns (name, elements that this rank sends, their type, ranks in the group) of a collective's row.

    None if the trace says nothing of it; a number that it does not say is -1.
    """
    extra = rank.extras[rank.extra[row]] if rank.extra[row] >= 0 else None
    if extra is None or extra[3] is None:
        return None
    return str(extra[3]), whole(extra[4]), None if extra[8] is None else str(extra[8]), whole(extra[7])


def leaves_with_flops(rank: Rank) -> np.ndarray:
    """Returns a mask over all rows: operators with known FLOPs that hold no other with known FLOPs."""
    ops, is_leaf = np.flatnonzero(rank.is_kind(events.CPU_OP)), np.zeros(len(rank.ts), bool)
    facts, index = _facts_of_calls(rank, ops)
    is_leaf[ops] = np.array([fact["flop"] is not None for fact in facts] or [False])[index]
    for nest in attribution.nests(rank, events.CPU_OP).values():
        has_inside = np.zeros(len(nest.rows), bool)
        around = np.unique(nest.parent[is_leaf[nest.rows]])
        while len(around := around[around >= 0]):
            has_inside[around] = True
            around = np.unique(nest.parent[around])
            around = around[(around < 0) | ~has_inside[around]]
        is_leaf[nest.rows[has_inside]] = False
    return is_leaf


def _facts_of_calls(rank: Rank, ops: np.ndarray) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Returns (facts_of() different calls, the index of each operator's in it)."""
    num_extras = len(rank.extras) + 1
    keys, index = np.unique(rank.name[ops].astype(np.int64) * num_extras + rank.extra[ops] + 1, return_inverse=True)
    return [facts_of(rank, key // num_extras, key % num_extras - 1) for key in keys.tolist()], index


def _memory(rank: Rank, rows: np.ndarray, ops: np.ndarray) -> dict[str, np.ndarray]:
    """Returns {"allocated_bytes": requested by each operator itself, "net_bytes": less what it freed}; or {}."""
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


def _believed(value: Any) -> int:
    number = whole(value)
    return number if abs(number) < MAX_BYTES else 0


@functools.lru_cache(maxsize=65536)
def _parsed(raw: bytes) -> list[Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None
