"""Runs compared within blocks: held to another solution of the same model, to brute force and to integration."""

import itertools
import json
import math

import claimed
import least_squares
import numpy as np
import pytest
from claimed import results  # noqa: F401  a fixture
from comparing import FAILED, FAST, SLOW, a_run, compare, raced

from bench.base import stats
from bench.compare import comparison, design, selection
from bench.record.rows import row_of

scipy_stats = pytest.importorskip("scipy.stats")
from scipy import integrate, optimize  # noqa: E402


def in_order(order, **changes):
    """Rows of A and of B that start in this order, a minute apart."""
    runs = [a_run(arm, 10.0 + number / 100, number, **changes) for number, arm in enumerate(order)]
    return [[row_of(run) for run, arm in zip(runs, order, strict=True) if arm == name] for name in "AB"]


def rounds_of(order, **changes):
    """The runs of each round, by their minutes -> [(minute of A, minute of B)], or None."""
    pairs = design.rounds(*in_order(order, **changes))
    return pairs and [tuple(int(row["started_at"][14:16]) for row in pair) for pair in pairs]


# ---- rounds


def test_a_round_is_a_run_of_each_arm_whichever_is_first():
    assert rounds_of("ABBABAAB") == [(0, 1), (3, 2), (5, 4), (6, 7)]
    assert rounds_of("ABBAA") is None  # one arm has more
    assert rounds_of("ABBA", provenance="imported") is None  # a log does not say that they were planned
    assert rounds_of("ABBA", started_at=None) is None


@pytest.mark.parametrize("order", ["AABB", "AAAABBBB", "ABBBAABA", "ABABABAB", "BABABABABA", "ABABABABBA"])
def test_runs_that_a_drift_or_a_slot_can_tell_apart_are_no_rounds(order):
    assert rounds_of(order) is None


@pytest.mark.parametrize("order", ["AB", "ABBAAB", "ABABBA", "ABBABAABAB", "ABABBABAABBA"])
def test_each_arm_may_be_first_a_third_more_often(order):
    assert len(rounds_of(order)) == len(order) // 2


def test_two_of_three_arms_are_rounds_whatever_runs_between_them():
    order = "ABCCBACABBAC"
    runs = {name: [] for name in "ABC"}
    for number, arm in enumerate(order):
        runs[arm].append(row_of(a_run(arm, 10.0, number)))
    for first, second in itertools.combinations("ABC", 2):
        assert len(design.rounds(runs[first], runs[second])) == 4
        assert sorted(design.from_rows(runs[first], runs[second]).slots.values()) == list(range(8))


def test_a_failed_run_keeps_its_slot_and_one_beside_the_rounds_changes_nothing():
    a, b = raced(FAST, SLOW)
    failed = a_run("B", None, 2, base=FAILED)
    time = compare(a, [failed if run["seed"] == 2 else run for run in b])["time"]
    logs, slots = [np.log(FAST), np.log(SLOW[:1] + SLOW[2:])], least_squares.in_turns(5)
    expected = least_squares.clipped(logs, [slots[0], slots[1][:1] + slots[1][2:]])
    assert (time["rounds"], time["n"]) == (4, [5, 4])
    assert time["change_pct"] == pytest.approx(100 * math.expm1(expected.difference), abs=1e-9)
    assert compare(a, [*b, a_run("B", None, 30, base=FAILED)])["time"] == compare(a, b)["time"]


def test_fewer_than_four_rounds_or_none_are_compared_by_welchs_test():
    three = compare(*raced(FAST[:3], SLOW[:3]))["time"]
    uneven = compare(*raced(FAST, SLOW[:4]))["time"]
    for time, (a, b) in ((three, (FAST[:3], SLOW[:3])), (uneven, (FAST, SLOW[:4]))):
        expected = scipy_stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
        assert (time["rounds"], time["p_flips"], time["log_e"], time["clipped"]) == (None, None, None, 0)
        assert time["p"] == pytest.approx(expected.pvalue, rel=1e-9)


# ---- the fit


ORDERS = ["ABBA", "ABBABAAB", "ABABBABA", "BAABBAAB"]


def fitted(values, slots, is_sequential=False, compilations=(), alpha=0.05):
    keys = [[f"{arm}{slot}" for slot in arm_slots] for arm, arm_slots in zip("AB", slots, strict=True)]
    slots_by_key = {key: slot for arm_keys, arm_slots in zip(keys, slots) for key, slot in zip(arm_keys, arm_slots)}
    values = [list(map(float, arm_values)) for arm_values in values]
    return design.fit(values, keys, design.Design(slots_by_key, compilations, is_sequential), alpha)


@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(design, "HUBER_SDS", math.inf)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_rounds", [4, 5, 6, 7, 11, 20])
def test_the_fit_is_that_of_least_squares(unclipped, order, num_rounds):
    rng = np.random.default_rng(num_rounds)
    slots = least_squares.in_turns(num_rounds, order=order)
    shifts = np.array([[0.0], [0.005]]) + 0.001 * np.array(slots)
    values = 2.3 + shifts + rng.normal(0, 0.002, (2, num_rounds))
    fit, expected = fitted(values, slots), least_squares.plain(values, slots)
    assert (fit.test.difference, fit.test.se) == pytest.approx((expected.difference, expected.se), rel=1e-9)
    assert (fit.num_rounds, fit.test.df, fit.num_clipped) == (num_rounds, expected.df, 0)
    assert fit.test.p == pytest.approx(2 * scipy_stats.t.sf(abs(expected.t), expected.df), rel=1e-6)
    edges = [100 * math.expm1(edge) for edge in fit.interval()]
    assert edges == pytest.approx(expected.interval_pct(), rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_runs_that_are_missing_are_left_out_of_the_same_model(unclipped, seed):
    """A round may lack both runs, and a block of one run says nothing."""
    rng = np.random.default_rng(seed)
    slots = least_squares.in_turns(9, order="ABBABAAB")
    kept = [sorted(rng.choice(arm_slots, size, replace=False).tolist()) for arm_slots, size in zip(slots, (8, 7))]
    values = [rng.normal(0.003 * arm, 0.002, len(arm_slots)) for arm, arm_slots in enumerate(kept)]
    fit, expected = fitted(values, kept), least_squares.plain(values, kept)
    assert (fit.test.difference, fit.test.se) == pytest.approx((expected.difference, expected.se), rel=1e-9)
    assert fit.test.df == expected.df
    assert fit.num_rounds == len({slot // 2 for slot in kept[0]} & {slot // 2 for slot in kept[1]})


def test_fewer_than_four_complete_rounds_are_no_design():
    slots = [[0, 3, 4, 7], [1, 2, 5, 8]]
    values = [[1.0, 1.1, 1.2, 1.05], [1.1, 1.3, 1.2, 1.4]]
    fit = fitted(values, slots)
    assert (fit.num_rounds, fit.test) == (None, stats.welch(*values))
    assert fitted(values, slots, is_sequential=True).test.p is None  # no Welch at every look
    assert design.fit([[], [1.0]], [[], ["x"]], None, 0.05) is None


def test_the_means_have_the_change_as_their_ratio_and_are_those_of_the_middle_of_the_race():
    drifting = [10.0 * 1.01**slot for slot in range(10)]
    a, b = ([drifting[slot] * scale for slot in slots] for slots, scale in zip(least_squares.in_turns(5), (1.0, 1.02)))
    b[2] *= 1.001
    time = compare(*raced(a, b))["time"]
    mean_a_s, mean_b_s = time["mean_s"]
    assert mean_b_s / mean_a_s - 1 == pytest.approx(time["change_pct"] / 100, rel=1e-9)
    assert math.sqrt(mean_a_s * mean_b_s) == pytest.approx(10.0 * 1.01**4.5 * math.sqrt(1.02), rel=2e-4)
    # with times of equal means the means are those, whatever the order
    assert compare(*raced([10.0, 10.1] * 4, [10.1, 10.0] * 4))["time"]["mean_s"] == pytest.approx([10.05, 10.05], 1e-3)


# ---- outlying runs


@pytest.mark.parametrize("seed", range(40))
def test_clipped_runs_are_hubers_estimate_by_another_way_to_it(seed):
    """Reweighted least squares has the same fixed point as pseudo-values."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(4, 21))
    slots = least_squares.in_turns(num)
    values = [rng.normal(0, 0.002, num), rng.normal(0.003, 0.002, num)]
    values[seed % 2][rng.integers(num)] += rng.choice([-1, 1]) * rng.exponential(0.02)
    fit, expected = fitted(values, slots), least_squares.clipped(values, slots)
    assert (fit.num_clipped, fit.test.df) == (expected.num_clipped, expected.df)
    assert (fit.test.difference, fit.test.se) == pytest.approx((expected.difference, expected.se), rel=1e-6)


@pytest.mark.parametrize("seed", [117, 121, 143, 232])
def test_an_estimate_that_settles_slowly_is_waited_for(seed):
    """After 50 rounds of it these were 0.02 to 0.6 standard deviations of a run away."""
    rng = np.random.default_rng(seed)
    slots = least_squares.in_turns(5)
    values = [rng.normal(0, 0.002, 5), rng.normal(0.003, 0.002, 5)]
    values[1][rng.integers(5)] += rng.choice([-1, 1]) * rng.exponential(0.02)
    expected = least_squares.clipped(values, slots)
    assert fitted(values, slots).test.difference == pytest.approx(expected.difference, abs=1e-9)


# ---- a second opinion


@pytest.mark.parametrize("num", [1, 3, 6, 9])
def test_the_sign_flip_test_counts_all_signs(num):
    differences = np.random.default_rng(num).normal(0.5, 1, num)
    means = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=num)]
    expected = np.mean(np.array(means) >= abs(differences.sum()) - 1e-9)
    assert design.flips_p(differences.tolist()) == expected
    assert design.flips_p([1.0] * num) == 2 / 2**num
    assert design.flips_p([0.0] * num) == 1.0


def test_of_many_rounds_signs_are_drawn_and_the_same_ones_each_time():
    differences = np.random.default_rng(1).normal(0.55, 1, 14)
    signs = np.array(list(itertools.product((1, -1), repeat=14)))
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9)
    p = design.flips_p(differences.tolist())
    assert p == design.flips_p(differences.tolist()) == pytest.approx(exact, abs=4 * math.sqrt(exact / 10_000))
    assert design.flips_p([1.0] * 20) == pytest.approx(1 / 10_001)  # the observed signs are one of them
    for num, alpha, is_made in ((5, 0.05, False), (6, 0.05, True), (6, 0.025, False), (7, 0.025, True)):
        values = np.random.default_rng(num).normal(0, 1, (2, num))  # made only where its p can be below alpha
        assert (fitted(values, least_squares.in_turns(num), alpha=alpha).p_flips is not None) == is_made


def test_the_sentence_names_a_sign_flip_test_that_disagrees():
    a = [10.0, 10.01, 9.99, 10.02, 9.98, 10.0]
    b = [10.05, 10.06, 10.05, 10.08, 10.03, 9.99]
    outcome = compare(*raced(a, b))
    time = outcome["time"]
    assert time["p"] < 0.05 <= time["p_flips"]
    clause = f"; a sign-flip test over 6 rounds disagrees, p = {time['p_flips']:.2g}"
    assert clause in outcome["words"]
    assert "sign-flip" not in compare(*raced(a, [1.01 * value for value in a]))["words"]


# ---- the e-value


@pytest.mark.parametrize("t", [0.0, 0.7, -2.5, 6.0])
@pytest.mark.parametrize(("df", "variance"), [(3, 0.5), (8, 0.3), (30, 0.05)])
def test_the_e_value_is_the_bayes_factor_by_integration(t, df, variance):
    """The density of t where the difference over a run's sd is normal with PRIOR_SDS, over that where there is none."""
    spread = design.PRIOR_SDS / math.sqrt(variance)  # of the noncentrality
    by_prior, _ = integrate.quad(
        lambda shift: scipy_stats.nct.pdf(t, df, shift) * scipy_stats.norm.pdf(shift, 0, spread),
        -5 * spread, 5 * spread, limit=400, points=[t, 0.0], epsabs=1e-14,
    )  # fmt: skip
    expected = math.log(by_prior / scipy_stats.t.pdf(t, df))
    assert design.log_e_value(t, df, 1 + spread**2) == pytest.approx(expected, abs=1e-5)


def sequential_fit(num_rounds, difference, sd=0.002, seed=1):
    rng = np.random.default_rng(seed)
    slots = least_squares.in_turns(num_rounds, order="ABBABAAB")
    values = [rng.normal(difference * arm, sd, num_rounds) for arm in (0, 1)]
    return fitted(values, slots, is_sequential=True), least_squares.plain(values, slots)


def test_a_plan_that_looks_after_every_round_has_the_p_of_its_e_value_and_no_clipping():
    fit, expected = sequential_fit(8, 0.01)
    assert (fit.test.difference, fit.num_clipped) == (pytest.approx(expected.difference, rel=1e-9), 0)
    assert fit.test.p == min(1.0, math.exp(-fit.log_e))
    assert fit.test.p > 2 * scipy_stats.t.sf(abs(expected.t), expected.df)  # what looking costs
    assert sequential_fit(8, 0.0)[0].test.p == 1.0


@pytest.mark.parametrize("confidence", [0.95, 0.9, 0.99])
def test_the_interval_of_such_a_plan_holds_the_differences_that_its_p_does_not_reject(confidence):
    fit, _ = sequential_fit(10, 0.004)
    for edge in fit.interval(confidence):
        t = (fit.test.difference - edge) / fit.test.se
        assert math.exp(-design.log_e_value(t, fit.test.df, fit.shrinkage)) == pytest.approx(1 - confidence)


def test_its_test_of_equivalence_is_by_the_farther_edge():
    fit, _ = sequential_fit(16, 0.0005, sd=0.0005)
    low, high = -0.005, 0.005
    edges = [(fit.test.difference - edge) / fit.test.se for edge in (low, high)]
    expected = max(math.exp(-design.log_e_value(t, fit.test.df, fit.shrinkage)) for t in edges)
    assert fit.p_equivalent(low, high) == pytest.approx(expected) and expected < 0.05
    assert fit.p_equivalent(0.1, 0.2) == 1.0
    margin = fit.interval(1 - 2 * 0.05)
    assert fit.p_equivalent(margin[0] - 1e-12, margin[1] + 1e-12) == pytest.approx(0.1, rel=1e-6)


def test_too_few_rounds_for_any_interval_have_none():
    """4 rounds leave 4 degrees of freedom: no t has an e-value of 10,000."""
    fit, _ = sequential_fit(4, 0.01)
    assert (fit.interval(0.9999), fit.smallest_difference(0.0001)) == ((-math.inf, math.inf), None)
    assert fit.interval_pct(0.9999) is None


def test_the_smallest_difference_of_such_a_plan_is_found_in_four_of_five_races():
    fit, _ = sequential_fit(10, 0.0)
    smallest, se, df = fit.smallest_difference(0.05), fit.test.se, fit.test.df
    threshold = optimize.brentq(lambda t: design.log_e_value(t, df, fit.shrinkage) - math.log(20), 0, 1000)
    assert smallest == pytest.approx(se * (threshold + scipy_stats.t.ppf(0.8, df)), rel=1e-6)


# ---- compilations


def test_compilations_are_the_sample_where_their_runs_share_something():
    """Six rounds of three compilations give three means of two differences, and Student's test two degrees."""
    rng = np.random.default_rng(0)
    slots = least_squares.in_turns(6)
    lottery = np.repeat([0.0, 0.01, -0.004], 2)
    values = [rng.normal(0, 1e-4, 6), lottery + 0.005 + rng.normal(0, 1e-4, 6)]
    fit = fitted(values, slots, compilations=[0, 0, 1, 1, 2, 2])
    plain = least_squares.clipped(values, slots)
    cleaned = {slot: value for logs, arm_slots in zip(values, slots) for slot, value in zip(arm_slots, logs)}
    assert plain.num_clipped == 0
    cleaned = {slot: value - plain.trend * slot for slot, value in cleaned.items()}
    differences = [cleaned[b] - cleaned[a] for a, b in zip(*slots, strict=True)]
    expected = scipy_stats.ttest_1samp(np.mean(np.reshape(differences, (3, 2)), axis=1), 0)
    assert (fit.test.t, fit.test.p, fit.test.df) == pytest.approx((expected.statistic, expected.pvalue, 2))
    one_a_round = fitted(values, slots, compilations=range(6))
    assert one_a_round.test == fitted(values, slots).test and one_a_round.test.p < fit.test.p
    assert fit.p_flips is None and one_a_round.p_flips is not None  # rounds of a compilation share their sign


def test_one_compilation_of_several_has_no_test():
    slots = least_squares.in_turns(4)
    values = np.random.default_rng(0).normal(0, 1, (2, 4))
    fit = fitted(values, slots, compilations=[0, 0, 0, 0])
    assert (fit.test.p, fit.test.se, fit.log_e, fit.num_rounds) == (None, None, None, 4)


def test_a_plan_says_which_rounds_share_a_compilation():
    a, b = raced([10.0] * 6, [10.1] * 6)
    rows = [row_of(run) for run in a], [row_of(run) for run in b]
    for plan, expected in (
        ({"n": 6, "compilations": 3}, [0, 0, 1, 1, 2, 2]),
        ({"n": 12, "compilations": 3}, [0, 0, 0, 0, 1, 1]),  # half of its rounds are there
        ({"n": 6, "compilations": 1}, ()),
        ({"n": 6}, ()),
    ):
        assert design.from_rows(*rows, {"race_id": "r", "on": "time", **plan}).compilations == expected
    assert design.from_rows(*rows, {"race_id": "r", "on": "time", "n": 6, "sequential": {"first": 3}}).is_sequential


def test_a_lottery_of_compilations_is_judged_with_its_own_error():
    """A compilation shifts times by 0.4 % either way: 1 % is certain by rounds alone, but not by three compilations."""
    a = [10.0, 10.002, 9.999, 10.001, 10.0, 10.001]
    b = [value * (1.01 + shift) for value, shift in zip(a, (0.008, 0.008, -0.008, -0.008, 0.004, 0.004))]
    plan = {"race_id": "r", "n": 6, "on": "time"}
    outcomes = {m: compare(*raced(a, b), plan=plan | {"compilations": m}) for m in (1, 3)}
    assert (outcomes[1]["verdict"], outcomes[3]["verdict"]) == ("slower", "inconclusive")
    assert outcomes[3]["time"]["ci95_pct"][0] < 0 < outcomes[1]["time"]["ci95_pct"][0]


# ---- earlier races of the same arms


def test_alpha_is_what_earlier_races_leave_of_it():
    outcome = compare(*raced(FAST, SLOW), earlier_weight=0.25, plan={"n": 5, "looks": [3, 5], "alpha": 0.04})
    assert (outcome["time"]["alpha"], outcome["earlier_weight"]) == (0.005, 0.25)
    plan = {"n": 5, "looks": [3, 4, 5], "alpha": 0.04, "sequential": {"first": 3, "last": 5}, "on": "time"}
    assert compare(*raced(FAST, SLOW), plan=plan)["time"]["alpha"] == 0.04  # its looks share nothing


@pytest.fixture(scope="module")
def four_races(tmp_path_factory):
    """Folders of races of the same arms, the oldest first."""
    results = claimed.Results(tmp_path_factory.mktemp("raced") / "results")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return [results.race(monkeypatch, "n=2") for _ in range(4)]


@pytest.mark.parametrize(
    ("log_es", "expected"),
    [
        ([], None),
        ([-1.0], math.exp(-1)),
        ([3.0], 1.0),
        ([-1.0, 2.0, -0.5], math.exp(-1.5)),
        ([None, -1.0], math.exp(-1) / 2),
    ],
)
def test_each_earlier_race_multiplies_alpha_by_its_e_value(four_races, monkeypatch, log_es, expected):
    """At most 1, and half for a race without an e-value: it was abandoned, is gone, or was judged by Welch's test."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(four_races[0].parent.parent))
    monkeypatch.setattr(comparison.race_folder, "vouched", comparison.race_folder.read)  # this test edits them
    for folder, log_e in zip(four_races, log_es, strict=False):
        path = folder / "race.json"
        race = json.loads(path.read_text())
        race["result"]["against"]["B"]["time"]["log_e"] = log_e
        path.write_text(json.dumps(race))
    last = four_races[len(log_es)]
    plan = json.loads((last / "plan.json").read_text())
    a, b = comparison_arms(last, plan)
    earlier = comparison.earlier_races(a, b)
    assert (earlier and earlier.weight) == (expected and pytest.approx(expected))
    assert earlier is None or sum(earlier.verdicts.values()) == len(log_es)
    for arm in (a, b):
        arm.plan = plan | {"on": "loss"}  # an arm that is slower for certain is not for that reason worse or better
    assert getattr(comparison.earlier_races(a, b), "weight", 1.0) == pytest.approx(0.5 ** len(log_es))


def comparison_arms(folder, plan):
    arms = selection.arms_from_words([f"{folder}:A", f"{folder}:B"])
    for arm in arms:
        arm.plan = plan
    return arms
