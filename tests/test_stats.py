"""Statistics, tests of two samples and what n runs can show, against numbers computed by hand and by scipy."""

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


GROUPS = (
    ([3.27, 3.28, 3.285, 3.279], [3.275, 3.272, 3.28]),
    ([1.0, 2.0], [1.5, 2.5]),
    ([5.0, 4.0, 6.5, 7.0, 3.0, 4.4, 5.1], [4.0, 4.1]),
    ([1e-9, 2e-9, 4e-9], [3e-9, 3.5e-9, 9e-9, 1e-9]),
    ([100.0, 100.0, 100.001], [101.0, 99.5, 102.0]),
)


@pytest.mark.parametrize(("a", "b"), GROUPS)
def test_welch_agrees_with_scipy(a, b):
    expected = pytest.importorskip("scipy.stats").ttest_ind(b, a, equal_var=False)
    test = stats.welch(a, b)
    assert (test.t, test.p, test.df) == pytest.approx((expected.statistic, expected.pvalue, expected.df), rel=1e-9)
    for confidence in (0.9, 0.95, 0.99):
        edges = tuple(expected.confidence_interval(confidence))
        assert stats.interval(test, confidence) == pytest.approx(edges, rel=1e-9)


@pytest.mark.parametrize(("a", "b"), GROUPS)
def test_one_sided_tests_agree_with_scipy(a, b):
    """Non-inferiority by a margin is the one-sided test of b - margin; TOST is the worse of two of them."""
    ttest_ind = pytest.importorskip("scipy.stats").ttest_ind
    test = stats.welch(a, b)
    for margin in (0.001, 0.3, 2.0):
        worse = ttest_ind([value - margin for value in b], a, equal_var=False, alternative="less").pvalue
        better = ttest_ind([value + margin for value in b], a, equal_var=False, alternative="greater").pvalue
        assert stats.non_inferiority_p(test, margin) == pytest.approx(worse, rel=1e-9, abs=1e-12)
        assert stats.equivalence_p(test, -margin, margin) == pytest.approx(max(worse, better), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0], [2.0, 3.0, 4.0]), ([1.0, 2.0], [2.0])])
def test_one_value_on_a_side_gives_a_difference_and_no_test(a, b):
    test = stats.welch(a, b)
    assert test.difference == stats.mean(b) - stats.mean(a)
    assert test[1:] == (None, None, None, None)
    assert stats.interval(test) is None
    assert stats.equivalence_p(test, -1, 1) is None
    assert stats.non_inferiority_p(test, 1) is None


def test_two_constant_samples_give_no_p_because_nothing_says_how_far_they_would_spread():
    assert stats.welch([5.0, 5.0], [6.0, 6.0, 6.0]) == (1.0, 0.0, None, None, None)
    assert stats.welch([5.0, 5.0], [5.0, 5.0]).p is None


def test_one_constant_sample_leaves_the_other_ones_degrees_of_freedom():
    """5, 5, 5 against 6, 8: se = sqrt(2/2) = 1, t = 2, df = 1; P(|T| > 2) of Cauchy = 1 - 2 atan(2)/pi = 0.2952."""
    test = stats.welch([5.0, 5.0, 5.0], [6.0, 8.0])
    assert (test.t, test.df) == (2.0, 1.0)
    assert test.p == pytest.approx(1 - 2 * math.atan(2) / math.pi, rel=1e-12)


def test_holm_worked_by_hand():
    """0.01 * 3, 0.02 * 2 and 0.04 * 1; the last is lifted to the one before where it would be smaller."""
    assert stats.holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
    assert stats.holm([0.01, 0.011, 0.5]) == pytest.approx([0.03, 0.03, 0.5])
    assert stats.holm([0.7, 0.6]) == [1.0, 1.0]
    assert stats.holm([None, 0.03]) == [None, 0.03]  # what was not tested costs nothing
    assert stats.holm([]) == []


# ---- power


def test_noncentral_t_agrees_with_scipy():
    """Compared where scipy gives a number: far out in the tails it gives nan."""
    nct = pytest.importorskip("scipy.stats").nct
    compared = 0
    for df in (1, 1.3, 4, 8, 18, 100, 9998):
        for shift in (-7, -0.5, 0, 0.1, 1, 2.8, 5, 16):
            for t in (-3, -0.2, 0, 0.5, 2, 4.3, 12.7, 60):
                expected = nct.cdf(t, df, shift)
                if not math.isnan(expected):
                    compared += 1
                    assert stats.noncentral_t_cdf(t, df, shift) == pytest.approx(expected, abs=1e-9)
    assert compared > 400


@pytest.mark.parametrize(
    ("cv_pct", "n", "mde_pct"),
    [(0.08, 3, 0.25), (0.08, 5, 0.16), (0.08, 8, 0.12), (0.08, 10, 0.11), (0.26, 5, 0.53), (0.26, 10, 0.34)],
)
def test_the_smallest_change_that_n_runs_show(cv_pct, n, mde_pct):
    """At 80 % power and 5 % two-sided they are the figures of a survey of 830 public runs, to two digits."""
    difference_pct = stats.smallest_difference((cv_pct, cv_pct), (n, n))
    assert difference_pct == pytest.approx(mde_pct, abs=0.006)
    assert stats.power(difference_pct, (cv_pct, cv_pct), (n, n)) == pytest.approx(0.8, abs=1e-9)


def test_power_agrees_with_the_noncentral_t_of_scipy():
    scipy_stats = pytest.importorskip("scipy.stats")
    for difference, n in ((0.5, 5), (1.0, 10), (2.0, 3), (0.0, 4)):
        df, shift = 2 * n - 2, difference / math.sqrt(2 / n)
        critical = scipy_stats.t.ppf(0.975, df)
        expected = scipy_stats.nct.sf(critical, df, shift) + scipy_stats.nct.cdf(-critical, df, shift)
        assert stats.power(difference, (1.0, 1.0), (n, n)) == pytest.approx(expected, abs=1e-9)
    assert stats.power(0.0, (1.0, 1.0), (4, 4)) == pytest.approx(0.05, abs=1e-12)  # nothing there: the false alarms


def test_the_n_that_a_change_needs_is_the_first_with_enough_power():
    for difference in (0.5, 1.0, 3.0, 20.0):
        n = stats.needed_n(difference, 1.0)
        assert stats.power(difference, (1.0, 1.0), (n, n)) >= 0.8
        assert n == 2 or stats.power(difference, (1.0, 1.0), (n - 1, n - 1)) < 0.8
    assert stats.needed_n(1.0, 1.0) == 17  # the textbook's two-sample t test of one standard deviation
    assert stats.needed_n(1.0, 0.0) == 2
    assert stats.needed_n(0.0, 1.0) is None
    assert stats.needed_n(1e-5, 1.0) is None  # 1.6e11 runs


def test_no_power_is_claimed_without_a_spread():
    assert stats.smallest_difference((None, 1.0), (1, 5)) is None
    assert stats.smallest_difference((0.0, 0.0), (5, 5)) is None
    assert stats.power(1.0, (0.0, 0.0), (5, 5)) is None
