"""Finds where the level of a series changes: the shortest stretches with a change, at a joint confidence of 95 %.

Narrowest Significance Pursuit for piecewise constant means: P. Fryzlewicz, Journal of the American Statistical
Association 119 (2024), 1633-1646, arXiv:2009.05431, in its plainest case:

1. The mean of every run of consecutive values has a band of +- threshold * sigma / sqrt(length of the run).  If the
   level does not change, all bands contain the true level with a probability of 0.95 or more.
2. A stretch in which two bands do not overlap therefore contains a change.  The shortest such stretch is reported.
3. The search continues before the stretch, up to its first value, and after it, from its last value on.

The noise is assumed to be independent, identically distributed and about normal.  With the heavier tails of Student's
t with 5 degrees of freedom, a change is reported in 8 % of steady series of 30 values, instead of in under 1 %
(tests/test_history.py), and in about 25 % of those of 100 values.
Unlike in the paper, sigma comes from the differences of neighbours without the largest quarter, so that a few changes
do not affect it; THRESHOLDS are calibrated for that sigma by simulation.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.base import stats

MIN_VALUES = 8  # fewer values say too little about the noise
MAX_VALUES = 1000  # the longest series that THRESHOLDS cover; of a longer one, callers pass the last values
# (largest number of values, threshold for series up to there): at least the 95 % quantile of the largest
# |sum of noise| / sqrt(length) / sigma over all stretches; from 200,000 simulated series for each length up to 50,
# and from 40,000 and 6,000 for the longer ones
THRESHOLDS = ((10, 5.46), (200, 5.08), (MAX_VALUES, 5.28))


@dataclass(frozen=True)
class Change:
    """A change of the level, which happened after the value at index `before` and by the value at index `after`.

    step: the difference of the means on its two sides, up to the neighbouring changes.  low, high: its 95 % interval
    (Welch's t), None for too few values; as the same values chose the stretch, it is a little too narrow.
    """

    before: int
    after: int
    step: float
    low: float | None
    high: float | None


def sigma(values: Sequence[float]) -> float:
    """Returns the root mean square of the differences of neighbours, without the largest quarter of them."""
    squares = sorted((b - a) ** 2 for a, b in zip(values, values[1:], strict=False))
    kept = squares[: len(squares) - math.ceil(len(squares) / 4)]
    return math.sqrt(math.fsum(kept) / len(kept))


def hidden_step(values: Sequence[float]) -> float:
    """Returns the step halfway through MIN_VALUES or more values that would be missed half of the time."""
    return 2 * _half_width(values) / math.sqrt(len(values) / 2)


def _half_width(values: Sequence[float]) -> float:
    return THRESHOLDS[bisect.bisect_left(THRESHOLDS, (len(values),))][1] * sigma(values)


def find(values: Sequence[float]) -> list[Change]:
    """Returns the changes of a series of up to MAX_VALUES values, in order; [] for fewer than MIN_VALUES."""
    num = len(values)
    if num < MIN_VALUES:
        return []
    assert num <= MAX_VALUES, num
    stretches = sorted(_stretches(values, _half_width(values), 0, num - 1))
    starts, ends = [0, *(after for _, after in stretches)], [*(before for before, _ in stretches), num - 1]
    levels = [values[start : end + 1] for start, end in zip(starts, ends, strict=True)]
    return [_change(*stretch, a, b) for stretch, a, b in zip(stretches, levels[:-1], levels[1:], strict=True)]


def _change(before: int, after: int, a: Sequence[float], b: Sequence[float]) -> Change:
    """Returns the Change at a stretch.  a, b: the values on its two sides, up to the neighbouring changes."""
    ends = stats.interval(stats.welch(a, b)) if min(len(a), len(b)) > 1 else None
    low, high = ends or (None, None)
    return Change(before, after, stats.mean(b) - stats.mean(a), low, high)


def _stretches(values: Sequence[float], half_width: float, first: int, last: int) -> list[tuple[int, int]]:
    """Returns (first, last index) of the stretches between two indices that contain a change, in no order."""
    # for each stretch of the current length: the highest lower edge and the lowest upper edge of the bands within it
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
