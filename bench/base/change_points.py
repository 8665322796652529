"""Finds where the level of a series changes: the shortest stretches that must contain a change, jointly at 95 %.

Narrowest Significance Pursuit for piecewise constant means: P. Fryzlewicz, Journal of the American Statistical
Association 119 (2024), 1633-1646, arXiv:2009.05431, in its plainest case:

1. The mean of every run of consecutive values has a band of +- threshold * sigma / sqrt(its length).  Without a change
   all bands hold the one true level, with probability 0.95 or more.
2. A stretch in which two bands do not meet therefore holds a change.  The shortest such stretch is taken.
3. The search goes on before the stretch, up to its first value, and after it, from its last value on.

It assumes noise that is independent, of one spread and about normal: with the heavier tails of Student's t with 5
degrees of freedom 8 % of steady series of 30 values have a change, in place of under 1 % (tests/test_history.py), and
about 25 % of those of 100 values.
Unlike the paper's, sigma is of the differences of neighbours, without the largest quarter of them, which a few changes
do not touch; THRESHOLDS are calibrated for that sigma by simulation.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.base import stats

MIN_VALUES = 8  # fewer say too little of the noise
MAX_VALUES = 1000  # of which THRESHOLDS knows; of more the last count
# (number of values up to which it holds, threshold): at least the 95 % quantile of the largest |sum of noise| /
# sqrt(length) / sigma over all stretches; 200,000 simulated series each up to 50 values, then 40,000 and 6,000
THRESHOLDS = ((10, 5.46), (200, 5.08), (MAX_VALUES, 5.28))


@dataclass(frozen=True)
class Change:
    """A change of the level after the value at index `before` and not after that at index `after`.

    low, high: the 95 % interval (Welch's t) of the step between the means on its two sides, up to the neighbouring
    changes; the stretch was chosen by the same values, so it is a little too narrow.  None: too few values.
    """

    before: int
    after: int
    step: float
    low: float | None
    high: float | None


def sigma(values: Sequence[float]) -> float:
    """Root mean square of the differences of neighbours, without the largest quarter of them."""
    squares = sorted((b - a) ** 2 for a, b in zip(values, values[1:], strict=False))
    kept = squares[: len(squares) - math.ceil(len(squares) / 4)]
    return math.sqrt(math.fsum(kept) / len(kept))


def find(values: Sequence[float]) -> list[Change]:
    """The changes of a series of MIN_VALUES to MAX_VALUES values, in order; [] for fewer."""
    num = len(values)
    if num < MIN_VALUES:
        return []
    assert num <= MAX_VALUES, num
    half_width = THRESHOLDS[bisect.bisect_left(THRESHOLDS, (num,))][1] * sigma(values)
    stretches = sorted(_stretches(values, half_width, 0, num - 1))
    starts, ends = [0, *(after for _, after in stretches)], [*(before for before, _ in stretches), num - 1]
    levels = [values[start : end + 1] for start, end in zip(starts, ends, strict=True)]
    return [_change(*stretch, a, b) for stretch, a, b in zip(stretches, levels[:-1], levels[1:], strict=True)]


def _change(before: int, after: int, a: Sequence[float], b: Sequence[float]) -> Change:
    """a, b: the values of the levels on its two sides."""
    ends = stats.interval(stats.welch(a, b)) if min(len(a), len(b)) > 1 else None
    low, high = ends or (None, None)
    return Change(before, after, stats.mean(b) - stats.mean(a), low, high)


def _stretches(values: Sequence[float], half_width: float, first: int, last: int) -> list[tuple[int, int]]:
    """(first, last index) of the stretches between these indices that must hold a change."""
    # of the stretches of one length: the highest lower and the lowest upper edge of the bands within each
    lows, highs = [-math.inf] * (last - first + 2), [math.inf] * (last - first + 2)
    sums = [0.0] * (last - first + 1)
    for length in range(1, last - first + 2):
        margin = half_width / math.sqrt(length)
        gaps = []
        for offset in range(last - first + 2 - length):
            sums[offset] += values[first + offset + length - 1]
            mean = sums[offset] / length
            lows[offset] = max(lows[offset], lows[offset + 1], mean - margin)
            highs[offset] = min(highs[offset], highs[offset + 1], mean + margin)
            if (gap := lows[offset] - highs[offset]) > 0:
                gaps.append((gap, first + offset))
        if gaps:
            _, start = max(gaps)
            end = start + length - 1
            before, after = (first, start), (end, last)
            return [(start, end), *_stretches(values, half_width, *before), *_stretches(values, half_width, *after)]
    return []
