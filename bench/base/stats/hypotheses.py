"""Tests: one sample against a number, two samples against each other, several tests together."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.base.stats.describe import is_constant, mean, sd
from bench.base.stats.distributions import student_t_cdf, student_t_quantile, student_t_sf


def one_sample_t_less(values: Iterable[float], target: float) -> tuple[float | None, float | None]:
    """One-sided one-sample t test, H0: mean >= target, H1: mean < target.  Returns (t, p).

    t = (mean - target) / (sd / sqrt(n)), p = P(T <= t), df = n - 1 (Student 1908).
    (None, None) where there is no spread to judge by: of fewer than two values, and of equal ones, which is what copies
    and coarse rounding look like and not what certainty looks like.
    """
    values = list(values)
    if len(values) < 2 or is_constant(values):
        return None, None
    t = (mean(values) - target) / (sd(values) / math.sqrt(len(values)))
    return t, student_t_cdf(t, len(values) - 1)


class Welch(NamedTuple):
    """Two samples with spreads of their own (Welch 1947).  All but difference are None where nothing can be tested."""

    difference: float  # mean(b) - mean(a)
    se: float | None  # standard error of the difference
    df: float | None
    t: float | None
    p: float | None  # two-sided


def welch(a: Iterable[float], b: Iterable[float]) -> Welch:
    """Two samples of at least one number each -> Welch.

    Fewer than two numbers in either have no spread to judge by.  Neither do two samples that are both constant: that is
    what copies and coarse rounding look like, not what certainty looks like, so it gives no p instead of p = 0.
    One constant sample is fine: the other's spread and degrees of freedom remain.
    """
    a, b = list(a), list(b)
    difference = mean(b) - mean(a)
    if min(len(a), len(b)) < 2:
        return Welch(difference, None, None, None, None)
    return welch_of_samples(difference, (sd(a), sd(b)), (len(a), len(b)))


def welch_of_samples(difference: float, sds: Sequence[float], ns: Sequence[int]) -> Welch:
    """The same from the difference of the means, the standard deviations and the sizes of two samples."""
    parts = [spread * spread / n for spread, n in zip(sds, ns, strict=True)]
    se = math.sqrt(sum(parts))
    if se == 0:
        return Welch(difference, 0.0, None, None, None)
    t, df = difference / se, welch_df(sds, ns)
    return Welch(difference, se, df, t, 2 * student_t_sf(abs(t), df))


def welch_df(sds: Sequence[float], ns: Sequence[int]) -> float:
    """Welch and Satterthwaite's degrees of freedom: (sum v_i)^2 / sum of v_i^2 / (n_i - 1), v_i = sd_i^2 / n_i.

    Shares of the sum instead of the squares themselves: those of tiny spreads would be 0 in floating point.
    """
    parts = [spread * spread / n for spread, n in zip(sds, ns, strict=True)]
    total = sum(parts)
    return 1 / sum((part / total) ** 2 / (n - 1) for part, n in zip(parts, ns, strict=True))


def interval(test: Welch, confidence: float = 0.95) -> tuple[float, float] | None:
    """Two-sided interval (low, high) of a Welch difference; None where there is no test."""
    if test.t is None:
        return None
    half_width = student_t_quantile(0.5 + confidence / 2, test.df) * test.se
    return test.difference - half_width, test.difference + half_width


def equivalence_p(test: Welch, low: float, high: float) -> float | None:
    """Two one-sided tests, H0: the difference is outside of (low, high) (Schuirmann 1987).  The larger p, or None.

    p < 0.05 exactly where the 90 % interval lies inside (low, high).
    """
    if test.t is None:
        return None
    above_low = student_t_sf((test.difference - low) / test.se, test.df)
    below_high = student_t_cdf((test.difference - high) / test.se, test.df)
    return max(above_low, below_high)


def non_inferiority_p(test: Welch, margin: float) -> float | None:
    """One-sided, H0: the difference is at least margin (b is worse by that much; less is better).  p, or None."""
    return None if test.t is None else student_t_cdf((test.difference - margin) / test.se, test.df)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values -> p values adjusted for their number, in the same order (Holm 1979).  None stays None, uncounted.

    Sorted p_(1) <= p_(2) ...: adjusted p_(i) = max over k <= i of (m - k + 1) p_(k), at most 1.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted, running = [None] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p))
        adjusted[index] = running
    return adjusted
