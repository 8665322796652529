"""A search's rules by simulation: its error budget, what it keeps, and how many runs that takes."""

import math
import random

import pytest
from cases import slow

from bench.compare import searching
from bench.plans.race import plan

SD, EFFECT, ALPHA = 0.003, 0.005, 0.05  # of log time: 0.3 % of noise, a gain of 0.5 %
NUM_SEARCHES, NUM_TRIES = 5, 200


def stage(chance, level, gain, sd=SD, drift=0.0):
    """Simulates a race or confirmation in the order of a race's plan.  Returns (its outcome, number of runs)."""
    stop = {"sd": SD, "effect": EFFECT, "level": level}
    gains, slot = [], 0
    order = plan.order(["A", "B"], searching.most_rounds(stop), order_seed=chance.getrandbits(32), warm_ups=[])
    while (outcome := searching.outcome(stop, [gains])) is None and len(gains) < searching.most_rounds(stop):
        is_a_first = order[slot]["arm"] == "A"
        drift_s = drift if is_a_first else -drift
        gains.append(gain + chance.gauss(0, SD) - chance.gauss(0, sd) - drift_s)
        slot += 2
    return outcome, slot


def search_of(chance, gains, **noise):
    """Simulates submissions with these true gains.  Returns [(kept, number of runs, warm-ups included)]."""
    outcomes, confirmed = [], []
    for gain in gains:
        outcome, num_runs = stage(chance, None, gain, **noise)
        num_runs += 1
        if outcome == searching.PROMISING:
            outcome, num_more = stage(chance, searching.level(ALPHA, confirmed), gain, **noise)
            num_runs += num_more
            confirmed.append(outcome == searching.KEEP)
        outcomes.append((outcome == searching.KEEP, num_runs))
    return outcomes


@pytest.mark.parametrize(("sd", "drift"), [slow(SD, 0.0), (3 * SD, 0.0), slow(SD, 2 * SD)])
def test_searches_in_which_nothing_is_better_keep_something_in_at_most_alpha_of_them(sd, drift):
    """Also of candidates whose times scatter three times as much, and on a machine that drifts within a round."""
    chance = random.Random(5)
    kept = [any(keep for keep, _ in search_of(chance, [0.0] * 20, sd=sd, drift=drift)) for _ in range(200)]
    assert sum(kept) / len(kept) <= ALPHA


def test_a_gain_of_half_a_per_cent_is_kept_nine_times_in_ten():
    """Runs have a noise of 0.3 %; n=10 a side, once to find it and once to confirm it, takes 44 runs."""
    chance = random.Random(6)
    outcomes = [search_of(chance, [EFFECT])[0] for _ in range(200)]
    assert sum(keep for keep, _ in outcomes) >= 0.87 * len(outcomes)  # 0.904 of 12,000
    assert sum(num_runs for _, num_runs in outcomes) / len(outcomes) < 24  # 21.9


def test_what_is_no_better_costs_less_than_half_of_ten_runs_a_side():
    chance = random.Random(7)
    outcomes = search_of(chance, [0.0] * 200)
    assert sum(num_runs for _, num_runs in outcomes) / len(outcomes) < 11  # 8.7 of 120,000; n=10 takes 22


@pytest.mark.parametrize(
    ("kept", "level"),
    [
        ([], 0.05 / 2),
        ([False], 0.05 / 6),
        ([True], 0.05 / 6),  # the first keep was paid for from the start
        ([True, True], 0.05 * (1 / 12 + 1 / 2)),
        ([False, True, False, True], 0.05 * (1 / 30 + 1 / 2)),
    ],
)
def test_a_keep_earns_alpha_again(kept, level):
    assert searching.level(0.05, kept) == pytest.approx(level)


def test_the_levels_add_up_to_alpha_for_each_keep_and_to_alpha_before_the_first():
    chance = random.Random(3)
    for _ in range(20):
        kept, total = [], 0.0
        for _ in range(300):
            total += searching.level(ALPHA, kept)
            assert total <= ALPHA * max(1, sum(kept))
            kept.append(chance.random() < 0.2)


def test_no_gain_in_a_round_more_than_doubles_the_evidence():
    """So that no lucky run, and no candidate of two speeds, is kept for a few of its rounds."""
    stop = {"sd": SD, "effect": EFFECT, "level": 0.025}
    assert searching.log_e(stop, [1e6]) == pytest.approx(math.log(2))
    assert searching.least_rounds(stop) == 6  # 2^6 = 64 > 40
    assert searching.outcome(stop, [[1e6] * 5]) is None
    assert searching.outcome(stop, [[1e6] * 6]) == searching.KEEP


def test_both_clocks_must_show_the_gain():
    stop = {"sd": SD, "effect": EFFECT, "level": 0.025}
    assert searching.outcome(stop, [[0.02] * 12]) == searching.KEEP
    assert searching.outcome(stop, [[0.02] * 12, [0.0] * 12]) == searching.DROP
