"""What kind of comparison two arms give, in a word and in a sentence, and that every page says it."""

import argparse

import claimed
import comparing
import pytest

from bench.base.paths import REPO
from bench.cli import race as race_verb
from bench.compare import questions, verdict
from bench.config.schema import TrackRules
from bench.record import race_folder
from bench.record.rows import row_of
from bench.report import race_page

FASTER, SLOWER = [10.0, 10.1, 10.2], [11.0, 11.1, 11.2]


def compared(a_s=SLOWER, b_s=FASTER, target=4.3, b_steps=4, b_losses=None, change=None, **options):
    """The Comparison of three runs a side with mean losses of 4.25, 4 steps each."""
    a, b = comparing.raced(a_s, b_s, None, b_losses)
    for run in a + b:
        run["goal"]["target_val_loss"] = target
    for run in b:
        run["metrics"]["num_steps"] = b_steps
        if change:
            change(run)
    return verdict.compare_rows([row_of(run) for run in a], [row_of(run) for run in b], **options)


def elsewhere(run):
    run.update(session_id="b" * 16, comparability_id="b" * 16)


def other_batches(run):
    run["measured"].update(batch_tokens=512)


@pytest.mark.parametrize(
    ("case", "kind", "sentence"),
    [
        ({}, "time_to_target", "4.3, which both means reach, at equal steps (4), so also ms per step"),
        ({"b_steps": 3}, "time_to_target", "4.3, which both means reach, in 4 and 3 steps, so not ms per step"),
        ({"change": other_batches}, "time_to_target", "in 4 and 4 steps of other batches, so not ms per step"),
        ({"target": None}, "ms_per_step", "(4); not time to a target, because the arms share no target loss"),
        ({"b_losses": [4.4, 4.5, 4.6]}, "ms_per_step", "(4); not time to a target, because the mean of B misses 4.3"),
        ({"target": 1.0}, "ms_per_step", "(4); not time to a target, because the means of A and B miss 1"),
        ({"change": elsewhere}, "loss_at_equal_steps", "loss at equal steps (4); not times"),
        (
            {"a_s": FASTER, "target": None, "b_steps": 8},
            "loss_at_equal_time",
            "loss at equal time, after 4 and 8 steps; not times",
        ),
        (
            {"target": None, "b_steps": 8},
            None,
            "losses after 4 and 8 steps, which are neither equal steps nor equal time",
        ),
    ],
)
def test_targets_steps_batches_and_sessions_say_what_is_compared(case, kind, sentence):
    comparison = compared(**case)
    assert comparison["kind"] == kind and comparison["kind_words"].endswith(sentence)


def test_a_track_that_judges_steps_says_so(monkeypatch):
    monkeypatch.setattr("bench.compare.target.rules_of", lambda track: TrackRules(judged="steps"))
    comparison = compared(b_steps=3)
    sentence = "steps to the target of 4.3, which both means reach: 4 and 3; this track does not judge time"
    assert (comparison["kind"], comparison["kind_words"]) == ("steps_to_target", sentence)


def test_runs_that_stop_at_their_target_each_reach_it():
    def stopped(reached):
        row = {"batch_tokens": 8, "score": 2.1, "stop_at_target": True, "target_reached": reached}
        arms = [[row | {"num_steps": steps} for steps in arm_steps] for arm_steps in ((90, 100), (80,))]
        return questions.kind_of(arms, "AB", 2.1, "time", True, True, 0.5)

    assert stopped(True) == (
        "time_to_target",
        "time to the target of 2.1, which every run reaches, in 90, 100 and 80 steps, so not ms per step",
    )
    assert stopped(False)[0] == "ms_per_step"


def test_nothing_in_common_is_said():
    expected = (None, "nothing: neither times nor losses")
    assert questions.kind_of([[], []], "AB", None, "time", False, False, 0.5) == expected


def test_the_kind_is_on_the_races_page_and_in_its_markdown_and_an_old_race_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = claimed.Results(tmp_path / "results").kept_race(monkeypatch)
    sentence = "time to the target of 3, which both means reach, at equal steps (120), so also ms per step"
    assert f"compared: {sentence}" in (folder / "race.md").read_text()
    assert f"compared: {sentence}" in (folder / "race.html").read_text()
    old = race_folder.read(folder)
    for name in ("kind", "kind_words"):
        del old["result"]["against"]["B"][name]
    monkeypatch.setattr(race_folder, "read", lambda folder: old)
    assert "compared:" not in race_page.document(folder).html()
    assert "compared:" not in race_page.document_of(old).markdown()


def test_a_race_that_could_be_claimed_ends_with_the_command_that_judges_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = claimed.Results(tmp_path / "results").kept_race(monkeypatch)
    race = race_folder.read(folder)
    typed = argparse.Namespace(quiet=False, md=False)
    race_verb._say(folder, race, typed)
    command = f"then\n          ./run.sh judge {race['race_id']}:B --claim NAME judges it as a claim"
    assert (race_folder.verdicts_of(race)["B"]["verdict"], command in capsys.readouterr().out) == ("faster", True)
    race["result"]["against"]["B"]["val_loss"]["below_target"] = [True, False]
    race_verb._say(folder, race, typed)
    assert "judges it as a claim" not in capsys.readouterr().out


@pytest.mark.parametrize("name", questions.KINDS)
def test_every_kind_is_in_the_docs(name):
    assert f"`{name}`" in (REPO / "docs/race.md").read_text()
