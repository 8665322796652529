"""When the runs of two arms started: whether the arms alternated, and how far they lie apart."""

from collections.abc import Sequence

from bench.base import utc
from bench.record.rows import Row

MAX_EARLIER_FRAC = 0.15  # how far from 1/2 the share of pairs may be in which A's run came first (assumed)


def are_interleaved(a_rows: Sequence[Row], b_rows: Sequence[Row]) -> bool | None:
    """Whether a drift of the machine would fall on both arms alike; None where a start is unknown or there is no pair.

    In order of their starts the arm must change at least as often as the smaller arm has runs (A B B A A B: 3 times),
    and of all pairs of an A and a B, A must be first in about half; strict alternation, A B A B ..., which is 1 / (2 n)
    off, always passes.
    """
    starts = [(row["started_at"], arm) for arm, rows in (("A", a_rows), ("B", b_rows)) for row in rows]
    if not a_rows or not b_rows or any(started_at is None for started_at, _ in starts):
        return None
    arms = [arm for _, arm in sorted(starts)]
    num_changes = sum(one != other for one, other in zip(arms, arms[1:], strict=False))
    num_a_first, num_a = 0, 0
    for arm in arms:
        num_a += arm == "A"
        num_a_first += num_a if arm == "B" else 0
    earlier_frac = num_a_first / (len(a_rows) * len(b_rows))
    allowed_frac = max(MAX_EARLIER_FRAC, (1 / len(a_rows) + 1 / len(b_rows)) / 4)
    return num_changes >= min(len(a_rows), len(b_rows)) and abs(earlier_frac - 0.5) <= allowed_frac + 1e-9


def gap_s(a: Sequence[Row], b: Sequence[Row]) -> float | None:
    """From the end of the earlier arm to the start of the later one, by the starts of their runs; None if unknown."""
    spans = []
    for rows in (a, b):
        if any(row["started_at"] is None for row in rows):
            return None
        seconds = [utc.seconds(row["started_at"]) for row in rows]
        spans.append((min(seconds), max(seconds)))
    (first, second) = sorted(spans)
    return max(0.0, second[0] - first[1])
