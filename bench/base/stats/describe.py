"""What a sample looks like: mean, spread, percentiles, the intervals of its mean and its median."""

import math
from collections.abc import Iterable, Sequence

from bench.base.stats.distributions import student_t_quantile


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one number, the sum rounded once (math.fsum); exactly x for copies of x."""
    values = list(values)
    assert values, "the mean of nothing"
    return values[0] if is_constant(values) else math.fsum(values) / len(values)


def sd(values: Iterable[float]) -> float | None:
    """Sample standard deviation, ddof = 1; None for fewer than two numbers, exactly 0.0 for equal ones."""
    values = list(values)
    if len(values) < 2:
        return None
    if is_constant(values):
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def cv_pct(values: Iterable[float]) -> float | None:
    """Coefficient of variation, 100 * sd / mean; None for fewer than two numbers or a mean that is not above 0."""
    values = list(values)
    spread = sd(values)
    return None if spread is None or mean(values) <= 0 else 100 * spread / mean(values)


def percentile(values: Iterable[float], pct: float) -> float | None:
    """Linear interpolation between order statistics, Hyndman and Fan (1996) type 7, as numpy; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    index = (len(ordered) - 1) * pct / 100
    low = math.floor(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (index - low) * (ordered[high] - ordered[low])


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """(low, high) of the mean by Student's t: mean -+ t * sd / sqrt(n), df = n - 1.

    None for fewer than two numbers and for equal ones, which is what coarse rounding looks like, not certainty.
    """
    spread = sd(values)
    if not spread:
        return None
    half_width = student_t_quantile(0.5 + confidence / 2, len(values) - 1) * spread / math.sqrt(len(values))
    return mean(values) - half_width, mean(values) + half_width


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """(low, high) of the median: the order statistics that hold it at least that often, for any distribution.

    The k-th from either end, where 2 * P(Binomial(n, 1/2) < k) <= 1 - confidence; None for too few values (5 at 0.95).
    """
    ordered, n = sorted(values), len(values)
    k, tail = 0, 0.5**n  # tail: P(X <= k)
    while 2 * tail <= 1 - confidence:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return None if k == 0 else (ordered[k - 1], ordered[n - k])


def is_constant(values: Sequence[float]) -> bool:
    """Whether all of at least one number are equal; nan is not equal to itself."""
    return values[0] == values[0] and values.count(values[0]) == len(values)
