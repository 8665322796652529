"""Which runs count, and when a track is won: numbers worked by hand."""

from types import SimpleNamespace as Space

import claimed
import pytest
from comparing import COMPLETE, a_run, write

from bench.api import judging
from bench.claims.rules import runs as run_rules
from bench.cli import speedrun
from bench.compare import effects, target
from bench.config import groups
from bench.data.sources.markov import floor_slack_nats
from bench.record import run_folder, validity
from bench.record.rows import row_of


def run(val_loss=1.95, **changes):
    facts = {
        "status": "complete",
        "validity": "valid",
        "metrics": {"val_loss": val_loss, "num_steps": 100, "target_reached": None},
        "data": {"floor_nats": None},
        "hardware": {"device": "cpu"},
        "goal": {"val_tokens": 65536, "stop_at_target": False, "target_val_loss": 3.30, "target_gap_nats": None},
        "measured": {"foreign_cpu_cores": 0.0},
    }
    return facts | changes


def test_chance_may_bring_a_loss_a_little_below_the_floor():
    record = run(1.9177 - 0.9 * floor_slack_nats(65536), data={"floor_nats": 1.9177})
    assert validity.validity(record) == ("valid", [])


def test_steps_that_took_no_time_were_timed_by_a_clock_that_stood_still():
    kind, reasons = validity.validity(run(metrics={"train_s": 0.0, "num_steps": 100, "val_loss": 2.0}))
    assert kind == "invalid" and reasons[0].startswith("its clock did not advance: 100 steps in 0 s")


def row(val_loss=1.95, **changes):
    facts = {"status": "complete", "validity": "valid", "score": val_loss, "num_steps": 100}
    return facts | {"target": 3.30, "stop_at_target": False, "target_reached": None} | changes


def to_target(reached):
    """A run that stops at its target."""
    return row(2.0, num_steps=260, stop_at_target=True, target=2.1, target_reached=reached)


def test_the_mean_must_be_shown_to_be_below_the_target():
    rows = [row(3.27), row(3.28), row(3.26)]  # mean 3.27, sd 0.01: t = -0.03 / (0.01 / sqrt(3)) = -5.196, p = 0.01755
    decision = target.decide(rows, 0.05)
    assert (decision["passed"], decision["n"]) == (True, 3)
    assert decision["t"] == pytest.approx(-5.19615, rel=1e-5)
    assert decision["p"] == pytest.approx(0.017551, rel=1e-3)
    assert target.decide(rows, 0.01)["passed"] is False


def test_the_p_of_the_target_and_the_margin_of_equivalence_are_the_tracks(monkeypatch, tmp_path):
    (tmp_path / "track").mkdir()
    strict = "track:\n  p_value: 0.001\n  rules:\n    equivalence_margin_pct: 0.2\n"
    for name, text in (("strict", strict), (target.OF_LOGS, "track:\n  p_value: 0.02\n")):
        (tmp_path / "track" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(groups, "CONF", tmp_path)
    target.track_settings.cache_clear()
    tracks = ("strict", "track_1_short", None, "../strict")
    rules = [(target.p_value_of(track), target.rules_of(track).equivalence_margin_pct) for track in tracks]
    target.track_settings.cache_clear()
    assert rules == [(0.001, 0.2), (0.02, 0.5), (0.02, 0.5), (0.02, 0.5)]


def test_a_gap_is_a_target_above_the_floor():
    row = row_of(
        run_folder.read(COMPLETE) | {"goal": {"target_gap_nats": 0.25}, "data": {"floor_nats": 2.0, "source": "x"}}
    )
    assert row["target"] == 2.25


@pytest.mark.parametrize(
    ("rows", "passed", "sentence"),
    [
        ([row(3.0)], None, "one run has no spread and gives no verdict"),
        ([row(3.0), row(3.0), row(None, status="failed")], False, "1 of 3 runs did not complete"),
        ([row(3.2999, seed=seed) for seed in range(3)], False, "all 3 values of val_loss are 3.2999, as in copies or"),
        ([to_target(True), to_target(True)], True, "2 of 2 runs reached the target, after 260, 260 steps"),
        ([to_target(True), to_target(False)], False, "1 of 2 runs reached the target, after 260 steps"),
    ],
)
def test_what_decides_without_a_test(rows, passed, sentence):
    decision = target.decide(rows, 0.01)
    assert decision["passed"] is passed and decision["words"].startswith(sentence)


def test_runs_of_one_seed_or_one_trajectory_count_once_against_the_target():
    """Two of 3.26 and one of 3.28 are one of 3.26 and one of 3.28: mean 3.27, sd sqrt(0.0002), t = -3, df 1."""
    rows = [row(3.26, seed=0), row(3.26, seed=1), row(3.28, seed=2)]
    decision = target.decide(rows, 0.2, ["x", "x", "y"])
    assert (decision["n"], decision["mean"], decision["t"]) == (2, pytest.approx(3.27), pytest.approx(-3.0))
    assert decision["words"].startswith("3 runs count as 2 by their seeds and losses; mean val_loss 3.2700 ")
    assert target.decide(rows, 0.2, [None, "y", "y"])["n"] == 2
    assert target.decide(rows, 0.2)["n"] == 3
    assert target.decide([row(3.26, seed=0), row(3.27, seed=1), row(3.28, seed=0)], 0.2, ["x", "y", "y"])["n"] == 1
    judged = target.decide(rows, 0.2, ["x"] * 3)
    assert (judged["passed"], judged["n"]) == (False, 1)


def test_an_interval_at_the_lower_edge_of_the_margin_is_that_edge():
    """B at -0.5 % or +0.5 % exactly, the edges of a margin of 0.5 %: p of equivalence is 0.5, whatever the spread."""
    times_s = [10.0, 10.01, 9.99]
    rows = [[{"train_s": time_s * factor} for time_s in times_s] for factor in (1.0, 0.995)]
    assert effects.time(rows, 0.1, 0.5, 0.05)["p_equivalent"] == pytest.approx(0.5, abs=1e-12)
    rows = [[{"train_s": time_s * factor} for time_s in times_s] for factor in (1.0, 1.005)]
    assert effects.time(rows, 0.1, 0.5, 0.05)["p_equivalent"] == pytest.approx(0.5, abs=1e-12)


def test_seeds_are_fresh(results):
    config = Space(track=Space(name="free", repeats=3), seed=5)
    job = Space(config=config, config_id="aaaaaaaa", is_profiled=False)
    assert list(speedrun.fresh_seeds(job, [])) == [0, 1, 2]
    for arm, seed in (("A", 0), ("A", 4), ("B", 9)):
        write(results, a_run(arm, 10.0, seed, track="free"))
    assert list(speedrun.fresh_seeds(job, [])) == [5, 6, 7]
    assert list(speedrun.fresh_seeds(job, ["seed=5"])) == [5, 6, 7]
    job.is_profiled, job.config_id = True, "cccccccc"
    assert list(speedrun.fresh_seeds(job, ["profile=window"])) == [0]
    assert list(speedrun.fresh_seeds(job, ["profile=window", "track.repeats=3"])) == [0, 1, 2]


def test_a_speedrun_says_that_a_claim_is_judged_by_more_runs_than_its_own(tmp_path):
    results = claimed.Results(tmp_path)

    def ended(*seeds):
        return [run_folder.read(folder) | {"folder": str(folder)} for folder in map(results.add, seeds)]

    first = ended(0, 1, 2)
    assert speedrun._judged(first) == (3, "")
    number, text = speedrun._judged(ended(3, 4, 5))
    assert number == 6 and text.startswith("a claim is judged by all 6 runs of this config and code, not by these 3")
    assert text.endswith(f"./run.sh judge {first[0]['config_id']}")
    ((_, claim),) = judging.claims_of([run["folder"] for run in first])
    assert run_rules.no_run_was_left_out(claim)[0] is False  # judge says so, too
    results.add(9, source="42")
    number, text = speedrun._judged(first)
    assert number == 6 and text.endswith(f"./run.sh judge {first[0]['run_id']} names the others")
