"""Statistics: numbers in, numbers out.  Nothing here knows a run, a file or a unit.

Student's t is computed here (no scipy at run time); the tests compare it with scipy to 1e-9 for 1 to 10,000 degrees
of freedom.
"""

import math


def mean(values):
    """Arithmetic mean of at least one number, the sum rounded once (math.fsum); exactly x for copies of x."""
    values = list(values)
    assert values, "the mean of nothing"
    return values[0] if _constant(values) else math.fsum(values) / len(values)


def sd(values):
    """Sample standard deviation, ddof = 1; None for fewer than two numbers, exactly 0.0 for equal ones."""
    values = list(values)
    if len(values) < 2:
        return None
    if _constant(values):
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def percentile(values, pct):
    """Linear interpolation between order statistics, Hyndman and Fan (1996) type 7, as numpy; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * pct / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean_interval(values, confidence=0.95):
    """Two-sided t interval (low, high) of the mean: mean -+ t * sd / sqrt(n), df = n - 1; None for n < 2."""
    values = list(values)
    if len(values) < 2:
        return None
    t = student_t_quantile(0.5 + confidence / 2, len(values) - 1)
    half_width = t * sd(values) / math.sqrt(len(values))
    return mean(values) - half_width, mean(values) + half_width


def one_sample_t_less(values, target):
    """One-sided one-sample t test, H0: mean >= target, H1: mean < target.  Returns (t, p).

    t = (mean - target) / (sd / sqrt(n)), p = P(T <= t), df = n - 1 (Student 1908).
    n < 2: (None, None), one value has no spread to judge by.  Equal values: t would be infinite and is None; p is 0.0
    if they lie below the target and 1.0 if not, the limit for ever smaller spreads.
    """
    values = list(values)
    if len(values) < 2:
        return None, None
    if _constant(values):
        return None, 0.0 if values[0] < target else 1.0
    t = (mean(values) - target) / (sd(values) / math.sqrt(len(values)))
    return t, student_t_cdf(t, len(values) - 1)


def student_t_cdf(t, df):
    """P(T <= t)."""
    return student_t_sf(-t, df)


def student_t_sf(t, df):
    """P(T > t) = I_x(df/2, 1/2) / 2 with x = df / (df + t^2), for t >= 0 (Abramowitz and Stegun 26.7.1 and 26.5.27)."""
    assert df > 0
    if t < 0:
        return 1.0 - student_t_sf(-t, df)
    if math.isinf(t * t):
        return 0.0
    return 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))


def student_t_quantile(p, df):
    """t with P(T <= t) = p, by bisection on the smaller tail."""
    assert 0 < p < 1 and df > 0
    if p < 0.5:
        return -_upper_quantile(p, df)
    return 0.0 if p == 0.5 else _upper_quantile(1.0 - p, df)


def _upper_quantile(tail, df):
    low, high = 0.0, 1.0
    while student_t_sf(high, df) > tail:
        low, high = high, 2 * high
    while True:
        middle = 0.5 * (low + high)
        if middle in (low, high):  # no float left between them
            return middle
        if student_t_sf(middle, df) > tail:
            low = middle
        else:
            high = middle


def _incomplete_beta(a, b, x, one_minus_x):
    """Regularised I_x(a, b); both x and 1 - x are given, so that neither loses digits (DLMF 8.17.4 and 8.17.22)."""
    if x <= 0.0 or one_minus_x <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(one_minus_x)
    if x < (a + 1) / (a + b + 2):  # where the fraction converges fast
        return math.exp(log_front) * _beta_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(b, a, one_minus_x) / b


def _beta_fraction(a, b, x):
    """The continued fraction 1/(1 + d1/(1 + d2/(1 + ...))) of DLMF 8.17.22, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / ((1.0 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or tiny)
            c = (1.0 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            return value
    raise AssertionError(f"no convergence for a={a} b={b} x={x}")


def _constant(values):
    return all(value == values[0] for value in values)
