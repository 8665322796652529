"""Which rank is late, and by how much: the slowest rank's milliseconds of a step against the median rank's.

The median of an even number of ranks is the lower middle one, so that it is a rank; of two, the faster.
"""

import statistics
from collections.abc import Sequence

from bench.base import stats

MIN_LATE_MS = 1.0
MIN_LATE_FRAC = 0.1  # of the median rank's milliseconds


def lateness(of_ranks: Sequence[dict[int, float]]) -> dict[int, tuple[float, int]]:
    """[{row: milliseconds} of each rank] -> {row: (slowest minus median rank, slowest rank)} of rows that all have."""
    if len(of_ranks) < 2:
        return {}
    result = {}
    for row in sorted(set.intersection(*(set(of_rank) for of_rank in of_ranks))):
        values = [of_rank[row] for of_rank in of_ranks]
        slowest = max(range(len(values)), key=values.__getitem__)
        result[row] = (values[slowest] - statistics.median_low(values), slowest)
    return result


def summary(by_rank):
    """step_files.read_by_rank(folder) -> run.json["skew"]: how late the slowest rank was, and which how often.

    None for fewer than two ranks.  num_late_steps counts lateness above 1 ms and above a tenth of the median rank's
    time; late_steps_by_rank says whose these were.
    """
    result = {name: _of_column(of_ranks) for name, of_ranks in by_rank.items() if len(of_ranks) > 1}
    return {name: column for name, column in result.items() if column} or None


def _of_column(of_ranks):
    late = lateness(of_ranks)
    if not late:
        return None
    late_ms = [ms for ms, _ in late.values()]
    late_by_rank = [0] * len(of_ranks)
    for row, (ms, slowest) in late.items():
        if is_late(ms, of_ranks[slowest][row] - ms):
            late_by_rank[slowest] += 1
    return {
        "late_ms_p50": stats.percentile(late_ms, 50),
        "late_ms_p95": stats.percentile(late_ms, 95),
        "late_ms_max": max(late_ms),
        "late_ms_sum": sum(late_ms),
        "num_late_steps": sum(late_by_rank),
        "late_steps_by_rank": late_by_rank,
    }


def is_late(ms, median_ms):
    return ms > max(MIN_LATE_MS, MIN_LATE_FRAC * median_ms)
