"""May these runs be compared?  What is known to differ is refused, what is unknown is marked."""

import math

import least_squares
import pytest
from comparing import FAST, SLOW, a_run, compare, raced

from bench.compare import comparison


def compared(change_b=None, change_all=None, **options):
    a, b = ([run | (change_all(run) if change_all else {}) for run in runs] for runs in raced(FAST, SLOW))
    return compare(a, [run | (change_b(run) if change_b else {}) for run in b], **options)


def environment(**facts):
    return lambda run: {"environment": run["environment"] | facts, "comparability_id": "1111111111111111"}


def timed(**facts):
    return lambda run: {"timing_protocol": run["timing_protocol"] | facts}


def disturbed(run):
    return {"metrics": run["metrics"] | {"num_flagged_steps": 3}}


H100, H200 = (
    {"name": f"NVIDIA {name}", "memory_gib": 80.0, "power_limit_w": 700.0} for name in ("H100 80GB HBM3", "H200")
)


H100_OF_500_W = H100 | {"power_limit_w": 500.0}


def on_gpus(gpu, count=8):
    return lambda run: {"environment": run["environment"] | {"gpus": [gpu] * count}}


def imported(run):
    """The run as a log would give it: what a log does not say is unknown."""
    unknown = dict.fromkeys(("session_id", "comparability_id", "seed", "world_size"))
    machine = {"driver": None, "nccl": None, "gpus": [{"name": "NVIDIA H100 80GB HBM3"}] * 8}
    data = run["data"] | {"train": [], "val": []}
    return {"provenance": "imported", "environment": run["environment"] | machine, "data": data} | unknown


def two_days_later(run):
    return {"started_at": run["started_at"].replace("2026-11-21", "2026-11-23")}


REFUSED = [
    (environment(torch="2.12.0"), "torch differs: 2.13.0+cpu in A, 2.12.0 in B"),
    (environment(num_threads=2), "threads a process differ: 1 in A, 2 in B"),
    (lambda run: {"session_id": "1111111111111111"}, "2 sessions (1111111111111111, c0ffee00c0ffee00)"),
    (lambda run: {"comparability_id": "1111111111111111"}, "comparability_id differs"),
    (lambda run: {"world_size": 4, "comparability_id": "1111111111111111"}, "world size differs: 2 in A, 4 in B"),
    (lambda run: {"data": run["data"] | {"train": []}, "comparability_id": "1" * 16}, "comparability_id differs"),
    (timed(id="tp-2"), "timing protocol differs: tp-1 in A, tp-2 in B"),
    (timed(instruments=[]), "instruments differ: regions in A, none in B"),
    (disturbed, "5 runs of B with steps that an instrument disturbed"),
    (lambda run: {"config_id": f"{run['seed']:08x}"}, "B mixes 5 configs"),
    (
        lambda run: {"data": run["data"] | {"train": [run["data"]["train"][0] | {"sha256": "f" * 64}]}},
        "training data differ: 116f54c41d04 in A, ffffffffffff in B",
    ),
    (on_gpus(H100, 1), "GPUs differ: none in A, NVIDIA H100 80GB HBM3 in B"),
]


def validations_timed(num_flagged_steps, instruments=()):
    """A change to a run of 100 steps whose own clock runs on during validations."""
    metrics = {"num_flagged_steps": num_flagged_steps, "num_steps": 100}
    own = {"script": {"dialect": "nanogpt"}, "instruments": dict.fromkeys(instruments, {})}
    return lambda run: {"metrics": run["metrics"] | metrics, **own}


def test_times_that_hold_validations_are_compared_where_both_arms_validate_equally_often():
    outcome = compared(change_all=validations_timed(10))
    assert outcome["comparable"] and outcome["time"]["change_pct"] is not None
    assert any("10 of 100 steps of A and 10 of 100 steps of B" in reason for reason in outcome["reasons"])
    outcome = compared(validations_timed(5), validations_timed(10))
    assert not outcome["comparable"] and "validate equally often" in outcome["words"]
    outcome = compared(change_all=validations_timed(10, ["window"]))
    assert any("5 runs of B with steps that an instrument disturbed" in reason for reason in outcome["reasons"])


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_is_known_to_differ_is_refused_with_the_reason(change, sentence):
    outcome = compared(change)
    assert (outcome["comparable"], outcome["verdict"]) == (False, "not_comparable")
    assert any(sentence in reason for reason in outcome["reasons"]), outcome["reasons"]
    assert outcome["time"]["change_pct"] is None
    assert outcome["time"]["p"] is None
    assert outcome["reasons"][0] in outcome["words"]


@pytest.mark.parametrize("change", [change for change, _ in REFUSED])
def test_force_gives_numbers_and_never_a_verdict(change):
    outcome = compared(change, force=True)
    expected = 100 * math.expm1(least_squares.raced(FAST, SLOW).difference)
    assert outcome["time"]["change_pct"] == pytest.approx(expected, abs=1e-9)
    assert (outcome["comparable"], outcome["verdict"]) == (False, "not_comparable")
    assert "forced" in outcome["flags"]


def test_a_run_in_both_arms_is_refused():
    a, b = raced(FAST, SLOW)
    assert f"1 run in both arms: {a[0]['run_id']}" in compare(a, [*b, a[0] | {"config_id": "bbbbbbbb"}])["reasons"]


@pytest.mark.parametrize(
    ("all_runs", "b_runs", "sentence"),
    [
        (on_gpus(H100), on_gpus(H200), "GPUs differ: 8 x NVIDIA H100 80GB HBM3 in A, 8 x NVIDIA H200 in B"),
        (on_gpus(H100), on_gpus(H100_OF_500_W), "power limits (W) differ: 8 x 700.0 in A, 8 x 500.0 in B"),
        (imported, on_gpus(H200), "GPUs differ: 8 x NVIDIA H100 80GB HBM3 in A, 8 x NVIDIA H200 in B"),
        (imported, two_days_later, "the session is unknown and the arms lie 48 hours apart: not raced in one session"),
    ],
)
def test_runs_of_two_machines_or_days_are_refused(all_runs, b_runs, sentence):
    outcome = compared(b_runs, all_runs)
    assert outcome["verdict"] == "not_comparable" and sentence in outcome["reasons"]


# ---- order


def arm(starts, name):
    return [a_run(name, 10.0 + 0.01 * number, minute) for number, minute in enumerate(starts)]


@pytest.mark.parametrize(
    ("order", "interleaved"),
    [
        ("ABBAABBAAB", True),
        ("ABABABAB", True),
        ("BAABBAAB", True),
        ("ABBA", True),
        ("AAAABBBB", False),
        ("AABB", False),
        ("ABAAABBBAB", False),
        ("AABBBBAA", False),
        ("ABABAAAA", False),
        ("ABAABA", True),
    ],
)
def test_arms_must_alternate_or_a_drift_looks_like_a_change(order, interleaved):
    a, b = (arm([minute for minute, letter in enumerate(order) if letter == name], name) for name in "AB")
    assert ("order-confounded" in compare(a, b)["flags"]) is not interleaved


def welch_pct(a_times_s, b_times_s):
    """The change and its 95 % interval by Welch's test of the logs, as scipy computes them."""
    scipy_stats = pytest.importorskip("scipy.stats")
    logs = [[math.log(time_s) for time_s in times_s] for times_s in (a_times_s, b_times_s)]
    edges = scipy_stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval()
    change = sum(logs[1]) / len(logs[1]) - sum(logs[0]) / len(logs[0])
    return 100 * math.expm1(change), [100 * math.expm1(edge) for edge in (edges.low, edges.high)]


def test_arms_one_after_the_other_have_no_verdict_and_an_interval_widened_by_a_drift_of_the_machine():
    a = [a_run("A", value, minute) for minute, value in enumerate(FAST)]
    b = [a_run("B", value, 10 + minute) for minute, value in enumerate(SLOW)]
    outcome = compare(a, b)
    assert (outcome["verdict"], "order-confounded" in outcome["flags"]) == ("not_interleaved", True)
    change, (low, high) = welch_pct(FAST, SLOW)
    assert outcome["time"]["change_pct"] == pytest.approx(change)
    assert outcome["time"]["ci95_pct"] == pytest.approx([low - 0.2, high + 0.2])
    assert outcome["time"]["p"] < 1e-9 and outcome["time"]["rounds"] is None
    remark = "widened by the 0.2 % by which repeats of the same code differ within a session): ./run.sh race"
    assert remark in outcome["words"]
    assert "slower" not in outcome["words"]


# ---- losses of times that are not comparable


@pytest.mark.parametrize(
    "change",
    [
        lambda run: {"session_id": "1111111111111111"},
        environment(torch="2.12.0"),
        lambda run: {"world_size": 4, "comparability_id": "1" * 16},
        disturbed,
        timed(instruments=[]),
    ],
)
def test_a_loss_is_no_matter_of_session_machine_or_instruments(change):
    expected, outcome = compared()["val_loss"], compared(change)
    assert (outcome["comparable"], outcome["verdict"], outcome["time"]["p"]) == (False, "not_comparable", None)
    assert outcome["val_loss"]["verdict"] == expected["verdict"] in ("not_worse", "inconclusive")
    assert outcome["val_loss"] | {"remarks": None} == expected | {"remarks": None}
    assert outcome["words"].startswith(f"time: {outcome['reasons'][0]}; val_loss: ")
    assert "not comparable" not in outcome["words"]


def test_what_may_change_losses_is_said_beside_them():
    assert compared()["val_loss"]["remarks"] == []
    assert compared(lambda run: {"session_id": "1" * 16})["val_loss"]["remarks"] == []
    for change, what in (
        (lambda run: {"world_size": 4, "comparability_id": "1" * 16}, "world size differs"),
        (environment(torch="2.12.0"), "torch differs"),
        (lambda run: environment(torch="2.12.0")(run) | {"world_size": 4}, "world size and torch differ"),
    ):
        assert compared(change)["val_loss"]["remarks"] == [f"{what}, which may change losses"]


def test_losses_on_other_validation_data_are_never_judged():
    other = [{"path": "val.bin", "sha256": "9" * 64, "num_tokens": 1}]
    for change in (
        lambda run: {"data": run["data"] | {"val": other}, "session_id": "1" * 16},
        lambda run: {"goal": run["goal"] | {"val_tokens": 1}, "session_id": "1" * 16},
    ):
        outcome = compared(change)
        assert outcome["val_loss"]["verdict"] == "unknown" and outcome["val_loss"]["reasons"]
        assert "val_loss" not in outcome["words"]


def test_losses_of_arms_that_are_none_are_not_judged():
    """A mix of configs, or other amounts of training, is no arm whatever is compared."""
    assert compared(lambda run: {"config_id": f"{run['seed']:08x}"})["val_loss"]["verdict"] == "unknown"
    without_target = compared(steps(3, target_val_loss=None))
    assert (without_target["verdict"], without_target["val_loss"]["verdict"]) == ("not_comparable", "unknown")
    assert "no shared target loss" in without_target["reasons"][0]


# ---- finish lines


def steps(num_steps, val_loss=4.25, **goal):
    return lambda run: {
        "metrics": run["metrics"] | {"num_steps": num_steps, "val_loss": val_loss, "target_reached": val_loss <= 4.5},
        "goal": run["goal"] | goal,
    }


def tokens(num_tokens, val_loss=4.25, **goal):
    return lambda run: steps(4, val_loss, **goal)(run) | {"measured": run["measured"] | {"batch_tokens": num_tokens}}


def test_half_the_tokens_are_no_speed():
    outcome = compared(tokens(512))
    assert "tokens-differ" in outcome["flags"] and any("tokens per step" in reason for reason in outcome["reasons"])
    outcome = compared(tokens(512, val_loss=4.7))
    assert outcome["verdict"] == "not_comparable" and "does not reach the target" in outcome["reasons"][0]


def test_other_step_ranges_are_compared_only_on_the_way_to_the_same_target():
    reached = compared(steps(3))
    assert reached["verdict"] == "slower"
    assert "steps-differ" in reached["flags"]
    remark = "A takes 4 steps and B 3: times to the shared target are compared, not milliseconds per step"
    assert remark in reached["reasons"]
    loss = compared(steps(3), on="loss")
    why = "A takes 4 steps and B 3: losses after different amounts of training are not comparable"
    assert (loss["comparable"], loss["reasons"][0], loss["verdict"]) == (False, why, "inconclusive")
    missed = compared(steps(3, val_loss=4.6))
    assert "A takes 4 steps and B 3, and B's mean val_loss 4.60000 does not reach the target 4.5" in missed["reasons"]
    without = compared(steps(3), lambda run: {"goal": run["goal"] | {"target_val_loss": None}})
    assert "they have no shared target loss" in without["reasons"][0]
    assert missed["verdict"] == without["verdict"] == "not_comparable"


def test_runs_that_stop_at_the_target_may_differ_in_steps_if_all_reach_it():
    stopping = {"stop_at_target": True}
    assert compared(steps(3, **stopping), lambda run: {"goal": run["goal"] | stopping})["comparable"] is True
    outcome = compared(steps(3, val_loss=4.6, **stopping), lambda run: {"goal": run["goal"] | stopping})
    assert "5 runs did not reach the target 4.5" in outcome["reasons"][0]


# ---- imported logs: little is known


def test_imported_logs_are_compared_and_marked_with_what_they_do_not_say():
    outcome = compared(change_all=imported)
    assert outcome["verdict"] == "slower"
    assert {"imported", "session-unknown"} <= set(outcome["flags"])
    reasons = " ".join(outcome["reasons"])
    for phrase in ("power limits", "NCCL", "training data", "world size", "raced in one session"):
        assert phrase in reasons


def test_an_unknown_start_is_an_unknown_order():
    outcome = compared(change_all=lambda run: imported(run) | {"started_at": None})
    assert outcome["verdict"] == "not_interleaved"
    assert {"order-unknown", "session-unknown"} <= set(outcome["flags"])
    change, (low, high) = welch_pct(FAST, SLOW)
    assert outcome["time"]["ci95_pct"] == pytest.approx([low - 1.8, high + 1.8])
    assert "the 1.8 % by which repeats of the same code differ between sessions" in outcome["words"]


# ---- what differs


def test_differences_are_listed_by_kind_with_the_values_of_both_arms():
    def other(run):
        changed = {"code": run["code"] | {"commit": "0" * 39 + "2"}, "optim": "muon"}
        return changed | {"environment": run["environment"] | {"governor": "powersave"}}

    differences = compared(other)["differences"]
    assert [(change["kind"], change["what"], change["a"], change["b"]) for change in differences] == [
        ("config", "optim", ["adamw"], ["muon"]),
        ("code", "commit", ["0" * 39 + "1"], ["0" * 39 + "2"]),
        ("environment", "governor", [None], ["powersave"]),
    ]


def test_eight_gpus_of_one_kind_are_one_difference():
    differences = compared(on_gpus(H200), on_gpus(H100), force=True)["differences"]
    listed = [(change["what"], change["a"], change["b"]) for change in differences]
    assert listed == [("gpus.name", ["NVIDIA H100 80GB HBM3"], ["NVIDIA H200"])]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"regions": {}}, {"regions": {}, "host": {}}, [("instruments.host", [None], ["on"])]),
        ({"garbage": {"ms": 1.0}}, {"garbage": {"ms": 0.0}}, [("instruments.garbage.ms", [1.0], [0.0])]),
        ({"regions": {}}, {"regions": {}}, []),
    ],
)
def test_instruments_and_their_settings_are_differences(a, b, expected):
    """So are those without settings, or "instruments differ" would list nothing."""
    (with_a, with_b) = ([comparison.facts(a_run("A", 1.0, 0) | {"instruments": instruments})] for instruments in (a, b))
    listed = [(change["what"], change["a"], change["b"]) for change in comparison.differences_of(with_a, with_b)]
    assert listed == expected


def test_seed_and_name_are_no_difference():
    assert compared(lambda run: {"name": "other", "seed": run["seed"] + 50})["differences"] == []
