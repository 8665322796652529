"""A real SLURM of two nodes on this machine (slurm_cluster.py): ranks of srun, jobs of cluster=slurm, sweeps by
submitit, a race, and the ends that they may come to."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import real_runs
import scripted
import slurm_cluster

from bench.launch import cluster as room
from bench.machine.signals import raise_interrupted
from bench.record import sweep

NODES = ("hardware.nodes=2", "hardware.num_threads=1")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    try:
        with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm") / "s") as cluster:
            yield cluster
    except RuntimeError as error:
        pytest.skip(str(error))


def command_of(slurm, results, *arguments):
    """Returns (the arguments of a process, subprocess's options)."""
    env = real_runs.environment(results) | slurm.variables
    return [sys.executable, "-m", "bench", *arguments], {"cwd": real_runs.REPO, "env": env, "text": True}


def bench(slurm, results, *arguments, before=(), timeout_s=300, code=None):
    command, options = command_of(slurm, results, *arguments)
    done = subprocess.run([*before, *command], capture_output=True, timeout=timeout_s, **options)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def started(slurm, results, *arguments, before=()):
    command, options = command_of(slurm, results, *arguments)
    return subprocess.Popen([*before, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def records(results):
    return [real_runs.run_json(folder) for folder in real_runs.folders(results)]


def test_ranks_of_srun_on_two_nodes_are_one_run(slurm, tmp_path):
    bench(slurm, tmp_path, "run", *real_runs.SHORT, NODES[1], before=("srun", "-N2", "-n2"), code=0)
    (run,) = records(tmp_path)
    assert run["launched_by"]["by"] == "srun" and run["launched_by"]["job_id"].isdigit()
    assert [node["ranks"] for node in run["nodes"]] == [[0], [1]]
    assert not (tmp_path / ".nodes").exists()


def test_a_job_over_two_nodes_is_submitted_followed_and_collected(slurm, tmp_path):
    done = bench(slurm, tmp_path, "run", *real_runs.SHORT, *NODES, "cluster=slurm", "cluster.time_min=10", code=0)
    (run,) = records(tmp_path)
    job_id = run["launched_by"]["job_id"]
    assert run["launched_by"] == {"by": "slurm", "job_id": job_id, "num_restarts": 0}
    assert [node["ranks"] for node in run["nodes"]] == [[0], [1]]
    assert f"job {job_id}, script " in done.stdout and "step:6/6" in done.stdout
    assert f"complete: {real_runs.folders(tmp_path)[0]}" in done.stdout
    (script,) = (tmp_path / room.FOLDER).glob("*.sh")
    assert "#SBATCH --nodes=2\n" in script.read_text() and "#SBATCH --time=10\n" in script.read_text()


def submitted(slurm, results, *overrides, run=real_runs.ENDLESS):
    """Submits a long run and waits until it trains.  Returns (the process that follows the job, the job's id)."""
    process = started(slurm, results, "run", *run, *NODES, "cluster=slurm", *overrides)
    real_runs.wait_for(lambda: list(results.glob("*/*/.progress.tmp")))
    return process, records(results)[0]["launched_by"]["job_id"]


@pytest.fixture(scope="module")
def requeued(slurm, tmp_path_factory):
    """Returns (the process that follows it, its id, results) of a job that was requeued.

    SLURM starts it again after 20 s at least: tests that leave the nodes as they are name it to run meanwhile.
    """
    results = tmp_path_factory.mktemp("requeued")
    overrides = ["goal.num_steps=30", "goal.val_every_steps=30", "cluster.requeue=true"]
    process, job_id = submitted(slurm, results, *overrides, run=real_runs.LONG)
    slurm.run("scontrol", "requeue", job_id)
    yield process, job_id, results
    if process.poll() is None:  # its own test was not asked for
        slurm.run("scancel", job_id)
        process.communicate(timeout=90)


def test_scancel_ends_in_an_honest_record(slurm, requeued, tmp_path):
    process, job_id = submitted(slurm, tmp_path)
    slurm.run("scancel", job_id)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and f"job {job_id} ended as CANCELLED" in out
    (run,) = records(tmp_path)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted"), run["failure"]


def test_more_nodes_than_the_job_has_are_refused(slurm, requeued, tmp_path):
    done = bench(slurm, tmp_path, "run", *real_runs.SHORT, *NODES, before=("salloc", "-N1"))
    assert done.returncode == 2 and "give sbatch --nodes=2, or cluster=slurm" in done.stderr
    assert records(tmp_path) == []


def test_a_sweep_spans_nodes_run_by_run(slurm, requeued, tmp_path):
    done = bench(slurm, tmp_path, "run", "-m", "seed=0,1", *real_runs.SHORT, *NODES, "--json", before=("salloc", "-N2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)) == 2
    assert [len(run["nodes"]) for run in records(tmp_path)] == [2, 2]


def test_a_requeued_job_leaves_the_run_that_it_lost_and_the_one_that_it_made(requeued):
    process, job_id, results = requeued
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    first, second = sorted(records(results), key=lambda run: run["started_at"])
    assert (first["status"], first["failure"]["kind"]) == ("aborted", "interrupted")
    assert (second["status"], second["launched_by"]["num_restarts"]) == ("complete", 1)
    assert first["launched_by"]["job_id"] == second["launched_by"]["job_id"] == job_id


@pytest.mark.parametrize("nodes", [(), NODES])
def test_a_preempted_job_writes_a_checkpoint_is_requeued_and_ends_as_one_record(slurm, tmp_path, nodes):
    """In GraceTime SLURM sends SIGTERM, at which the job would end as failed and not start again by itself."""
    num_steps = 3000 if nodes else 6000
    overrides = [f"goal.num_steps={num_steps}", "goal.val_every_steps=2000", "resume=auto", *nodes]
    script = tmp_path / "job.sh"
    command = [sys.executable, "-m", "bench", "run", *real_runs.ENDLESS, *overrides]
    script.write_text(f"#!/bin/bash\ncd {real_runs.REPO}\nexec {' '.join(command)}\n")
    results = real_runs.environment(tmp_path)["SPEEDRUN_RESULTS"]
    options = ["--partition=low", "--requeue", "--exclusive", "--open-mode=append", f"--output={tmp_path}/log"]
    options += ["--nodes=2"] * bool(nodes)
    job_id = slurm.run("sbatch", "--parsable", *options, str(script), SPEEDRUN_RESULTS=results).stdout.strip()
    real_runs.wait_for(lambda: list(tmp_path.glob("*/*/.progress.tmp")))
    slurm.run("srun", "--partition=p", "-N2", "--exclusive", "sleep", "1", timeout_s=120)
    real_runs.wait_for(lambda: [run["status"] for run in records(tmp_path)] == ["complete"], timeout_s=240)
    (run,) = records(tmp_path)
    first, second = run["segments"]
    assert first["status"] == "preempted" and first["reason"].startswith("the run got SIGTERM: SLURM ended job")
    assert "another job preempted it" in first["reason"]
    assert [part["launched_by"] for part in (first, second)] == [
        {"by": "slurm", "job_id": job_id, "num_restarts": restarts} for restarts in (0, 1)
    ]
    assert "starts again, and resumes" in (tmp_path / "log").read_text()
    assert [node["ranks"] for node in run.get("nodes", [])] == ([[0], [1]] if nodes else [])


# ---- Hydra's launcher


HAS_SUBMITIT = importlib.util.find_spec("submitit") is not None
needs_submitit = pytest.mark.skipif(not HAS_SUBMITIT, reason="no submitit: pip install hydra-submitit-launcher")
LAUNCHER = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=p", "hydra.launcher.timeout_min=10")


@needs_submitit
def test_a_sweep_by_submitit_is_collected_and_its_table_printed(slurm, tmp_path):
    points = ["optim.lr=0.001,0.002", "hardware.num_threads=1"]
    done = bench(slurm, tmp_path, "run", "-m", *real_runs.SHORT, *points, *LAUNCHER, code=0)
    runs = records(tmp_path)
    assert [(run["status"], run["launched_by"]["by"]) for run in runs] == [("complete", "slurm")] * 2
    assert "run  optim.lr=0.001: complete: val_loss" in done.stdout  # as it ended, in its job
    assert "2 configs, least mean val_loss first" in done.stdout and "2 of 2 complete" in done.stdout
    (folder,) = sweep.folders(tmp_path)
    assert {path.name for path in folder.glob("points*.jsonl")} == {"points.0.jsonl", "points.1.jsonl"}
    assert {point.folder.name for point in sweep.points(folder)} == {run["run_id"] for run in runs}


@contextlib.contextmanager
def sweep_by_submitit(slurm, results, *overrides, num_running=2):
    """Yields the process of a sweep, so many runs of which have begun to train."""
    command = ["run", "-m", *real_runs.LONG, "hardware.num_threads=1", *overrides, *LAUNCHER]
    with started(slurm, results, *command) as process:
        real_runs.wait_for(lambda: len(list(results.glob("*/*/.progress.tmp"))) >= num_running)
        yield process


@needs_submitit
def test_a_job_of_a_sweep_that_is_lost_does_not_end_the_others_and_the_same_command_runs_it_again(slurm, tmp_path):
    """Killed with all that could write a record, as by a cgroup that ran out of memory."""
    overrides = ["seed=0,1", "goal.num_steps=40", "goal.val_every_steps=40"]
    with sweep_by_submitit(slurm, tmp_path, *overrides) as process:
        (first,) = [run for run in records(tmp_path) if run["seed"] == 0]
        for pid in pids_of_job(first["launched_by"]["job_id"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 1, out
    assert ": SLURM has ended it, and it left no result; waiting for the other jobs" in out, out
    assert "1 of 2 complete" in out and "a job was lost: the same command runs again" in out, out
    lost, other = sorted(records(tmp_path), key=lambda run: run["seed"])
    assert (lost["status"], lost["failure"]["kind"], other["status"]) == ("aborted", "launcher_killed", "complete")
    assert lost["failure"]["message"].startswith("SLURM ended its job")
    assert scripted.pids(tmp_path) == []
    assert slurm.run("squeue", "--noheader").stdout == ""
    done = bench(slurm, tmp_path, "run", "-m", *real_runs.LONG, "hardware.num_threads=1", *overrides, *LAUNCHER)
    assert done.returncode == 0 and "2 of 2 complete" in done.stdout, done.stdout + done.stderr
    assert sorted(run["seed"] for run in records(tmp_path)) == [0, 0, 1]


def pids_of_job(job_id):
    """The pids of what one of SLURM's jobs runs."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SLURM_JOB_ID={job_id}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


@needs_submitit
def test_a_sweep_by_submitit_waits_for_a_job_whose_node_failed_and_which_begins_anew(slurm, tmp_path):
    with sweep_by_submitit(slurm, tmp_path, "seed=0,1", "goal.num_steps=40", "goal.val_every_steps=40") as process:
        slurm.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
        slurm.run("scontrol", "update", "nodename=n1", "state=resume")  # or it is back by itself: ReturnToService
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "2 of 2 complete" in out, out
    lost = [run for run in records(tmp_path) if run["status"] != "complete"]
    assert lost, out
    for run in lost:  # the launcher may have been killed with its node
        cause = run["failure"]
        assert cause["kind"] == "launcher_killed" or ": SLURM starts job " in cause["message"], (cause, run["ended_at"])
    assert {run["launched_by"]["num_restarts"] for run in lost} == {0}
    assert scripted.pids(tmp_path) == []
    assert slurm.run("squeue", "--noheader").stdout == ""


def test_a_job_that_loses_a_node_says_so_in_its_record(slurm, tmp_path):
    process, job_id = submitted(slurm, tmp_path, "cluster.requeue=false")
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    out, _ = process.communicate(timeout=90)
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    assert process.returncode == 1 and f"job {job_id} ended as NODE_FAIL" in out, out
    (run,) = records(tmp_path)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted")
    assert run["failure"]["message"].endswith(f"SLURM ended job {job_id}, because a node of it failed")
    assert scripted.pids(tmp_path) == []


@needs_submitit
def test_a_signal_to_a_sweep_by_submitit_ends_its_jobs_and_keeps_honest_records(slurm, tmp_path):
    overrides = ["seed=0,1,2", "hydra.launcher.array_parallelism=1"]
    with sweep_by_submitit(slurm, tmp_path, *overrides, num_running=1) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and "ending 3 job(s)" in out and "2 not run, it was interrupted" in out, out
    assert slurm.run("squeue", "--noheader").stdout == ""
    (run,) = records(tmp_path)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted"), run["failure"]
    (folder,) = sweep.folders(tmp_path)
    assert sweep.read(folder)["why"] == "it was interrupted"


# ---- a race


def followers(results):
    """The pids of what srun started on other nodes for the runs in this results folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (path / "cmdline").read_bytes().split(b"\0")
            ours = f"SPEEDRUN_RESULTS={results}".encode() in (path / "environ").read_bytes().split(b"\0")
            if ours and b"bench.launch.nodes.member" in arguments and arguments[0] != b"srun":
                pids.append(int(path.name))
    return pids


def test_a_race_whose_run_loses_a_node_runs_it_again(slurm, tmp_path):
    """It goes as far as its second attempt and is interrupted then, to be resumed."""
    arguments = ["race", "A=optim.lr=0.001", "B=optim.lr=0.002", "n=2", "--anyway", *real_runs.SHORT, *NODES]
    arguments += ["goal.num_steps=150", "goal.val_every_steps=150"]  # seconds, in which the loss is noticed
    with started(slurm, tmp_path, *arguments, before=("salloc", "-N2")) as process:
        real_runs.wait_for(lambda: real_runs.folders(tmp_path), timeout_s=240)  # all nodes have met
        for pid in followers(tmp_path):
            os.kill(pid, signal.SIGKILL)
        real_runs.wait_for(lambda: "complete" in [run["status"] for run in records(tmp_path)], timeout_s=240)
        (child_pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child_pid), signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "./run.sh race --resume" in out, out
    lost, again, *_ = sorted(records(tmp_path), key=lambda run: run["started_at"])
    assert (lost["status"], lost["failure"]["kind"]) == ("aborted", "node_lost")
    assert (again["status"], len(again["nodes"]), again["race"]["attempt"]) == ("complete", 2, 2)
    assert lost["race"]["position"] == again["race"]["position"] == 0
    real_runs.wait_for(lambda: not slurm.run("squeue", "--noheader").stdout)


GPU_OF_NODE = """import os
from bench.machine import gpus
name = f"GPU-{os.environ.get('SLURMD_NODENAME', 'n1')}-{os.environ['SLURM_JOB_ID']}"
gpus.devices = lambda: [gpus.Device(0, name, 80.0, 0, frozenset())]
"""
RACER = """import os, subprocess, sys
from bench.launch.nodes import joining
LEASE = "import os; from bench.machine import gpus, leases; print(leases.lease(gpus.devices()[0].name))"
USERS = ("SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE")
def on_node_2(env=os.environ):
    env = {name: value for name, value in env.items() if name not in USERS}
    subprocess.run(["srun", "--overlap", "-N1", "-n1", "--relative=1", sys.executable, "-c", LEASE], env=env)
stranger = dict(os.environ)
with joining.leased(1, 2):
    on_node_2(), on_node_2(stranger)  # as a member of a run, and as somebody else
on_node_2(stranger)
"""


def test_a_race_has_the_gpus_of_every_node_from_its_first_run_to_its_last(slurm, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GPU_OF_NODE)
    env = os.environ | slurm.variables | {"PYTHONPATH": f"{real_runs.REPO}:{tmp_path}"}
    env |= {"SLURM_LABELIO": "1", "SLURM_STDINMODE": "none", "SLURM_STDOUTMODE": "none"}  # of a user who likes labels
    command = ["salloc", "-N2", sys.executable, "-c", RACER]
    done = subprocess.run(command, cwd=real_runs.REPO, env=env, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r"None\nprocess \d+ of user \d+\nNone\n", done.stdout), done.stderr


SCONTROL = """#!/bin/sh
echo asked >> "$0.calls"
case $(wc -l < "$0.calls") in
1|2) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1;;
3) echo "JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0";;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
"""


def test_a_controller_that_does_not_answer_is_waited_for_and_said_once(tmp_path, monkeypatch, capsys):
    program = tmp_path / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(room, "LOOK_EVERY_S", 0.01)
    with raise_interrupted() as signals:
        assert room._follow("7", tmp_path / "log", signals) == ("COMPLETED", 0)
    assert capsys.readouterr().out.count("the controller does not answer, and is waited for") == 1
    with pytest.raises(ValueError, match="job 7: SLURM no longer lists it"):
        room._state("7")


def test_two_jobs_submitted_in_one_second_share_no_script_and_no_log(results, monkeypatch):
    submitted, at = [], datetime(2026, 11, 28, 5, 19, tzinfo=UTC)
    monkeypatch.setattr(room, "datetime", SimpleNamespace(now=lambda zone: at))
    monkeypatch.setattr(room, "_submit", lambda path: submitted.append(path) or "7")
    monkeypatch.setattr(room, "_follow", lambda job_id, log, signals: ("COMPLETED", 0))
    for verb in ("doctor", "table"):
        assert room.go(verb, room.request_from([verb, "cluster=slurm"])) == 0
    first, second = submitted
    assert first != second and " doctor " in first.read_text() and " table " in second.read_text()
    for script in submitted:
        assert script.name.startswith("20261128T051900Z-") and script.stat().st_mode & 0o044 == 0o044
        assert f"#SBATCH --output={script.with_suffix('.log')}" in script.read_text()
