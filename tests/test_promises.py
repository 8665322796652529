"""Promises of a record and of a verdict that nothing else would notice broken, each entered as a user enters."""

import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import claimed
import pytest
import real_runs
import scripted
from claimed import results  # noqa: F401  a fixture
from comparing import FAST, SLOW, a_run, raced, write

from bench.cli import compare, judge, race
from bench.config import compose
from bench.data import shards
from bench.launch import initial_record
from bench.launch.prepare import prepare
from bench.machine import environment
from bench.record import ledger

INVALID = {"validity": "invalid", "validity_reasons": ["val_loss is below the data's floor"]}
TARGET = 3.0  # of track cpu_nano
TRACKS = sorted(path.stem for path in (real_runs.REPO / "conf" / "track").glob("*.yaml"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))


def compared(capsys):
    assert compare.main(["aaaaaaaa", "bbbbbbbb", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- an invalid run enters no statistic


def test_an_invalid_run_enters_no_number_of_a_comparison(results, capsys):
    for run in (run for arm in raced(FAST, SLOW) for run in arm):
        write(results.folder, run)
    without = compared(capsys)
    write(results.folder, a_run("B", 1.0, 10, val_loss=0.5, **INVALID))
    judged = compared(capsys)
    assert judged["started"] == [5, 6]
    assert (judged["time"], judged["val_loss"], judged["verdict"]) == (without["time"], without["val_loss"], "slower")


def test_an_invalid_run_enters_no_number_of_a_race(results, monkeypatch):
    """The third run of B takes 1 s and is invalid: with it B would be faster."""
    b_times_s = iter([10.5, 10.51, 1.0, 10.49, 10.52])  # the first is the discarded warm-up
    a_times_s = iter([10.0, 10.01, 9.99, 10.02, 9.98])
    spoil = lambda run: run.update(INVALID) if run["measured"]["train_s_by_rank"] == [1.0] else None  # noqa: E731
    results.add = functools.partial(results.add, change=spoil)
    claimed.Racers(results, lambda arm, seed: next(b_times_s if arm == "B" else a_times_s)).install(monkeypatch)
    race.main(["A=", "B=optim.beta2=0.99", "n=4"])
    (path,) = (results.folder / "races").glob("*/race.json")
    comparison = json.loads(path.read_text())["result"]["against"]["B"]
    assert (comparison["verdict"], comparison["started"]) == ("slower", [4, 4])
    assert comparison["time"]["n"] == comparison["val_loss"]["n"] == [4, 3]
    assert comparison["time"]["change_pct"] == pytest.approx(5, abs=0.5)


def test_an_invalid_run_reaches_no_target(results, capsys):
    spoil = [None, None, lambda run: run.update(INVALID)]
    folders = [results.add(seed, val_loss=2.74 + 0.01 * seed, change=spoil[seed]) for seed in range(3)]
    assert judged(folders, capsys) == (False, "1 of 3 runs did not complete or are invalid")


def judged(folders, capsys):
    """Whether the target is reached, and the evidence."""
    judge.main(["--json", *map(str, folders)])
    (rule,) = [rule for rule in json.loads(capsys.readouterr().out)["rules"] if rule["rule"] == "the target is reached"]
    return rule["passed"], rule["evidence"]


# ---- a target is reached at p < 0.01, not at 0.05


@pytest.mark.parametrize("track", TRACKS)
def test_every_track_asks_p_below_one_in_a_hundred(track):
    assert compose.compose([f"track={track}"]).track.p_value <= 0.01


@pytest.mark.parametrize(("spread", "passed", "p"), [(0.02, False, "p=0.025"), (0.01, True, "p=0.0065")])
def test_a_claim_whose_p_lies_between_001_and_005_does_not_reach_the_target(results, capsys, spread, passed, p):
    """Three losses, 0.05 nats below the target on average: t = -4.33 and -8.66 with 2 degrees of freedom."""
    folders = [results.add(seed, val_loss=TARGET - 0.05 + spread * (seed - 1)) for seed in range(3)]
    is_below, evidence = judged(folders, capsys)
    assert is_below is passed
    assert p in evidence and "needed p<0.01" in evidence


def test_a_comparison_calls_a_mean_below_the_target_only_at_p_below_001(results, capsys):
    """Five losses, 0.03 nats below the target on average: t = -2.83 and -8.49 with 4 degrees of freedom."""
    losses = [[TARGET - 0.03 + spread * step for step in range(-2, 3)] for spread in (0.015, 0.005)]
    for arm in raced(FAST, SLOW, *losses, goal={"target_val_loss": TARGET, "target_gap_nats": None}):
        for run in arm:
            write(results.folder, run)
    val_loss = compared(capsys)["val_loss"]
    assert val_loss["p_target"] == [pytest.approx(0.0237, abs=1e-3), pytest.approx(0.0005, abs=1e-4)]
    assert val_loss["below_target"] == [False, True]


# ---- a run that the ledger does not know is not there


def test_no_run_is_there_that_the_ledger_could_not_take(tmp_path):
    (tmp_path / "ledger.jsonl").mkdir()  # nothing can be appended to it, not even by root
    done = real_runs.bench(tmp_path, "run", *real_runs.SHORT)
    assert done.returncode == 2 and "no record can be written there" in done.stderr
    assert real_runs.folders(tmp_path) == []


def test_a_run_is_in_the_ledger_before_its_folder_has_a_record(tmp_path, monkeypatch):
    """A launcher that is killed between the two leaves no record that the ledger does not know."""
    seen, started = [], ledger.started

    def watched(results, folder, run, shape):
        seen.append((folder / "run.json").exists())
        return started(results, folder, run, shape)

    monkeypatch.setattr(ledger, "started", watched)
    job = prepare([*real_runs.SHORT, "instruments=[]"])
    facts = environment.environment()
    record = initial_record.record_of(job, facts | {"env": {}}, ["run"])
    folder = initial_record.folder_of(job.config, record, tmp_path)
    assert seen == [False] and real_runs.folders(tmp_path) == [folder]


# ---- a failure names no private path


def test_the_message_of_a_failed_run_names_no_private_path(tmp_path):
    """A shard in the home folder vanishes between the launcher's check and the workers'."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("train", "val"):
        shards.write(home / f"{name}.bin", [token % (256 - len(name)) for token in range(20000)])
    overrides = [f"data.train_glob={home}/train.bin", f"data.val_glob={home}/val.bin", "data.vocab_size=257"]
    with real_runs.Background(tmp_path / "results", "data=shards", *overrides, HOME=str(home)) as run:
        run.wait_for_record()
        (home / "train.bin").unlink()
        code, out = run.end()
        failure = real_runs.run_json(run.folder)["failure"]
    assert (code, failure["kind"]) == (1, "bad_data")
    assert "~/train.bin" in failure["message"]
    assert str(home) not in (run.folder / "run.json").read_text() + real_runs.logs(tmp_path) + out


NAMES_ITS_USER = """
import os
for step in range(6):
    print(f"step:{step}/6 train_loss:4.0 train_time:{10 * step}ms step_avg:10.0ms", flush=True)
print("step:6/6 train_loss:".ljust(83 - len(os.environ["HOME"])) + os.environ["HOME"], flush=True)
print("step:6/6 hf_token=hf_" + 36 * "a", flush=True)
raise RuntimeError("permission denied for user " + os.environ["USER"])
"""


def test_what_a_script_says_of_its_user_is_not_in_the_record(tmp_path):
    """Quoted lines are cut, and nothing recognizes half of a private path; a login is a word of a message as well."""
    home, script = Path(tempfile.mkdtemp(prefix="zeldaland")), tmp_path / "train_gpt.py"  # short enough to be cut
    script.write_text(NAMES_ITS_USER)
    setting = ["script.torchrun=false", "script.dialect=modded-nanogpt"]
    folder = scripted.run(tmp_path / "results", script, *setting, expect=1, HOME=str(home), USER="zeldaland")
    record = real_runs.run_json(folder)
    assert record["failure"]["message"].endswith("permission denied for user USER")
    assert any("look like metric lines" in doubt["doubt"] for doubt in record["doubts"])
    assert not re.search("zelda|aaaa", (folder / "run.json").read_text())
    shutil.rmtree(home)
