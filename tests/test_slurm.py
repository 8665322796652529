"""A real SLURM of two nodes on this machine (slurm_cluster.py): ranks of srun, jobs of cluster=slurm, their ends."""

import json
import subprocess
import sys
import time

import pytest
import real_runs
import slurm_cluster

from bench.launch import cluster as room

NODES = ("hardware.nodes=2", "hardware.num_threads=1")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    try:
        with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm") / "s") as cluster:
            yield cluster
    except RuntimeError as error:
        pytest.skip(str(error))


def bench(slurm, results, *words, before=(), timeout_s=300):
    env = real_runs.environment(results) | slurm.variables
    words = [*before, sys.executable, "-m", "bench", *words]
    return subprocess.run(words, cwd=real_runs.REPO, env=env, capture_output=True, text=True, timeout=timeout_s)


def records(results):
    return [real_runs.run_json(folder) for folder in real_runs.folders(results)]


def wait_for(what, timeout_s=120):
    until_s = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < until_s
        time.sleep(0.5)
    return found


def test_ranks_of_srun_on_two_nodes_are_one_run(slurm, tmp_path):
    done = bench(slurm, tmp_path, "run", *real_runs.SHORT, NODES[1], before=("srun", "-N2", "-n2"))
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = records(tmp_path)
    assert run["launched_by"]["by"] == "srun" and run["launched_by"]["job_id"].isdigit()
    assert [node["ranks"] for node in run["nodes"]] == [[0], [1]]
    assert not (tmp_path / ".nodes").exists()


def test_a_job_over_two_nodes_is_submitted_followed_and_collected(slurm, tmp_path):
    done = bench(slurm, tmp_path, "run", *real_runs.SHORT, *NODES, "cluster=slurm", "cluster.time_min=10")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = records(tmp_path)
    job_id = run["launched_by"]["job_id"]
    assert run["launched_by"] == {"by": "slurm", "job_id": job_id, "num_restarts": 0}
    assert [node["ranks"] for node in run["nodes"]] == [[0], [1]]
    assert f"job {job_id}, script " in done.stdout and "step:6/6" in done.stdout
    assert f"complete: {real_runs.folders(tmp_path)[0]}" in done.stdout
    (script,) = (tmp_path / room.FOLDER).glob("*.sh")
    assert "#SBATCH --nodes=2\n" in script.read_text() and "#SBATCH --time=10\n" in script.read_text()


def submitted(slurm, results, *words):
    """A job of a long run that has begun to train -> (the process that follows it, its id)."""
    env = real_runs.environment(results) | slurm.variables
    command = [sys.executable, "-m", "bench", "run", *real_runs.LONG, *NODES, "cluster=slurm", *words]
    process = subprocess.Popen(
        command, cwd=real_runs.REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: list(results.glob("*/*/.progress.tmp")))
    return process, records(results)[0]["launched_by"]["job_id"]


def test_scancel_ends_in_an_honest_record(slurm, tmp_path):
    process, job_id = submitted(slurm, tmp_path)
    slurm.run("scancel", job_id)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and f"job {job_id} ended as CANCELLED" in out
    (run,) = records(tmp_path)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted"), run["failure"]


def test_a_requeued_job_leaves_the_run_that_it_lost_and_the_one_that_it_made(slurm, tmp_path):
    process, job_id = submitted(slurm, tmp_path, "goal.num_steps=60", "goal.val_every_steps=60", "cluster.requeue=true")
    slurm.run("scontrol", "requeue", job_id)
    wait_for(lambda: slurm.run("squeue", "--noheader", "--format=%T", f"--jobs={job_id}").stdout.strip() == "PENDING")
    slurm.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")  # else two minutes after it was requeued
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    first, second = sorted(records(tmp_path), key=lambda run: run["started_at"])
    assert (first["status"], first["failure"]["kind"]) == ("aborted", "interrupted")
    assert (second["status"], second["launched_by"]["num_restarts"]) == ("complete", 1)
    assert first["launched_by"]["job_id"] == second["launched_by"]["job_id"] == job_id


def test_more_nodes_than_the_job_has_are_refused(slurm, tmp_path):
    done = bench(slurm, tmp_path, "run", *real_runs.SHORT, *NODES, before=("salloc", "-N1"))
    assert done.returncode == 2 and "ask for more, sbatch --nodes=2" in done.stderr
    assert records(tmp_path) == []


def test_a_sweep_spans_nodes_run_by_run(slurm, tmp_path):
    done = bench(slurm, tmp_path, "run", "-m", "seed=0,1", *real_runs.SHORT, *NODES, "--json", before=("salloc", "-N2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)) == 2
    assert [len(run["nodes"]) for run in records(tmp_path)] == [2, 2]
