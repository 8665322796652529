"""What a contestant may do to plans, ledger and repeats to make a claim look better, and what judge says to it."""

import dataclasses
import json
import re
import shutil

import claimed
import pytest
from claimed import failed, results, three  # noqa: F401  results is a fixture
from real_runs import git

from bench.base import utc
from bench.claims import claim
from bench.claims.rules import records
from bench.cli import judge
from bench.cli import main as program
from bench.config import identity, schema
from bench.plans.race import planning
from bench.record import ledger, line_count, race_folder
from bench.report import basis

WHOLE, DROPPED, OF_LEDGER = "the ledger is whole", "no run was left out", "every record matches the ledger"
OWN_SEED, PLAN = "every run has its own seed", "the plan is as strict as the track"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


# ---- the track's alpha, margins and number of runs


@pytest.mark.parametrize("pair, limit", [("alpha=0.49", "0.05"), ("margin=0.01", "0.002")])
def test_a_plan_that_asks_more_than_the_track_is_refused_before_it_is_made(results, monkeypatch, pair, limit):
    name = pair.partition("=")[0]
    with pytest.raises(ValueError, match=f"{pair}: track cpu_nano allows at most {limit}: give {name}={limit} or less"):
        results.race(monkeypatch, "n=3", pair)
    assert not (results.folder / "races").exists()


def test_stricter_plans_and_tracks_that_fix_nothing_choose_for_themselves(results, monkeypatch):
    made = json.loads((results.race(monkeypatch, "n=3", "alpha=0.01", "margin=0.001") / "plan.json").read_text())
    assert (made["alpha"], made["loss_margin_nats"], made["on"]) == (0.01, 0.001, "time")
    planning.refuse_laxer("free", {"alpha": 0.4, "margin": 1.0})


def test_a_plan_with_the_candidates_own_alpha_and_margin_is_refused(results, monkeypatch):
    monkeypatch.setattr(planning, "refuse_laxer", lambda *_: None)
    folder = results.race(monkeypatch, "n=3", "alpha=0.49", "margin=0.01")
    why = "alpha 0.49, the track's is 0.05, loss_margin_nats 0.01, the track's is 0.002"
    assert failed(folder) == {PLAN: f"{folder.name}: {why}"}


def test_fewer_runs_than_the_track_asks_and_another_question_are_refused(results, monkeypatch, capsys):
    assert failed(results.race(monkeypatch, "n=2"))[PLAN].endswith("n 2, the track's is 3")
    assert "judge would refuse a claim: n=2 is too few: track cpu_nano requires 3 (n=3)" in capsys.readouterr().out
    rules = claimed.config().track.rules
    monkeypatch.setattr("bench.compare.target.rules_of", lambda track: type(rules)(judged="steps"))
    assert failed(results.race(monkeypatch))[PLAN].endswith("it asks for steps_to_target, the track judges time")


def test_an_edited_verdict_is_shown_nowhere(results, monkeypatch, capsys):
    """Compare and the pages keep the race's own floor, alpha and Holm's p from race.json."""
    folder = results.race(monkeypatch, "n=3")
    original = (folder / "race.json").read_text()
    race = json.loads(original)
    race["result"]["against"]["B"]["earlier_weight"] = 10
    (folder / "race.json").write_text(json.dumps(race))
    for verb, *arguments in (("compare", str(folder)), ("report", str(folder)), ("publish", str(folder))):
        assert program.main([verb, *arguments]) == 2
        assert "is not the one that the ledger has from the end of the race: restore it" in capsys.readouterr().err
    (folder / "race.json").unlink()
    for verb in ("compare", "publish"):
        assert program.main([verb, str(folder)]) == 2
        remedy = f"restore it from a copy, or read the verdict of its runs: race --look {folder.name}"
        assert f"its race.json is missing, though the race has ended: {remedy}" in capsys.readouterr().err
    assert program.main(["race", "--look", folder.name]) == 0 and "verdict: FASTER" in capsys.readouterr().out
    (folder / "race.json").write_text(original)
    assert program.main(["compare", str(folder)]) == 0


def test_runs_of_one_arm_alone_that_were_interrupted_are_refused(results, monkeypatch):
    folder = results.race(monkeypatch, hurt={3: "interrupt", 6: "interrupt"})
    compared = race_folder.verdicts_of(race_folder.read(folder))["B"]
    assert "run-again" in compared["flags"] and compared["run_again"] == [0, 2]
    assert "0 runs of the baseline and 2 of the candidate were interrupted and run again" in str(basis.basis(compared))
    for limit in (2, None):  # the free track allows any number
        rules = schema.TrackRules(**vars(claimed.config().track.rules) | {"max_interrupted": limit})
        track = dataclasses.replace(claimed.config().track, rules=rules)
        monkeypatch.setattr(claim, "track_rules", lambda name, track=track: track)
        evidence = failed(folder)["few runs were interrupted"]
        assert "one-sided" in evidence and "0 of A, 2 of B" in evidence


@pytest.mark.parametrize(("disturbed", "pct", "why"), [
    ((0, 2), -5, "perhaps the bad ones"),  # two more of B: its time is that of the runs that it chose
    ((1, 1), -1.5, "with the excluded runs the times would give a different verdict"),
    ((1, 1), -5, None),
])  # fmt: skip
def test_a_gain_that_rests_on_runs_that_an_arm_may_have_excluded_is_refused(results, monkeypatch, disturbed, pct, why):
    add, left = results.add, dict(zip("AB", disturbed, strict=True))

    def suspect(run):
        run["validity"], run["validity_reasons"] = "suspect", ["the launcher did not run for 0.10 of the 1.02 s"]

    def add_disturbed(seed, train_s, val_loss, overrides, shares, race, status):
        if race["discarded"] or not left[race["arm"]]:
            return add(seed, train_s, val_loss, overrides, shares, race, status)
        left[race["arm"]] -= 1
        return add(seed, train_s * 1.05, val_loss, overrides, shares, race, status, change=suspect)

    monkeypatch.setattr(results, "add", add_disturbed)
    evidence = failed(results.race(monkeypatch, "n=6", pct=pct)).get("it is faster than its baseline")
    assert evidence is None if why is None else why in evidence and "race again on a quiet machine" in evidence


def test_fewer_compilations_than_the_track_asks_are_refused(results, monkeypatch):
    """The cheapest cheat, compilations=1, is in the plan."""
    rules = schema.TrackRules(**vars(claimed.config().track.rules) | {"compilations": 3})
    track = dataclasses.replace(claimed.config().track, rules=rules)
    monkeypatch.setattr(claim, "track_rules", lambda name: track)
    assert failed(results.race(monkeypatch, "n=3"))[PLAN].endswith("1 compilations, the track's are 3")
    assert PLAN not in failed(results.race(monkeypatch, "n=3", "compilations=3"))


def test_seeds_that_were_chosen_are_refused(results, monkeypatch):
    """The cheapest cheat: seeds that are known to reach the target."""
    evidence = failed(results.race(monkeypatch, "n=3", "seed=1234"))[PLAN]
    assert evidence.endswith("its first seed was chosen (1234): leave seed= out")


@pytest.mark.parametrize(("cache", "is_refused"), [("cold", False), (None, False), ("warm", True)])
def test_a_compilation_that_found_compiled_code_is_refused(results, monkeypatch, cache, is_refused):
    """script.env or the arm's own code may name another TORCHINDUCTOR_CACHE_DIR, which all compilations then share."""
    add, change = results.add, lambda run: run["measured"].update(compile_cache=cache)
    monkeypatch.setattr(results, "add", lambda *args, **options: add(*args, **options, change=change))
    faults = failed(results.race(monkeypatch, "n=3", "compilations=3"))
    assert ("was to compile afresh and found compiled code" in faults.get("the runs follow the plan", "")) == is_refused


# ---- runs that the ledger should have and has not


def cut(results, num_lines, also=()):
    """Cuts the ledger's end off, as the audit did, and removes what else a cheat may remove."""
    path = results.folder / ledger.NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:num_lines]))
    for other in also:
        shutil.rmtree(other) if other.is_dir() else other.unlink()


def lucky(results, also=()):
    """Keeps three of six runs: after each bad one its folder and its two lines are removed."""
    kept = []
    for seed, val_loss in enumerate((2.9, 3.2, 2.91, 3.3, 3.1, 2.92)):
        num_lines = len(kept) * 2
        folder = results.add(seed, val_loss=val_loss)
        if val_loss < 3:
            kept.append(folder)
        else:
            cut(results, num_lines, [folder, *also])
    return kept


def test_an_end_that_was_cut_without_another_run_after_it_is_missed_on_this_machine(results):
    folders = [*three(results), results.add(3, val_loss=3.3)]
    cut(results, 6, [folders.pop()])
    why = "this machine has counted 8 lines, but the last one is number 6: its end was removed"
    assert failed(*folders) == {WHOLE: why}


@pytest.mark.parametrize(
    ("counts", "evidence"),
    [
        ([], "line 3 is number 5 of this ledger but follows number 2: 2 between them were removed"),
        ([line_count.NAME], "2 between them were removed"),
        (["../state"], "2 between them were removed"),
        ([line_count.NAME, "../state"], "the line count restarted at line 3, between the claim's runs"),
    ],
)
def test_a_ledger_whose_end_was_cut_after_each_bad_run_is_not_whole(results, counts, evidence):
    """It is not whole either if its count, which is kept in two places, was removed as well."""
    failures = failed(*lucky(results, [results.folder / count for count in counts]))
    assert list(failures) == [WHOLE] and evidence in failures[WHOLE]


def test_a_count_that_began_anew_before_the_claim_is_named_and_refuses_nothing(results, capsys):
    results.add(7, source="66")
    cut(results, 2, [results.folder / line_count.NAME, results.folder.parent / "state"])
    assert judge.main([str(folder) for folder in three(results)]) == 0
    assert "restarted at line 3: whether lines were removed before it is unknown" in capsys.readouterr().out


@pytest.fixture
def project(results, tmp_path, monkeypatch):
    """A project whose ledger was published with a bad run -> (its folder, the folders of the runs)."""
    published = tmp_path / "project" / "results" / "published"
    folders = [*three(results), results.add(3, val_loss=3.3)]
    (published / "early").mkdir(parents=True)
    shutil.copy(results.folder / ledger.NAME, published / "early")
    monkeypatch.setattr(records, "published_root", lambda: published)
    return tmp_path / "project", folders


def hide_the_last(results, folders):
    """Removes the ledger's end, its count and the folder of the last run."""
    state = results.folder.parent / "state"
    cut(results, 6, [folders[-1], results.folder / line_count.NAME, *([state] if state.is_dir() else [])])
    return folders[:-1]


def test_lines_that_a_published_copy_has_are_missed(results, project):
    folder, folders = project
    why = "early/ledger.jsonl has 2 lines that are missing from this ledger, the first is start cpu_nano/"
    assert why in failed(*hide_the_last(results, folders))[WHOLE]


def test_a_publication_that_was_removed_is_found_in_gits_history(results, project):
    folder, folders = project
    git(folder, "init")
    git(folder, "add", "results")
    git(folder, "commit", "-m", "early")
    shutil.rmtree(folder / "results" / "published" / "early")
    git(folder, "commit", "-am", "gone")
    (folder / "results" / "published").mkdir(parents=True, exist_ok=True)
    assert failed(*hide_the_last(results, folders))[WHOLE].startswith("results/published/early/ledger.jsonl in git (")


def test_another_ledger_an_older_copy_and_a_whole_one_miss_nothing(results, project, tmp_path, monkeypatch):
    folder, folders = project
    assert "the ledger is whole" not in failed(*folders)
    other = claimed.Results(tmp_path / "other")
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(other.folder))
    assert failed(*three(other)) == {}
    older = tmp_path / "older"  # a claim's folder from before the last run
    shutil.copytree(results.folder, older)
    claimed_runs = hide_the_last(claimed.Results(older), [older / "cpu_nano" / folder.name for folder in folders])
    assert failed(*claimed_runs) == {}


# ---- tries of the same thing under other names


def test_tries_with_settings_a_hair_apart_are_tries_of_the_same_thing(results):
    for number in range(1, 11):
        results.add(number, val_loss=3.4, overrides=[f"optim.eps={1e-8 * (1 + number / 1500):.9g}"])
    evidence = failed(*three(results))
    assert list(evidence) == [DROPPED]
    assert "started with settings less than 1 % from the claim's, and not claimed: " in evidence[DROPPED]
    assert re.search(r"-s8-m\w{6} \(complete\) and 2 more$", evidence[DROPPED])


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ("optim.beta2=0.96", []),
        ("goal.val_every_steps=30", []),
        ("hardware.dtype=bfloat16", []),
        ("hardware.collective_timeout_s=240", [DROPPED]),  # waiting longer makes no other config
    ],
)
def test_a_config_that_differs_by_more_than_a_hair_is_another(results, change, rules):
    results.add(1, val_loss=3.4, overrides=[change])
    assert list(failed(*three(results))) == rules


def test_tries_of_another_day_and_of_other_code_are_others(results):
    results.add(1, val_loss=3.4, overrides=["optim.eps=1.001e-8"], source="66")
    results.clock = iter(range(24 * 60, 25 * 60))
    folders = three(results)
    results.clock = iter(range(48 * 60, 49 * 60))
    results.add(1, val_loss=3.4, overrides=["optim.eps=1.001e-8"])
    assert failed(*folders) == {}


def test_of_an_older_ledger_the_folders_say_what_was_tried_and_without_them_it_is_unknown(results, monkeypatch, capsys):
    monkeypatch.setattr(identity, "shape", lambda config, shape=identity.shape: {})
    tried = results.add(1, val_loss=3.4, overrides=["optim.eps=1.001e-8"])
    folders = three(results)
    monkeypatch.undo()
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results.folder))
    assert list(failed(*folders)) == [DROPPED]
    shutil.rmtree(tried)
    assert judge.main([str(folder) for folder in folders]) == 0
    assert "of this code and day, with settings that are no longer known: cpu_nano/" in capsys.readouterr().out


def test_a_lost_race_repeated_with_another_digit_is_a_dropped_one(results, monkeypatch):
    lost, won = results.kept_race(monkeypatch, pct=5), results.race(monkeypatch, b="optim.beta2=0.990001")
    evidence = failed(won)
    assert list(evidence) == [DROPPED] and f"in race {lost.name}" in evidence[DROPPED]


def test_a_race_without_a_verdict_and_the_next_one_are_claimed_with_the_command_that_both_say(
    results, monkeypatch, capsys
):
    first = results.kept_race(monkeypatch, pct=0)
    capsys.readouterr()
    won = results.race(monkeypatch)
    out, both = capsys.readouterr().out, f"{first.name}:B {won.name}:B"
    assert f"next  ./run.sh replay {both}, whose certificates" in out and f"./run.sh judge {both} --claim NAME" in out
    evidence = failed(won)
    assert list(evidence) == [DROPPED] and f"claim them too: ./run.sh judge {both}" in evidence[DROPPED]
    assert failed(f"{first.name}:B", f"{won.name}:B") == {}


def test_arms_of_one_race_may_be_near_each_other(results, monkeypatch):
    assert failed(results.race(monkeypatch, b="optim.beta2=0.9501")) == {}


# ---- one run under several names


def test_three_seeds_of_one_trajectory_are_one_run(results):
    folders = [results.add(seed, val_loss=2.75 + 0.01 * seed, train_loss=3.0) for seed in range(3)]
    evidence = failed(*folders)
    assert list(evidence) == [OWN_SEED, "the target is reached"]
    assert "have bit-identical training losses: they are one run, whatever their seeds" in evidence[OWN_SEED]
    assert evidence["the target is reached"].startswith("3 runs count as 1 by their seeds and losses")


# ---- times that cannot be


def test_entries_of_runs_that_never_ran_do_not_fit_into_the_ledgers_times(results, monkeypatch):
    monkeypatch.setattr(results, "_ledger", lambda entry, when, *facts: entry(results.folder, *facts))
    evidence = failed(*three(results))
    assert list(evidence) == [OF_LEDGER]
    assert "by its own record, but at 20" in evidence[OF_LEDGER]
    shutil.rmtree(results.folder)
    for times, why in (
        (dict.fromkeys(("started_at", "ended_at"), utc.now()), "it trained for 10.0 s, but the ledger has only 0."),
        ({"ended_at": "2026-11-21T07:59:00.000Z"}, "it ended at 2026-11-21T07:59:00.000Z, before it was started at"),
    ):
        folders = three(results, change=lambda run, times=times: run.update(times))
        assert why in failed(*folders)[OF_LEDGER]


def test_a_ledger_whose_times_jump_back_is_not_whole(results):
    results.clock = iter([0, 60 * 24 * 365, 5, 6, 7])
    results.add(9, source="66")
    results.add(8, source="66")
    evidence = failed(*three(results))
    assert list(evidence) == [WHOLE] and "a clock was set back, or lines were made up" in evidence[WHOLE]


def test_two_runs_of_a_race_at_once_are_refused(results, monkeypatch):
    folder = results.kept_race(monkeypatch)
    path = results.folder / ledger.NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = [number for number, line in enumerate(lines) if line["event"] == "end"][3]
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    for line, before in zip(lines[at:], lines[at - 1 :]):
        line["prev"], line["number"] = before["sha256"], before["number"] + 1
        line["sha256"] = ledger.digest(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "was started before cpu_nano/" in failed(folder)["the runs follow the plan"]
