"""What a comparison of n runs a side can see: power, the smallest difference, and the n that is needed.

Of the two-sided Welch test, by the noncentral t distribution with the degrees of freedom that the spreads give.  Near
enough from 5 a side; below, Welch's degrees of freedom vary from sample to sample and it promises too much: with 3 a
side the change that should be found in 80 of 100 races is found in 70 (simulated, tests/test_simulation.py).
"""

import functools
import math
from collections.abc import Sequence

from bench.base.stats.distributions import noncentral_t_cdf, student_t_quantile
from bench.base.stats.hypotheses import welch_df

ALPHA = 0.05  # of every test that names no other
WANTED_POWER = 0.8  # of the MDE, the minimum detectable effect
MAX_N = 1_000_000


def power(difference: float, sds: Sequence[float | None], ns: Sequence[int], alpha: float = ALPHA) -> float | None:
    """Probability that the test gives p < alpha where the means differ so; None: no test (n < 2, no spread)."""
    se, df = _se_and_df(sds, ns)
    return None if df is None else _power(difference / se, df, student_t_quantile(1 - alpha / 2, df))


def smallest_difference(
    sds: Sequence[float | None], ns: Sequence[int], alpha: float = ALPHA, wanted_power: float = WANTED_POWER
) -> float | None:
    """The difference of the means that the test finds with the wanted power (MDE); None where there is no test."""
    if not 0 < alpha < wanted_power < 1:
        raise ValueError(f"alpha={alpha:g}, power={wanted_power:g}: use 0 < alpha < power < 1")
    se, df = _se_and_df(sds, ns)
    return None if df is None else _shift(df, alpha, wanted_power) * se


def needed_n(difference: float, sd: float | None) -> int | None:
    """Runs a side, at least 2, that find a difference with WANTED_POWER where both spreads are sd.

    None where even a million would not do, a difference of 0 among them, and where sd is None.
    """
    if difference == 0 or sd is None:
        return None
    if sd == 0:
        return 2

    def enough(n):
        return power(difference, (sd, sd), (n, n)) >= WANTED_POWER

    high = 2
    while not enough(high):
        high *= 2
        if high > MAX_N:
            return None
    low = high // 2  # not enough, or 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _se_and_df(sds, ns):
    if None in sds or min(ns) < 2 or sum(sds) == 0:
        return None, None
    return math.sqrt(sum(sd * sd / n for sd, n in zip(sds, ns, strict=True))), welch_df(sds, ns)


def _power(shift, df, critical):
    """Of the test that calls |t| > critical a difference, where the true difference is shift standard errors."""
    return 1 - noncentral_t_cdf(critical, df, abs(shift)) + noncentral_t_cdf(-critical, df, abs(shift))


@functools.lru_cache(maxsize=256)  # some 50 evaluations, and a table of n asks for the same ones again
def _shift(df, alpha, wanted_power):
    """Difference over standard error at which the power is as wanted, by bisection."""
    critical = student_t_quantile(1 - alpha / 2, df)
    low, high = 0.0, 2 * critical
    while _power(high, df, critical) < wanted_power:
        low, high = high, 2 * high
    while (middle := 0.5 * (low + high)) not in (low, high) and high - low > 1e-13 * high:
        low, high = (middle, high) if _power(middle, df, critical) < wanted_power else (low, middle)
    return middle
