"""A lower loss is not counted where the candidate spends more time outside its own clock: it may have trained there."""

import math
import random
from types import SimpleNamespace as Space

import comparing
import pytest
from benchmarks import contestants

from bench.base import stats, text_table
from bench.claims.rules import races
from bench.cli import compare
from bench.compare import clocks, effects, eligibility, wording
from bench.record.rows import row_of
from bench.record.validity import BUSY
from bench.report import verdicts

A_S, B_S = [10.0, 10.01, 9.99, 10.005], [10.005, 9.995, 10.0, 10.01]
HIGHER, LOWER = [3.0, 3.01, 2.99, 3.0], [2.9, 2.91, 2.89, 2.9]
USUAL_S, MORE_S = [0.3, 0.31, 0.3, 0.29], [0.8, 0.81, 0.8, 0.79]  # outside its own clock


def raced(b_off_s, a_off_s=USUAL_S, b_s=B_S, b_losses=LOWER, a_at_start_s=0.1, b_at_start_s=0.1, goal=None, **options):
    """Returns the Comparison of runs that spend so many seconds outside their own clocks."""
    both = comparing.raced(A_S, b_s, HIGHER, b_losses, **({"goal": goal} if goal else {}))
    pairs = zip(both, (a_off_s, b_off_s), (a_at_start_s, b_at_start_s), strict=True)
    arms = ([_clocked(*pair, at_s) for pair in zip(runs, off_s)] for runs, off_s, at_s in pairs)
    return comparing.compare(*arms, **options)


def _clocked(run, off_s, at_start_s):
    whole_s = run["metrics"]["train_s"] + off_s
    clock = {"outside_s": whole_s, "outside_validations_s": off_s, "validation_at_start_s": at_start_s, "unknown": None}
    return run | {"referee": {"clock": clock}}


def is_counted(comparison):
    return effects.NOT_COUNTED not in comparison["flags"]


def test_a_lower_loss_of_who_spends_more_outside_its_own_clock_is_not_counted():
    comparison = raced(MORE_S)
    outside = comparison["time"]["outside"]
    assert outside["extra_s"] == pytest.approx(0.5, abs=1e-3) and outside["extra_p"] < 1e-5
    assert outside["extra_ci95_s"] == pytest.approx([0.486, 0.514], abs=1e-3)  # 2.45 * 0.0082 * sqrt(2 / 4)
    assert comparison["verdict"] != "faster" and not is_counted(comparison)
    assert "B spends 0.500 s more outside its own clock than A (95 % interval 0.486 to 0.514 s" in comparison["words"]
    assert comparison["words"].endswith("so its lower val_loss is not counted")
    shown = verdicts.document_of((), [comparison | {"about": ["a", "b"]}]).terminal()
    assert "\nlower-loss-not-counted" in shown and "the candidate may have trained" in shown


def test_an_inconclusive_loss_says_which_change_would_have_been_seen():
    """Two arms of n=4 with a standard deviation of 0.008165: 2.381 of it, by the noncentral t distribution."""
    comparison = raced(USUAL_S, b_losses=[3.001, 3.011, 2.991, 3.001], on="loss")
    assert comparison["verdict"] == "inconclusive"
    assert comparison["val_loss"]["mde"] == pytest.approx(2.381 * 0.008165, rel=2e-3)
    assert "these runs can only detect changes above 0.019 nats (MDE, 80 % power)" in comparison["words"]
    table = verdicts.document_of((), [comparison | {"about": ["a", "b"]}]).terminal()
    assert next(line for line in table.splitlines() if line.startswith("val_loss ")).endswith("0.019 nats")
    shown = raced(USUAL_S, on="loss")
    assert shown["verdict"] == "better" and "MDE" not in shown["words"]
    halved = raced(USUAL_S, b_losses=[2.985, 2.995, 2.975, 2.985], on="loss", earlier_weight=0.2)  # p = 0.041
    why = "); p is not below the alpha of 0.01 (earlier races of these arms left 20 % of it); these runs can"
    assert halved["verdict"] == "inconclusive" and why in halved["words"]
    assert halved["words"].endswith(": add runs to detect smaller ones")
    assert ", p = 2.4e-06, below the alpha of 0.025, n = " in raced(USUAL_S, on="loss", earlier_weight=0.5)["words"]


def test_alpha_stands_beside_the_p_of_times_where_it_is_not_the_usual_one():
    arms = comparing.raced([10.0, 10.3, 9.8, 10.1, 9.9], [10.15, 10.3, 10.0, 10.15, 10.02])
    words = [comparing.compare(*arms, floor_pct=0.1, earlier_weight=weight)["words"] for weight in (1.0, 0.5, 0.2)]
    assert words[0].endswith("+0.27 to +1.42 %, p = 0.013, n = 5 and 5)")
    assert words[1].endswith("p = 0.013, below the alpha of 0.025, n = 5 and 5)") and words[1].startswith("B is 0.84 %")
    why = "p is not below the alpha of 0.01 (earlier races of these arms left 20 % of it); these runs can only"
    assert f"p = 0.013, n = 5 and 5); {why}" in words[2] and words[2].startswith("B against A: +0.84 %")


def test_an_inconclusive_race_says_how_many_runs_another_one_needs_at_the_alpha_that_is_left():
    plan = {"n": 4, "looks": [4], "alpha": 0.025, "name": "study"}
    b_losses = [2.9838, 2.9938, 2.9738, 2.9838]
    words = raced(USUAL_S, b_losses=b_losses, on="loss", plan=plan)["words"]
    why = "half of the study's, which also asks for the time to the same loss"
    assert f"p is not below the alpha of 0.025 ({why})" in words
    left = 0.025 * math.exp(effects.log_left(raced(USUAL_S, plan=plan)["time"], "loss"))
    assert left == pytest.approx(0.0125)
    n = stats.needed_n(0.0162, 0.01 * math.sqrt(2 / 3), left)
    again = f"race again with n={n} to detect one of this size, at the alpha of {text_table.two_digits(left)} that"
    assert again in words and stats.needed_n(0.0162, 0.01 * math.sqrt(2 / 3)) < n < 20
    same = raced(USUAL_S, b_losses=HIGHER, on="loss", plan=plan)["words"]
    assert "a new race needs far more runs from the start, at the alpha of" in same
    assert (wording.apart(0.02504, 0.025), wording.apart(0.025, 0.02504)) == ("0.02504", "0.025")


def test_one_of_several_candidates_needs_the_runs_of_the_alpha_that_holm_leaves_it():
    plan = {"n": 4, "looks": [4], "alpha": 0.05}
    compared = raced(USUAL_S, b_losses=[2.9838, 2.9938, 2.9738, 2.9838], on="loss", plan=plan)
    loss = compared["val_loss"]
    loss["p"], loss["p_holm"] = 0.03, 0.3  # of ten candidates
    n = stats.needed_n(loss["change"], 0.01 * math.sqrt(2 / 3), 0.1 * 0.025)
    assert f"race again with n={n} to detect one of this size" in wording._detects(compared, loss, "0.02 nats")


def test_what_the_verdict_on_the_loss_rests_on_is_its_own_test_and_not_that_of_times():
    shown = [
        verdicts.document_of((), [raced(USUAL_S, on=on) | {"about": ["a", "b"]}]).terminal() for on in ("time", "loss")
    ]
    lines = ("compared: time to the target", "noise floor: ", "design: 4 rounds, compared within blocks of two")
    assert all(line in shown[0] and line not in shown[1] for line in lines) and "question: loss" in shown[1]
    test = "\ntest: Welch's t on the final val_loss, 4 and 4 runs\n"
    assert test in shown[1] and test not in shown[0]


def test_it_is_neither_better_nor_are_its_steps_fewer():
    def in_fewer_steps(b_off_s):
        arms = comparing.raced(A_S, B_S, HIGHER, HIGHER, goal={"target_val_loss": 4.0, "stop_at_target": True})
        for run in arms[1]:
            run["metrics"] = run["metrics"] | {"num_steps": 3}
        clocked = [[_clocked(*pair, 0.1) for pair in zip(runs, off_s)] for runs, off_s in zip(arms, (USUAL_S, b_off_s))]
        return comparing.compare(*clocked, on="steps_to_target")

    for comparison in (raced(USUAL_S, on="loss"), in_fewer_steps(USUAL_S)):
        assert comparison["verdict"] == "better" and is_counted(comparison)
    for comparison, what in (
        (raced(MORE_S, on="loss"), "its lower val_loss is"),
        (in_fewer_steps(MORE_S), "its fewer steps are"),
    ):
        assert comparison["verdict"] == "inconclusive" and not is_counted(comparison)
        assert comparison["words"].endswith(f", so {what} not counted")


def test_it_is_not_counted_where_times_are_not_comparable_either():
    """A cheat: a clock that is set back once, or a budget, of which only the losses are compared."""
    for options, refusal in (({"goal": {"budget": {"time_s": 10.0}}}, "a budget of"), ({}, "timed steps differ")):
        comparisons = []
        for off_s in (USUAL_S, MORE_S):
            with pytest.MonkeyPatch.context() as patch:
                if not options:
                    only_steps = lambda a, b, names, on: [("time", "timed steps differ")]  # noqa: E731
                    patch.setattr(eligibility, "_finish_line", only_steps)
                comparisons.append(raced(off_s, on="loss", **options))
        honest, cheat = comparisons
        assert not honest["comparable"] and refusal in honest["reasons"][0]
        assert (honest["verdict"], is_counted(honest)) == ("better", True)
        assert (cheat["verdict"], is_counted(cheat)) == ("inconclusive", False)
        assert "B spends 0.500 s more outside its own clock than A (95 % interval 0.486 to 0.514" in cheat["words"]
        assert cheat["time"]["mean_s"] == [None, None] and cheat["time"]["outside"]["mean_s"] is None


@pytest.mark.parametrize(("budget", "refused"), [({"time_s": 10.0}, True), ({"tokens": 1000}, False)])
def test_what_makes_times_unlike_makes_losses_within_a_budget_of_time_unlike(budget, refused):
    """A cheat: a program that burns the cores beside A's runs alone, or a clock that is set back once in B."""
    arms = [[row_of(run) for run in runs] for runs in comparing.raced(A_S, B_S, HIGHER, LOWER, goal={"budget": budget})]
    assert eligibility.judge(*arms).loss_refusals == []
    for row in arms[0]:
        row["machine_doubts"] = [f"{BUSY} 1.27 CPU cores during the run"]
    answer = eligibility.judge(*arms)
    assert any("load that is mostly beside one arm biases the race" in why for why in answer.refusals)
    assert bool(answer.loss_refusals) == refused and not any(
        "of what they reach" in why for why in answer.loss_refusals
    )


@pytest.mark.parametrize(
    ("metrics", "goal"),
    [
        (lambda num_steps: {"num_steps": num_steps // 2}, {}),  # a larger model, whose first validation took as long
        (
            lambda num_steps: {"num_steps": 2 * num_steps},
            {"num_scores": 20},
        ),  # a faster one, which validates more often
    ],
)
def test_in_a_budget_a_larger_model_may_validate_longer_and_a_faster_one_more_often(monkeypatch, metrics, goal):
    budget, twice_s = {"budget": {"time_s": 10.0}}, [2 * seconds for seconds in USUAL_S]
    at_start_s = 0.1 if goal else 0.2
    assert not is_counted(raced(twice_s, on="loss", goal=budget, b_at_start_s=at_start_s))
    real = clocks.outside

    def other(arms, *args):
        rows = [dict(row, num_scores=10) for row in arms[0]]
        changed = [dict(row, num_scores=10) | metrics(row["num_steps"]) | goal for row in arms[1]]
        return real([rows, changed], *args)

    monkeypatch.setattr(clocks, "outside", other)
    assert is_counted(raced(twice_s, on="loss", goal=budget, b_at_start_s=at_start_s))


def test_it_is_counted_where_both_spend_as_much_and_nothing_is_said_of_a_loss_that_is_not_lower():
    assert is_counted(raced(USUAL_S)) and "outside its own clock than" not in raced(USUAL_S)["words"]
    assert is_counted(raced(MORE_S, b_losses=[3.1, 3.11, 3.09, 3.1]))
    assert is_counted(raced(USUAL_S, a_off_s=MORE_S))  # A spends more


def test_less_than_the_noise_floor_is_nothing():
    """0.1 % of 10 s."""
    spread_s = [0.3, 0.3001, 0.3, 0.2999]
    for extra_s, counted in ((0.008, True), (0.02, False)):
        comparison = raced([seconds + extra_s for seconds in spread_s], a_off_s=spread_s, b_s=[9.99, 9.98, 9.99, 9.98])
        assert comparison["time"]["outside"]["extra_p"] < 1e-5 and is_counted(comparison) == counted


def test_a_larger_model_may_validate_as_much_longer_as_it_steps_and_as_it_did_at_step_0():
    """Twice the time a step: twice the validations, or 2.3 times if the first one took as much longer."""
    twice = {"b_s": [2 * seconds for seconds in B_S]}
    as_steps, beyond = [2 * seconds for seconds in USUAL_S], [2.3 * seconds for seconds in USUAL_S]
    assert is_counted(raced(as_steps, **twice, b_at_start_s=0.2))
    assert not is_counted(raced(as_steps, **twice, b_at_start_s=0.1))  # it sleeps in its steps, and hides training
    assert is_counted(raced(beyond, **twice, b_at_start_s=0.23))
    assert not is_counted(raced(beyond, **twice, b_at_start_s=0.2))


def test_a_first_validation_that_is_stretched_excuses_a_quarter_of_the_others():
    for b_off_s, counted in ((0.36, True), (0.6, False)):
        spread_s = [b_off_s, b_off_s + 0.01, b_off_s, b_off_s - 0.01]
        assert is_counted(raced(spread_s, b_at_start_s=9.0)) == counted


@pytest.mark.slow
def test_validations_that_a_busy_machine_holds_up_accuse_nobody():
    """Three validations of 50 ms a run, each held up one time in five by 100 ms on average; races of 3 and of 5."""
    rng, false_alarms = random.Random(25), 0
    for num_races, n in ((400, 3), (400, 5)):
        for _ in range(num_races):
            arms = [[_noisy(rng) for _ in range(n)] for _ in range(2)]
            false_alarms += effects.spends_more_outside(effects.time(arms, 0.1, 0.5, stats.ALPHA))
    assert false_alarms <= 12  # 8 of EXTRA_ALPHA, and chance


def _noisy(rng):
    held_up_s = sum(rng.expovariate(10) for _ in range(3) if rng.random() < 0.2)
    off_s, train_s = 0.15 + rng.gauss(0, 0.005) + held_up_s, 1.45 * (1 + rng.gauss(0, 0.01))
    return {"train_s": train_s, "outside_s": train_s + off_s, "outside_validations_s": off_s}


def test_a_gate_on_the_loss_does_not_pass_a_lower_one_that_is_not_counted():
    loss = [("loss", None)]
    assert compare.exit_code(raced(USUAL_S), loss) == 0
    assert compare.exit_code(raced(MORE_S), loss) == 1


def test_who_spends_more_outside_its_own_clock_has_no_fewer_steps(claim_by_steps):
    passed, evidence = races.it_is_faster_than_its_baseline(claim_by_steps(raced(MORE_S)))
    assert not passed and "90 steps, its baseline 100, which are not counted: B spends 0.500 s more" in evidence
    longer_beside = claim_by_steps(raced(USUAL_S) | {"flags": [clocks.MORE_BESIDE]})
    passed, evidence = races.it_is_faster_than_its_baseline(longer_beside)
    assert passed and "look at its code: the candidate takes longer before or after its clock" in evidence


@pytest.fixture
def claim_by_steps(monkeypatch):
    """claim(comparison) makes it that of a race of 100 and 90 steps on a track that judges steps."""

    def claim(comparison):
        comparison["steps"] = [100, 90]
        state = Space(plan={"baseline": "A", "arms": {"A": {}, "B": {}}}, lines=[], folder=None)
        state.lines, state.folder = [{"event": "race_end", "race_json_sha256": "x"}], races.race_folder.Path()
        race = Space(arm="B", race_id="r", state=state, race_json={"result": {"against": {"B": comparison}}})
        monkeypatch.setattr(races.ledger, "sha256_of", lambda path: "x")
        monkeypatch.setattr(races, "_verdict_again", lambda *_: comparison)
        monkeypatch.setattr(races.race_folder, "about", lambda arms: dict.fromkeys(arms, ""))
        return Space(races=[race], track_rules=Space(rules=Space(judged="steps", statistic="t")))

    return claim


def test_the_benchmark_of_cheats_takes_only_a_refused_win_for_caught():
    assert "loss -0.100 nats not counted" in contestants.refused_win(raced(MORE_S))
    assert contestants.refused_win(raced(USUAL_S)) is None
    less = {"b_s": [0.97 * seconds for seconds in A_S], "b_losses": HIGHER}  # 3 % of each step
    refused = contestants.refused_win(raced([seconds + 0.3 for seconds in USUAL_S], **less))
    assert "-3.00 % by its own clock, -0.00 % by the launcher's" in refused and "not counted" not in refused
    assert contestants.refused_win(raced(USUAL_S, **less)) is None  # faster
