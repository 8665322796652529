"""Statistics: numbers in, numbers out.  Nothing here knows a run, a file or a unit.

Samples, distribution functions, tests, power, and how low a loss can be by luck.  Written without scipy, which is not
needed at run time; the tests compare every function with it to 1e-9.

Power is that of the two-sided Welch test, by the noncentral t distribution with Welch's degrees of freedom.  It is
accurate from 5 values per side on.  With fewer, the degrees of freedom vary from sample to sample and it is too high:
with 3 per side, a change that should be detected in 80 of 100 races is detected in 70 (tests/test_simulation.py).
"""

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TINY = 1e-300
ALPHA = 0.05  # the default of every test
WANTED_POWER = 0.8  # the power at which the minimum detectable effect (MDE) is reported
MAX_N = 1_000_000
E_VALUE_ALPHA = 1e-6  # a check of a loss raises one false alarm in a million
MIN_LOG_E_VALUE = math.log(1 / E_VALUE_ALPHA)  # 13.8


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one number.  The sum is rounded once (math.fsum); the mean of copies of x is x."""
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
    """Percentile by linear interpolation as in numpy (type 7 of Hyndman and Fan 1996); None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    index = (len(ordered) - 1) * pct / 100
    low = math.floor(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (index - low) * (ordered[high] - ordered[low])


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval (low, high) of the mean by Student's t: mean -+ t * sd / sqrt(n), df = n - 1.

    None for fewer than two numbers, and for equal ones: they indicate coarse rounding, not certainty.
    """
    spread = sd(values)
    if not spread:
        return None
    half_width = student_t_quantile(0.5 + confidence / 2, len(values) - 1) * spread / math.sqrt(len(values))
    return mean(values) - half_width, mean(values) + half_width


def is_constant(values: Sequence[float]) -> bool:
    """Whether all numbers, of which there is at least one, are equal; nan is not equal to itself."""
    return values[0] == values[0] and values.count(values[0]) == len(values)


# ---- distributions


def normal_cdf(z: float) -> float:
    """P(Z <= z)."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def student_t_cdf(t: float, df: float) -> float:
    """P(T <= t)."""
    return student_t_sf(-t, df)


def student_t_sf(t: float, df: float) -> float:
    """P(T > t) = I_x(df/2, 1/2) / 2 with x = df / (df + t^2), for t >= 0 (Abramowitz and Stegun 26.7.1 and 26.5.27)."""
    assert df > 0
    if t < 0:
        return 1.0 - student_t_sf(-t, df)
    if math.isinf(t * t):
        return 0.0
    return 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))


@functools.lru_cache(maxsize=256)  # takes 8 evaluations, and a comparison needs the same quantiles repeatedly
def student_t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p, computed on the smaller tail."""
    assert 0 < p < 1 and df > 0
    if p < 0.5:
        return -_upper_quantile(p, df)
    return 0.0 if p == 0.5 else _upper_quantile(1.0 - p, df)


def _upper_quantile(tail: float, df: float) -> float:
    """The t > 0 with P(T > t) = tail, by Newton's method; steps from the left never pass the root, as P is convex."""
    t, high = 0.0, 1.0
    while student_t_sf(high, df) > tail:
        t, high = high, 2 * high
    while True:
        step = (student_t_sf(t, df) - tail) / (_student_t_density(t, df) or math.inf)
        t += step
        if step <= 1e-15 * t:  # as small as rounding errors
            return t


def _student_t_density(t: float, df: float) -> float:
    log_front = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
    return math.exp(log_front - (df + 1) / 2 * math.log1p(t * t / df))


def noncentral_t_cdf(t: float, df: float, shift: float) -> float:
    """P(T <= t) for T = (Z + shift) / sqrt(chi2_df / df).

    For t >= 0: normal_cdf(-shift) + 1/2 sum over j >= 0 of p_j I_x(j + 1/2, df/2) + q_j I_x(j + 1, df/2), with
    x = t^2 / (df + t^2), h = shift^2 / 2, p_j = e^-h h^j / j!, q_j = shift / sqrt(2) e^-h h^j / Gamma(j + 3/2)
    (Lenth 1989).  Absolute error below 1e-10.
    """
    assert df > 0
    if t < 0:
        return 1.0 - noncentral_t_cdf(-t, df, -shift)
    if t == 0 or shift == 0:
        return normal_cdf(-shift) if t == 0 else student_t_cdf(t, df)
    h, b = shift * shift / 2, df / 2
    x, one_minus_x = t * t / (df + t * t), df / (df + t * t)
    j = max(0, math.floor(h - 9 * math.sqrt(h)) - 40)  # earlier terms add up to less than 1e-17
    odd, odd_step = _beta_and_step(j + 0.5, b, x, one_minus_x)
    even, even_step = _beta_and_step(j + 1.0, b, x, one_minus_x)
    total, last = 0.0, h + 20 * math.sqrt(h) + 1000
    while True:
        p = math.exp(j * math.log(h) - h - math.lgamma(j + 1))
        q = shift / math.sqrt(2) * math.exp(j * math.log(h) - h - math.lgamma(j + 1.5))
        total += p * odd + q * even
        if j > h and max(p, abs(q)) < 1e-18:
            return min(1.0, max(0.0, normal_cdf(-shift) + 0.5 * total))
        odd, even = odd - odd_step, even - even_step  # I_x(a + 1, b) = I_x(a, b) - step; DLMF 8.17.20
        odd_step *= x * (j + 0.5 + b) / (j + 1.5)
        even_step *= x * (j + 1.0 + b) / (j + 2.0)
        j += 1
        assert j < last, f"no convergence for t={t} df={df} shift={shift}"


def _beta_and_step(a: float, b: float, x: float, one_minus_x: float) -> tuple[float, float]:
    """I_x(a, b) and x^a (1 - x)^b / (a B(a, b))."""
    log_step = a * math.log(x) + b * math.log(one_minus_x) + math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b)
    return _incomplete_beta(a, b, x, one_minus_x), math.exp(log_step)


def _incomplete_beta(a: float, b: float, x: float, one_minus_x: float) -> float:
    """Regularised incomplete beta function I_x(a, b) (DLMF 8.17.4, 8.17.22); 1 - x is passed to keep its digits."""
    if x <= 0.0 or one_minus_x <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(one_minus_x)
    if x < (a + 1) / (a + b + 2):  # here the continued fraction converges fast
        return math.exp(log_front) * _beta_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(b, a, one_minus_x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1/(1 + d1/(1 + d2/(1 + ...))) of DLMF 8.17.22, by Lentz's method."""
    c, d = 1.0, 1.0 / ((1.0 - (a + b) * x / (a + 1)) or TINY)
    value = d
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or TINY)
            c = (1.0 + term / c) or TINY
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            return value
    raise AssertionError(f"no convergence for a={a} b={b} x={x}")


# ---- tests


def one_sample_t_less(values: Iterable[float], target: float) -> tuple[float | None, float | None]:
    """One-sided one-sample t test, H0: mean >= target, H1: mean < target.  Returns (t, p).

    t = (mean - target) / (sd / sqrt(n)), p = P(T <= t), df = n - 1 (Student 1908).
    (None, None) for fewer than two values, and for equal ones: they indicate copies or coarse rounding, not certainty.
    """
    values = list(values)
    spread = sd(values)
    if not spread:
        return None, None
    t = (mean(values) - target) / (spread / math.sqrt(len(values)))
    return t, student_t_cdf(t, len(values) - 1)


class Welch(NamedTuple):
    """Welch's test of two samples with unequal variances (Welch 1947).  df, t and p are None if it is not possible."""

    difference: float  # mean(b) - mean(a)
    se: float | None  # standard error of the difference
    df: float | None
    t: float | None
    p: float | None  # two-sided


def welch(a: Iterable[float], b: Iterable[float]) -> Welch:
    """Welch's test of two samples of at least one number each.

    It is not possible if either has fewer than two numbers, which have no spread, or if both are constant: they
    indicate copies or coarse rounding, not certainty, so p is None and not 0.  If only one is constant, the test uses
    the spread and the degrees of freedom of the other.
    """
    a, b = list(a), list(b)
    difference = mean(b) - mean(a)
    sd_a, sd_b = sd(a), sd(b)
    if sd_a is None or sd_b is None:
        return Welch(difference, None, None, None, None)
    return welch_of_samples(difference, (sd_a, sd_b), (len(a), len(b)))


def welch_of_samples(difference: float, sds: Sequence[float], ns: Sequence[int]) -> Welch:
    """Welch's test from the difference of the means, the standard deviations and the sizes of two samples."""
    parts = [spread * spread / n for spread, n in zip(sds, ns, strict=True)]
    se = math.sqrt(sum(parts))
    if se == 0:
        return Welch(difference, 0.0, None, None, None)
    t, df = difference / se, welch_df(sds, ns)
    return Welch(difference, se, df, t, 2 * student_t_sf(abs(t), df))


def welch_df(sds: Sequence[float], ns: Sequence[int]) -> float:
    """Degrees of freedom by Welch and Satterthwaite: (sum v_i)^2 / sum(v_i^2 / (n_i - 1)), v_i = sd_i^2 / n_i.

    The v_i are divided by their sum before they are squared, as the squares of tiny ones would be 0 in floating point.
    """
    parts = [spread * spread / n for spread, n in zip(sds, ns, strict=True)]
    total = sum(parts)
    return 1 / sum((part / total) ** 2 / (n - 1) for part, n in zip(parts, ns, strict=True))


def interval(test: Welch, confidence: float = 0.95) -> tuple[float, float] | None:
    """Two-sided interval (low, high) of the difference of the means; None if the test is not possible."""
    if test.df is None or test.se is None:
        return None
    half_width = student_t_quantile(0.5 + confidence / 2, test.df) * test.se
    return test.difference - half_width, test.difference + half_width


def equivalence_p(test: Welch, low: float, high: float) -> float | None:
    """The larger p of two one-sided tests with H0: the difference is outside of (low, high) (Schuirmann 1987).

    p < 0.05 exactly if the 90 % interval lies inside (low, high).  None if the test is not possible.
    """
    if test.df is None or test.se is None:
        return None
    above_low = student_t_sf((test.difference - low) / test.se, test.df)
    below_high = student_t_cdf((test.difference - high) / test.se, test.df)
    return max(above_low, below_high)


def non_inferiority_p(test: Welch, margin: float) -> float | None:
    """p of a one-sided test with H0: the difference is at least margin (b is worse by that much, as less is better).

    None if the test is not possible.
    """
    if test.df is None or test.se is None:
        return None
    return student_t_cdf((test.difference - margin) / test.se, test.df)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values adjusted for their number, in the same order (Holm 1979).  None stays None and is not counted.

    For p_(1) <= p_(2) <= ... <= p_(m), the adjusted p_(i) is the maximum over k <= i of (m - k + 1) p_(k), at most 1.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p))
        adjusted[index] = running
    return adjusted


# ---- power


def power(difference: float, sds: Sequence[float | None], ns: Sequence[int], alpha: float = ALPHA) -> float | None:
    """Probability that the test gives p < alpha if the means differ by difference; None if the test is not possible."""
    test = _test_of(sds, ns)
    if test.se is None or test.df is None:
        return None
    return _power(difference / test.se, test.df, student_t_quantile(1 - alpha / 2, test.df))


def smallest_difference(sds: Sequence[float | None], ns: Sequence[int], alpha: float = ALPHA) -> float | None:
    """Difference of the means that Welch's test detects with WANTED_POWER (MDE); None if the test is not possible."""
    test = _test_of(sds, ns)
    return None if test.se is None or test.df is None else detectable(test.se, test.df, alpha)


def detectable(se: float, df: float, alpha: float = ALPHA) -> float:
    """Difference that a t test with this standard error detects with WANTED_POWER, which alpha must be below."""
    if not 0 < alpha < WANTED_POWER:
        raise ValueError(f"alpha={alpha:g}: use a probability above 0 and below {WANTED_POWER:g}")
    return _shift(df, alpha, WANTED_POWER) * se


def needed_n(difference: float, sd: float | None, alpha: float = ALPHA) -> int | None:
    """Runs per side, at least 2, that detect a difference with WANTED_POWER if both standard deviations are sd.

    None if even MAX_N are too few, as for a difference of 0, and if sd is None.
    """
    if difference == 0 or sd is None:
        return None
    if sd == 0:
        return 2

    def is_enough(n: int) -> bool:
        return (power(difference, (sd, sd), (n, n), alpha) or 0.0) >= WANTED_POWER

    high = 2
    while not is_enough(high):
        high *= 2
        if high > MAX_N:
            return None
    return bisect.bisect_left(range(high), True, lo=high // 2 + 1, key=is_enough)


def _test_of(sds: Sequence[float | None], ns: Sequence[int]) -> Welch:
    """Welch's test for standard deviations and sizes alone: only its standard error and degrees of freedom matter."""
    spreads = [spread for spread in sds if spread is not None]
    return welch_of_samples(0.0, spreads, ns) if len(spreads) == len(sds) and min(ns) > 1 else Welch(0.0, *[None] * 4)


def _power(shift: float, df: float, critical: float) -> float:
    """Power of a test that rejects at |t| > critical, if the true difference is shift standard errors."""
    return 1 - noncentral_t_cdf(critical, df, abs(shift)) + noncentral_t_cdf(-critical, df, abs(shift))


@functools.lru_cache(maxsize=256)  # takes some 50 evaluations, and a table of n needs the same shifts repeatedly
def _shift(df: float, alpha: float, wanted_power: float) -> float:
    """Difference divided by standard error at which the test has the wanted power, by bisection."""
    critical = student_t_quantile(1 - alpha / 2, df)
    low, high = 0.0, 2 * critical
    while _power(high, df, critical) < wanted_power:
        low, high = high, 2 * high
    while (middle := 0.5 * (low + high)) not in (low, high) and high - low > 1e-13 * high:
        low, high = (middle, high) if _power(middle, df, critical) < wanted_power else (low, middle)
    return middle


def log_e_value(nats_of_p: float, nats: float, num_tokens: int) -> float:
    """Log of the e-value of a mean loss in nats.  A causal model reaches MIN_LOG_E_VALUE in one of a million checks.

    The tokens are drawn from a known distribution p, and nats_of_p is the mean of -ln p over those that were drawn; for
    tokens uniform over a vocabulary of V it is ln V.  It holds by Markov's inequality for every num_tokens, without a
    standard error or an assumption about the model: docs/record.md, "The arithmetic of random tokens".
    """
    return num_tokens * (nats_of_p - nats)


def least_nats(nats_of_p: float, num_tokens: int) -> float:
    """Mean loss at which log_e_value() is MIN_LOG_E_VALUE."""
    return nats_of_p - MIN_LOG_E_VALUE / num_tokens
