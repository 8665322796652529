"""What each track fixes, how often it is repeated, and by what its record is judged."""

import json

import claimed
import pytest

from bench.base.paths import REPO
from bench.claims import claim as claims
from bench.claims import leaderboard, leaderboard_views
from bench.claims.rules import rulebook, runs
from bench.cli import table
from bench.compare import target
from bench.config import compose, groups, identity, resolve, schema
from bench.config.resolve import deviations_of
from bench.record import store

GPUS, LAPTOP = schema.Machine(8, 64), schema.Machine(0, 2)
SPEEDRUNS = ("gpt2_small", "gpt2_medium", "gpt2_short")


def resolved(*overrides, machine=GPUS, vocab_size=50257):
    return resolve.resolve(compose.compose(list(overrides), machine), machine, vocab_size)


@pytest.mark.parametrize("track", SPEEDRUNS)
def test_a_speedrun_may_change_steps_batch_sequence_schedule_and_shards(track):
    """modded-nanogpt's rule 1: just don't change the underlying streams of tokens."""
    overrides = ["goal.num_steps=3250", "goal.val_every_steps=50", "data.batch_tokens=262144", "data.seq_len=2048"]
    overrides += ["data.num_train_shards=9", "model=gpt2", "optim=adamw", "optim/schedule=cosine"]
    assert deviations_of(resolved(f"track={track}", *overrides)) == []


@pytest.mark.parametrize("track", [*SPEEDRUNS, "steps"])
@pytest.mark.parametrize(
    "pair",
    ["data=finewebedu10B", "data.revision=null", "goal.val_tokens=1048576", "goal.target_val_loss=3.5", "goal=target"],
)
def test_a_speedrun_may_not_change_tokens_validation_or_target(track, pair):
    target = ["goal.target_val_loss=4.0"] if pair == "goal=target" else []
    assert deviations_of(resolved(f"track={track}", pair, *target))


@pytest.mark.parametrize("pair", ["data.batch_tokens=262144", "data.seq_len=2048", "model=gpt2", "model.num_layers=6"])
def test_the_steps_track_keeps_batch_and_architecture(pair):
    assert deviations_of(resolved("track=steps", "data.num_train_shards=9", "goal.num_steps=3000", "optim=adamw")) == []
    assert deviations_of(resolved("track=steps", pair))


def test_every_track_composes_unchanged():
    for track in [track for track in compose.choices("track") if track != "nanochat"]:  # only scripts print CORE
        assert deviations_of(resolved(f"track={track}")) == [], track
    assert deviations_of(compose.compose(["track=nanochat"])) == []


def test_the_published_runs_keep_their_id_and_division():
    for folder in (REPO / "results/published").glob("*/*/*/config.yaml"):
        config = schema.read(folder.parent)
        run = json.loads((folder.parent / "run.json").read_text())
        config.track.rules.implausible_val_loss = compose.compose(["track=cpu_nano"]).track.rules.implausible_val_loss
        assert run["config_id"] in identity.config_ids(config) and deviations_of(config) == run["deviations"]


def test_how_often_a_run_is_repeated_changes_no_config_id():
    once, often = (resolved("track=cpu_nano", f"track.repeats={n}", machine=LAPTOP, vocab_size=257) for n in (1, 7))
    assert identity.config_id(once) == identity.config_id(often) == "91fa142f"


def test_a_run_that_is_repeated_more_or_less_often_still_counts():
    assert deviations_of(resolved("track=gpt2_small", "track.repeats=1")) == []


def test_a_record_takes_as_many_runs_as_speedrun_makes():
    """One number: no track file has a second one."""
    for track in compose.choices("track"):
        facts = groups.values_of("track", track)["track"]
        assert "num_runs" not in facts.get("rules", {})
        asks_one = facts.get("rules", {}).get("statistic") == "z" or track == "nanochat"  # upstream's own rules
        assert facts["repeats"] >= (1 if asks_one else 3)
    assert [claims.track_rules(track).repeats for track in ("gpt2_small", "cpu_nano", "steps")] == [10, 3, 1]


def test_an_older_config_with_num_runs_among_its_rules_is_read():
    values = schema.to_dict(resolved("track=cpu_nano", machine=LAPTOP, vocab_size=257))
    values["track"]["rules"]["num_runs"] = 3
    assert "num_runs" not in schema.upgraded(values)["track"]["rules"]


# ---- judged by steps


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Runs of cpu_nano, as if it judged steps."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    track_rules = claims.track_rules("cpu_nano")
    monkeypatch.setattr(track_rules.rules, "judged", "steps")
    return claimed.Results(tmp_path / "results")


def three(results, train_s, num_steps, source="41", **changes):
    def change(run):
        run.update(changes)

    for seed in range(3):
        folder = results.add(seed, train_s=train_s, val_loss=2.7 + 0.01 * seed, source=source, change=change)
        run = json.loads((folder / "run.json").read_text())
        run["metrics"]["num_steps"] = num_steps
        (folder / "run.json").write_text(json.dumps(run))


def board(results):
    entries = leaderboard.by_track(store.read_rows([results.folder]))["cpu_nano"]
    records = leaderboard.progression(entries, claims.track_rules("cpu_nano"), judge=lambda entry: None)
    return records, sorted(entries, key=lambda entry: entry.rows[0]["started_at"])


def test_fewer_steps_make_a_record_however_long_they_take(results):
    three(results, 10, 120, source="11")
    three(results, 90, 100, source="22", validity="suspect", validity_reasons=["other programs"])
    three(results, 1, 120, source="33")
    records, entries = board(results)
    assert [entry.score for entry, _, _ in records] == [120, 100]
    assert [entry.status for entry in entries] == ["was a record", "record", "no fewer steps than the record"]
    assert records[1][2] == {"change_pct": pytest.approx(-100 / 6), "measured": "in steps"}


def test_the_leaderboard_shows_steps_where_they_are_judged(results, printed):
    three(results, 10, 1200)
    out = printed(table, "--leaderboard", "--md")
    assert "| steps" in out and "| 1,200" in out and "train_s" not in out
    assert "in fewer steps than the one before" in out


def test_the_site_shows_and_draws_steps_where_they_are_judged(results):
    three(results, 10, 1200)
    html = leaderboard_views.standing(store.read_rows([results.folder]), [results.folder]).records
    assert "cpu_nano on any device" in html and ">1,200</td>" in html
    assert ">steps</th>" in html and ">train_s" not in html


def test_judge_counts_suspect_runs_where_steps_are_judged(results):
    three(results, 10, 120, validity="suspect", validity_reasons=["other programs"])
    claim = claims.from_folders(sorted((results.folder / "cpu_nano").iterdir()))
    assert runs.there_are_enough_runs(claim) == (
        True,
        "3 valid or suspect of 3 runs, the track needs 3; suspect: other programs",
    )


def test_a_candidate_that_is_only_faster_does_not_win_where_steps_are_judged(results, monkeypatch):
    results.race(monkeypatch, pct=-20)
    raced = [path.parent for path in sorted(results.folder.glob("cpu_nano/*/run.json"))]
    b_runs = [path for path in raced if json.loads((path / "run.json").read_text())["race"]["arm"] == "B"]
    (rule,) = [
        rule for rule in rulebook.check(claims.from_folders(b_runs)) if rule["rule"] == "it is faster than its baseline"
    ]
    assert not rule["passed"] and rule["evidence"].endswith(": 120 steps, its baseline 120")


# ---- a target that is not measured


def test_a_track_without_a_target_keeps_no_record_and_says_why():
    assert not claims.has_target("gpt2_short") and claims.has_target("cpu_floor") and claims.has_target("steps")
    row = {"status": "complete", "validity": "valid", "score": 4.0, "target": None, "stop_at_target": False}
    assert target.decide([row, row], 0.01)["passed"] is None
