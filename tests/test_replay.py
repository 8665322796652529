"""A record run again from itself alone: what the certificate says of a true one, a changed one, an incomplete one."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import types
import typing
from pathlib import Path
from unittest import mock

import claimed
import kept_records
import pytest
import real_runs
import scripted
import torch
import yaml

from bench.analysis.diagnosis import code_diff
from bench.base import atomic
from bench.base.reading import yaml_file
from bench.claims import claim as claims
from bench.claims.rules import rulebook
from bench.cli import main as program
from bench.cli import replay
from bench.compare import comparison, selection
from bench.machine import code_state, environment, git, processes, sandbox
from bench.machine.signals import Interrupted
from bench.plans.race import worktrees
from bench.plans.replay import certificate, outcomes, rebuilding, recorded, repeats, replaying
from bench.record import certificates, failures, ledger, metrics, named, run_folder, step_files, verification
from bench.record.rows import row_of
from bench.report import run_page, table_groups, verdicts


def replayed(results, *arguments, expect=0, **env):
    """Runs ./run.sh replay ARGUMENTS --json and returns (the certificates, its standard error)."""
    done = real_runs.bench(results, "replay", *map(str, arguments), "--json", **env, code=expect)
    return json.loads(done.stdout or "null"), done.stderr


def edit(folder, alter):
    """Changes run.json: alter(run) does it in place."""
    run = json.loads((folder / "run.json").read_text())
    alter(run)
    atomic.write_json(folder / "run.json", run)


def change(folder, name, edited):
    """A file of a record, changed by somebody who mends its hash and the metrics in run.json as well."""
    path = folder / name
    path.write_text(edited(path.read_text()))

    def mend(run):
        run["metrics"] = metrics.metrics(run, step_files.read(folder))
        (listed,) = [file for file in run["artifacts"] if file["path"] == name]
        listed.update(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), num_bytes=path.stat().st_size)

    edit(folder, mend)


# ---- losses


def rows(*train, val=4.0):
    """Rows 0 to n of steps.csv with these training losses, validated at the end."""
    step_rows = [{"step": 0, "train_loss": None, "val_loss": None}]
    step_rows += [{"step": step, "train_loss": loss, "val_loss": None} for step, loss in enumerate(train, 1)]
    step_rows[-1]["val_loss"] = val
    return step_rows


RECORDED = rows(5.0, 4.5, 4.25, 4.125, 4.0625)
SAME = outcomes.Conditions(is_same=True, dtype="float32", is_cpu=True)
ELSEWHERE = dataclasses.replace(SAME, is_same=False)
CLOSE = rows(5.0, 4.5000005, 4.2500005, 4.1250005, 4.0625005, val=4.0000005)
FAR = rows(5.0, 4.6, 4.251, 4.13, 4.07)


@pytest.mark.parametrize(
    ("losses", "verdict", "num_equal", "sentence"),
    [
        (RECORDED, "identical", 6, "all 6 losses are the same"),
        (CLOSE, "equal within rounding", 1, "train_loss of step 2"),
        (rows(5.0, 4.5, 4.25, 4.125, 4.06251), "undecided", 4, "training losses up to step 5 differ"),
        (FAR, "not reproduced", 1, "the training losses up to step 3 differ"),
        (
            rows(5.0, 4.5, 4.25, 4.125, 4.0625, val=4.00001),
            "not reproduced",
            5,
            "every training loss before it is the same",
        ),
        (rows(5.0, 4.5, 4.25, 4.125), "not reproduced", 4, "train_loss of step 5 is missing"),
        (rows(5.0, 4.5, float("nan"), 4.125, 4.0625), "not reproduced", 2, "is nan"),
    ],
)
def test_losses_of_another_machine_are_judged_by_what_rounding_does(losses, verdict, num_equal, sentence):
    """A perturbed replay has the replay's losses but for the last digits."""
    if len(losses) < len(RECORDED):
        losses[-1]["val_loss"] = None
    moved = [row | {name: row[name] and row[name] * (1 + 2e-7) for name in outcomes.LOSSES} for row in losses]
    outcome = outcomes.from_losses(RECORDED, losses, ELSEWHERE, perturbed=[moved, moved])
    assert (outcome.word, outcome.num_equal_losses, outcome.num_losses, outcome.needs) == (verdict, num_equal, 6, None)
    assert sentence in outcome.why


def test_a_word_that_needs_a_further_replay_says_which():
    assert outcomes.from_losses(RECORDED, RECORDED, ELSEWHERE).needs is None
    first = outcomes.from_losses(RECORDED, CLOSE, ELSEWHERE)
    assert (first.word, first.needs) == ("undecided", "perturbed")
    near = outcomes.from_losses(RECORDED, CLOSE, ELSEWHERE, perturbed=[RECORDED])
    assert (near.word, near.needs) == ("equal within rounding", None), "a run that rounding moves as far itself"
    assert outcomes.from_losses(RECORDED, FAR, ELSEWHERE, perturbed=[FAR]).needs == "perturbed", "it had no effect"
    assert outcomes.from_losses(RECORDED, FAR, ELSEWHERE, perturbed=[FAR, FAR]).needs is None
    refused = outcomes.from_losses(RECORDED, FAR, ELSEWHERE, perturbed=[rows(5.0, 4.6001, 4.251, 4.13, 4.07)])
    assert (refused.word, refused.needs) == ("not reproduced", "perturbed"), "before it is said for good"
    gpu = dataclasses.replace(ELSEWHERE, is_cpu=False)
    assert outcomes.from_losses(RECORDED, FAR, gpu).needs == "twin"


def test_on_the_same_machine_and_software_nothing_but_identical_holds():
    assert outcomes.from_losses(RECORDED, RECORDED, SAME).word == "identical"
    alone = outcomes.from_losses(RECORDED, CLOSE, SAME)
    assert (alone.word, alone.needs) == ("undecided", "twin") and "only a second replay" in alone.why
    outcome = outcomes.from_losses(RECORDED, CLOSE, SAME, twins=[CLOSE])
    assert outcome.word == "not reproduced" and "two replays here agree with each other" in outcome.why
    assert outcomes.from_losses(RECORDED, CLOSE, ELSEWHERE, perturbed=[RECORDED]).word == "equal within rounding"


def test_a_run_that_differs_from_itself_is_no_cheat():
    """A GPU's atomic additions do that: the record may be honest, and nobody can tell here."""
    judged = outcomes.from_losses(RECORDED, FAR, SAME, twins=[rows(5.0, 4.6, 4.2, 4.13, 4.07)])
    assert (
        judged.word == "undecided"
        and "two replays here also differ from each other, in train_loss of step 3: 4.251 and 4.2" in judged.why
    )
    gpu = dataclasses.replace(ELSEWHERE, is_cpu=False)
    judged = outcomes.from_losses(RECORDED, FAR, gpu, twins=[FAR])
    assert judged.word == "undecided" and "all replays gave the same losses" in judged.why and "--times" in judged.why
    judged = outcomes.from_losses(RECORDED, rows(9.0, 4.6, 4.25, 4.1, 4.0), gpu, twins=[rows(9.1, 4.6, 4.25, 4.1, 4.0)])
    assert judged.word == "undecided", "another GPU's rounding was not measured by it"
    other_torch = dataclasses.replace(ELSEWHERE, is_other_software=True)
    near_far = rows(5.0, 4.600001, 4.251, 4.13, 4.07)
    assert outcomes.from_losses(RECORDED, FAR, other_torch, perturbed=[near_far, near_far]).word == "undecided"
    assert outcomes.from_losses(RECORDED, FAR, ELSEWHERE, perturbed=[near_far, near_far]).word == "not reproduced"


def test_a_run_that_rounding_scatters_is_not_certified_by_it():
    """With too high a learning rate, a loss lowered by a tenth of a nat would lie within what rounding does."""
    outcome = outcomes.from_losses(RECORDED, FAR, ELSEWHERE, perturbed=[rows(5.0, 4.4, 4.3, 4.1, 4.0, val=4.3)])
    assert (outcome.word, outcome.needs) == ("undecided", None)
    assert "rounding alone moves the losses of this run by 7.5 %" in outcome.why


def test_the_last_digit_that_a_script_prints_is_rounding():
    printed, replay = rows(5.0123, 4.5, val=4.1234), rows(5.0123, 4.5, val=4.1235)
    other = rows(5.0124, 4.5, val=4.1235)
    for is_script, word in ((True, "equal within rounding"), (False, "not reproduced")):
        conditions = dataclasses.replace(ELSEWHERE, is_script=is_script)
        assert outcomes.from_losses(printed, replay, conditions, perturbed=[other, other]).word == word


# ---- what this sees, on real runs of cpu_nano (tests/rounding_losses.json)

KEPT = json.loads(Path(__file__).with_name("rounding_losses.json").read_text())
AT = {"float32": ("native", ["default"]), "bfloat16": ("native", ["core", "atendef"])}  # a replay, and perturbed ones


def kept_rows(name):
    """Returns the rows of a kept run's steps.csv."""
    validated = {int(step): loss for step, loss in KEPT[name]["val_loss"].items()}
    trained = [None, *KEPT[name]["train_loss"]]
    return [{"step": step, "train_loss": loss, "val_loss": validated.get(step)} for step, loss in enumerate(trained)]


def across(recorded, dtype, seed=0):
    """The outcome for rows that were recorded on another instruction set than that of the replay."""
    conditions = dataclasses.replace(ELSEWHERE, dtype=dtype)
    at, perturbed = AT[dtype]
    rows_of = {name: kept_rows(f"gpt2-{dtype}-s{seed}-{name}") for name in (at, *perturbed)}
    return outcomes.from_losses(recorded, rows_of[at], conditions, perturbed=[rows_of[name] for name in perturbed])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_run_of_another_instruction_set_holds(dtype, seed):
    """From seed 1 rounding grows to 1e-4 in float32, a hundred times as far as from seed 0."""
    other = "avx2" if dtype == "float32" else "threads1"
    outcome = across(kept_rows(f"gpt2-{dtype}-s{seed}-{other}"), dtype, seed)
    assert outcome.word == "equal within rounding" and outcome.num_equal_losses < 20, outcome


@pytest.mark.parametrize(
    ("changed", "in_float32", "in_bfloat16"),
    [
        ("lr1", "not reproduced", "not reproduced"),  # learning rate +1 %
        ("beta2", "not reproduced", "not reproduced"),  # +1 %
        ("eps", "not reproduced", "undecided"),  # ten times
        ("wd0", "not reproduced", "equal within rounding"),  # no weight decay: over 120 steps less than rounding does
        ("wd101", "not reproduced", "equal within rounding"),  # 0.101 for 0.1
    ],
)
def test_another_setting_is_not_rounding(changed, in_float32, in_bfloat16):
    for dtype, expected in (("float32", in_float32), ("bfloat16", in_bfloat16)):
        outcome = across(kept_rows(f"gpt2-{dtype}-s0-native-{changed}"), dtype)
        assert outcome.word == expected, outcome


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_last_loss_that_was_lowered_is_not_rounding(dtype):
    """It is 0.012 nats, which an assumed bound once took for rounding in bfloat16."""
    recorded = kept_rows(f"gpt2-{dtype}-s0-{'avx2' if dtype == 'float32' else 'threads1'}")
    recorded[-1]["val_loss"] -= 0.012
    outcome = across(recorded, dtype)
    assert outcome.word == "not reproduced" and "val_loss of step 120" in outcome.why


def test_windows_of_steps_double_and_what_rounding_does_to_training_never_falls():
    fracs = {(0, "val_loss"): 0.0} | {(step, "train_loss"): 4e-6 for step in range(1, 6)} | {(5, "val_loss"): 4e-6}
    pairs = [{key: frac / 2 for key, frac in fracs.items()}, {(1, "train_loss"): 1e-6, (2, "train_loss"): 8e-6}]
    windows = outcomes.moved_by_rounding(fracs, pairs, {"train_loss": 1e-7, "val_loss": 1e-7})
    shares = [(window.step, window.kind, round(window.share, 3)) for window in windows]
    assert shares[:3] == [(0, "val_loss", 0), (1, "train_loss", 2), (3, "train_loss", 0.5)]
    assert shares[3:] == [(5, "val_loss", 2), (5, "train_loss", 0.5)], "a validation has the room of its own window"


# ---- times


def timed(train_s, **changed):
    """A row of a run that took so long."""
    run = json.loads((kept_records.COMPLETE / "run.json").read_text())
    row = row_of(run) | {"train_s": train_s, "run_id": f"{train_s}", "log_id": None, "validity": "valid"}
    return row | {"session_id": "a", "machine_doubts": [], "num_disturbed_steps": 0} | changed


@pytest.mark.parametrize(
    ("recorded", "replayed", "verdict", "sentence"),
    [
        (timed(10.0), [timed(10.1)], "reproduced", "+1.0 %, within 8.0 %; noise floor of this session: not measured"),
        (timed(5.0), [timed(10.0)], "undecided", "a second replay is needed"),
        (timed(5.0), [timed(10.0), timed(10.1)], "not reproduced", "the replays agree with each other"),
        (timed(5.0), [timed(10.0), timed(15.0)], "undecided", "differ from each other by as much"),
        (timed(5.0), [timed(10.0), timed(5.2)], "reproduced", "within 8.0 %"),
        (timed(5.0), [timed(10.0, session_id="b")], "not comparable", "2 sessions"),
        (timed(5.0), [timed(10.0, validity="suspect", machine_doubts=["busy"])], "not comparable", "is suspect: busy"),
        (timed(9.0), [timed(t) for t in (10.0, 10.1, 9.9)], "not reproduced", "95 % of runs within"),
    ],
)
def test_the_time_has_a_word_of_its_own(recorded, replayed, verdict, sentence):
    time = repeats.from_rows(recorded, replayed)
    assert time.word == verdict and sentence in time.why, time


def test_a_record_whose_times_were_cut_in_half_is_identical_and_its_time_is_not(tmp_path):
    results = claimed.Results(tmp_path / "results")
    folders = [results.add(train_s=train_s) for train_s in (5.0, 10.0, 10.1)]
    record, first, second = (
        recorded.Recorded(folder, run_folder.read(folder), yaml_file.read(folder / "config.yaml"), [])
        for folder in folders
    )
    judged = replaying.judged(record, [first, second])
    assert (judged["outcome"], judged["time"]["word"]) == ("identical", "not reproduced"), judged
    assert "train_s 10.00 and 10.10 s against 5.00 s recorded, +101.0 %" in judged["time"]["why"]
    assert replaying.judged(first, [second])["time"]["word"] == "reproduced"
    assert replaying.further(record, [first]) == ("as the first: does this machine take as long again?", {})
    assert replaying.further(first, [second]) is None


def test_one_more_value_lies_in_the_prediction_interval_of_a_textbook():
    low, high = repeats.prediction_interval([1.0, 2.0, 3.0], 0.95)
    assert (low, high) == pytest.approx((2 - 4.30265 * (4 / 3) ** 0.5, 2 + 4.30265 * (4 / 3) ** 0.5), abs=1e-4)


def test_fresh_seeds_must_reach_the_target_that_the_record_reached():
    assert repeats.judged_losses(3.0, [2.99, 3.0, 3.01], None, 0.01, None)[0] == "statistically reproduced"
    assert repeats.judged_losses(4.0, [2.99, 3.0, 3.01], None, 0.01, None)[0] == "not reproduced"
    verdict, why, facts = repeats.judged_losses(3.0, [2.99, 3.0, 3.01], 3.1, 0.01, True)
    assert verdict == "statistically reproduced" and facts["p"] < 0.01 and "below 3.1" in why
    verdict, why, _ = repeats.judged_losses(3.0, [2.99, 3.0, 3.01], 3.005, 0.01, True)
    assert verdict == "not reproduced" and "not shown to be below 3.005" in why
    assert repeats.judged_losses(3.0, [2.99, 3.0, 3.01], 2.9, 0.01, False)[0] == "statistically reproduced"


def test_the_likeliest_cause_is_named():
    old = {"torch": "2.13.0", "cpu_model": "A", "num_threads": 2, "gpus": [], "os": "one"}
    now = old | {"cpu_capability": "AVX512"}
    assert certificate.likeliest_cause([], certificate.unrecorded(old, now), False).endswith("the record does not say")
    fields = certificate.differences(old, now | {"torch": "2.12.0", "num_threads": 4, "os": "two"})
    assert [field.name for field in fields] == ["torch", "num_threads", "os"]
    assert certificate.likeliest_cause(fields, [], False) == "another torch"
    assert certificate.likeliest_cause(fields[2:], [], False).endswith("hardware.deterministic is off")
    assert certificate.machine_kind(old, now | {"torch": "2.12.0"}, False) == "other torch"
    assert certificate.machine_kind(old, now | {"cpu_model": "B"}, False) == "other machine"


def test_numerical_libraries_are_named_with_their_versions():
    text = "- Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 2024\n- Intel(R) MKL-DNN v3.12.0 (Git"
    assert environment.numerical_libraries(text) == ["MKL 2024.2", "oneDNN v3.12.0"]


# ---- as its user starts it


def test_a_record_replays_identical_and_both_hold_the_certificate(finished_run, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    ((cert,), stderr) = replayed(tmp_path / "results", folder)
    assert (cert["outcome"], cert["machine"]) == ("identical", "same session"), cert["why"]
    assert cert["num_equal_losses"] == cert["num_losses"] == 6 + 3  # six steps, validated at 0, 3 and 6
    assert "2 shards with the record's sha256" in stderr and f"time  {cert['time']['word']}" in stderr
    (replay,) = (tmp_path / "results" / "replays").glob("*/*/run.json")
    assert certificates.read(replay.parent) is not None
    assert step_files.read_columns(folder, ["train_loss"]) == step_files.read_columns(replay.parent, ["train_loss"])
    assert real_runs.bench(tmp_path / "results", "verify", str(folder)).returncode == 0
    page = run_page.html(folder, at=tmp_path)
    assert f'href="results/free/{folder.name}/certificate.json">identical (same session), time ' in page
    assert [path.parent for path in (tmp_path / "results").glob("*/*/run.json")] == [folder]  # no repeat of its config
    _is_computed_again_by_a_judge(folder, replay.parent, tmp_path, monkeypatch)


def came_again(folder):
    """Returns (passed, evidence) of the rule that judge --replayed adds, for one run."""
    rules = rulebook.check(claims.from_folders([folder]), replayed=True)
    (rule,) = [rule for rule in rules if rule["rule"] == "every run was reproduced"]
    return rule["passed"], rule["evidence"]


def _is_computed_again_by_a_judge(folder, replay, tmp_path, monkeypatch):
    """Cheats with certificates, each on a copy of the results folder that has a true one."""
    assert came_again(folder)[0], came_again(folder)
    assert certificates.outcome(folder) == "identical"
    real = (folder / certificates.FILE).read_text()
    # the file is not read: what it says, and whether it is there, changes nothing
    for content in ('{"outcome": "identical",\n "replays": []}', real.replace("identical", "undecided")):
        (folder / certificates.FILE).write_text(content)
        assert came_again(folder)[0]
    # without replays of one's own no file helps, neither one of two lines nor a true one that came with the record
    (tmp_path / "results" / "replays").rename(tmp_path / "replays")
    (folder / certificates.FILE).write_text('{"outcome": "identical",\n "replays": []}')
    assert certificates.outcome(folder) == "malformed"
    passed, evidence = came_again(folder)
    assert not passed and "was not written by ./run.sh replay" in evidence
    (folder / certificates.FILE).write_text(real)
    assert certificates.outcome(folder) == "claimed: identical"
    passed, evidence = came_again(folder)
    assert not passed and "its certificate claims 'identical', which was not checked" in evidence
    (folder / certificates.FILE).unlink()
    assert "has no certificate, and no replay of it was made here" in came_again(folder)[1]
    (tmp_path / "replays").rename(tmp_path / "results" / "replays")
    # a replay that was changed afterwards, by somebody who mends its hashes
    kept = (replay / "run.json").read_bytes(), (replay / "steps.csv").read_bytes()
    change(replay, "steps.csv", lambda text: text.replace(",4.", ",3."))
    assert "is not as the ledger of replays has it" in came_again(folder)[1]
    (replay / "run.json").write_bytes(kept[0])
    assert "fails ./run.sh verify, artifacts are unchanged" in came_again(folder)[1]
    (replay / "steps.csv").write_bytes(kept[1])
    assert came_again(folder)[0]
    _a_copy_is_no_replay(folder, tmp_path / "results" / "replays")


def _a_copy_is_no_replay(folder, replays):
    """The record itself, entered under another name into the judge's own ledger of replays."""
    name = f"{folder.name[:-1]}5-9"
    copy = replays / folder.parent.name / name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(certificates.FILE))
    run = json.loads((copy / "run.json").read_text()) | {"run_id": name}
    run["ledger_sha256"] = ledger.started(replays, copy, run)
    atomic.write_json(copy / "run.json", run)
    ledger.ended(replays, copy, run)
    entry = {"record": certificates.name_of(run | {"run_id": folder.name}), "replays": [certificates.name_of(run)]}
    ledger.append(
        replays, certificates.EVENT, **entry, losses_sha256=certificates.losses_sha256(run), outcome="identical"
    )
    assert verification.report(copy)["passed"], verification.report(copy)
    assert "is a copy: every step time is the record's" in came_again(folder)[1]


def test_a_git_that_is_not_installed_is_no_missing_commit(finished_run, monkeypatch):
    monkeypatch.setenv("PATH", "")
    check = recorded._commit(recorded.read(finished_run))
    assert check.status == "fail" and "git cannot be run" in check.found and "install git" in check.remedy


FAULTS = ("no process for git", "no process for a program that git starts", "for the replay", "the replay was killed")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_machine_without_free_processes_gets_no_certificate(tmp_path, monkeypatch, capsys, fault):
    """EAGAIN once overwrote twelve published certificates with "impossible here" and advised to install git."""
    published = min((real_runs.REPO / "results/published/cpu_nano-gpt2-adamw/cpu_nano").iterdir())
    folder = Path(shutil.copytree(published, tmp_path / "results" / "cpu_nano" / published.name))
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    before = (folder / certificates.FILE).read_bytes()
    short = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if fault == "no process for git":
        monkeypatch.setattr(git.subprocess, "run", mock.Mock(side_effect=short))
    elif "replay" in fault:
        nothing = contextlib.nullcontext(rebuilding.Checkout(tmp_path, tmp_path, tmp_path))
        for name in ("refuse_other_code", "own_choices", "identity"):
            monkeypatch.setattr(rebuilding, name, lambda *_: None)
        for name in ("checkout", "alone"):
            monkeypatch.setattr(rebuilding, name, lambda *_: nothing)
        monkeypatch.setattr(recorded, "checks", lambda record: [])
        monkeypatch.setattr(rebuilding, "train", lambda *_: killed)
        killed = Path(shutil.copytree(folder, tmp_path / "killed"))
        edit(killed, lambda run: run.update(status="failed", failure=failures.failure("rank_killed", "by SIGKILL")))
        if fault == "for the replay":
            printed = ValueError(f"Traceback ...\nBlockingIOError: {short}")  # as arm_process.ask() passes it on
            monkeypatch.setattr(rebuilding, "identity", mock.Mock(side_effect=printed))
    else:
        program_file = tmp_path / "git"
        program_file.write_text(f"#!/bin/sh\necho 'error: cannot fork: {short.strerror}' >&2\nexit 128\n")
        program_file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
    assert program.main(["replay", str(folder), "--trust"]) == 75
    said = capsys.readouterr()
    assert f"no certificate of {folder.name} was written" in said.err and "run the same command again" in said.err
    assert "[Errno" not in said.err.partition("no certificate")[0] or fault == "for the replay"
    assert "install git" not in said.out + said.err and (folder / certificates.FILE).read_bytes() == before


def test_a_run_refuses_to_begin_if_git_finds_no_free_process(monkeypatch, capsys):
    """Its record would say that nobody knows its commit, and could not be claimed."""
    monkeypatch.setattr(git.subprocess, "run", mock.Mock(side_effect=OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    with pytest.raises(BlockingIOError, match="git could not be started: Resource temporarily unavailable"):
        code_state.state()
    assert program.main(["history"]) == 75
    assert "no free processes, memory or open files (EAGAIN): run the same command again" in capsys.readouterr().err


def test_what_is_missing_is_said_before_any_work(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    change(folder, "steps.csv", lambda text: text)

    def lacking(run):
        run["code"]["commit"] = "0" * 40
        run["data"]["train"][0]["sha256"] = "0" * 64
        run["hardware"]["num_processes"] = 8

    edit(folder, lacking)
    (cert,), stderr = replayed(tmp_path / "results", folder, "--trust", expect=2)
    assert cert["outcome"] == "impossible here"
    assert "commit: 000000000000 is not in this repository" in cert["why"] and "sha256" in cert["why"]
    assert not (tmp_path / "results" / "replays").exists()
    change(folder, "steps.csv", lambda text: text)
    (folder / "steps.csv").write_text("step\n")
    (cert,), stderr = replayed(tmp_path / "results", folder, "--check", expect=2)
    assert "steps.csv" in cert["why"]


@pytest.mark.slow
def test_losses_of_another_setting_are_not_reproduced_on_the_same_machine(finished_run, tmp_path):
    """The losses of a run whose weight decay was 0.101, in the record of one with 0.1; `verify` finds nothing."""
    folder = real_runs.copy_of(finished_run, tmp_path / "a")
    other = real_runs.run(tmp_path / "other", "seed=5", "optim.weight_decay=0.101")
    _take_losses(folder, other)
    assert verification.report(folder)["passed"], verification.report(folder)
    (cert,), _ = replayed(tmp_path / "a", folder, "--trust", expect=1)
    assert cert["outcome"] == "not reproduced" and len(cert["replays"]) == 2
    assert "two replays here agree with each other: only identical losses hold" in cert["why"]


def _take_losses(folder, other):
    def grafted(text):
        other_losses = iter(real_runs.losses(other))
        head, *lines = text.rstrip("\n").split("\n")
        at = [head.split(",").index(name) for name in ("train_loss", "val_loss")]
        for number, line in enumerate(lines):
            cells, losses = line.split(","), next(other_losses)[1:]
            for column, loss in zip(at, losses, strict=True):
                cells[column] = loss
            lines[number] = ",".join(cells)
        return "\n".join([head, *lines]) + "\n"

    change(folder, "steps.csv", grafted)


@pytest.mark.slow
def test_a_record_that_verify_refuses_gets_no_certificate_and_changed_code_is_refused(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "a")
    edit(folder, lambda run: run["metrics"].update(val_loss=run["metrics"]["val_loss"] - 0.01))
    (cert,), stderr = replayed(tmp_path / "a", folder, "--trust", expect=2)
    assert cert["outcome"] == "impossible here" and "metrics follow from the facts: val_loss" in cert["why"]
    assert "wrote  no certificate" in stderr and not (folder / certificates.FILE).exists()
    assert not (tmp_path / "a" / "replays").exists()
    folder = real_runs.copy_of(finished_run, tmp_path / "b")
    edit(folder, lambda run: run["code"].update(source_sha256="1" * 64))  # of code that the record does not hold
    (cert,), _ = replayed(tmp_path / "b", folder, "--trust", expect=2)
    assert cert["outcome"] == "impossible here" and "the record was changed or is incomplete" in cert["why"]


@pytest.mark.parametrize("linked", ["", "own", "script", "untracked", "own/keys", "own/net/key.py", "untracked/.git"])
def test_no_file_of_a_code_folder_with_links_or_a_repository_is_used(tmp_path, linked):
    """A link shows private files to code in the sandbox; `git apply` runs the filters of a .git, outside of it."""
    record, private = tmp_path / "run", tmp_path / "private"
    (record / "code/own").mkdir(parents=True)
    private.mkdir()
    (private / "diff.patch").write_text("swordfish")
    link = record / "code" / linked
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if linked.endswith(".git"):
        link.write_text("gitdir: evil")
    else:
        link.symlink_to(private / "diff.patch" if linked.endswith(".py") else private)
    code = {"commit": git.run(real_runs.REPO, "rev-parse", "HEAD").strip(), "diff_sha256": None}
    theirs = recorded.Recorded(record, {"run_id": "theirs", "track": "free", "code": code}, {}, [])
    assert theirs.patch() is None
    name = "/".join(filter(None, ["run/code", linked]))
    why = f"{name} is a (link|git repository), so no file of this code/ is used"
    with pytest.raises(ValueError, match=why), rebuilding.checkout(theirs):
        pass
    assert name in code_diff.diff_folders(record, tmp_path / "other")["unknown"]


@pytest.mark.parametrize("kept", ["models/mine/net.py", "models/link.py", "models/loop", "readme/net.py", "a/.GIT"])
def test_a_record_writes_through_no_link_of_its_commit(tmp_path, monkeypatch, kept):
    repo, elsewhere, record = tmp_path / "repo", tmp_path / "elsewhere", tmp_path / "run"
    (repo / "models").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "shell.rc").write_text("mine")
    (repo / "readme").write_text("")
    for name, target in (("mine", elsewhere), ("link.py", elsewhere / "shell.rc"), ("loop", "loop")):
        (repo / "models" / name).symlink_to(target)
    for command in ("init -q", "add .", "commit -qm theirs"):
        real_runs.git(repo, *command.split())
    (record / "code/untracked" / kept).parent.mkdir(parents=True)
    (record / "code/untracked" / kept).write_text("theirs")
    monkeypatch.setattr(rebuilding, "REPO", repo)
    code = {"commit": git.run(repo, "rev-parse", "HEAD").strip(), "diff_sha256": None}
    theirs = recorded.Recorded(record, {"run_id": "theirs", "track": "free", "code": code}, {}, [])
    why = "could not be put into its commit|is a git repository"
    with pytest.raises(ValueError, match=why), rebuilding.checkout(theirs):
        pass
    assert (elsewhere / "shell.rc").read_text() == "mine" and len(list(elsewhere.iterdir())) == 1


def test_the_folders_of_a_killed_replay_are_removed_by_the_next_and_those_of_a_running_one_are_not(
    tmp_path, monkeypatch
):
    repo, temp, boot = tmp_path / "repo", tmp_path / "temp", processes.boot_id_hash()[:8]
    for folder in (repo, temp, tmp_path / "run/code"):
        folder.mkdir(parents=True)
    for command in ("init -q", "commit -q --allow-empty -m one"):
        real_runs.git(repo, *command.split())
    monkeypatch.setattr(rebuilding, "REPO", repo)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    killed = subprocess.Popen(["true"])
    killed.wait()
    code = {"commit": git.run(repo, "rev-parse", "HEAD").strip(), "diff_sha256": None}
    record = recorded.Recorded(tmp_path / "run", {"run_id": "a-s0", "track": "free", "code": code}, {}, [])
    for pid in (killed.pid, os.getppid()):
        (temp / f"speedrun-replay-{boot}-{pid}-a_b1/results").mkdir(parents=True)
        worktrees.add(repo, f"replay-b-s1-{boot}-{pid}", code["commit"])
    (temp / "tmp1234").mkdir()
    with rebuilding.checkout(record) as tree:
        assert tree.own.parent == temp and tree.own.name.startswith(f"speedrun-replay-{boot}-{os.getpid()}-")
    assert sorted(path.name for path in temp.iterdir()) == [f"speedrun-replay-{boot}-{os.getppid()}-a_b1", "tmp1234"]
    assert [path.name for path in worktrees.path_of(repo, "").iterdir()] == [f"replay-b-s1-{boot}-{os.getppid()}"]


@pytest.mark.parametrize("linked", ["code", "code/own", "code/untracked/models", "logs", "traces"])
def test_verify_refuses_a_record_with_a_folder_that_is_a_link(tmp_path, linked):
    record = shutil.copytree(kept_records.COMPLETE, tmp_path / kept_records.COMPLETE.name)
    link = record / linked
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "private")  # which need not be there yet
    edit(record, lambda run: run.update(artifacts=[
        file for file in run["artifacts"] if not file["path"].startswith(linked)
    ]))  # fmt: skip
    rules = {rule["rule"]: rule for rule in verification.report(record)["rules"]}
    assert rules["nothing is unrecorded"]["evidence"] == f"{linked} is a link and no part of the record"
    (tmp_path / "private").mkdir()
    assert not verification.report(record)["passed"]


@pytest.mark.slow
def test_an_interrupted_replay_in_a_sandbox_leaves_its_record(tmp_path, monkeypatch):
    """As its launcher has finished it there, which gets the signal through the sandbox's wrappers (test_sandbox.py)."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    tree = types.SimpleNamespace(temp=tmp_path / "temp", code=tmp_path, own=tmp_path)
    (tmp_path / ".git").write_text(f"gitdir: {tmp_path}/.git")
    confined = rebuilding.Sandbox(recorded.read(kept_records.COMPLETE), tree, has_data=True)

    def ended(*_):
        claimed.Results(confined.results).add(1, status="aborted")
        raise Interrupted("SIGINT")

    monkeypatch.setattr(rebuilding.arm_process, "run_to_end", ended)
    with pytest.raises(Interrupted):
        rebuilding.train(tmp_path, [], {}, "theirs", confined=confined)
    (name,) = ledger.read(tmp_path / "results/replays").runs
    run = run_folder.read(tmp_path / "results/replays" / name)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_replay_that_a_signal_ends_is_not_one_that_was_not_reproduced(monkeypatch, capsys, number):
    monkeypatch.setattr(replay, "_of", mock.Mock(side_effect=Interrupted(number.name)))
    assert program.main(["replay", str(kept_records.COMPLETE)]) == 128 + number
    assert f"interrupted ({number.name}): no certificate of" in capsys.readouterr().out


def test_a_fetched_commit_and_settings_that_name_code_are_a_strangers_code_too(tmp_path, monkeypatch):
    repo = tmp_path / "repo"
    git.run(tmp_path, "init", "-q", "-b", "main", str(repo))
    who = ("-c", "user.name=me", "-c", "user.email=me@here", "commit", "-q", "--allow-empty", "-m", "a commit")
    git.run(repo, *who)
    ours = git.run(repo, "rev-parse", "HEAD").strip()
    git.run(repo, "checkout", "-q", "-b", "fetched")
    git.run(repo, *who)
    theirs = git.run(repo, "rev-parse", "HEAD").strip()
    git.run(repo, "checkout", "-q", "main")
    monkeypatch.setattr(rebuilding, "REPO", repo)

    def brought(commit, *overrides):
        run = {"track": "free", "run_id": "a", "code": {"commit": commit, "diff_sha256": None}}
        return rebuilding.strangers_code(recorded.Recorded(tmp_path, run, {}, list(overrides)))

    assert brought(ours, "optim.lr=0.1", "seed=1") == []
    assert brought(theirs) == [f"commit {theirs[:12]}, which HEAD does not contain"]
    for override in ("model.arch=subprocess:Popen", " script.rev=x", "instruments={a: {class: os:x}}"):
        assert brought(ours, override) == ["settings that name code"]
    monkeypatch.setattr(ledger, "is_changed", lambda folder, end: False)
    lines = [{"event": "plan"}, *({"event": event, "run": "free/a", "race": None} for event in ("start", "end"))]
    for root, expected in ((1, []), (2, ["settings that name code"])):  # 2: the lines of another ledger, collected
        book = ledger.Ledger(tmp_path, lines, [], roots=[1, root, root])
        monkeypatch.setattr(ledger, "read", lambda results, book=book: book)
        assert brought(ours, "model.arch=subprocess:Popen") == expected
    monkeypatch.undo()
    monkeypatch.setattr(rebuilding, "REPO", repo)
    for number, config in enumerate(
        (
            {"model": {"arch": "subprocess:Popen"}},
            {"model": {"layers": ["linear", "mine.py:Layer"]}},
            {"model": {"layers": ["mine.py:Ünet"]}},
            {"script": {"command": ["sh", "evil.sh"]}},
            {"script": {"module": "evil"}},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        run = {"track": "free", "run_id": "a", "code": {"commit": ours, "diff_sha256": None}}
        record = recorded.Recorded(folder, run, {}, ["experiment=mine"])
        assert rebuilding.strangers_code(record) == ["settings that name code"]


@pytest.mark.slow
def test_a_strangers_code_runs_in_a_sandbox_and_gets_no_tokens(finished_run, tmp_path, monkeypatch):
    """A patch of bench/, its hash put right, that writes to a file which tokens it sees."""
    folder = real_runs.copy_of(finished_run, tmp_path / "theirs")
    commit = real_runs.run_json(folder)["code"]["commit"]
    worktree, spied = tmp_path / "worktree", tmp_path / "spied"
    git = ["git", "-C", str(worktree)]
    subprocess.run(["git", "worktree", "add", "-q", "--detach", worktree, commit], cwd=real_runs.REPO, check=True)
    try:
        init = worktree / "bench/__init__.py"
        told = f"open({str(spied)!r}, 'a').write(str([n for n in os.environ if 'TOKEN' in n]))"
        spy = f"import contextlib, os\nwith contextlib.suppress(OSError): {told}\n"
        init.write_text(init.read_text() + spy)
        patch = subprocess.run([*git, "diff", "--binary"], check=True, capture_output=True, text=True).stdout
        state = code_state.state(worktree)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", worktree], cwd=real_runs.REPO, check=True)

    change(folder, "code/diff.patch", lambda text: patch)
    edit(folder, lambda run: run.update(code=run["code"] | state | {"copy": run["code"]["copy"]}))
    (cert,), stderr = replayed(tmp_path / "results", folder, HF_TOKEN="secret")
    assert cert["outcome"] == "identical" and "the record brings code/diff.patch" in stderr
    assert cert["sandbox"] in (sandbox.BUBBLEWRAP, sandbox.NAMESPACES)
    assert not spied.exists() and (folder / "certificate.json").exists()
    (name,) = cert["replays"]
    assert verification.report(tmp_path / "results/replays" / name)["passed"]
    assert ledger.read(tmp_path / "results/replays").runs[name]["end"]["status"] == "complete"
    monkeypatch.setattr(sandbox, "_tried", lambda: (None, "not permitted"))
    record = recorded.read(folder)
    with pytest.raises(ValueError, match=r"code/diff.patch.*no sandbox can be made here .not permitted.*--trust"):
        replaying.replay(record, [], replaying.Options(), say=print)
    (cert,), _ = replayed(tmp_path / "results", folder, "--trust", HF_TOKEN="secret")
    assert cert["outcome"] == "identical" and cert["sandbox"] is None and set(spied.read_text()) == set("[]")
    spied.unlink()
    change(folder, "code/diff.patch", lambda text: text.replace("import contextlib, os", "import contextlib, os, sys"))
    patched_sha256 = hashlib.sha256((folder / "code/diff.patch").read_bytes()).hexdigest()
    edit(folder, lambda run: run["code"].update(diff_sha256=patched_sha256))
    (cert,), _ = replayed(tmp_path / "results", folder, "--trust", expect=2)
    assert "bench/__init__.py, as the record holds it, is not the file" in cert["why"] and not spied.exists()


@pytest.mark.slow
def test_two_replays_of_one_record_at_once_do_not_meet(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    both = [real_runs.started(tmp_path / "results", "replay", str(folder), "--quiet") for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("waiting for another replay" in text for text in outputs) <= 1
    replays = tmp_path / "results" / "replays"
    book = ledger.read(replays)
    assert not book.faults and len(book.runs) == 2 and all(entry["end"] for entry in book.runs.values())
    names = [line["replays"] for line in book.lines if line["event"] == certificates.EVENT]
    assert sorted(name for (name,) in names) == sorted(book.runs), "each certificate is by a run of its own"
    assert all(
        json.loads((replays / name / certificates.FILE).read_text())["outcome"] == "identical" for name in book.runs
    )
    assert f"replay-{folder.name}" not in git.run(real_runs.REPO, "worktree", "list")


@pytest.mark.parametrize("where", ["overrides", "config"])
def test_a_strangers_settings_that_refer_to_this_machine_are_refused(tmp_path, monkeypatch, where):
    """The user's name or PATH would stand in the certificate beside the stranger's record."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    (tmp_path / "run").mkdir()
    text = "x${oc.env:USER}"
    (tmp_path / "run/config.yaml").write_text(f"goal:\n  metric: '{text if where == 'config' else 'val_loss'}'\n")
    overrides = [f"name={text}"] if where == "overrides" else []
    record = recorded.Recorded(tmp_path / "run", {"run_id": "a", "track": "free"}, {}, overrides)
    with pytest.raises(ValueError, match=r"free/a: .*x\$\{oc.env:USER\} refers to this machine, whose ledger"):
        rebuilding.refuse_interpolations(record)
    monkeypatch.setattr(rebuilding, "is_ours_by_ledger", lambda record: True)
    rebuilding.refuse_interpolations(record)


def test_a_record_sets_only_variables_that_reach_arithmetic():
    """Others of the same libraries write a file of the reader's, or load one."""
    kept = {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
    others = {"MKL_VERBOSE": "1", "MKL_VERBOSE_OUTPUT_FILE": "/home/a/.bashrc", "OMP_TOOL_LIBRARIES": "/tmp/a.so"}
    assert recorded.variables({"env": kept | others | {"ONEDNN_JIT_DUMP": "1", "OMP_NUM_THREADS": "3"}}) == kept


@pytest.mark.slow
def test_another_instruction_set_is_another_machine(finished_run, tmp_path):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this process has the least instruction set already")
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    other = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    (cert,), _ = replayed(tmp_path / "results", folder, "--keep-env", **other)
    assert cert["outcome"] == "equal within rounding" and cert["machine"] == "same session"
    assert cert["cause"] == "another instruction set of the CPU" and len(cert["replays"]) == 3  # one was no other


@pytest.mark.slow
def test_a_script_replays_from_the_sources_that_its_record_keeps(tmp_path):
    script = tmp_path / "mine" / "train_gpt.py"
    script.parent.mkdir()
    for path in scripted.MODDED.parent.glob("*.py"):
        (script.parent / path.name).write_bytes(path.read_bytes())
    script.write_text(script.read_text() + "\nimport tempfile\n\ntempfile.mkdtemp()  # as torch's agent did, a run\n")
    temp = real_runs.temp_in(tmp_path)
    folder = scripted.run(tmp_path / "results", script, TMPDIR=str(temp))
    remaining = set(temp.iterdir())
    for path in script.parent.iterdir():
        path.unlink()
    (cert,), _ = replayed(tmp_path / "results", folder, TMPDIR=str(temp))
    assert cert["outcome"] == "identical", cert["why"]
    assert remaining and set(temp.iterdir()) == remaining, "the replay's temporary files are removed with its checkout"


@pytest.mark.slow
def test_a_run_of_ones_own_model_optimizer_and_track_replays_from_its_record_alone(tmp_path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    real_runs.bench(tmp_path / "results", "init", SPEEDRUN_CWD=str(project), code=0)
    chosen = ["track=mine", "model=mine", "optim=mine", "instruments=[regions,trace]", "goal.num_steps=30"]
    folder = real_runs.run(tmp_path / "results", *chosen, SPEEDRUN_CWD=str(project))
    elsewhere.mkdir()
    shutil.rmtree(project)
    (cert,), stderr = replayed(tmp_path / "results", folder, SPEEDRUN_CWD=str(elsewhere))
    assert cert["outcome"] == "identical", cert["why"]
    assert "settings  track=mine, model=mine, optim=mine: not in the code's conf/: taken from config.yaml" in stderr


@pytest.mark.slow
def test_code_that_git_does_not_know_is_replayed_too(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(real_runs.REPO), str(clone)], check=True)
    base = clone / "models" / "base.py"
    base.write_text(base.read_text() + "\nADDED = 1\n")
    (clone / "models" / "ladder" / "own.py").write_text("ADDED = 1\n")

    def bench(*arguments):
        return real_runs.bench(tmp_path / "results", *arguments, cwd=clone, code=0).stdout

    bench("run", *real_runs.SHORT)
    subprocess.run(["git", "checkout", "-q", "."], cwd=clone, check=True)
    (clone / "models" / "ladder" / "own.py").unlink()
    (folder,) = real_runs.folders(tmp_path / "results")
    (cert,) = json.loads(bench("replay", str(folder), "--json"))
    assert cert["outcome"] == "identical", cert["why"]


def test_replays_of_fresh_seeds_do_not_replace_one_of_the_records_own_seed(monkeypatch):
    """Two losses are within almost any interval of two others."""
    record = min((real_runs.REPO / "results/published/cpu_nano-gpt2-adamw/cpu_nano").iterdir())  # of seed 0
    own, fresh = "cpu_nano/A-s0", ["cpu_nano/A-s1000", "cpu_nano/A-s1001"]
    asked = mock.Mock(side_effect=ValueError("asked"))
    monkeypatch.setattr(replaying, "_read_replay", asked)
    for made, expected in (([[own], fresh], own), ([fresh], fresh[0]), ([fresh, [own], fresh], own)):
        entries = [{"replays": names} for names in made]
        monkeypatch.setattr(certificates, "entries", lambda *facts, entries=entries: entries)
        with pytest.raises(ValueError, match="asked"):
            replaying.recomputed(record)
        assert asked.call_args[0][1] == expected


def test_a_judge_may_demand_that_each_run_was_run_again(results, tmp_path, capsys):
    published = real_runs.REPO / "results" / "published" / "cpu_nano-gpt2-adamw"
    for demand, accepted in (([], True), (["--replayed"], False)):
        judged = json.loads(shown(capsys, "judge", published, "--json", *demand))
        assert judged["accepted"] == accepted, judged
    (failed,) = [rule for rule in judged["rules"] if rule["passed"] is False]
    assert failed["rule"] == "every run was reproduced" and "./run.sh replay" in failed["evidence"]
    assert "its certificate claims 'equal within rounding', which was not checked" in failed["evidence"]
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    min(copy.glob("cpu_nano/*/certificate.json")).unlink()
    _lists_certificates(capsys, published, copy)


def shown(capsys, *arguments):
    """What a verb prints."""
    program.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def _lists_certificates(capsys, published, copy):
    """published: three runs with certificates; copy: the first one's is gone."""
    claimed = "claimed: equal within rounding"
    rows = json.loads(shown(capsys, "table", copy, "--json", "--columns", "run_id,certificate"))
    assert [row["certificate"] for row in rows] == [None, claimed, claimed]
    head, *_ = shown(capsys, "table", copy).splitlines()
    assert head.split()[-1] == "certificate"
    for folder, cell in ((copy, f"2 of 3 {claimed}"), (published, f"  3 {claimed}")):
        board = shown(capsys, "table", "--leaderboard", folder)
        assert cell in board and "A certificate is the outcome of ./run.sh replay; 'claimed' marks" in board
        (row,) = table_groups.groups(named.rows_of_names([str(folder)]))
        assert row["certificate"] == cell.strip()
    first, *others = map(str, sorted(published.glob("cpu_nano/*")))
    ((_, compared),) = comparison.compare_arms(selection.arms_from_words([first, "vs", *others]))
    assert compared["certificates"] == [f"1 {claimed}", f"2 {claimed}"]
    assert f"(2 runs, 120 steps; replayed: 2 {claimed})" in verdicts.document_of((), [compared]).terminal()
    for path in copy.glob("cpu_nano/*/certificate.json"):
        path.unlink()
    assert "certificate" not in shown(capsys, "table", copy) + shown(capsys, "table", "--leaderboard", copy)


def test_after_a_replay_of_what_is_published_its_tables_are_to_be_written(tmp_path, monkeypatch, capsys):
    published = real_runs.REPO / "results" / "published" / "cpu_nano-gpt2-adamw"
    monkeypatch.setattr(replay, "_of", lambda folder, args: {"outcome": "identical"})
    for folder, is_shown in ((published, True), (shutil.copytree(published, tmp_path / "copy"), False)):
        assert program.main(["replay", str(folder)]) == 0
        assert ("next  ./run.sh table --write && git add results" in capsys.readouterr().out) == is_shown


def test_the_words_of_certificates_are_those_of_outcomes():
    outcome_words = {value for name, value in vars(outcomes).items() if name.isupper() and isinstance(value, str)}
    outcome_words -= {outcomes.TWIN, outcomes.PERTURBED, outcomes.FRESH_SEEDS}
    assert outcome_words == set(typing.get_args(certificates.Word)) and outcome_words > set(certificates.HOLDS)


def test_repeats_are_certified_together():
    assert certificates.summarized([None, None]) is None
    assert certificates.summarized(["identical"] * 3) == "3 identical"
    summary = certificates.summarized(["identical", None, "identical", "not reproduced"])
    assert summary == "2 of 4 identical, 1 of 4 not reproduced"


def test_files_of_a_sandbox_that_take_less_disk_than_their_copies_are_refused(tmp_path, monkeypatch):
    """A cheat: holes, or many names of one file, which would fill the reader's disk."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(rebuilding, "MAX_MADE_BYTES", 2**20)
    run = shutil.copytree(claimed.BASE, tmp_path / "run")
    made = types.SimpleNamespace(_recorded=types.SimpleNamespace(name="a", run=run_folder.read_raw(run)))
    with open(run / "hole.bin", "wb") as file:
        file.truncate(2**23)
    with pytest.raises(ValueError, match="8.0 MiB of files that take .* on the disk, by holes or links: not copied"):
        rebuilding.Sandbox.adopted(made, run)
    (run / "hole.bin").write_bytes(os.urandom(2**20))
    for number in range(9):
        os.link(run / "hole.bin", run / f"{number}.bin")
    with pytest.raises(ValueError, match="by holes or links: not copied"):
        rebuilding.Sandbox.adopted(made, run)
    for number in range(9):
        (run / f"{number}.bin").unlink()
    assert rebuilding.Sandbox.adopted(made, run).is_dir()
