"""Secrets planted in every input of a run are in nothing that is published; what a run needs is, and it replays."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import real_runs
from real_runs import git

from bench.record import verification

CANARY = "Canary7"  # part of every secret, in text that a search for shapes alone would not know
SCRIPT = """
import glob, hashlib, json, sys, time
import helper
settings = json.load(open("settings.json"))
for path in glob.glob("data/fineweb10B/*.bin"):
    with open(path, "rb") as file:
        file.read(100)
assert hashlib.sha256(" ".join(sys.argv[1:]).encode()).hexdigest() == "{sha256}", "the script gets what was typed"
print(sys.argv)
train_ms = 0.0
for step in range(7):
    if step % 3 == 0:
        average_ms = train_ms / max(step, 1)
        print(f"step:{{step}}/6 val_loss:{{6 - step}} train_time:{{train_ms:.0f}}ms step_avg:{{average_ms:.2f}}ms")
    started_s = time.perf_counter()
    time.sleep(0.03)
    if step < 6:
        train_ms += 1e3 * (time.perf_counter() - started_s)
        print(f"step:{{step + 1}}/6 train_time:{{train_ms:.0f}}ms step_avg:{{train_ms / (step + 1):.2f}}ms")
"""
TYPED = [
    f"--url=https://ada:{CANARY}pw@db.example/x",
    f"https://{CANARY}tok@host.example/x",
    f"https://ada:{CANARY}/slash@host.example/x",
    f"{CANARY}value",  # after --api-key
    f"https://host.example/?token={CANARY}query&a=1",
]
ARGS = [*TYPED[:3], "--api-key", *TYPED[3:], "--lr", "0.1"]
# all of these files hold the canary, one of them in its name
BESIDE = ["hf_token.txt", "credentials.json", "notes.txt", "launch.sh", "unused.py", ".env"]
UNTRACKED = ["launch_mine.sh", "my_secrets.yaml", "bench/scratch.py", "conf/optim/other.yaml"]
UNTRACKED.append(f"hf_{CANARY}aaaaaaaaaaaaaaaaaaaaaaaa.py")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clone with secrets in it, and a script with secrets beside it."""
    folder = tmp_path_factory.mktemp("clone")
    git(folder, "clone", "-q", str(real_runs.REPO), "checkout")
    checkout, beside = folder / "checkout", folder / "script"
    for name in ("bench", "models", "conf"):  # as they are here, committed or not
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(real_runs.REPO / name, checkout / name, dirs_exist_ok=True, ignore=ignored)
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "the code under test")
    git(checkout, "remote", "set-url", "origin", f"https://ada:{CANARY}@git.example/x.git")
    beside.mkdir()
    for path in (*(checkout / name for name in UNTRACKED), *(beside / name for name in BESIDE)):
        path.write_text(f"KEY = '{CANARY}'\n")
    (beside / "helper.py").write_text("X = 1\n")
    (beside / "settings.json").write_text("{}")
    (beside / "train.py").write_text(SCRIPT.format(sha256=hashlib.sha256(" ".join(ARGS).encode()).hexdigest()))
    return checkout


def bench(checkout, *arguments, **environ):
    env = os.environ | {"SPEEDRUN_DATA": str(real_runs.REPO / ".data"), "MY_TOKEN": f"{CANARY}-of-the-shell"}
    env = {name: value for name, value in env.items() if name not in ("SPEEDRUN_RESULTS", "SPEEDRUN_CWD")} | environ
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run(checkout):
    return trained(checkout)


def trained(checkout):
    """Runs the script -> the folder of its record."""
    before = set((checkout / "results" / "cpu_nano").glob("*"))
    overrides = ["track=cpu_nano", "hardware=cpu", f"script={checkout.parent}/script/train.py", f"script.args={ARGS}"]
    done = bench(checkout, "run", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert CANARY not in done.stdout + done.stderr
    (folder,) = set((checkout / "results" / "cpu_nano").glob("*")) - before
    return folder


def holding(folder):
    """The files in folder that hold a canary in their content or name."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [str(path) for path in paths if CANARY in str(path) or CANARY.encode() in path.read_bytes()]


def test_a_record_holds_no_secret_and_all_that_the_run_used(checkout, run):
    assert holding(run) == []
    record = real_runs.run_json(run)
    assert record["redacted"] == [f"script.args.{number}" for number in (0, 1, 2, 4, 5)]
    assert set(record["script"]["used"]) == {f"script/{name}" for name in ("helper.py", "settings.json", "train.py")}
    kept = [path.relative_to(run / "code").as_posix() for path in (run / "code").rglob("*") if path.is_file()]
    assert sorted(kept) == ["commit.json", "diff.patch", *sorted(record["script"]["used"])]
    assert record["code"]["dirty"] and record["code"]["untracked"] == []
    assert sorted(record["code"]["untracked_excluded"]) == ["bench/scratch.py", "conf/optim/other.yaml"]
    assert {"script/credentials.json", "script/hf_token.txt"} < set(record["script"]["sha256_by_file"])
    assert [rule for rule in verification.report(run)["rules"] if not rule["passed"]] == []


@pytest.mark.slow
def test_nothing_that_leaves_holds_a_secret(checkout, run):
    folder = checkout / "results" / "published" / "first"
    outputs = []
    for arguments in (
        ["publish", run, "--name", "first"],
        ["judge", run, "--claim", checkout / "claim"],
        ["report", run],
        ["report", "results"],
        ["export", run, "--to", "csv"],
        ["table", "--csv"],
    ):
        done = bench(checkout, *arguments)
        assert done.returncode in (0, arguments[0] == "judge"), done.stdout + done.stderr
        outputs.append(done.stdout)
    assert [text for text in outputs if CANARY in text] == []
    assert (folder / "cpu_nano" / run.name / "code" / "script" / "settings.json").is_file()
    assert "of the script: opened" in outputs[0] and "code/script/train.py" in outputs[0]
    assert "its value is not recorded" in outputs[1]
    assert holding(checkout / "results") == [] and holding(checkout / "claim") == []
    copy = folder / "cpu_nano" / run.name
    done = bench(checkout, "replay", copy)
    assert done.returncode == 2 and "was recorded without script.args.0" in done.stdout + done.stderr
    values = ["ada:" + CANARY + "pw", CANARY + "tok", f"ada:{CANARY}/slash", TYPED[3], CANARY + "query"]
    done = bench(checkout, "replay", copy, *(argument for value in values for argument in ("--fill", value)))
    assert done.returncode in (0, 1), done.stdout + done.stderr  # it ran: its lines are the same, its times are not
    assert "impossible" not in (done.stdout + done.stderr).lower() and holding(checkout / "results") == []


def test_what_the_script_opened_is_searched_and_stops_the_publication(checkout, run):
    settings = checkout.parent / "script" / "settings.json"
    settings.write_text('{"wandb_api_key": "' + "0f" * 20 + '"}')
    second = trained(checkout)
    settings.write_text("{}")
    done = bench(checkout, "publish", second, "--name", "second")
    assert done.returncode == 2 and not (checkout / "results" / "published" / "second").exists()
    assert "code/script/settings.json, line 1: holds the value of wandb_api_key" in done.stderr
    assert "0f0f" not in done.stdout + done.stderr
    done = bench(checkout, "publish", second, "--name", "second", "--dry-run", "--allow", "script/settings.json")
    assert done.returncode == 0 and not (checkout / "results" / "published" / "second").exists()


def test_a_record_that_was_changed_is_not_published(checkout, run):
    path = run / "code" / "script" / "settings.json"
    path.write_text('{"a": 1}')
    done = bench(checkout, "publish", run, "--name", "changed")
    path.write_text("{}")
    assert done.returncode == 2 and "settings.json has 8 bytes instead of 2: restore it" in done.stderr
    assert not (checkout / "results" / "published" / "changed").exists()


def test_a_file_that_no_part_of_the_record_accounts_for_does_not_go(checkout, run):
    path = run / "code" / "untracked" / "launch.sh"
    path.parent.mkdir()
    path.write_text("echo")
    done = bench(checkout, "publish", run, "--name", "third", "--dry-run")
    path.unlink()
    assert done.returncode == 2
    assert "code/untracked/launch.sh: the record does not say that the run used it" in done.stderr


@pytest.mark.slow
def test_a_race_whose_plan_would_show_a_credential_is_refused(checkout):
    overrides = [f"script={checkout.parent}/script/train.py", "track=cpu_nano", "hardware=cpu", "n=2"]
    done = bench(checkout, "race", "A=script.args=[--lr,0.1]", f"B=script.args=[--token,{CANARY}]", *overrides)
    assert done.returncode == 2 and "B: script.args.1 looks like a credential" in done.stderr, done.stderr
    assert not (checkout / "results" / "races").exists()


def test_a_refusal_of_a_credential_that_was_typed_does_not_show_it(tmp_path):
    token = "hf_" + "aB3dE5gH7jK9" * 3
    done = real_runs.bench(tmp_path, "run", f"script.env={{HF_TOKEN: {token}}}")
    assert done.returncode == 2 and "script.env={HF_TOKEN: SECRET}: there is no script" in done.stderr
    assert token not in done.stdout + done.stderr
