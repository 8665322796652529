"""Normal, Student's t and noncentral t: distribution functions and quantiles."""

import functools
import math

TINY = 1e-300


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


@functools.lru_cache(maxsize=256)  # 8 evaluations each, and a comparison asks for the same ones again
def student_t_quantile(p: float, df: float) -> float:
    """t with P(T <= t) = p, found on the smaller tail."""
    assert 0 < p < 1 and df > 0
    if p < 0.5:
        return -_upper_quantile(p, df)
    return 0.0 if p == 0.5 else _upper_quantile(1.0 - p, df)


def _upper_quantile(tail, df):
    """By Newton's method: to the right of 0 the tail is convex, so steps from the left never pass the root."""
    t, high = 0.0, 1.0
    while student_t_sf(high, df) > tail:
        t, high = high, 2 * high
    while True:
        step = (student_t_sf(t, df) - tail) / (_student_t_density(t, df) or math.inf)
        t += step
        if step <= 1e-15 * t:  # rounding: nothing is left to gain
            return t


def _student_t_density(t, df):
    log_front = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
    return math.exp(log_front - (df + 1) / 2 * math.log1p(t * t / df))


def noncentral_t_cdf(t: float, df: float, shift: float) -> float:
    """P(T <= t) of T = (Z + shift) / sqrt(chi2_df / df).

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
    j = max(0, math.floor(h - 9 * math.sqrt(h)) - 40)  # the terms before add up to less than 1e-17
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


def _beta_and_step(a, b, x, one_minus_x):
    """I_x(a, b) and x^a (1 - x)^b / (a B(a, b))."""
    log_step = a * math.log(x) + b * math.log(one_minus_x) + math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b)
    return _incomplete_beta(a, b, x, one_minus_x), math.exp(log_step)


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
