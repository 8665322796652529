"""Runs that are warned, killed and go on: one record, whose losses are those of a run without a break."""

import contextlib
import json
import os
import shutil
import signal

import pytest
import real_runs

from bench.compare import eligibility
from bench.config.schema import GoalConfig
from bench.launch import initial_record, launcher, ranks, resume
from bench.launch.prepare import prepare
from bench.machine import environment
from bench.record import checkpoints, ledger, outside_clock, rows, run_folder, validity
from bench.record.outside_clock import GO, PAUSE, SAVE, START, STOP
from bench.training.clock import Clock
from bench.training.finish_line import FinishLine
from bench.training.loop import train

WORDS = ["track=free", *real_runs.SMALL, *real_runs.SLIGHT, "goal.num_steps=1200", "goal.val_every_steps=300"]
WORDS += ["goal.val_tokens=1024", "hardware=cpu", "hardware.num_threads=1", "instruments=[]"]
OFTEN = "checkpoint.every_min=0.002"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--signals-to-handle={ranks.WARNED_BY}")


def only_folder(results):
    (folder,) = real_runs.folders(results)
    return folder


def segment(results, *overrides, at=0, end=None, program=("bench",)):
    """Runs the command, ended by a signal once a run has made so many steps.  Returns (exit code, output)."""
    with real_runs.started(results, "run", *WORDS, "resume=auto", *overrides, program=program) as process:
        if end is not None:
            real_runs.wait_for(lambda: any(step_of(folder) >= at for folder in real_runs.folders(results)))
            if end == signal.SIGKILL:  # of a launcher whose last checkpoint is in the ledger
                real_runs.wait_for(lambda: known_steps(results) > at)
                os.kill(real_runs.run_json(only_folder(results))["launcher"]["pid"], end)  # of rank 0 under torchrun
            else:
                process.send_signal(end)
        out, _ = process.communicate(timeout=120)
    return process.returncode, out


def step_of(folder):
    return run_folder.progress(folder).get("step") or 0


def known_steps(results):
    return max((line["step"] for line in ledger.read(results).lines if line["event"] == "checkpoint"), default=0)


def broken_thrice(results, *overrides, program=("bench",)):
    for at, end, extra in ((100, signal.SIGUSR1, ()), (400, signal.SIGKILL, (OFTEN,)), (700, signal.SIGTERM, ())):
        code, out = segment(results, *overrides, *extra, at=at, end=end, program=program)
        assert code == (-9 if end == signal.SIGKILL and program == ("bench",) else 1), out
    code, out = segment(results, *overrides, program=program)
    assert code == 0, out
    return only_folder(results)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    results = tmp_path_factory.mktemp("unbroken")
    real_runs.bench(results, "run", *WORDS, code=0)
    return only_folder(results)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return broken_thrice(tmp_path_factory.mktemp("broken"))


@pytest.mark.slow
def test_a_run_that_is_warned_killed_and_requeued_is_one_record_with_the_losses_of_an_unbroken_one(unbroken, broken):
    assert real_runs.losses(broken) == real_runs.losses(unbroken)
    run = run_folder.read(broken)
    assert (run["status"], run["config_id"]) == ("complete", run_folder.read(unbroken)["config_id"])
    parts = run["segments"]
    assert [part["status"] for part in parts] == ["preempted", "aborted", "preempted", "complete"]
    assert [part["to_step"] for part in parts[:-1]] == [part["from_step"] for part in parts[1:]]
    assert sum(part["train_s"] for part in parts) == pytest.approx(run["metrics"]["train_s"], rel=1e-9)
    assert run["measured"]["wall_s"] == pytest.approx(sum(part["wall_s"] for part in parts))
    assert run["metrics"]["energy_j"] is None and run["measured"]["num_validations"] == 5
    assert not (broken / "checkpoint").exists()  # a complete run needs none
    results = broken.parent.parent
    events = [line["event"] for line in ledger.read(results).lines]
    assert events.count("resume") == 3 and events.count("start") == 1 and events[-1] == "end"
    assert ledger.read(results).faults == []
    real_runs.bench(results, "verify", str(broken), code=0)


@pytest.mark.slow
def test_its_time_counts_only_where_the_track_says_so(unbroken, broken):
    run = run_folder.read(broken)
    assert run["validity"] == "suspect" and any("4 segments" in reason for reason in run["validity_reasons"])
    refusals = eligibility.judge([rows.row_of(run)], [rows.row_of(run_folder.read(unbroken))]).refusals
    assert any("in segments" in refusal for refusal in refusals)
    allowed = run | {"goal": run["goal"] | {"may_resume": True}}
    assert validity.broken_time(allowed) is None and validity.broken_time(run) is not None


@pytest.mark.slow
def test_two_ranks_save_before_the_same_step_and_go_on_whoever_starts_them(tmp_path):
    two = ("hardware.num_processes=2",)
    real_runs.bench(tmp_path / "unbroken", "run", *WORDS, *two, code=0)
    for name, program, overrides in (("ours", ("bench",), two), ("theirs", (*TORCHRUN, "-m", "bench"), ())):
        folder = broken_thrice(tmp_path / name, *overrides, program=program)
        assert real_runs.losses(folder) == real_runs.losses(only_folder(tmp_path / "unbroken"))
        assert (folder / "steps_by_rank.csv").read_text().count("\n") == 1200 + 1
        parts = run_folder.read(folder)["segments"]
        assert [part["status"] for part in parts] == ["preempted", "aborted", "preempted", "complete"]


@pytest.fixture(scope="module")
def warned_once(tmp_path_factory):
    """The results of a run that was warned in its warm-up, before it had made a step."""
    results = tmp_path_factory.mktemp("warned")
    with real_runs.started(results, "run", *WORDS, "resume=auto") as process:
        real_runs.wait_for(lambda: any((run / "logs" / "rank0.log").exists() for run in real_runs.folders(results)))
        process.send_signal(signal.SIGUSR2)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "goes on from its checkpoint" in out, out
    return results


@pytest.fixture
def warned(warned_once, tmp_path):
    shutil.copytree(warned_once, tmp_path / "results")
    return tmp_path / "results"


def test_a_warning_is_heard_from_the_first_instant(warned):
    run = run_folder.read(only_folder(warned))
    assert (run["status"], run["failure"]["kind"], run["failure"]["signal"]) == ("preempted", "preempted", "SIGUSR2")
    assert ledger.read(warned).runs[f"free/{run['run_id']}"]["end"]["status"] == "preempted"


def test_a_checkpoint_that_was_changed_is_refused(warned):
    (checkpoint,) = checkpoints.newest_first(only_folder(warned))
    path = checkpoint / "rank0.pt"
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    code, out = segment(warned)
    assert code == 2 and "rank0.pt is not what the ledger says was written" in out, out
    state = json.loads((checkpoint / checkpoints.STATE).read_text())  # its own sha256 made to fit
    state["files"]["rank0.pt"]["sha256"] = ledger.sha256_of(path)
    (checkpoint / checkpoints.STATE).write_text(json.dumps(state))
    code, out = segment(warned)
    assert code == 2 and "state.json is not what the ledger says was written" in out, out
    assert run_folder.read(only_folder(warned))["status"] == "preempted"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("resume={run_id}", "goal.num_steps=1201"), "another config id"),
        (("resume={run_id}", "seed=1"), "another seed"),
        (("resume=nobodys",), "no such run"),
    ],
)
def test_what_is_another_run_does_not_go_on(warned, overrides, why):
    run_id = only_folder(warned).name
    done = real_runs.bench(warned, "run", *WORDS, *(word.format(run_id=run_id) for word in overrides))
    assert done.returncode == 2 and why in done.stderr, done.stdout + done.stderr
    assert len(real_runs.folders(warned)) == 1


def test_a_run_whose_folder_cannot_be_written_to_does_not_go_on(warned, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(warned))
    monkeypatch.setattr(resume.atomic, "locked", lambda path: os.close(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        launcher.launch(job("resume=auto"))


@pytest.mark.parametrize("why", ["it is running", "another launcher has resumed it", None])
def test_only_one_launcher_goes_on_with_a_run_also_where_clocks_differ(warned, monkeypatch, why):
    folder = only_folder(warned)
    path, word = folder / "run.json", f"resume={folder.name}"
    record, newest = json.loads(path.read_text()), resume._newest
    elsewhere = {"launcher": {"boot_id_hash": "of another machine"}, "heartbeat_at": "2026-01-01T00:00:00Z"}
    path.write_text(json.dumps(record | elsewhere | {"status": "running"}))
    if why != "it is running":
        os.utime(path, (0, 0))  # it is silent, whatever the clocks say
    if why == "another launcher has resumed it":  # while this one reads the checkpoint
        late = json.dumps(record | {"status": "running"})
        monkeypatch.setattr(resume, "_newest", lambda *known: (path.write_text(late), newest(*known))[1])
    begun = initial_record.record_of(job(word), environment.environment(), [])
    with pytest.raises(ValueError, match=why) if why else contextlib.nullcontext():
        _, going_on = resume.go_on(job(word), begun, warned)
        assert going_on["segments"][0]["ended_at"] == elsewhere["heartbeat_at"]  # by the other's clock, as its start


def job(*overrides):
    return prepare([*WORDS, *overrides], say=lambda text: None, check_own=False)


def test_settings_of_checkpoints_change_no_config_id():
    ids = {job(*overrides).config_id for overrides in ((), ("resume=auto",), ("checkpoint.every_min=5",))}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("hardware.nodes=2", "hardware.num_processes=2", "hardware.rendezvous=h:1"), "only runs on one node"),
        (("+instruments=trace",), "disturbs the run"),
    ],
)
def test_a_run_that_could_not_go_on_is_refused_before_it_begins(overrides, why):
    with pytest.raises(ValueError, match=why):
        job("resume=auto", *overrides)


def test_a_job_that_slurm_starts_again_knows_that_its_earlier_start_has_ended(tmp_path, monkeypatch):
    run = {"launched_by": {"by": "slurm", "job_id": "7", "num_restarts": 0}, "launcher": {}}
    (tmp_path / "run.json").touch()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for restarts, is_over in (("0", False), ("1", True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert resume._is_over(run, tmp_path) == is_over


# ---- its parts


def test_a_loop_that_goes_on_validates_no_step_twice():
    calls = []

    class Instruments:
        def __getattr__(self, name):
            return lambda *args: calls.append((name, args[0])) if name == "on_validation" else None

    def checkpoint(step, next_stop):
        calls.append(("save", step, next_stop))
        return step == 4

    steps = iter(range(100))
    line = FinishLine(GoalConfig(num_steps=8, val_tokens=1, val_every_steps=4), 1.0, 1, float, print)
    loop = (lambda step: next(steps), lambda: 1.0, line)
    saves = (lambda step: step in (2, 4), checkpoint)
    clock = Clock(lambda: None, lambda: None)
    assert train(*loop, clock, Instruments(), checkpoints=saves) == (4, None)
    assert calls == [("on_validation", 0), ("save", 2, 4), ("on_validation", 4), ("save", 4, 8)]
    calls.clear()
    again = Clock(lambda: None, lambda: None, train_s=7.0)
    assert train(*loop, again, Instruments(), begin=(4, 8)) == (8, 1.0)
    assert calls == [("on_validation", 8)] and again.train_s > 7.0


def test_pauses_for_checkpoints_are_no_training_time_and_no_validation():
    edges = [(0, 0, START), (1, 0, PAUSE), (2, 0, GO), (5, 0, SAVE), (9, 0, GO), (11, 0, PAUSE), (12, 0, STOP)]
    edges = [(t_s * 10**9, late, word) for t_s, late, word in edges]
    clock = outside_clock.clock_from_edges(edges, [], 6.0)
    assert (clock["outside_s"], clock["outside_train_s"], clock["validations_s"]) == (12.0, 6.0, [1.0, 1.0])
    warned = outside_clock.clock_from_edges([*edges[:4], (9 * 10**9, 0, STOP)], [], 4.0)
    assert (warned["outside_train_s"], warned["unknown"]) == (4.0, None)
    both = outside_clock.joined([warned, clock], 10.0)
    assert (both["outside_train_s"], both["claimed_train_s"], both["validations_s"]) == (10.0, 10.0, [1.0, 1.0, 1.0])
    assert "segment 2 has no second clock" in outside_clock.joined([warned, None], 10.0)["unknown"]
