"""The verdict: what may be concluded from two groups of runs, and what not."""

import json
import math

import least_squares
import pytest
from comparing import FAILED, FAST, SLOW, a_run, compare, compare_arms, raced

from bench.base import stats
from bench.compare import effects, target, wording
from bench.config import compose, identity

QUIET = [10.0, 10.001, 9.999, 10.0005]


# p of 0.035
CLOSE_A, CLOSE_B = [10.01, 9.97, 9.95, 9.95, 10.0], [9.85, 9.92, 9.93, 9.93, 9.88]


def compared(a_times_s, b_times_s, **options):
    changes = options.pop("changes", {})
    return compare(*raced(a_times_s, b_times_s, **changes), **options)


def change_pct(a_times_s, b_times_s):
    """The change between runs raced A B B A, by another solution of the same model."""
    return pytest.approx(100 * math.expm1(least_squares.raced(a_times_s, b_times_s).difference), abs=1e-9)


# ---- the shape and the numbers


def test_the_json_has_what_programs_rely_on_in_every_case():
    """Where nothing can be said a number is null; a key is never missing, and no number is nan."""
    for a, b in ((FAST, SLOW), ([10.0], [11.0]), ([10.0, 10.0], [11.0, 11.0]), ([], [1.0]), ([], [])):
        comparison = compared(a, b)
        assert list(comparison)[:6] == ["comparable", "reasons", "time", "val_loss", "verdict", "flags"]
        assert set(comparison["time"]) >= {"change_pct", "ci95_pct", "p", "n", "cv_pct", "mde_pct"}
        assert json.loads(json.dumps(comparison, allow_nan=False)) == comparison
        assert comparison["verdict"] in ("faster", "slower", "equivalent", "inconclusive", "not_comparable")


def test_the_comparison_agrees_with_scipy():
    scipy_stats = pytest.importorskip("scipy.stats")
    a, b = [10.0, 10.02, 9.97, 10.04], [9.9, 9.91, 9.95]
    expected = scipy_stats.ttest_ind([math.log(x) for x in b], [math.log(x) for x in a], equal_var=False)
    time = compared(a, b)["time"]
    assert time["n"] == [4, 3]
    assert time["cv_pct"] == pytest.approx([100 * scipy_stats.variation(times_s, ddof=1) for times_s in (a, b)])
    assert time["p"] == pytest.approx(expected.pvalue, rel=1e-9)
    for name, confidence in (("ci95_pct", 0.95), ("ci90_pct", 0.90)):
        edges = expected.confidence_interval(confidence)
        assert time[name] == pytest.approx([100 * math.expm1(edges.low), 100 * math.expm1(edges.high)], rel=1e-9)


def test_a_difference_within_the_noise_floor_is_neither_faster_nor_slower():
    """0.48 % with p < 0.001 on a machine whose A/A runs differ by 0.49 %: shown to be there, not to be the code."""
    a = [10.0, 10.0005, 9.9995, 10.001, 9.999]
    b = [1.005 * value for value in a]
    assert compared(a, b, floor_pct=0.3)["verdict"] == "slower"
    a, b = [1.0, 1.0005, 0.9995, 1.0, 1.0], [1.0043, 1.0053, 1.0043, 1.0053, 1.0048]
    comparison = compared(a, b, floor_pct=0.49)
    assert comparison["time"]["p"] < 0.001
    assert comparison["time"]["change_pct"] == change_pct(a, b) == pytest.approx(0.48, abs=0.01)
    assert comparison["verdict"] == "inconclusive"
    assert "; the difference is not beyond the noise floor of 0.49 %" in comparison["words"]


def test_noise_is_no_margin_of_equivalence():
    """47.84 % slower with p = 0.011; a busy machine's floor of 77 % made that "B is as fast as A"."""
    a, b = [10.0, 10.6, 9.5], [14.8, 15.2]
    assert compared(a, b)["verdict"] == "slower"
    noisy = compared(a, b, floor_pct=77.0)
    assert (noisy["verdict"], noisy["time"]["floor_pct"], noisy["time"]["margin_pct"]) == ("inconclusive", 77.0, 0.5)
    assert "noise floor of 77 % is coarser than the margin of 0.5 %: measure on a quiet machine" in noisy["words"]
    assert "inconclusive" not in noisy["words"]  # the renderer says the word
    for change in (1.0, 1.0001, 0.999, 1.004):  # not even where the arms are alike: this machine cannot know
        noisy = compared(QUIET, [change * value for value in QUIET], floor_pct=0.51)
        assert noisy["verdict"] == "inconclusive"


def test_equivalent_is_inside_the_margin_of_the_plan_or_of_the_track():
    """Two one-sided tests against the margin: p_equivalent, from another solution of the same model."""
    scipy_stats = pytest.importorskip("scipy.stats")
    b = [1.0019 * value for value in QUIET]
    comparison = compared(QUIET, b, floor_pct=0.3)
    assert comparison["verdict"] == "equivalent"
    assert comparison["words"].startswith("B is as fast as A: +0.19 % is inside the margin of 0.5 % (95 % interval")
    test = least_squares.raced(QUIET, b)
    expected = scipy_stats.t.cdf((test.difference - math.log1p(0.005)) / test.se, test.df)
    assert comparison["time"]["p_equivalent"] == pytest.approx(expected, rel=1e-6)
    for margin_pct, verdict in ((0.195, "slower"), (0.2, "equivalent")):  # 0.19 % +- 0.007 with a confidence of 90 %
        plan = {"n": 4, "equivalence_margin_pct": margin_pct}
        assert compared(QUIET, b, floor_pct=0.1, plan=plan)["verdict"] == verdict
    assert compared(QUIET, b, floor_pct=0.3, plan={"n": 4})["verdict"] == "equivalent"  # a plan of before: 0.5 %


def test_a_margin_changes_no_config_id():
    config = compose.compose(["track=cpu_nano"])
    config_id = identity.config_id(config)
    assert config.track.rules.equivalence_margin_pct == target.rules_of("cpu_nano").equivalence_margin_pct == 0.5
    config.track.rules.equivalence_margin_pct = 2.0
    assert identity.config_id(config) == config_id


def test_equal_arms_with_little_spread_are_equivalent_and_with_much_inconclusive():
    quiet = compared([10.0, 10.001, 9.999, 10.0005], [10.0005, 9.9995, 10.001, 9.999])
    assert quiet["verdict"] == "equivalent"
    a, b = [10.0, 10.1, 9.9, 10.05], [10.05, 9.95, 10.1, 9.9]
    noisy = compared(a, b)
    assert noisy["verdict"] == "inconclusive"
    expected = least_squares.mde(least_squares.raced(a, b), alpha=0.05)
    assert noisy["time"]["mde_pct"] == pytest.approx(100 * math.expm1(expected), rel=1e-3)
    assert "these runs can only detect changes above" in noisy["words"]


def test_an_mde_whose_digits_say_nothing_is_given_as_over_a_thousand_per_cent():
    comparison = compared([10.0, 40.0], [11.0, 30.0])  # two runs a side: sums of squares with a degree of freedom each
    assert comparison["verdict"] == "inconclusive" and comparison["time"]["mde_pct"] > 1000
    assert "these runs can only detect changes above 1000 % (MDE, 80 % power): add runs" in comparison["words"]
    assert (wording.mde_text(1000.0), wording.mde_text(1000.1)) == ("1000 %", "over 1000 %")


def test_the_floor_is_never_below_a_tenth_of_a_per_cent():
    assert compared(FAST, SLOW)["time"]["floor_pct"] == 0.1
    assert compared(FAST, SLOW, floor_pct=0.02)["time"]["floor_pct"] == 0.1
    assert compared(FAST, SLOW, floor_pct=0.7)["time"]["floor_pct"] == 0.7
    assert compared(FAST, SLOW, floor_pct=250.0)["verdict"] == "inconclusive"
    assert "uncalibrated" in compared(FAST, SLOW)["flags"]
    assert "uncalibrated" not in compared(FAST, SLOW, floor_pct=0.02)["flags"]


# ---- few and strange runs


@pytest.mark.parametrize(("a", "b"), [([10.0], [20.0]), ([10.0], [20.0, 20.1, 20.2]), ([10.0, 10.1, 10.2], [20.0])])
def test_one_run_gives_no_verdict_however_large_the_change(a, b):
    outcome = compared(a, b)
    assert outcome["comparable"] is True
    assert outcome["verdict"] == "inconclusive"
    assert (outcome["time"]["p"], outcome["time"]["ci95_pct"], outcome["time"]["mde_pct"]) == (None, None, None)
    assert outcome["time"]["change_pct"] > 90
    assert "n=1" in outcome["flags"]
    assert outcome["words"].startswith("no verdict: one run has no spread")


def test_times_that_are_all_equal_are_copies_or_rounded_and_prove_nothing():
    for b in ([10.0, 10.0], [11.0, 11.0]):
        comparison = compared([10.0, 10.0, 10.0], b)
        assert comparison["verdict"] == "inconclusive"
        assert "no-spread" in comparison["flags"]
        assert comparison["time"]["p"] is None
        assert "not measured?" in comparison["words"]


def test_a_failed_run_is_counted_as_started_also_for_the_plan_and_has_no_time():
    a, b = raced(FAST, SLOW)
    failed = a_run("B", None, 30, base=FAILED)
    comparison = compare(a, [*b, failed])
    assert (comparison["started"], comparison["time"]["n"]) == ([5, 6], [5, 5])
    assert "runs-without-a-time" in comparison["flags"]
    assert comparison["verdict"] == "slower"
    assert "not-at-a-planned-look" not in compare(a, [*b[:4], failed], plan={"n": 5})["flags"]
    comparison = compare(a, [failed])
    assert (comparison["comparable"], comparison["verdict"]) == (False, "not_comparable")
    assert "B has no complete run with a time among 1" in comparison["reasons"][0]


# ---- excluded runs


def suspect(run, because="other programs used 0.80 CPU cores during the run (limit 0.1)", instrument=None):
    doubts = [{"rank": 0, "instrument": instrument, "doubt": because}] if instrument else []
    return run | {"validity": "suspect", "validity_reasons": [because], "doubts": doubts}


def test_runs_that_the_machine_disturbed_are_left_out_of_both_arms_and_the_result_is_shown_both_ways():
    a, b = raced([*FAST, 10.0], [*SLOW, 12.0])
    b[-1] = suspect(b[-1])
    a[0] = suspect(a[0])
    shown = compare(a, b)
    assert shown["time"]["n"] == [5, 5]
    assert shown["time_all"]["n"] == [6, 6]
    assert shown["time_all"]["change_pct"] > shown["time"]["change_pct"] + 0.04  # 12 s are clipped, not left out
    assert (shown["time_all"]["clipped"], shown["time"]["clipped"]) == (1, 0)
    assert [(run["arm"], run["run_id"]) for run in shown["excluded"]] == [("A", a[0]["run_id"]), ("B", b[-1]["run_id"])]
    assert "runs-excluded" in shown["flags"]


def test_a_program_that_burns_in_one_arms_runs_alone_leaves_no_verdict_on_time():
    """A saboteur beside the race knows when the other arm runs; it is named, whichever arm it serves."""
    a, b = raced(SLOW, FAST)
    a = [suspect(run, "other programs used 0.80 CPU cores during the run (limit 0.1): burner 0.78") for run in a]
    for comparison in (compare(a, b), compare(a[:2], b[:2]), compare(b, a)):
        assert (comparison["comparable"], comparison["verdict"]) == (False, "not_comparable")
        assert any("burner 0.78; load that is mostly beside one arm" in reason for reason in comparison["reasons"])
    everywhere = compare(a, [suspect(run) for run in b])  # a busy machine, which knows no arm
    assert everywhere["comparable"] and "suspect-runs" in everywhere["flags"]


def suspect_at(runs, *numbers):
    return [suspect(run, "the launcher was stopped") if at in numbers else run for at, run in enumerate(runs)]


def test_a_verdict_that_rests_on_runs_that_one_arm_may_have_excluded_is_none():
    """The cheat stops its launcher in its slow runs: 14 % slower in all of them, 18 % faster in those that are left."""
    a, b = raced([*FAST, 10.0], [8.2, 13.5, 13.4, 8.21, 13.5, 13.6])
    cheat = compare(a, suspect_at(b, 1, 2, 4, 5))
    assert (cheat["time"]["n"], cheat["verdict"]) == ([6, 2], "inconclusive")
    assert {"verdict-depends-on-exclusions", "one-sided-exclusions"} <= set(cheat["flags"])
    assert "0 of A and 4 of B failed or were disturbed, perhaps the bad ones (+14." in cheat["words"]
    a, b = raced(FAST, [*SLOW, 6.0])  # one run, which reverses the change
    assert compare(a, suspect_at(b, 5))["verdict"] == "inconclusive"
    a, b = raced(FAST[:3], [9.0, 9.01, 12.0])  # one of three
    assert compare(a, suspect_at(b, 2))["verdict"] == "inconclusive"


def test_an_arm_that_fails_in_its_slow_runs_gets_no_verdict():
    a, b = raced(FAST, [9.0, 9.01, 9.02, 9.0, 9.01])
    failed = [a_run("B", None, int(run["started_at"][14:16]), base=FAILED) for run in b]
    assert compare(a, [failed[0], *b[1:]])["verdict"] == "faster"  # one of five, which may happen
    both = compare(a, [failed[0], b[1], b[2], failed[3], b[4]])
    assert both["verdict"] == "inconclusive" and "0 of A and 2 of B failed or were" in both["words"]


def test_an_arm_that_fails_where_its_loss_is_bad_is_neither_better_nor_no_worse():
    """Half of the seeds of both arms end at 4.2, half at 4.3; one arm fails on its bad ones."""
    losses = [4.3, 4.2001, 4.2, 4.3001, 4.2002, 4.3002, 4.1999, 4.2998]
    a, b = raced([10.0] * 8, [10.0] * 8, a_losses=losses, b_losses=losses[::-1])
    failed = [a_run("B", None, int(run["started_at"][14:16]), base=FAILED) for run in b]
    picky = [run if run["metrics"]["val_loss"] < 4.25 else gone for run, gone in zip(b, failed, strict=True)]
    hidden = compare(a, picky, on="loss", target_val_loss=4.25)
    assert hidden["val_loss"]["p"] < 0.05 and "one-sided-exclusions" in hidden["flags"]
    assert (hidden["verdict"], hidden["val_loss"]["verdict"]) == ("inconclusive", "inconclusive")
    assert hidden["val_loss"]["below_target"][1] is False
    assert "more runs of B than of A failed, have no value or count as one" in hidden["words"]
    assert compare(picky, a, on="loss")["verdict"] == "inconclusive"  # the baseline's failures help it as little
    worse = [run | {"metrics": run["metrics"] | {"val_loss": 4.6 + run["seed"] / 1e4}} for run in b]
    worse = [run if place > 1 else gone for place, (run, gone) in enumerate(zip(worse, failed, strict=True))]
    assert compare(a, worse, on="loss")["verdict"] == "worse"  # although it failed


def test_runs_that_the_machine_disturbed_in_both_arms_cost_no_verdict():
    a, b = raced([*FAST[:4], 18.0, 11.5], [*SLOW[:4], 12.5, 20.5])
    comparison = compare(suspect_at(a, 4, 5), suspect_at(b, 4, 5))
    assert comparison["verdict"] == "slower" and "verdict-depends-on-exclusions" in comparison["flags"]
    a, b = raced(FAST, [*SLOW[:3], 10.4, 10.6])  # and where only B's were, it holds with them
    comparison = compare(a, suspect_at(b, 3, 4))
    assert comparison["verdict"] == "slower" and "one-sided-exclusions" in comparison["flags"]


def test_steps_to_the_target_count_the_disturbed_runs():
    goal = {"goal": {"stop_at_target": True, "target_val_loss": 5.0}}
    a, b = raced(FAST, SLOW, **goal)
    for run, num_steps in zip([*a, *b], [10, 11, 10, 11, 10, 20, 9, 20, 9, 9]):
        run["metrics"] |= {"num_steps": num_steps, "target_reached": True}
    assert compare(a, suspect_at(b, 0, 2), on="steps_to_target")["steps_to_target"]["mean"] == [10.4, 13.4]


@pytest.mark.parametrize(
    ("why", "instrument", "num_excluded"),
    [
        # a recompile in the timed region is part of how fast the code is; excluding it would flatter it
        ("2 recompiles in the timed region", "recompiles", 0),
        ("GPU 3 slowed down by heat in 12 % of samples", "telemetry", 1),
    ],
)
def test_a_doubt_about_the_machine_leaves_a_run_out_and_one_about_the_code_does_not(why, instrument, num_excluded):
    a, b = raced(FAST, [*SLOW, 12.0])
    b[-1] = suspect(b[-1], why, instrument=instrument)
    comparison = compare(a, b)
    assert [run["run_id"] for run in comparison["excluded"]] == [b[-1]["run_id"]] * num_excluded
    assert comparison["time"]["n"] == [5, 6 - num_excluded]
    assert ("suspect-records" in comparison["flags"]) == (num_excluded == 0)


def test_where_too_few_would_remain_all_are_counted_and_marked():
    a, b = raced(FAST, SLOW)
    b = [*map(suspect, b[:3]), *b[3:]]
    comparison = compare([suspect(run) for run in a], b)
    assert comparison["time"]["n"] == [5, 5]
    assert comparison["excluded"] == []
    assert "suspect-runs" in comparison["flags"]
    one_left = [suspect(run) if place else run for place, run in enumerate(a)]
    assert compare(one_left, b)["time"]["n"] == [5, 5]  # one run a side would give no verdict at all


# ---- several candidates, plans


def test_several_candidates_share_holms_adjusted_p():
    """Alone each of two has p of about 0.03; together the smaller is doubled, and neither is called faster."""
    a_runs, b_runs = raced(CLOSE_A, CLOSE_B)
    alone = compare(a_runs, b_runs)
    assert alone["verdict"] == "faster"
    assert 0.02 < alone["time"]["p"] < 0.05
    c_runs = [run | {"run_id": f"{run['run_id']}-c", "config_id": "cccccccc"} for run in b_runs]
    together = compare_arms({"A": a_runs, "B": b_runs, "C": c_runs})
    for name in "BC":
        comparison = together[name]
        assert comparison["time"]["p_holm"] == pytest.approx(2 * alone["time"]["p"])
        assert comparison["time"]["p_equivalent_holm"] == pytest.approx(min(1, 2 * alone["time"]["p_equivalent"]))
        assert comparison["verdict"] == "inconclusive"
        assert comparison["time"]["ci95_pct"] == alone["time"]["ci95_pct"]


def test_a_planned_race_has_a_verdict_only_at_its_planned_number_of_runs():
    plan = {"n": 5, "alpha": 0.05, "hash": "what else it says does not matter"}
    assert compared(FAST, SLOW, plan=plan)["verdict"] == "slower"
    for a, b in ((FAST[:4], SLOW[:4]), ([*FAST, 10.0], [*SLOW, 10.5]), (FAST, SLOW[:4])):
        comparison = compared(a, b, plan=plan)
        assert comparison["verdict"] == "inconclusive"
        assert "not-at-a-planned-look" in comparison["flags"]
        assert "but the plan looks at 5 per arm" in comparison["words"]


def test_declared_looks_share_the_level():
    plan = {"n": 10, "looks": [5, 10], "alpha": 0.05}
    assert compared(FAST, SLOW, plan=plan)["time"]["alpha"] == 0.025
    assert compared(CLOSE_A, CLOSE_B, plan={"n": 5})["verdict"] == "faster"  # p is between 0.025 and 0.05
    assert compared(CLOSE_A, CLOSE_B, plan=plan)["verdict"] == "inconclusive"
    assert "not-at-a-planned-look" in compared(FAST * 2, SLOW, plan=plan)["flags"]  # 10 and 5 are two looks, not one


# ---- losses


def test_not_worse_is_shown_only_where_the_margin_is_excluded(monkeypatch):
    losses = [4.2500, 4.2501, 4.2499, 4.2500, 4.2502]
    changes = {"a_losses": losses, "b_losses": [loss + 0.0005 for loss in losses]}
    by_default = "0.002 nats (the default; the track sets no loss_margin_nats)"
    track_settings = target.track_settings("cpu_nano") | {"rules": {"loss_margin_nats": 0.0004}}
    for options, verdict, margin in (
        ({}, "not_worse", by_default),
        ({"loss_margin_nats": 0.0005}, "worse", "0.0005 nats (as given)"),
        ({"plan": {"n": 5, "loss_margin_nats": 0.001}}, "not_worse", "0.001 nats (from the plan)"),
        ({"track_settings": track_settings}, "worse", "0.0004 nats (set by track cpu_nano)"),
    ):
        if track_settings := options.pop("track_settings", None):
            monkeypatch.setattr(target, "track_settings", lambda _: track_settings)
        comparison = compared(FAST, FAST, changes=changes, **options)
        assert comparison["val_loss"]["verdict"] == verdict
        assert f"margin for val_loss: {margin}" in wording.design_sentences(comparison)
    monkeypatch.undo()
    changes = {"a_losses": [4.2, 4.3, 4.25, 4.22, 4.28], "b_losses": [4.21, 4.3, 4.25, 4.22, 4.28]}
    assert compared(FAST, FAST, changes=changes)["val_loss"]["verdict"] == "inconclusive"


def test_repeats_of_one_seed_are_one_loss():
    """Five copies of one loss would have no spread and p = 0 against any target above it."""
    a, b = raced(FAST, SLOW)
    a = [run | {"seed": 7, "metrics": run["metrics"] | {"val_loss": 4.25}} for run in a]
    comparison = compare(a, b)
    assert comparison["val_loss"]["n"] == [1, 5]
    assert comparison["val_loss"]["p_target"][0] is None
    assert "same-seed" in comparison["flags"]
    assert comparison["time"]["n"] == [5, 5]  # times do not depend on the seed


def test_energy_memory_and_compile_time_are_compared_too_and_share_holms_p():
    a, b = raced(FAST, SLOW)
    for number, run in enumerate(a + b):
        run["metrics"] |= {"energy_j": 1000.0 + number, "peak_mem_gib": 0.5 + 0.01 * (number % 3)}
        run["metrics"]["compile_s"] = 30.0 + (number % 4)
    comparison = compare(a, b)
    ps = [comparison[name]["p"] for name in ("energy", "memory", "compile")]
    assert comparison["energy"]["change_pct"] == pytest.approx(0.5, abs=0.01)
    assert [comparison[name]["p_holm"] for name in ("energy", "memory", "compile")] == stats.holm(ps)
    joules = [[1000.0 + number for number in numbers] for numbers in (range(5), range(5, 10))]
    assert comparison["energy"]["change_pct"] == change_pct(*joules)
    assert comparison["energy"]["mean_j"] == pytest.approx([1002.0, 1007.0], abs=0.1)  # geometric, less the trend
    mean_a_j, mean_b_j = comparison["energy"]["mean_j"]
    assert 100 * (mean_b_j / mean_a_j - 1) == pytest.approx(comparison["energy"]["change_pct"], rel=1e-9)


# ---- a real pair

# KellerJordan/modded-nanogpt (MIT licence), records/track_1_short/2026-02-28_TransposeCopyBackward: six runs of the
# baseline and six of the pull request on one 8xH100 node on 2 March 2026, (start, train_time ms, val_loss) of each log.
BASELINE = [
    ("18:15", 88281, 3.2783),
    ("18:40", 88398, 3.2789),
    ("19:02", 88350, 3.2791),
    ("19:22", 88559, 3.2787),
    ("19:30", 88320, 3.2798),
    ("19:38", 88351, 3.2799),
]
THIS_PR = [
    ("18:02", 88324, 3.2781),
    ("18:29", 87853, 3.2793),
    ("18:50", 87826, 3.2793),
    ("19:12", 87874, 3.2795),
    ("19:26", 87912, 3.2789),
    ("19:34", 87824, 3.2784),
]


def test_a_public_pair_of_six_and_six_runs_comes_out_as_its_logs_say():
    """-0.50 % [-0.73, -0.27]; val_loss 3.27912 (sd 0.00063), 3.27892 (sd 0.00056), below 3.28: p 0.0091, 0.0026."""
    unknown = {"provenance": "imported", "session_id": None, "comparability_id": None, "seed": None}

    def run_of(arm, number, start, ms, loss):
        run = a_run(arm, ms / 1e3, number, val_loss=loss, goal={"target_val_loss": 3.28})
        return run | unknown | {"started_at": f"2026-03-02T{start}:00Z"}

    arms = [
        [run_of(arm, number, *log) for number, log in enumerate(logs)]
        for arm, logs in (("A", BASELINE), ("B", THIS_PR))
    ]
    comparison = compare(*arms)
    time, loss = comparison["time"], comparison["val_loss"]
    assert f"{time['change_pct']:.2f} [{time['ci95_pct'][0]:.2f}, {time['ci95_pct'][1]:.2f}]" == "-0.50 [-0.73, -0.27]"
    assert time["n"] == [6, 6]
    assert [f"{mean:.5f}" for mean in loss["mean"]] == ["3.27912", "3.27892"]
    assert [f"{sd:.5f}" for sd in loss["sd"]] == ["0.00063", "0.00056"]
    assert [f"{p:.4f}" for p in loss["p_target"]] == ["0.0091", "0.0026"]
    assert comparison["verdict"] == "faster"
    assert {"imported", "session-unknown", "uncalibrated"} <= set(comparison["flags"])
    assert not {"order-confounded", "order-unknown"} & set(comparison["flags"])  # they alternate


def test_the_sentence_alone_says_what_the_verdict_is_and_says_it_once():
    noisy = compared([10.0, 10.1, 9.9, 10.05], [10.05, 9.95, 10.1, 9.9])
    assert wording.standalone_verdict(noisy) == f"inconclusive: {noisy['words']}"
    assert "inconclusive" not in noisy["words"]
    assert wording.standalone_verdict(compared(FAST, SLOW)).startswith("B is 4.98 % slower than A")
    assert wording.standalone_verdict(compared([10.0], [20.0])).startswith("no verdict: one run has no spread")
    other = compared(FAST, SLOW[:0])
    assert wording.standalone_verdict(other) == "not comparable: B has no complete run with a time among 0"
    older = {"verdict": "inconclusive", "words": "inconclusive: +1.10 % (95 % interval -1.0 to +3.2 %)"}
    assert wording.standalone_verdict(older) == older["words"]


def steps_of(*train_losses):
    return [{"step": step, "train_loss": loss, "val_loss": None} for step, loss in enumerate(train_losses, 1)]


def test_runs_with_the_same_training_losses_are_one_run_whatever_their_seeds_and_validations():
    a, b = raced([10.0, 10.1, 10.2], [10.0, 10.1, 10.2], [4.24, 4.25, 4.26], [4.25, 4.26, 4.24])
    losses = [5.0 - 0.1 * step for step in range(8)]
    for run in a:
        run["steps"] = steps_of(*losses)
    for number, run in enumerate(b):
        run["steps"] = steps_of(*losses[:7], losses[7] + 1e-9 * number)
    val_loss = compare(a, b)["val_loss"]
    assert val_loss["n"] == [1, 3] and val_loss["mean"][0] == pytest.approx(4.25)
    sentence = "3 runs of A have bit-identical training losses: they count as one loss, "
    assert val_loss["remarks"] == [f"{sentence}whatever their seeds"]
    assert val_loss["remarks"][0] in wording.loss_sentences(compare(a, b)["val_loss"] | {"change": 0.0}, ["A", "B"])
    assert (val_loss["p"], val_loss["verdict"]) == (None, "unknown")


def test_many_runs_with_the_same_training_losses_are_one_run_too():
    a, b = raced([10.0] * 60, [10.0] * 60, [4.25] * 60, [4.2] * 60)
    for run in b:
        run["steps"] = steps_of(*[5.0 - 0.1 * step for step in range(8)])
    assert compare(a, b)["val_loss"]["n"] == [60, 1]


def test_bad_runs_that_count_as_one_give_their_arm_nothing():
    """A cheat: where val_loss is bad, the same training losses are printed, and the bad runs weigh as one."""
    losses = [4.2, 4.2001, 4.2002, 4.2003, 4.3, 4.3001, 4.3002, 4.3003]
    a, b = raced([10.0] * 8, [10.0] * 8, losses, losses)
    assert compare(a, b, on="loss")["verdict"] == "inconclusive"
    for number, run in enumerate(a + b):
        run["steps"] = steps_of(*[5.0 - 0.1 * step - 1e-9 * number for step in range(8)])
    for run in b[4:]:
        run["steps"] = steps_of(*[9.0] * 8)
    folded = compare(a, b, on="loss")
    assert folded["val_loss"]["n"] == [8, 5] and folded["val_loss"]["flattered"] == 1
    assert "more runs of B than of A failed, have no value or count as one" in folded["words"]


def test_a_run_that_is_run_again_and_one_that_failed_are_two_of_an_arm():
    for started, left, run_again, arm in (
        ((5, 5), (5, 4), (0, 0), None),
        ((5, 5), (5, 4), (0, 1), 1),
        ((5, 5), (5, 4), (1, 1), None),
        ((5, 5), (4, 5), (1, 0), 0),
        ((5, 5), (5, 5), (0, 3), None),  # whoever interrupts a race has not seen its results
        ((2, 2), (2, 1), (0, 0), 1),
    ):
        assert effects.flattered(started, left, run_again) == arm
    a, b = raced([10.0] * 5, [9.0, 9.01, 9.02, 9.0, 9.03])
    b[2] |= {"status": "failed", "failure": {"kind": "x"}}
    assert compare(a, b)["verdict"] == "faster" and compare(a, b, run_again=(0, 1))["verdict"] == "inconclusive"


def test_a_p_that_is_too_small_to_print_is_below_a_bound():
    assert [wording.p_sentence(p) for p in (0.0114, 3e-20, None)] == ["p = 0.011", "p < 1e-16", "p = -"]
