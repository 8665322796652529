"""modded-nanogpt's rule of track 3: the first step at which the mean of all runs is below the target, and which result
is better than another.  https://github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/README.md
"""

import random

import pytest

from bench.compare import target
from bench.compare.target import StepMean


def passing_step(*curves):
    passing = target.first_passing(curves, 3.28, 0.004)
    return passing and passing.step


def test_the_first_step_counts_at_which_the_mean_of_all_runs_passes():
    a = {3100: 3.2790, 3125: 3.2775, 3150: 3.2760}
    b = {3100: 3.2780, 3125: 3.2768, 3150: 3.2750}
    # (3.28 - 3.2785) * 2**0.5 = 0.0021, (3.28 - 3.27715) * 2**0.5 = 0.0040305, and 0.0064
    assert target.first_passing([a, b], 3.28, 0.004) == StepMean(3125, 2, pytest.approx(3.27715))


@pytest.mark.parametrize(
    ("n", "mean", "passes"),
    [(1, 3.276, True), (1, 3.2761, False), (4, 3.278, True), (4, 3.2781, False), (16, 3.279, True), (1, 3.28, False)],
)
def test_one_run_needs_3_276_and_sixteen_need_3_279(n, mean, passes):
    assert (passing_step(*[{3000: mean}] * n) == 3000) is passes


def test_runs_that_stopped_early_are_judged_at_the_steps_that_all_of_them_reached():
    whole, stopped = {2720: 3.2772, 2725: 3.2700, 2900: 3.26}, {2720: 3.2770}
    assert passing_step(whole, stopped) == 2720
    assert passing_step(whole, {2700: 3.2700}) is None  # validated at no step of the other's
    assert passing_step() is None


def test_upstreams_own_examples_of_two_results_are_the_same_numbers():
    eleven, thirteen = StepMean(3225, 16, 3.2785), StepMean(3210, 10, 3.2785)
    assert target.pairwise_margin_nats(thirteen, eleven, 0.0045) == pytest.approx(0.00167, abs=5e-6)
    six, twelve = StepMean(3375, 20, 3.2788), StepMean(3325, 20, 3.2790)
    assert target.pairwise_margin_nats(twelve, six, 0.0045) == pytest.approx(0.00648, abs=5e-6)
    eight = StepMean(3250, 10, 3.2778)  # its README counts 10 runs in its table, and 16 in this example: 0.0027
    assert target.pairwise_margin_nats(thirteen, eight, 0.0045) == pytest.approx(0.00246, abs=5e-6)


def test_the_p_values_of_pairs_that_upstreams_table_gives_are_the_same():
    eight, nine, eleven = StepMean(3250, 10, 3.2778), StepMean(3250, 8, 3.2771), StepMean(3225, 16, 3.2785)
    thirteen, fourteen, sixteen = StepMean(3210, 10, 3.2785), StepMean(3150, 4, 3.2776), StepMean(3125, 8, 3.2784)
    for new, old, p in [
        (eleven, nine, 0.69),
        (thirteen, eleven, 0.099),
        (thirteen, eight, 0.029),
        (sixteen, fourteen, 0.34),
    ]:
        margin_nats = target.pairwise_margin_nats(new, old, 0.0045)
        assert target.z_p(margin_nats, 0.0013) == pytest.approx(p, abs=0.005)


def test_a_mean_at_the_target_passes_hardly_more_often_however_many_validations_are_looked_at():
    """4,000 results of four runs: 4.2 pass by chance at one validation each.

    Spreads as in upstream's logs: runs 0.0013 nats, which the rule assumes, validations within a run 0.00003.
    """
    chance = random.Random(3)
    num_passed = {1: 0, 20: 0}
    for _ in range(4000):
        offsets = [chance.gauss(3.28, 0.0013) for _ in range(4)]
        curves = [{step: offset + chance.gauss(0, 0.00003) for step in range(20)} for offset in offsets]
        for count in num_passed:
            num_passed[count] += (
                passing_step(*[{step: curve[step] for step in range(count)} for curve in curves]) is not None
            )
    assert num_passed[1] <= num_passed[20] <= 12
