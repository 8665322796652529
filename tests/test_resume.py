"""Runs that are warned, killed and go on: one record, whose losses are those of a run without a break."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time

import pytest
import real_runs
import torch

from bench.compare import eligibility
from bench.config.schema import GoalConfig
from bench.launch import initial_record, launcher, ranks, resume
from bench.launch.prepare import prepare
from bench.machine import environment
from bench.record import failures, ledger, outside_clock, rows, run_folder, step_files, validity
from bench.record.outside_clock import GO, PAUSE, SAVE, START, STOP
from bench.training import checkpoint
from bench.training.distributed import Ranks
from bench.training.timing.clock import Clock
from bench.training.timing.loop import FinishLine, train

WORDS = ["track=free", *real_runs.SMALL, *real_runs.SLIGHT, "goal.num_steps=1200", "goal.val_every_steps=300"]
WORDS += ["goal.val_tokens=1024", "hardware=cpu", "hardware.num_threads=1", "instruments=[]"]
OFTEN = "checkpoint.every_min=0.01"
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


def test_a_checkpoint_that_came_with_a_collected_run_is_not_gone_on_from(warned, monkeypatch):
    """It may hold a stranger's weights."""
    folder, book = only_folder(warned), ledger.read(warned)
    assert resume._newest(folder, warned) is not None
    collected = dataclasses.replace(book, roots=[1, *[2] * (len(book.lines) - 1)])
    monkeypatch.setattr(ledger, "read", lambda results: collected)
    assert resume._newest(folder, warned) is None


def test_a_checkpoint_that_was_changed_is_refused(warned):
    (checkpoint,) = run_folder.checkpoints(only_folder(warned))
    path = checkpoint / "rank0.pt"
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    code, out = segment(warned)
    assert code == 2 and "rank0.pt is not what the ledger says was written" in out, out
    state = json.loads((checkpoint / run_folder.CHECKPOINT_STATE).read_text())  # its own sha256 made to fit
    state["files"]["rank0.pt"]["sha256"] = ledger.sha256_of(path)
    (checkpoint / run_folder.CHECKPOINT_STATE).write_text(json.dumps(state))
    code, out = segment(warned)
    assert code == 2 and "state.json is not what the ledger says was written" in out, out
    assert run_folder.read(only_folder(warned))["status"] == "preempted"


def test_a_damaged_checkpoint_is_named_and_a_damaged_record_costs_only_itself(warned):
    folder, auto = only_folder(warned), job("resume=auto")
    begun, watch = initial_record.record_of(auto, environment.environment(), []), resume.Watch(folder, warned)
    (checkpoint,) = run_folder.checkpoints(folder)
    newer = shutil.copytree(folder, folder.with_name(f"9{folder.name}"))
    (newer / "run.json").write_text("{")
    resume.wait_for_signs(auto, warned)
    assert resume.find(auto, begun, warned).folder == folder
    (checkpoint / "rank0.pt").unlink()
    os.mkfifo(checkpoint / "rank0.pt")  # for whose other end nobody waits
    for name in ("rank0.pt", run_folder.CHECKPOINT_STATE):
        with pytest.raises(ValueError, match=f"{name} is not what the ledger says was written"):
            resume.find(auto, begun, warned)
        (checkpoint / run_folder.CHECKPOINT_STATE).write_text("{")
    (folder / "checkpoint" / "step999").mkdir()
    (folder / "checkpoint" / "step999" / run_folder.CHECKPOINT_STATE).write_text('{"step": {}}')  # by a contestant
    watch.tick()
    assert watch.step == 0 and ledger.read(warned).faults == []


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("resume={run_id}", "goal.num_steps=1201"), "another config id"),
        (("resume={run_id}", "seed=1"), "another seed"),
        (("resume={run_id}", "hardware.num_processes=2"), "another world size, 2 instead of 1"),
        (("resume=nobodys",), "no such run"),
        (("resume=*",), "no such run"),
    ],
)
def test_what_is_another_run_does_not_go_on(warned, overrides, why):
    run_id = only_folder(warned).name
    done = real_runs.bench(warned, "run", *WORDS, *(override.format(run_id=run_id) for override in overrides))
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
    path, override = folder / "run.json", f"resume={folder.name}"
    record, newest = json.loads(path.read_text()), resume._newest
    elsewhere = {"launcher": {"boot_id_hash": "of another machine"}, "heartbeat_at": "2026-01-01T00:00:00Z"}
    path.write_text(json.dumps(record | elsewhere | {"status": "running"}))
    if why != "it is running":
        os.utime(path, (0, 0))  # it is silent, whatever the clocks say
    if why == "another launcher has resumed it":  # while this one reads the checkpoint
        late = json.dumps(record | {"status": "running"})
        monkeypatch.setattr(resume, "_newest", lambda *known: (path.write_text(late), newest(*known))[1])
    begun = initial_record.record_of(job(override), environment.environment(), [])
    (known,) = run_folder.checkpoints(folder)
    shutil.copytree(known, folder / "checkpoint/step999")  # which its killed launcher had not put into the ledger yet
    with pytest.raises(ValueError, match=why) if why else contextlib.nullcontext():
        going_on = resume.go_on(resume.find(job(override), begun, warned), job(override), begun, warned)
        assert going_on["segments"][0]["ended_at"] == elsewhere["heartbeat_at"]  # by the other's clock, as its start
        assert run_folder.checkpoints(folder) == [known]


@pytest.mark.parametrize("lives", [True, False])
def test_a_launcher_on_another_machine_that_gives_no_sign_of_life_is_waited_for(warned, monkeypatch, lives):
    folder = only_folder(warned)
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running", "launcher": {}}))
    began_s, slept_s = time.time(), []
    os.utime(path, (began_s - 50, began_s - 50))

    def sleep(seconds):
        slept_s.append(seconds)
        if lives and len(slept_s) == 3:
            os.utime(path)

    monkeypatch.setattr(resume.time, "sleep", sleep)
    monkeypatch.setattr(resume.atomic, "clock_s", lambda folder: began_s + sum(slept_s))
    resume.wait_for_signs(job("resume=auto"), warned)
    assert sum(slept_s) == (3 if lives else 11)  # a minute after the last sign, 50 s of which had passed


def job(*overrides):
    return prepare([*WORDS, *overrides], say=lambda text: None, check_own=False)


def test_settings_of_checkpoints_change_no_config_id():
    ids = {job(*overrides).config_id for overrides in ((), ("resume=auto",), ("checkpoint.every_min=5",))}
    assert len(ids) == 1


def test_a_run_that_could_not_go_on_is_refused_before_it_begins():
    with pytest.raises(ValueError, match="disturbs the run"):
        job("resume=auto", "+instruments=trace")


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
    edges = [(t_s * 10**9, late, kind) for t_s, late, kind in edges]
    clock = outside_clock.clock_from_edges(edges, [], 6.0)
    assert (clock["outside_s"], clock["outside_train_s"], clock["validations_s"]) == (12.0, 6.0, [1.0, 1.0])
    warned = outside_clock.clock_from_edges([*edges[:4], (9 * 10**9, 0, STOP)], [], 4.0)
    assert (warned["outside_train_s"], warned["unknown"]) == (4.0, None)
    both = outside_clock.joined([warned, clock], 10.0)
    assert (both["outside_train_s"], both["claimed_train_s"], both["validations_s"]) == (10.0, 10.0, [1.0, 1.0, 1.0])
    assert "segment 2 has no second clock" in outside_clock.joined([warned, None], 10.0)["unknown"]


# ---- with other ranks

ONE, TWO = "hardware.num_processes=1", "hardware.num_processes=2"


@pytest.fixture
def shrinks(tmp_path):
    """The arguments by which a run may go on with fewer ranks."""
    return real_runs.track_with(tmp_path / "conf", "{may_shrink: true}")


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks_where_the_track_allows_it_and_with_as_many_again(tmp_path, shrinks):
    real_runs.bench(tmp_path / "unbroken", "run", *WORDS, *shrinks, TWO, code=0)
    results = tmp_path / "broken"
    for ranks_of_segment, at in ((TWO, 100), (ONE, 400)):
        code, out = segment(results, *shrinks, ranks_of_segment, at=at, end=signal.SIGUSR1)
        assert code == 1, out
    code, out = segment(results, *shrinks, TWO)
    assert code == 0, out
    folder, other = only_folder(results), only_folder(tmp_path / "unbroken")
    run, unbroken = run_folder.read(folder), run_folder.read(other)
    assert [(part["status"], part.get("world_size")) for part in run["segments"]] == [
        ("preempted", None),
        ("preempted", 1),
        ("complete", 2),
    ]
    assert (run["world_size"], run["config_id"]) == (2, unbroken["config_id"])
    since = run["segments"][1]["from_step"]
    ours, theirs = real_runs.losses(folder), real_runs.losses(other)
    assert ours[: since + 1] == theirs[: since + 1] and len(ours) == len(theirs)
    assert [row["tokens"] for row in real_runs.steps(folder)] == [row["tokens"] for row in real_runs.steps(other)]
    ours, theirs = ([float(value or 0) for row in losses for value in row] for losses in (ours, theirs))
    assert ours == pytest.approx(theirs, abs=0.005)  # training amplifies rounding
    assert min(step_files.read_by_rank(folder)["step_ms"][1]) == run["segments"][2]["from_step"] + 1
    real_runs.bench(results, "verify", str(folder), code=0)
    allowed = run | {"goal": run["goal"] | {"may_resume": True}}  # which is of other interruptions
    why = "it was trained with 2, then 1, then 2 ranks: its loss counts, its time does not"
    assert why in run["validity_reasons"] and validity.broken_time(allowed) == why
    judgement = eligibility.judge([rows.row_of(run)], [rows.row_of(unbroken)])
    assert "world size differs: 2 x 2, 1 in A, 2 in B" in judgement.refusals
    assert "world size differs, which may change losses" in judgement.loss_remarks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("optim=muon", "optim=muon: its 2 ranks do not have the same state, as they do with optim=adamw"),
        ("hardware.reducer=shard", "hardware.reducer=shard: each of its 2 ranks has only its share"),
    ],
)
def test_a_run_whose_state_is_divided_among_its_ranks_begins_anew_with_fewer(tmp_path, shrinks, setting, why):
    results = tmp_path / "results"
    code, out = segment(results, *shrinks, TWO, setting, at=100, end=signal.SIGUSR1)
    assert code == 1, out
    code, out = segment(results, *shrinks, ONE, setting)
    assert code == 0 and why in out, out
    first, second = (real_runs.run_json(folder) for folder in real_runs.folders(results))
    assert (first["status"], second["status"]) == ("preempted", "complete")


@pytest.mark.parametrize(
    ("saved", "rules", "reducer", "state", "why"),
    [
        (2, True, None, {}, None),
        (1, True, None, {"replicated": True}, None),
        (1, True, None, {"replicated": False}, "optim=adamw: its 1 ranks do not have the same state"),
        (1, True, None, {}, "optim=adamw: its 1 ranks do not have the same state"),
        (4, True, "shard", {"replicated": True}, "hardware.reducer=shard: each of its 4 ranks has only its share"),
        (1, None, None, {"replicated": True}, "its checkpoint is of 1 ranks, not 2, and its track has no rules"),
    ],
)
def test_other_ranks_go_on_only_with_a_state_that_all_have(saved, rules, reducer, state, why):
    config = job(TWO).config
    config.track.rules.may_shrink = rules
    before = {"hardware": {"reducer": reducer}, "optim": "adamw"}
    hindrance = resume._hindrance_of_ranks(before, {"files": dict.fromkeys(range(saved))} | state, config)
    assert (hindrance or "").startswith(why or "") and bool(hindrance) == bool(why)


def test_a_rank_that_sees_another_file_than_the_launcher_has_checked_fails_like_a_bad_disk(warned):
    (newest,) = run_folder.checkpoints(only_folder(warned))
    state = json.loads((newest / run_folder.CHECKPOINT_STATE).read_text())
    survival = {"folder": str(only_folder(warned)), "step": state["step"], "files": state["files"]}
    alone = Ranks(0, 1, torch.device("cpu"))
    assert checkpoint.load(survival, alone)["trainer"]["steps_done"] == state["step"]
    state["files"]["rank0.pt"]["sha256"] = "0" * 64
    with pytest.raises(OSError, match="this node sees another file than node 0 does") as seen:
        checkpoint.load(survival, alone)
    assert failures.kind_of(seen.value) == "disk_error" and "disk_error" in resume.OF_MACHINE


def test_ranks_have_the_same_state_only_if_every_tensor_and_number_is():
    def state(value=1.0, dtype=torch.float32, names=("a", "b"), lr=0.1):
        moments = {name: torch.full((2, 3), value, dtype=dtype) for name in names}
        return {"optimizer": {"state": moments, "param_groups": [{"lr": lr}]}, "grads": {}}

    other = (state(2.0), state(dtype=torch.bfloat16), state(names=("a",)), state(names=("a", "c")), state(lr=0.2))
    digests = {checkpoint._digest(value) for value in (state(), *other)}
    assert len(digests) == 6 and checkpoint._digest(state()) in digests
