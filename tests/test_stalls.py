"""Stalled steps: the rule at its borders, by hand, and no false alarm on what is only a drift, a stage or noise."""

import math
import random

import pytest

from bench.analysis.diagnosis import stalls


def rows(values, flags=()):
    return [{"step": 0, "step_ms": None}] + [
        {"step": num, "step_ms": ms, "flags": "profiled" if num in flags else ""} for num, ms in enumerate(values, 1)
    ]


def test_a_step_far_above_its_neighbours_is_found_with_what_it_cost():
    values = [100.0] * 40
    values[6] = 300.0
    values[25] = 160.0
    assert stalls.find(rows(values)) == [
        {"step": 7, "ms": 200.0, "step_ms": 300.0, "usual_ms": 100.0},
        {"step": 26, "ms": 60.0, "step_ms": 160.0, "usual_ms": 100.0},
    ]


# Of 31 around step 19, 11 take 100 ms, 10 take 90, 10 take 110 or more: median 100, median difference 10 ms, still so
# with one of them odd.  A robust standard deviation is 14.826 ms, six of them 88.956: the border is at 188.956 ms.
UNEVEN = [90.0, 100.0, 110.0] * 13


@pytest.mark.parametrize(
    ("values", "odd_ms", "is_stall"),
    [
        ([100.0] * 41, 120.0, False),  # less than a fifth, however steady the others are
        ([100.0] * 41, 120.5, True),
        ([0.5] * 41, 1.4, False),  # less than a millisecond, however short the steps are
        ([0.5] * 41, 1.6, True),
        (UNEVEN, 188.0, False),  # less than six robust standard deviations
        (UNEVEN, 190.0, True),
    ],
)
def test_a_stall_is_above_all_three_borders(values, odd_ms, is_stall):
    assert bool(stalls.outliers([*values[:19], odd_ms, *values[20:]])) is is_stall


def test_too_few_steps_show_no_usual_time():
    assert stalls.outliers([100.0, 100.0, 100.0, 900.0]) == []
    assert stalls.outliers([100.0, 100.0, 100.0, 900.0, 100.0]) == [(3, 800.0)]


def test_the_first_and_the_last_step_are_judged_too():
    assert stalls.outliers([300.0] + [100.0] * 10 + [200.0]) == [(0, 200.0), (11, 100.0)]


def test_flagged_steps_are_neither_judged_nor_usual():
    values = [100.0] * 12
    values[3] = values[4] = 5000.0
    assert stalls.find(rows(values, flags=(4, 5))) == []
    assert stalls.find(rows(values, flags=(4,)))[0]["step"] == 5


def test_a_running_median_follows_a_step_in_the_level_at_once():
    values = [31.0] * 40 + [57.0] * 40
    assert stalls.running_median(values) == values


def gauss(rng, frac):
    return 1 + frac * rng.gauss(0, 1)


QUIET = {
    "steady with 1 % noise": lambda num, rng: 50 * gauss(rng, 0.01),
    "steady with 10 % noise": lambda num, rng: 50 * gauss(rng, 0.10),
    "1 % slower each step": lambda num, rng: 50 * 1.01**num * gauss(rng, 0.01),
    "faster step by step": lambda num, rng: 50 * (1 + math.exp(-num / 5)) * gauss(rng, 0.01),
    "three stages of a schedule": lambda num, rng: (31, 57, 83)[num // 400] * gauss(rng, 0.005),
    "an optimizer that updates every other step": lambda num, rng: (27, 35)[num % 2] * gauss(rng, 0.005),
    "waves": lambda num, rng: 50 * (1 + 0.3 * math.sin(num / 30)) * gauss(rng, 0.01),
}


@pytest.mark.parametrize("kind", QUIET)
def test_no_false_alarm_in_1200_steps_that_only(kind):
    """Ten seeds each; with a real stall of half a step planted in the same series, just that one is found."""
    for seed in range(10):
        rng = random.Random(seed)
        values = [QUIET[kind](num, rng) for num in range(1200)]
        assert stalls.outliers(values) == []
        values[700] *= 2.5
        assert [num for num, _ in stalls.outliers(values)] == [700]


def test_excess_is_above_the_running_median_and_knows_only_rows_that_have_the_column():
    rows = [{"step": num, "data_ms": 1.0} for num in range(1, 9)] + [{"step": 9, "data_ms": 51.0}, {"step": 10}]
    assert stalls.excess(rows, "data_ms") == {**dict.fromkeys(range(1, 9), 0.0), 9: 50.0}
    assert stalls.excess(rows, "cpu_ms") == {}
