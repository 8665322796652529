"""What the device did: types and categories of kernels, and a table of each by name.

Type is HolisticTraceAnalysis' coarse division: computation, communication, memory.  Category (categories.py) is finer.
"""

import numpy as np

from bench.trace import events, intervals
from bench.trace.categories import RULES, category, is_communication

TYPES = ("COMPUTATION", "COMMUNICATION", "MEMORY")
US = 1000  # nanoseconds


def types(rank, rows, rules=RULES):
    """Index into TYPES for each device row: copies and memsets are memory, whatever else moves data communication."""
    by_name = np.array([1 if is_communication(name, rules) else 0 for name in rank.names] or [0], np.int8)
    memory_name = np.array(
        [name.startswith(("Memcpy", "Memset", "hipMemcpy", "hipMemset", "Copy", "FillBuffer")) for name in rank.names]
        or [False]
    )
    found = by_name[rank.name[rows]]
    is_memory = np.isin(rank.kind[rows], (events.MEMCPY, events.MEMSET)) | memory_name[rank.name[rows]]
    return np.where(is_memory & (found == 0), 2, found)


def by_type(rank, rows, kinds):
    """[{"type", "sum_us", "pct"}]: exclusive and overlapping time of the types, pct of all busy time, longest first."""
    sets = [intervals.union(rank.ts[rows[kinds == kind]], rank.end[rows[kinds == kind]]) for kind in range(len(TYPES))]
    found = intervals.combinations(sets)
    total = sum(found.values())
    lines = []
    for mask, ns in found.items():
        name = " overlapping ".join(word for bit, word in enumerate(TYPES) if mask >> bit & 1)
        lines.append({"type": name, "sum_us": ns / US, "pct": 100 * ns / total})
    return sorted(lines, key=lambda line: -line["sum_us"])


def by_name(rank, rows, kinds, rules=RULES):
    """[{"name", "type", "category", "count", "sum_us", "mean_us", "min_us", "max_us", "std_us"}], longest first.

    std is of a sample (n - 1); 0 for one.
    """
    if not len(rows):
        return []
    key = rank.name[rows].astype(np.int64) * len(TYPES) + kinds
    found, place = np.unique(key, return_inverse=True)
    dur = rank.dur[rows].astype(np.float64)
    count = np.bincount(place)
    total = np.zeros(len(found), np.int64)
    np.add.at(total, place, rank.dur[rows])
    low, high = np.full(len(found), np.iinfo(np.int64).max), np.full(len(found), np.iinfo(np.int64).min)
    np.minimum.at(low, place, rank.dur[rows])
    np.maximum.at(high, place, rank.dur[rows])
    mean = total / count
    squares = np.bincount(place, weights=(dur - mean[place]) ** 2)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    lines = []
    for num in np.argsort(-total, kind="stable"):
        name = rank.names[found[num] // len(TYPES)]
        lines.append(
            {
                "name": name,
                "type": TYPES[found[num] % len(TYPES)],
                "category": category(name, rules=rules),
                "count": int(count[num]),
                "sum_us": int(total[num]) / US,
                "mean_us": float(mean[num]) / US,
                "min_us": int(low[num]) / US,
                "max_us": int(high[num]) / US,
                "std_us": float(std[num]) / US,
            }
        )
    return lines


def by_category(table):
    """The kernel table summed up by category, [{"category", "count", "sum_us", "pct"}], longest first."""
    total_us = sum(line["sum_us"] for line in table)
    sums = {}
    for line in table:
        one = sums.setdefault(line["category"], {"category": line["category"], "count": 0, "sum_us": 0.0})
        one["count"] += line["count"]
        one["sum_us"] += line["sum_us"]
    found = sorted(sums.values(), key=lambda one: -one["sum_us"])
    return [one | {"pct": 100 * one["sum_us"] / total_us if total_us else 0.0} for one in found]
