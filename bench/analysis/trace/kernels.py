"""What the device did: types and categories of kernels, and a table of each by name.

Type is HolisticTraceAnalysis' coarse division: computation, communication, memory.  Category (categories.py) is finer.
"""

import numpy as np

from bench.analysis.trace import events, intervals
from bench.analysis.trace.categories import RULES, Rule, category, is_communication
from bench.analysis.trace.columns import US, sums
from bench.analysis.trace.load import Rank

TYPES = ("COMPUTATION", "COMMUNICATION", "MEMORY")
COMPUTATION, COMMUNICATION, MEMORY = range(3)
COPY_NAMES = ("Memcpy", "Memset", "hipMemcpy", "hipMemset", "Copy", "FillBuffer")
INT64 = np.iinfo(np.int64)


def types(rank: Rank, rows: np.ndarray, rules: tuple[Rule, ...] = RULES) -> np.ndarray:
    """Index into TYPES for each device row: copies and memsets are memory, others that move data are communication."""
    kinds = rank.is_named(lambda name: is_communication(name, rules), rows).astype(np.int8)
    is_copy = np.isin(rank.kind[rows], (events.MEMCPY, events.MEMSET))
    is_copy |= rank.is_named(lambda name: name.startswith(COPY_NAMES), rows)
    return np.where(is_copy & (kinds == COMPUTATION), MEMORY, kinds)


def unions(rank, rows, kinds):
    """The merged intervals of each of TYPES."""
    return [intervals.union(rank.ts[mine], rank.end[mine]) for mine in (rows[kinds == kind] for kind in range(3))]


def by_type(rank, rows, kinds):
    """[{"type", "sum_us", "pct"}]: exclusive and overlapping time of the types, pct of all busy time, longest first."""
    by_mask = intervals.combinations(unions(rank, rows, kinds))
    total, lines = sum(by_mask.values()), []
    for mask, ns in by_mask.items():
        name = " overlapping ".join(word for bit, word in enumerate(TYPES) if mask >> bit & 1)
        lines.append({"type": name, "sum_us": ns / US, "pct": 100 * ns / total})
    return sorted(lines, key=lambda line: -line["sum_us"])


def by_name(rank, rows, kinds, rules=RULES):
    """[{"name", "type", "category", "count", "sum_us", "mean_us", "min_us", "max_us", "std_us"}], longest first.

    std is of a sample (n - 1); 0 for one.
    """
    if not len(rows):
        return []
    keys, index = np.unique(rank.name[rows].astype(np.int64) * len(TYPES) + kinds, return_inverse=True)
    dur, count = rank.dur[rows], np.bincount(index)
    total, low, high = sums(index, len(keys), dur), np.full(len(keys), INT64.max), np.full(len(keys), INT64.min)
    np.minimum.at(low, index, dur)
    np.maximum.at(high, index, dur)
    mean = total / count
    squares = np.bincount(index, weights=(dur.astype(np.float64) - mean[index]) ** 2)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    lines = []
    for number in np.argsort(-total, kind="stable"):
        name = rank.names[keys[number] // len(TYPES)]
        line = {"name": name, "type": TYPES[keys[number] % len(TYPES)], "category": category(name, rules=rules)}
        line["count"] = int(count[number])
        columns = {"sum_us": total, "mean_us": mean, "min_us": low, "max_us": high, "std_us": std}
        lines.append(line | {column: values[number].item() / US for column, values in columns.items()})
    return lines


def by_category(table):
    """The kernel table summed up by category, [{"category", "count", "sum_us", "pct"}], longest first."""
    total_us = sum(line["sum_us"] for line in table)
    lines = {}
    for line in table:
        name = line["category"]
        summed = lines.setdefault(name, {"category": name, "count": 0, "sum_us": 0.0})
        summed["count"] += line["count"]
        summed["sum_us"] += line["sum_us"]
    longest_first = sorted(lines.values(), key=lambda line: -line["sum_us"])
    return [line | {"pct": 100 * line["sum_us"] / total_us if total_us else 0.0} for line in longest_first]
