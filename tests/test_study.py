"""A study: equal searches, edges extended, fresh seeds for the race, resumed; trials and races cost no time here."""

import argparse
import csv
import json
import math
import os
import random
import re
import signal

import browser
import claimed
import pytest
from test_simulation import BASE

from bench.base import metric
from bench.cli import race
from bench.cli import study as cli
from bench.compare import effects, same_loss, verdict
from bench.machine import leases
from bench.machine.signals import Interrupted
from bench.plans import study
from bench.plans.race import arm_process
from bench.plans.sweep import points
from bench.plans.sweep.points import Points
from bench.record import run_folder, sweep
from bench.report import study_page

WORDS = ["optim=adamw,muon", "tune=optim.lr", "budget=5trials", "n=4", "track=cpu_nano"]
BEST_LR = {"adamw": 0.018, "muon": 0.0013}
FLOOR = {"adamw": 2.8, "muon": 2.7}


def lost(name, lr):
    """Returns val_loss above its floor, a parabola in log lr."""
    return FLOOR[name] + 0.1 * math.log(lr / BEST_LR[name]) ** 2


class Bench:
    """Trials and a race without training: the losses are lost(), in the race with noise of the seed."""

    def __init__(self, tmp_path, monkeypatch, end_after=None, hurt=None):
        self.results, self.trials, self.end_after = claimed.Results(tmp_path / "results"), [], end_after
        self.made = {}  # {overrides: folder} of all trials, also of other studies
        chance = random.Random(7)
        racers = claimed.Racers(
            self.results,
            lambda arm, seed: 10.0 * (1 + chance.gauss(0, 0.002)),
            lambda arm, seed: FLOOR[arm.lower()] + chance.gauss(0, 0.005),
            hurt=hurt,
        )
        racers.install(monkeypatch)
        facts = racers.facts

        def with_row(folder, overrides, results):
            own_facts = facts(folder, overrides, results)
            return own_facts | {"row": own_facts.get("row", {}) | {"num_steps": 120, "batch_tokens": 1024}}

        monkeypatch.setattr(arm_process, "facts", with_row)
        monkeypatch.setattr(study.planning, "refuse_incomparable", lambda facts, measured: None)
        monkeypatch.setattr(Points, "all", lambda points, *args: self.all(points, *args))
        monkeypatch.setattr(study, "made_before", self.made_before)
        self.racers = racers

    def all(self, points, points_overrides, first, settings):
        for number, overrides in enumerate(points_overrides):
            if len(self.trials) == self.end_after:
                self.end_after = None
                raise Interrupted("SIGINT")
            values = sweep.values(overrides)
            self.trials.append((values["optim"], values["optim.lr"], values["seed"]))
            own = [override for override in overrides if not override.startswith("seed=")]
            folder = self.results.add(values["seed"], 10.0, lost(values["optim"], values["optim.lr"]), own)
            sweep.keep(points.folder, first + number, overrides, {"folder": folder})
            self.made[tuple(overrides)] = folder

    def made_before(self, points_overrides):
        folders = {number: self.made.get(tuple(overrides)) for number, overrides in enumerate(points_overrides)}
        runs = {number: run_folder.read(folder) | {"folder": folder} for number, folder in folders.items() if folder}
        return {number: run for number, run in runs.items() if run["status"] == "complete"}


def folder_of(bench):
    (folder,) = (bench.results.folder / "sweeps").iterdir()
    return folder


def test_an_edge_is_extended_and_then_the_wider_gap_beside_the_best_is_halved():
    tried = {}
    for _ in range(7):
        value = study.next_values(0.001, tried)[0]
        tried[value] = abs(math.log10(value / 0.02))
    assert list(tried) == [0.001, 0.00316, 0.00999, 0.0316, 0.0999, 0.0178, 0.0133]
    assert study.next_values(1.0, {1.0: math.inf}) == [3.16, 0.316]  # up, and where that may not be, down
    assert study.next_values(1.0, {1.0: math.inf, 3.16: math.inf})[0] == 0.316
    tried = {1.0: 2.0, 2.0: 1.0, 3.0: 2.0}
    assert study.next_values(1.0, tried)[:2] == [1.41, 2.45]


def test_arms_have_as_many_trials_of_one_seed_and_the_race_has_others(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main(WORDS) == 0
    assert [sum(name == arm for arm, *_ in bench.trials) for name in BEST_LR] == [5, 5]
    assert {seed for *_, seed in bench.trials} == {0}
    folder = folder_of(bench)
    facts = sweep.read_study(folder)
    tried = sweep.trials(folder, facts)
    assert {name: sweep.best_of(losses) for name, losses in tried.items()} == {"AdamW": 0.018, "Muon": 0.00126}
    plan = (bench.results.folder / "races" / facts["race_id"] / "plan.json").read_text()
    assert '"first_seed": 1' in plan and '"alpha": 0.025' in plan and "optim.lr=0.00126" in plan
    out = capsys.readouterr().out
    assert out.index("verdict: BETTER  Muon") < out.index("verdict: FASTER  Muon")
    assert "verdict: FASTER  Muon reaches val_loss 2.80" in out and ", which every run reaches, in " in out
    assert "at the edge" not in out
    for text in (out, (folder / "study.md").read_text(), (folder / "study.html").read_text()):
        assert "What the verdict on the loss rests on" in text and "Flags: uncalibrated" in text  # those of its race
    rows = list(csv.reader((folder / "study.csv").read_text().splitlines()))
    assert [row[0] for row in rows] == ["arm", "AdamW (baseline)", "Muon"] and rows[2][1:4] == [
        "optim.lr=0.00126",
        rows[2][2],
        "5",
    ]
    times = study_page.document(folder).data["same_loss"]["Muon"]
    heads = ["change of val_loss", "95 % interval", "p", "verdict", f"steps to {times['val_loss']:.4f}"]
    of_time = ["change of time, %", "95 % interval of time, %", "p of time", "verdict on time"]
    assert rows[0][7:12] == heads and rows[0][13:] == of_time
    assert rows[2][13] == f"{times['change_pct']:+.2f}" and rows[2][15:] == [f"{times['p']:.2g}", "faster"]
    assert rows[2][14] == "{:+.2f} to {:+.2f}".format(*times["ci95_pct"]) and rows[1][13:] == ["", "", "", ""]
    assert (rows[1][10], rows[2][10]) == ("", "better")
    tex = (folder / "study.tex").read_text()
    assert (
        tex.count(r"\\") == 6
        and tex.count("AdamW (baseline) & ") == 2
        and "95 \\% interval" in tex
        and "val\\_loss" in tex
    )
    page = (folder / "study.html").read_text()
    race_page = (bench.results.folder / "races" / facts["race_id"] / "race.html").read_text()
    for html in (page, race_page):
        assert "pysource, gpt2, 4 layers of width 128, 120 steps of 1,024 tokens, on Example CPU; track" in html
    assert "study-tuned" in page and "arms-val_loss-train_s" in page and "Study: Muon against AdamW" in page
    browser.look_at(folder / "study.html")
    assert cli.main(WORDS) == 0  # all is done: the answer again
    assert len(bench.trials) == 10


def test_how_many_tokens_a_script_takes_is_not_said_and_no_budget():
    facts = {"tokens": 0, "arms": {"A": [], "B": []}, "num_trials": None, "n": 3}
    assert sweep.tokens_text(facts) == "" and sweep.tokens_text(facts | {"tokens": 2048}) == " of 2,048 tokens each"
    with pytest.raises(ValueError, match="budget=5Mtokens: how many tokens a run takes is not known before: write 2h"):
        study._budget_s(facts, "5Mtokens")
    assert study._budget_s(facts, "8trials") is None and facts["num_trials"] == 8


def test_an_inconclusive_time_says_below_what_p_must_be():
    numbers = {"mean_s": [1.0, 0.9], "mean_steps": [9.0, 8.0], "val_loss": 3.0, "change_pct": -10.0}
    times = numbers | {"ci95_pct": [-19.0, -1.0], "p": 0.0252, "alpha": 0.025, "verdict": "inconclusive"}
    times["more_outside"] = False
    sentence = study_page._sentence("Mine", "AdamW", times, metric.VAL_LOSS)
    assert sentence.endswith("%, p = 0.0252); p is not below the alpha of 0.025 (the loss has the other half)")
    hidden = study_page._sentence("Mine", "AdamW", times | {"more_outside": True}, metric.VAL_LOSS)
    assert hidden.endswith("; it spends more time outside its own clock than AdamW, so this is not counted")


def test_no_time_is_compared_to_a_loss_that_a_run_had_before_its_first_step(monkeypatch):
    """As where losses rise: the worst final one is then that of step 0."""
    arms = {name: [(name, {"run_id": f"{name}{seed}"}) for seed in (0, 1)] for name in ("A", "B")}
    ends = {"A0": 5.0, "A1": 5.1, "B0": 6.0, "B1": 6.2}
    monkeypatch.setattr(
        study_page.curves, "validations", lambda path, metric: [(0, 0.0, 5.6), (3, 1.0, ends.popitem()[1])]
    )
    assert study_page._same_loss(arms, {}, {"B": {}}, {"alpha": 0.05}) == {}


def test_the_figure_omits_the_first_third_of_the_curves_but_no_run():
    runs = [{"x": [0, 30, 60], "y": [5.6, 3.0, 2.8]}, {"x": [0, 10], "y": [5.6, 4.0]}]  # the second one failed early
    chart = study_page._ends({"caption": "mean", "arms": [{"name": "AdamW", "runs": runs}]})
    assert chart["caption"] == "mean; without the first third"
    assert chart["arms"][0]["runs"] == [{"x": [30, 60], "y": [3.0, 2.8]}, {"x": [10], "y": [4.0]}]


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main([*WORDS, "--dry-run"]) == 0
    out = capsys.readouterr().out
    text = "5 trials per arm of 122,880 tokens each, optim.lr starting at 0.0018 (AdamW), "
    assert text in out and "; then a race of the best configs with 4 fresh seeds" in out
    runs = "10 trials, then a race of 10 runs (a warm-up and 4 of each arm)"
    assert f"    plan  20 runs, the first run shows how long they take: {runs}; a dry run: nothing was trained" in out
    assert cli.main(["optim=adamw,muon", "tune=optim.lr", "budget=2h", "track=cpu_nano", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_trials"] is None
    assert bench.trials == [] and not (bench.results.folder / "sweeps").exists()


def test_its_baseline_stays_the_baseline_of_a_race_from_it(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main(WORDS) == 0
    tried = sweep.trials(folder_of(bench), sweep.read_study(folder_of(bench)))
    best_lr = {name: sweep.best_of(losses) for name, losses in tried.items()}
    assert min(tried["Muon"].values()) < min(tried["AdamW"].values())  # by which a sweep would put it first
    assert points.winning_arms(folder_of(bench), 2) == [
        f"{name}=track=cpu_nano optim={name.lower()} optim.lr={best_lr[name]!r}" for name in ("AdamW", "Muon")
    ]
    with pytest.raises(ValueError, match="--top 3: study-.* has 2 configs with complete runs"):
        points.winning_arms(folder_of(bench), 3)
    arms = {"A=script.root=. 'script.command=sh evil.sh' script.args": [], "B": []}  # of a collected study
    study = folder_of(bench) / sweep.STUDY
    study.write_text(json.dumps(json.loads(study.read_text()) | {"arms": arms}))
    with pytest.raises(ValueError, match="A=script.root=.* is no name of an arm: the file was damaged"):
        points.winning_arms(folder_of(bench), 2)


@pytest.mark.slow
def test_the_same_command_goes_on_after_an_interrupt_of_the_search_and_of_the_race(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, end_after=3, hurt={4: "interrupt"})
    assert cli.main(WORDS) == 1 and len(bench.trials) == 3
    assert sweep.read(folder_of(bench))["why"] == "it was interrupted"
    assert cli.main(WORDS) == 1 and len(bench.trials) == 10  # the race was interrupted
    num_started = bench.racers.num_started
    assert cli.main(WORDS) == 0 and len(bench.trials) == 10 == len(set(bench.trials))
    assert bench.racers.num_started == 2 * (4 + 1) + 1 > num_started
    assert len(list((bench.results.folder / "races").iterdir())) == 1


def test_a_study_that_another_process_runs_is_refused_and_its_file_stays(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, end_after=3)
    assert cli.main(WORDS) == 1
    file = folder_of(bench) / sweep.STUDY
    with study.locked(folder_of(bench)), pytest.raises(leases.Busy, match="runs this study: wait for its end"):
        file.write_text(kept := file.read_text() + "\n")
        cli.main(WORDS)
    assert len(bench.trials) == 3 and file.read_text() == kept


def test_a_budget_of_tokens_holds_the_race_too(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    tokens = 2 * (4 + 1 + 3) * 120 * 1024  # a race with its warm-ups and three trials of each arm
    assert cli.main([*WORDS[:2], *WORDS[3:], f"budget={tokens}tokens"]) == 0 and len(bench.trials) == 6


@pytest.mark.slow
def test_a_duration_leaves_time_for_the_race_and_arms_have_as_many_trials(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch, end_after=3)  # a run takes 30 s
    arguments = [*WORDS[:2], *WORDS[3:], f"budget={math.ceil(study.RESERVE * (2 * 30 * (4 + 1) + 2 * 30 * 4 + 20))}s"]
    assert cli.main(arguments) == 1 and len(bench.trials) == 3  # one arm is a trial ahead
    out = capsys.readouterr().out
    assert "tuning optim.lr; they show how many the budget allows" in out
    assert re.search("study  a run takes 30 s, of which it trains [0-9]+ s", out)
    assert cli.main(arguments) == 0
    assert [sum(name == arm for arm, *_ in bench.trials) for name in BEST_LR] == [4, 4]
    assert sweep.read_study(folder_of(bench))["num_trials"] == 4
    with pytest.raises(
        ValueError, match="budget=5m: 3 trials of each arm, without which nothing .* race with its warm-ups are 16 runs"
    ):
        cli.main([*arguments[:-1], "budget=5m"])  # by the runs that are known: before anything is trained
    assert len(bench.trials) == 8
    capsys.readouterr()
    assert cli.main([*arguments[:-1], "budget=700s", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "about 6 trials per arm of 122,880 tokens each" in out
    assert "plan  14 runs, about 7 min: 4 trials (8 of 12 complete already), then a race of 10 runs (a warm" in out
    assert study.num_trials({"n": 4, "arms": {"A": [], "B": []}}, "9h", 99.0) == study.MAX_TRIALS


def test_an_arm_has_the_name_that_its_yaml_spells_and_else_a_capital_letter(monkeypatch):
    assert [study._name(f"optim={name}") for name in ("adamw", "muon", "groups")] == ["AdamW", "Muon", "Groups"]
    for about, name in (
        ("SGLion: a sign.", "SGLion"),
        ("SG-Lion, which", "SG_Lion"),
        ("Sglions", "Sglion"),
        ("2glion", "Sglion"),
    ):
        monkeypatch.setattr(study.meanings, "about", lambda group, choice, about=about: about)
        monkeypatch.setattr(study.groups, "choices", lambda group: ["sglion"])
        assert study._name("optim=sglion") == name
    assert study._name("optim.beta2=0.9") == "beta2_0_9".capitalize()


def test_a_study_from_elsewhere_or_of_two_codes_is_refused(tmp_path, monkeypatch):
    """collect brings study.json of others, whose arms may be scripts."""
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main(["optim=adamw,muon", *WORDS[1:2], "budget=2trials", *WORDS[3:]]) == 0
    folder, num = folder_of(bench), len(bench.trials)
    kept = sweep.read_study(folder)
    evil = {"AdamW": ["optim=adamw"], "Muon": ["script=../evil/train.py"]}
    (folder / sweep.STUDY).write_text(json.dumps(kept | {"arms": evil}))
    with pytest.raises(
        ValueError, match="its arms are not those of this command, as of a study from elsewhere: remove"
    ):
        cli.main([*WORDS[:2], "budget=2trials", *WORDS[3:]])
    assert len(bench.trials) == num
    (folder / sweep.STUDY).write_text(json.dumps(kept))
    run = run_folder.read(sweep.points(folder)[0].folder)
    run["code"]["source_sha256"] = "0" * 64
    (sweep.points(folder)[0].folder / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match="the code of AdamW changed between its trials: remove it"):
        sweep.trials(folder, kept)


def test_the_same_command_is_another_study_once_a_yaml_has_changed(tmp_path, monkeypatch):
    """Else the verdict of the old settings would be printed for the new ones."""
    bench = Bench(tmp_path, monkeypatch)
    _, before, *_ = study.planned(WORDS, bench.results.folder, anyway=False)
    own = arm_process.facts
    edited = lambda *arguments: own(*arguments) | {"config_id": own(*arguments)["config_id"][::-1]}  # noqa: E731
    monkeypatch.setattr(arm_process, "facts", edited)
    _, after, *_ = study.planned(WORDS, bench.results.folder, anyway=False)
    assert before != after


def test_a_signal_between_two_runs_ends_it_as_one_within_a_run_does(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    monkeypatch.setattr(study, "go", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(WORDS) == 1 and not bench.trials
    assert "it was interrupted: repeat the command to continue" in capsys.readouterr().out


def test_a_race_of_a_studys_arms_has_its_alpha(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main([*WORDS[:2], "budget=2trials", *WORDS[3:]]) == 0
    sweep_id = folder_of(bench).name
    for typed, alpha in (([], "alpha=0.025"), (["alpha=0.01"], "alpha=0.01")):
        args = argparse.Namespace(arguments=["n=9", *typed], from_sweep=sweep_id, top=2)
        assert [word for word in race._requested(args) if word.startswith("alpha=")] == [alpha]
    assert "race  alpha=0.025: half of the study's, which has two questions" in capsys.readouterr().out


def test_trials_that_the_budget_does_not_allow_after_all_are_said(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    walls_s = lambda folder, key="": [30.0 if len(bench.trials) < 3 else 45.0] * len(bench.trials)  # noqa: E731
    monkeypatch.setattr(study, "_walls_s", walls_s)
    assert cli.main([*WORDS[:2], *WORDS[3:], "budget=588s"]) == 0 and len(bench.trials) == 4
    out = capsys.readouterr().out
    assert "study  at most 4 trials per arm of 122,880 tokens each" in out
    why = "a run takes 45 s, and with one more of each arm the race would end after the budget of 588 s"
    assert f"study  2 trials per arm instead of 4: {why}\n" in out


def test_a_larger_budget_uses_the_trials_of_a_smaller_one_and_counts_what_is_left(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main([*WORDS[:2], "budget=2trials", *WORDS[3:]]) == 0 and len(bench.trials) == 4
    assert (
        "a larger budget= tries more.  It uses these trials again and ends with a new race." in capsys.readouterr().out
    )
    assert cli.main([*WORDS, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "plan  16 runs, " in out and ": 6 trials (4 of 10 complete already), then a race of 10 runs (" in out
    assert cli.main(WORDS) == 0 and len(bench.trials) == 10 == len(set(bench.trials))
    out = capsys.readouterr().out
    assert "study  uses 4 trials of earlier runs again" in out and "plan  16 runs, " in out
    assert "alpha is 0.0" not in out  # its race is of other configs
    folder = max((bench.results.folder / "sweeps").iterdir(), key=lambda folder: len(sweep.points(folder)))
    assert [len(tried) for tried in sweep.trials(folder, sweep.read_study(folder)).values()] == [5, 5]


def test_a_best_at_the_edge_is_said_and_a_run_that_diverges_is_the_worst(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    monkeypatch.setitem(BEST_LR, "adamw", 50.0)
    assert cli.main(["budget=2trials" if argument.startswith("budget") else argument for argument in WORDS]) == 0
    assert "The best optim.lr of AdamW and Muon is at the edge of what was tried" in capsys.readouterr().out
    folder, facts = folder_of(bench), sweep.read_study(folder_of(bench))
    overrides = ["track=cpu_nano", "optim=adamw", "optim.lr=0.5", "seed=0"]
    sweep.keep(folder, 9, overrides, {"folder": bench.results.add(0, overrides=overrides[1:3], status="failed")})
    assert sweep.trials(folder, facts)["AdamW"][0.5] == math.inf
    record = bench.results.add(0, overrides=["optim=adamw", "optim.lr=0.6"], status="failed")
    text = (record / "run.json").read_text()
    (record / "run.json").write_text(text.replace('"kind": "non_finite_loss"', '"kind": "out_of_memory"'))
    sweep.keep(folder, 10, [*overrides[:2], "optim.lr=0.6", "seed=0"], {"folder": record})
    assert 0.6 not in sweep.trials(folder, facts)["AdamW"]  # to be made again


def test_a_trial_that_fails_ends_the_command_and_is_made_again_by_the_next(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    everything = Points.all

    def fails(points, *args):
        everything(points, *args)
        folder = sweep.points(points.folder)[-1].folder
        record = json.loads((folder / "run.json").read_text())
        failure = {"kind": "exception", "message": "RuntimeError: planted (my_optim.py, line 30)"}
        (folder / "run.json").write_text(json.dumps(record | {"status": "failed", "failure": failure}))

    with monkeypatch.context() as patch:
        patch.setattr(Points, "all", fails)
        assert cli.main(WORDS) == 1
    said = "failed: RuntimeError: planted (my_optim.py, line 30): fix it, then repeat the command to continue"
    out = capsys.readouterr().out
    assert said in out and "   study  Muon: trial " in out
    assert "plan  20 runs, " in out  # the search and the race
    assert cli.main([*WORDS, "--dry-run"]) == 0
    assert ": 9 trials left, then a race of 10 runs (a warm-up and 4 of each arm); a dry" in capsys.readouterr().out
    assert cli.main(WORDS) == 0 and len(bench.trials) == 11
    assert cli.main([*WORDS, "--dry-run"]) == 0
    assert "plan  nothing is left to run: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim=adamw,mion", *WORDS[1:]], "there is no optim 'mion'; did you mean muon"),
        (["optim=adamw", *WORDS[1:]], "no arms: give the arms as one setting with several values"),
        (["optim=adamw,muon", "model=gpt2,modern", *WORDS[1:]], "optim=adamw,muon model=gpt2,modern: give the arms"),
        (["optim=adamw,adamw", *WORDS[1:]], "give two arms or more, under different names"),
        ([WORDS[0], "tune=optim.muon_lr", *WORDS[2:]], "tune=optim.muon_lr: optim=adamw has no such setting"),
        ([WORDS[0], "tune=optim.name", *WORDS[2:]], "optim=adamw has optim.name=adamw: use a number above 0"),
        ([*WORDS[:2], *WORDS[3:]], "budget is missing: "),
        ([*WORDS[:2], "budget=2x", *WORDS[3:]], "budget=2x: write 2h or 45m, 8trials"),
        ([*WORDS[:2], "budget=0trials", *WORDS[3:]], "budget=0trials: write 2h or 45m, 8trials (each arm, to 9999)"),
        ([*WORDS[:2], "budget=1000000000trials", *WORDS[3:]], "8trials (each arm, to 9999)"),
        ([*WORDS[:2], "budget=1Mtokens", *WORDS[3:]], "are 16 runs: give 2 times as much"),
        ([*WORDS, "on=time"], "on=time: a study has its own question"),
        ([*WORDS[:3], "n=auto:3-9", WORDS[4]], "a study has its own question, and no n=auto: omit it, or give n=5"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(tmp_path, monkeypatch, arguments, message):
    bench = Bench(tmp_path, monkeypatch)
    with pytest.raises(ValueError) as refused:
        cli.main(arguments)
    assert message in str(refused.value) and not bench.trials and not (bench.results.folder / "sweeps").exists()


def test_a_study_of_bits_per_byte_searches_races_and_tables_them(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path, monkeypatch)
    assert cli.main([*WORDS, "goal.metric=val_bpb", "goal.target_val_loss=null"]) == 0
    folder = folder_of(bench)
    tried = sweep.trials(folder, sweep.read_study(folder))
    assert tried["AdamW"][0.018] == pytest.approx(FLOOR["adamw"] / 4)  # planted: a quarter of val_loss
    out = capsys.readouterr().out
    assert "best at optim.lr=0.018, val_bpb 0.7000" in out and "reaches val_bpb 0.70" in out
    assert not re.findall(r"[^.]*(?<!target_)val_loss.*", out)
    rows = list(csv.reader((folder / "study.csv").read_text().splitlines()))
    assert rows[0][5] == "val_bpb" and float(rows[1][5]) == pytest.approx(0.7, abs=0.005)
    page = (folder / "study.html").read_text()
    assert "val_bpb by optim.lr" in page and "are of val_bpb, bits per byte" in page


def test_where_higher_is_better_the_search_goes_up_and_divergence_is_the_worst():
    core, tried = metric.CORE, {0.1: 0.2, 0.316: 0.3, 1.0: -math.inf}
    assert sweep.best_of(tried, core) == 0.316 and sweep.best_of({1.0: 0.3, 2.0: 0.3}, core) == 1.0
    assert study.next_values(0.1, tried, core)[0] == 0.562  # beside the best, in the wider gap
    assert study.next_values(0.1, {0.1: 0.2, 0.316: 0.3}, core)[0] == 0.999


# ---- honesty


def curve(loss, train_s):
    steps = list(range(0, 101, 20))
    losses = [loss + 2.5 * math.exp(-step / 25) - 2.5 * math.exp(-4) for step in steps]
    return [(step, train_s * step / 100, value) for step, value in zip(steps, losses)]


def answers(chance, n=5, sd_nats=0.02, b_faster=1.0, reuse=False, more_outside=False):
    """Returns (loss verdict, time verdict) of a study of two equal arms, each with the luckiest of 8 trials.

    reuse: the cheat, the race's runs of B have the seed of the lucky trial and so its luck.
    """
    luck = [min(chance.gauss(0, sd_nats) for _ in range(8)) for _ in range(2)]
    curves, arms = {}, []
    for number, arm in enumerate("AB"):
        rows = []
        for place in range(n):
            own = luck[1] / 2 if reuse and arm == "B" else 0.0
            loss, train_s = 3.0 + own + chance.gauss(0, sd_nats), 10.0 * (1 + chance.gauss(0, 0.002))
            train_s /= b_faster if arm == "B" else 1.0
            at = f"2026-11-21T{place:02d}:{(place + number) % 2}0:00.000Z"
            facts = {
                "run_id": f"{arm}{place}",
                "config_id": arm,
                "seed": 10 + place,
                "started_at": at,
                "val_loss": loss,
                "score": loss,
            }
            rows.append(BASE | facts | {"train_s": train_s, "num_disturbed_steps": 0, "target_val_loss": None})
            curves[f"{arm}{place}"] = curve(loss, train_s)
        arms.append(rows)
    race = verdict.compare_rows(*arms, plan={"n": n, "alpha": 0.025, "on": "loss"}, floor_pct=0.1)
    race["more_outside"] = more_outside
    time_answer = same_loss.compared(arms, curves, 0.025, race, {"n": n, "on": "loss"})
    return race["answers"]["loss"]["verdict"], time_answer["verdict"]


def test_who_spends_more_outside_its_own_clock_is_not_faster_to_the_same_loss(monkeypatch):
    monkeypatch.setattr(effects, "secondary", lambda *args: {name: {} for name in effects.SECONDARY})
    for b_faster, more_outside, expected in (
        (2.0, False, "faster"),
        (2.0, True, "inconclusive"),
        (0.5, True, "slower"),
    ):
        assert answers(random.Random(1), b_faster=b_faster, more_outside=more_outside)[1] == expected


@pytest.mark.slow
def test_the_luck_of_a_search_decides_no_more_often_than_alpha(monkeypatch):
    monkeypatch.setattr(effects, "secondary", lambda *args: {name: {} for name in effects.SECONDARY})
    chance, num = random.Random(1), 200
    verdicts = [answers(chance) for _ in range(num)]
    num_wrong = sum(loss in ("better", "worse") or time in ("faster", "slower") for loss, time in verdicts)
    assert num_wrong <= 0.05 * num + 2 * math.sqrt(0.05 * 0.95 * num), num_wrong
    cheated = [answers(chance, reuse=True)[0] for _ in range(40)]
    assert cheated.count("better") > 4  # with the search's own luck it would
    seen = [answers(chance, b_faster=2.0)[1] for _ in range(10)]
    assert seen.count("faster") == 10
