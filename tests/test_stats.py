"""Statistics against hand-worked numbers and scipy."""

import math

import pytest

from bench.base import stats

T_VALUES = (0.0, 1e-4, 0.1, 0.5, 1.0, 1.5, 2.0, 2.9, 4.0, 12.0, 30.0, 1e4, -0.2, -3.0, -20.0)
DEGREES = (1, 2, 3, 3.7, 4, 9, 19, 30, 100, 999, 10_000)


def test_one_value_has_no_spread():
    assert stats.sd([3.28]) is None
    assert stats.one_sample_t_less([3.2], 3.28) == (None, None)


def test_equal_values_have_a_spread_of_exactly_zero():
    assert stats.mean([0.1] * 3) == 0.1  # a plain sum over 3 gives 0.10000000000000002
    assert stats.sd([0.1] * 3) == 0.0


def test_percentiles_interpolate_between_neighbours():
    assert stats.percentile([50, 52, 56], 50) == 52
    assert stats.percentile([56, 50, 52], 95) == pytest.approx(55.6)  # place 1.9: 52 + 0.9 * 4
    assert stats.percentile([7.0], 95) == 7.0
    assert stats.percentile([], 50) is None


@pytest.mark.parametrize("df", DEGREES)
def test_student_t_agrees_with_scipy(df):
    scipy_t = pytest.importorskip("scipy.stats").t
    for t in T_VALUES:
        assert stats.student_t_cdf(t, df) == pytest.approx(scipy_t.cdf(t, df), abs=1e-9)
        assert stats.student_t_sf(t, df) == pytest.approx(scipy_t.sf(t, df), rel=1e-9, abs=1e-300)
    for p in (1e-6, 0.01, 0.025, 0.3, 0.5, 0.6, 0.95, 0.995, 0.999999):
        assert stats.student_t_quantile(p, df) == pytest.approx(scipy_t.ppf(p, df), rel=1e-9, abs=1e-9)


def test_the_t_test_agrees_with_scipy():
    scipy_stats = pytest.importorskip("scipy.stats")
    for values in ([1.0, 2.0], [3.27, 3.28, 3.285, 3.279], [5.0, 4.0, 6.5, 7.0, 3.0]):
        for target in (1.4, 3.28, 6.0):
            expected = scipy_stats.ttest_1samp(values, target, alternative="less")
            assert stats.one_sample_t_less(values, target) == pytest.approx(
                (expected.statistic, expected.pvalue), rel=1e-9
            )


def test_the_interval_of_a_mean_is_students():
    """1, 2, 3: mean 2, sd 1, t(0.975, df 2) = 4.3027, so 2 -+ 4.3027 / sqrt(3)."""
    assert stats.mean_interval([3, 1, 2]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    import scipy.stats

    low, high = stats.mean_interval([1.0, 4.0, 2.5, 3.0], 0.9)
    assert (low, high) == pytest.approx(scipy.stats.t.interval(0.9, 3, 2.625, scipy.stats.sem([1.0, 4.0, 2.5, 3.0])))
    assert stats.mean_interval([1.0]) is None and stats.mean_interval([2.0, 2.0]) is None


def test_numbers_that_are_none_are_not_constant():
    """The same nan twice is equal to nothing: a spread of 0 would be a claim."""
    assert math.isnan(stats.sd([math.nan, math.nan])) and math.isnan(stats.mean([math.nan, math.nan]))
