"""Killed ranks, killed launchers, full disks, losses that are not finite: the record says what happened."""

import json
import os
import signal
import time

import pytest
import real_runs
import scripted
from cases import slow

from bench.record import run_folder, step_files

TWO = [*real_runs.TWO, "hardware.collective_timeout_s=20"]
HURRIED = {"bench.launch.launcher.HEARTBEAT_S": 0.0, "bench.launch.launcher.TICK_S": 0.1}


def test_a_killed_rank_is_named_and_ends_the_run(tmp_path):
    with real_runs.Background(tmp_path, *TWO) as running:
        running.wait_for_step(3)
        os.kill(running.rank_pid(1), signal.SIGKILL)
        code, out = running.end()
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert code == 1
    assert (run["status"], run["validity"]) == ("failed", "invalid")
    failure = run["failure"]
    assert (failure["kind"], failure["rank"]) == ("rank_killed", 1)
    assert (failure["signal"], failure["exit_code"]) == ("SIGKILL", -9)
    assert failure["step"] >= 3
    assert "rank_killed" in out and failure["hint"] in out
    rows = step_files.read(running.folder)  # what was written before is kept
    assert len(rows) > 3 and rows[3]["step"] == 3


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM])
def test_an_interrupt_is_a_clean_end(tmp_path, number):
    with real_runs.Background(tmp_path / "results", TMPDIR=str(real_runs.temp_in(tmp_path))) as running:
        running.wait_for_step(3)
        running.process.send_signal(number)
        code, out = running.end()
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert (run["status"], run["failure"]["kind"], run["failure"]["signal"]) == ("aborted", "interrupted", number.name)
    assert run["failure"]["step"] >= 3
    assert code == 1
    assert "aborted: interrupted" in out
    assert {artifact["path"] for artifact in run["artifacts"]} >= {"steps.csv", "config.yaml"}
    assert real_runs.left_in_temp(tmp_path) == []


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(two_rank_run, diverged_run):
    folder, (code, text) = diverged_run, real_runs.ending(diverged_run)
    assert [real_runs.left_in_temp(run.parents[2]) for run in (two_rank_run, diverged_run)] == [[], []]
    assert not [name for name in run_folder.files(two_rank_run) if "attempt" in name or "elastic" in name]
    assert code == 1
    failure = real_runs.run_json(folder)["failure"]
    assert failure["kind"] == "non_finite_loss"
    assert failure["rank"] == 0
    assert 1 <= failure["step"] < 10
    (event,) = [event for event in step_files.read_events(folder) if event["event"] == "non_finite_loss"]
    assert (event["rank"], event["step"]) == (0, failure["step"])
    assert real_runs.run_json(folder)["costs"]["non_finite_loss"] == {"count": 1, "ms": None}
    assert "lower optim.lr" in text


@pytest.mark.slow
def test_a_run_says_that_it_lives_until_it_has_taken_too_long(tmp_path):
    """Its heartbeat is fresh: elsewhere, a run whose heartbeat is a minute old is taken for abandoned."""
    seen = []
    with real_runs.Background(tmp_path, "hardware.wall_timeout_s=2", changed=HURRIED) as running:
        running.wait_for_record()
        while running.process.poll() is None:
            seen.append(real_runs.run_json(running.folder))
            time.sleep(0.1)
        code, _ = running.end()
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert (code, run["status"], run["failure"]["kind"]) == (1, "failed", "wall_timeout")
    assert len({run["heartbeat_at"] for run in seen if run["status"] == "running"}) >= 3


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_within_the_timeout_and_the_record_says_where_each_rank_stood(tmp_path):
    with real_runs.Background(tmp_path, *TWO[:2], "hardware.collective_timeout_s=3") as running:
        running.wait_for_step(3)
        os.kill(running.rank_pid(1), signal.SIGSTOP)
        started_s = time.monotonic()
        code, _ = running.end(timeout_s=60)
        assert time.monotonic() - started_s < 25  # torch's agent alone waits 30 s before it kills what does not end
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert code == 1
    assert (run["status"], run["failure"]["kind"], run["failure"]["rank"]) == ("failed", "collective_timeout", 0)
    flight = json.loads((running.folder / "logs" / "rank0.flight.json").read_text())
    assert flight["entries"][-1]["profiling_name"].startswith("gloo:")
    assert "logs/rank0.flight.json" in {artifact["path"] for artifact in run["artifacts"]}
    stack = (running.folder / "logs" / "rank1.log").read_text()  # woken, it left this before it ended
    assert "most recent call first" in stack and "./bench/training/worker.py" in stack


def test_a_full_disk_still_gets_its_record(small_disk):
    with real_runs.Background(small_disk) as running:
        running.wait_for_step(3)
        real_runs.fill(small_disk / "other_program.bin")
        code, out = running.end(timeout_s=90)
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert code == 1
    assert (run["status"], run["failure"]["kind"]) == ("failed", "disk_full")
    assert run["failure"]["rank"] == 0
    assert "free space" in out


def test_a_full_disk_ends_a_script_and_its_record_says_so(small_disk):
    with scripted.hanging(small_disk) as (launcher, folder):
        real_runs.fill(small_disk / "other_program.bin")
        assert launcher.wait(60) == 1
        assert scripted.all_gone(small_disk)
        run = real_runs.run_json(folder)
    assert (run["status"], run["failure"]["kind"]) == ("failed", "disk_full")
