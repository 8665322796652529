"""What a comparison asks, the answer to each question, and what --fail-on makes of it."""

import math

import pytest
from comparing import FAST, SLOW, a_run, compare, compare_arms, raced, write

from bench.base import stats
from bench.cli import compare as cli
from bench.compare import questions

A_LOSSES = [4.250, 4.252, 4.248, 4.251, 4.249]
LOWER = [loss - 0.02 for loss in A_LOSSES]
HIGHER = [loss + 0.02 for loss in A_LOSSES]
CLOSE = [loss + 0.0001 for loss in reversed(A_LOSSES)]
NOISY = [4.15, 4.35, 4.25, 4.2, 4.3]


def ask(on, a_times_s=FAST, b_times_s=FAST[::-1], a_losses=A_LOSSES, b_losses=LOWER, **options):
    return compare(*raced(a_times_s, b_times_s, a_losses, b_losses), on=on, **options)


# ---- the question


def test_the_verdict_answers_the_question_of_the_plan_or_of_the_user_and_the_others_stand_below():
    for on, verdict in (("time", "slower"), ("loss", "better")):
        outcome = ask(on, b_times_s=SLOW)
        assert (outcome["on"], outcome["verdict"]) == (on, verdict)
        assert {name: judged["verdict"] for name, judged in outcome["answers"].items()} == {
            "time": "slower",
            "loss": "better",
        }
        assert outcome["words"] == outcome["answers"][on]["words"]
        assert ask(None, b_times_s=SLOW, plan={"n": 5, "on": on})["verdict"] == verdict
    assert ask(None, b_times_s=SLOW)["on"] == "time"
    assert ask("time", b_times_s=SLOW, plan={"n": 5, "on": "loss"})["verdict"] == "slower"  # the user's comes first
    assert set(questions.QUESTIONS) == {"time", "loss", "time_to_target", "steps_to_target"}


# ---- losses


@pytest.mark.parametrize(
    ("b_losses", "margin_nats", "verdict"),
    [
        (LOWER, 0.002, "better"),
        (HIGHER, 0.002, "worse"),
        (CLOSE, 0.004, "equivalent"),
        (CLOSE, 0.0002, "inconclusive"),
        (NOISY, 0.002, "inconclusive"),
        (LOWER, 0.05, "equivalent"),  # inside the margin, whatever its sign and p
    ],
)
def test_the_verdict_on_losses(b_losses, margin_nats, verdict):
    outcome = ask("loss", b_losses=b_losses, loss_margin_nats=margin_nats)
    loss = outcome["val_loss"]
    assert (outcome["verdict"], outcome["answers"]["loss"]["verdict"]) == (verdict, verdict)
    expected = stats.welch(A_LOSSES, b_losses)
    assert (loss["change"], loss["p"]) == pytest.approx((expected.difference, expected.p))
    assert loss["p_equivalent"] == pytest.approx(stats.equivalence_p(expected, -margin_nats, margin_nats))
    if verdict in ("better", "worse"):
        assert outcome["words"].startswith(f"B is {verdict} than A: {expected.difference:+.5f} nats of val_loss (95 %")
    if verdict == "equivalent":
        assert f"is inside the margin of {margin_nats:g} nats" in outcome["words"]


def loss(**changes):
    facts = {"verdict": "inconclusive", "reasons": [], "change": -0.1, "p": 0.001, "p_equivalent": 0.9}
    return facts | changes


@pytest.mark.parametrize(
    ("val_loss", "verdict"),
    [
        (loss(), "better"),
        (loss(change=0.1), "worse"),
        (loss(p=0.05), "inconclusive"),  # p must be below alpha
        (loss(p_equivalent=0.04), "equivalent"),
        (loss(p_holm=0.2), "inconclusive"),
        (loss(p=0.2, p_holm=0.001), "better"),
        (loss(p_equivalent=0.04, p_equivalent_holm=0.08), "better"),
        (loss(p_holm=None, p_equivalent_holm=None), "better"),
        (loss(verdict="waived", change=0.0, p=None), "equivalent"),
        (loss(verdict="unknown"), "inconclusive"),
        (loss(verdict="unknown", reasons=["validation data differ"]), "not_comparable"),
        (loss(p=None), "inconclusive"),
        (loss(change=None), "inconclusive"),
        (loss(p_equivalent=None), "better"),
    ],
)
def test_each_way_to_a_verdict_on_losses(val_loss, verdict):
    assert questions.loss_answer(val_loss, 0.05, is_at_a_look=True) == verdict
    away = {"not_comparable": "not_comparable", "equivalent": verdict if val_loss["verdict"] == "waived" else None}
    assert questions.loss_answer(val_loss, 0.05, is_at_a_look=False) == (away.get(verdict) or "inconclusive")


def test_several_candidates_share_holms_p_of_their_losses():
    a_runs, b_runs = raced(FAST, FAST[::-1], A_LOSSES, [loss - 0.0025 for loss in A_LOSSES])
    alone = compare(a_runs, b_runs, on="loss", loss_margin_nats=1e-4)
    assert 0.025 < alone["val_loss"]["p"] < 0.05 and alone["verdict"] == "better"
    c_runs = [run | {"run_id": f"{run['run_id']}-c", "config_id": "cccccccc"} for run in b_runs]
    together = compare_arms({"A": a_runs, "B": b_runs, "C": c_runs}, on="loss", loss_margin_nats=1e-4)
    for outcome in together.values():
        assert outcome["val_loss"]["p_holm"] == pytest.approx(2 * alone["val_loss"]["p"])
        assert outcome["verdict"] == "inconclusive" and "after Holm" in outcome["words"]
        assert "add runs to detect smaller ones" in outcome["words"]  # without a plan
        assert "p counts after Holm's correction for several candidates, without which these" in outcome["words"]


def test_losses_that_cannot_be_compared_are_not_comparable_whatever_the_times_are():
    a, b = raced(FAST, SLOW, A_LOSSES, LOWER)
    outcome = compare(a, [run | {"goal": run["goal"] | {"val_tokens": 4096}} for run in b], on="loss")
    assert (outcome["verdict"], outcome["words"]) == ("not_comparable", "numbers of validation tokens differ")
    assert (outcome["comparable"], outcome["answers"]["time"]["verdict"]) == (True, "slower")
    other = compare(a, [run | {"session_id": "1" * 16} for run in b], on="loss")
    assert (other["verdict"], other["comparable"]) == ("better", False)  # a loss is no matter of the session


def test_losses_without_a_spread_have_no_verdict_and_the_same_trajectories_are_equivalent():
    outcome = ask("loss", b_losses=[4.2] * 5, a_losses=[4.3] * 5)
    assert outcome["verdict"] == "inconclusive" and outcome["words"].startswith("no verdict: the losses have no spread")
    outcome = ask("loss", identical_losses=True)
    assert (outcome["verdict"], outcome["words"]) == ("equivalent", "B's losses are bit-identical to A's")


# ---- the way to a target


def test_time_to_a_target_is_the_answer_on_time_where_both_reach_it():
    outcome = ask("time_to_target", b_times_s=SLOW)
    assert (outcome["kind"], outcome["verdict"]) == ("time_to_target", "slower")
    assert list(outcome["answers"]) == ["time_to_target", "time", "loss"]
    missed = ask("time_to_target", b_times_s=SLOW, b_losses=[4.6, 4.61, 4.59, 4.6, 4.62])
    assert (missed["kind"], missed["verdict"]) == ("ms_per_step", "inconclusive")
    assert missed["answers"]["time"]["verdict"] == "slower"
    assert missed["words"].startswith("no time to a target: it compares ms per step at equal steps")


def row(num_steps, val_loss=4.0, **changes):
    return {"num_steps": num_steps, "score": val_loss, "stop_at_target": False, "target_reached": None} | changes


def stopped(num_steps, target_reached=True):
    return row(num_steps, stop_at_target=True, target_reached=target_reached)


def below(a, b, target=4.5):
    return {"target": target, "below_target": [a, b]}


BELOW = below(True, True)


@pytest.mark.parametrize(
    ("a", "b", "losses", "why"),
    [
        ([row(90)] * 2, [row(80)] * 2, below(None, None, target=None), "the arms have no common target"),
        ([row(90)] * 2, [row(80)] * 2, below(True, False), "not shown to be below the target"),
        ([row(90)] * 2, [row(80)] * 2, below(None, None), "not shown to be below the target"),
        ([row(90)] * 2, [row(80), row(81)], BELOW, "the runs of an arm took different numbers of steps"),
        ([row(90)] * 2, [row(80)], BELOW, "one run has no spread"),
        ([stopped(90)] * 2, [stopped(80), stopped(99, False)], BELOW, "1 runs did not reach the target"),
        ([stopped(90)], [stopped(80)], BELOW, "one run has no spread"),
        ([], [row(80)] * 2, below(None, None, target=None), "the arms have no common target"),
        ([row(90)] * 2, [row(80)] * 2, BELOW, None),
        ([stopped(90), stopped(92)], [stopped(80)] * 2, BELOW, None),
    ],
)
def test_why_steps_to_a_target_cannot_be_compared(a, b, losses, why):
    steps = questions.steps_to((a, b), losses, 0.05)
    assert steps["why"] == why or why in steps["why"]
    assert why is None or questions.steps_answer(steps, is_at_a_look=True) == "inconclusive"
    expected = [sum(row["num_steps"] for row in rows) / len(rows) if rows else None for rows in (a, b)]
    assert steps["mean"] == expected


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([100] * 4, [90] * 4, "better"),
        ([90] * 4, [100] * 4, "worse"),
        ([100] * 3, [90] * 3, "inconclusive"),  # one order of six runs in ten
        ([90] * 3, [90] * 3, "equivalent"),
        ([100, 101, 99], [90, 91, 89], "better"),
        ([90, 91, 89], [100, 101, 99], "worse"),
        ([100, 120, 80], [95, 115, 75], "inconclusive"),
    ],
)
def test_the_verdict_on_steps_to_a_target(a, b, verdict):
    steps = questions.steps_to([[stopped(num) for num in arm_steps] for arm_steps in (a, b)], BELOW, 0.05)
    assert questions.steps_answer(steps, is_at_a_look=True) == verdict
    assert questions.steps_answer(steps, is_at_a_look=False) == "inconclusive"
    is_constant = len({*a}) == len({*b}) == 1 and a != b
    assert steps["p"] == (2 / math.comb(2 * len(a), len(a)) if is_constant else stats.welch(a, b).p)
    assert questions.steps_answer(None, is_at_a_look=True) == "inconclusive"


def test_the_sentence_on_steps_to_a_target():
    a, b = raced(FAST, SLOW, A_LOSSES, LOWER)
    for run in b:
        run["metrics"] = run["metrics"] | {"num_steps": 3}
    outcome = compare(a, b, on="steps_to_target")
    assert (outcome["verdict"], outcome["answers"]["time"]["verdict"]) == ("better", "slower")
    assert outcome["words"] == "B needs fewer steps than A to the target: 4 and 3 (the same number in every run)"
    assert compare(b, a, on="steps_to_target")["words"].startswith("B needs more steps than A")
    above = compare(a, b, on="steps_to_target", target_val_loss=4.24)
    why = "the mean val_loss of both arms is not shown to be below the target 4.24"
    assert (above["verdict"], above["words"]) == ("inconclusive", f"steps to the target: 4 and 3, not compared: {why}")
    assert compare(a, b)["steps_to_target"] is None  # nobody asked
    early = compare(a, b, plan={"n": 6, "on": "steps_to_target"})
    assert (early["verdict"], early["words"][:42]) == ("inconclusive", "no verdict: 5 and 5 runs were started, but")


def test_the_looks_and_the_candidates_of_a_race_share_the_alpha_of_its_steps():
    """100 against 96.4 +- 2 steps have p = 0.025."""
    goal = {"target_val_loss": 4.5, "stop_at_target": True}
    a, b = raced(FAST, SLOW, A_LOSSES, A_LOSSES, goal=goal)
    for runs, all_steps in ((a, [98, 99, 100, 101, 102]), (b, [94, 95, 96, 98, 99])):
        for run, num_steps in zip(runs, all_steps, strict=True):
            run["metrics"] = run["metrics"] | {"num_steps": num_steps, "target_reached": True}
    plan = {"n": 5, "on": "steps_to_target"}
    alone = compare(a, b, plan=plan)
    assert 0.0125 < alone["steps_to_target"]["p"] < 0.025 and alone["verdict"] == "better"
    looks = {"looks": [2, 3, 4, 5], "sequential": {"first": 2, "last": 5}}
    outcome = compare(a, b, plan=plan | looks)
    assert (outcome["verdict"], outcome["steps_to_target"]["alpha"], outcome["time"]["alpha"]) == (
        "inconclusive",
        0.0125,
        0.05,
    )
    others = {name: [run | {"run_id": f"{run['run_id']}-{name}"} for run in b] for name in "CDE"}
    for outcome in compare_arms({"A": a, "B": b, **others}, plan=plan).values():
        assert (outcome["verdict"], outcome["steps_to_target"]["alpha"]) == ("inconclusive", 0.0125)


# ---- exit codes


def exits(outcome, *conditions, shown=False):
    return cli.exit_code(outcome, cli.conditions(conditions), shown)


def test_any_verdict_can_be_one_to_fail_on():
    comparisons = {
        "faster": ask("time", SLOW, FAST),
        "slower": ask("time", FAST, SLOW),
        "equivalent": ask("time", FAST, FAST),
        "inconclusive": ask("time", [10.0, 10.5, 9.6, 10.2, 9.9], [9.9, 10.2, 9.6, 10.5, 10.0]),
        "better": ask("loss"),
        "worse": ask("loss", b_losses=HIGHER),
    }
    for verdict, of in comparisons.items():
        assert of["verdict"] == verdict
        for kind in ("faster", "better", "worse", "equivalent", "inconclusive"):
            assert exits(of, kind) == int(kind == verdict), (verdict, kind)
        assert exits(of) == 0
    assert exits(comparisons["better"], "worse,equivalent", "better") == 1
    assert exits(ask("loss", b_losses=HIGHER), "loss") == exits(ask("time", b_losses=HIGHER), "loss") == 1


def test_a_gate_on_slower_asks_the_times_whatever_the_question_is(capsys):
    outcome = ask("loss", b_times_s=SLOW)
    assert outcome["verdict"] == "better"
    assert exits(outcome, "slower:1%") == exits(outcome, "slower:1%", shown=True) == 1
    assert "a slowdown of B by more than 1 % is shown" in capsys.readouterr().err
    assert exits(outcome, "slower:9%") == 0


def one_after_the_other(a_losses=A_LOSSES, b_losses=LOWER, **options):
    a = [a_run("A", *facts, val_loss=loss) for *facts, loss in zip(FAST, range(5), a_losses)]
    b = [a_run("B", *facts, val_loss=loss) for *facts, loss in zip(SLOW, range(20, 25), b_losses)]
    return compare(a, b, **options)


def test_arms_that_were_not_interleaved_pass_no_gate_and_fail_none(capsys):
    outcome = one_after_the_other()
    assert (outcome["verdict"], exits(outcome)) == ("not_interleaved", 0)
    for kind in ("slower", "slower:0.5%", "slower:50%", "faster", "equivalent", "inconclusive", "loss"):
        assert exits(outcome, kind) == 2, kind
    assert "these arms were not interleaved, so only the machine may have changed" in capsys.readouterr().err


def test_a_loss_does_not_drift():
    """Arms one after the other have comparable losses; only what asks their times too is refused."""
    outcome = one_after_the_other(on="loss")
    assert (outcome["verdict"], outcome["answers"]["time"]["verdict"]) == ("better", "not_interleaved")
    assert (exits(outcome), exits(outcome, "worse"), exits(outcome, "better"), exits(outcome, "loss")) == (0, 0, 1, 0)
    assert exits(outcome, "worse", "slower:9%") == 2
    other = one_after_the_other(on="loss", b_losses=HIGHER)
    assert (exits(other, "loss"), exits(other, "worse")) == (1, 1)


def test_a_question_on_losses_needs_no_comparable_times():
    a, b = raced(FAST, SLOW, A_LOSSES, LOWER)
    b = [run | {"session_id": "1" * 16} for run in b]
    by_losses, by_times = (compare(a, b, on=on) for on in ("loss", "time"))
    assert (exits(by_losses), exits(by_losses, "better"), exits(by_times)) == (0, 1, 2)
    other = [run | {"goal": run["goal"] | {"val_tokens": 4096}} for run in b]
    assert exits(compare(a, other, on="loss")) == 2


def test_the_question_can_be_given_and_the_other_answers_stand_below(results, answer_of, printed, capsys):
    for run in sum(raced(FAST, SLOW, A_LOSSES, LOWER), []):
        write(results, run)
    ids = ["aaaaaaaa", "bbbbbbbb"]
    shown = printed(cli, *ids, "--on", "loss")
    assert shown.startswith("verdict: BETTER  B is better than A: -0.02000 nats of val_loss (95 % interval")
    assert "\ntime, slower: B is 4.98 % slower than A (95 % interval" in shown
    shown = printed(cli, *ids)
    assert shown.startswith("verdict: SLOWER") and "\nloss, better: B is better than A: -0.02000 nats" in shown
    outcome = answer_of(cli, *ids, "--on", "loss")
    assert (outcome["verdict"], outcome["on"], outcome["answers"]["time"]["verdict"]) == ("better", "loss", "slower")
    assert cli.main([*ids, "--on", "loss", "--fail-on", "better"]) == 1
    assert cli.main([*ids, "--fail-on", "better"]) == 0
    capsys.readouterr()
    with pytest.raises((SystemExit, ValueError)):
        cli.main([*ids, "--on", "speed"])


# ---- equivalence before sign


def test_a_difference_inside_the_margin_is_never_called_by_its_sign():
    a = [10.0, 10.001, 9.999, 10.0005, 10.0, 9.9995]
    outcome = compare(*raced(a, [1.002 * value for value in a]))
    assert outcome["time"]["p"] < 1e-6 and outcome["time"]["change_pct"] > outcome["time"]["floor_pct"]
    assert outcome["verdict"] == "equivalent"
