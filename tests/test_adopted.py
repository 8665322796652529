"""Ranks that torchrun, srun or mpirun started: found by their variables, and together one run with one record."""

import os
import subprocess
import sys
import time
import types

import pytest
import real_runs

from bench.launch import allocation, console, ranks
from bench.launch.nodes import joining, leader
from bench.record import ledger


def variables(text):
    """NAME=VALUE ... -> {name: value}"""
    return dict(pair.split("=") for pair in text.split())


TORCHRUN = variables("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1")
TORCHRUN |= variables("MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=r")
SRUN = variables("SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_JOB_ID=17 SLURM_STEP_ID=0")
SRUN |= variables("SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)")
MPIRUN = variables("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 PMIX_NAMESPACE=7")
MPIRUN |= variables("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2")


def place(launch):
    names = ("by", "rank", "local_rank", "world_size", "local_size", "node", "num_nodes")
    return tuple(getattr(launch, name) for name in names)


def test_a_process_that_nobody_started_as_a_rank_is_none():
    assert allocation.externally_launched({}) is None
    # a batch script of SLURM is no task of a step, and a step of one task is not a group
    assert allocation.externally_launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert allocation.externally_launched({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert allocation.externally_launched({"WORLD_SIZE": "1", "RANK": "0"}) is None


def test_each_launcher_is_read_from_its_own_variables():
    launch = allocation.externally_launched(TORCHRUN)
    assert place(launch) == ("torchrun", 3, 1, 4, 2, 1, 2)
    assert (launch.host, launch.has_store) == ("10.0.0.1", True)
    launch = allocation.externally_launched({**SRUN, "SLURM_STEP_NODELIST": "127.0.0.[1-2]"})
    assert place(launch) == ("srun", 2, 0, 4, 2, 1, 2)
    launch = allocation.externally_launched(MPIRUN)
    assert (place(launch), launch.host) == (("mpirun", 1, 1, 2, 2, 0, 1), "127.0.0.1")
    by_hand = {name: TORCHRUN[name] for name in TORCHRUN if name not in ("TORCHELASTIC_RUN_ID", "GROUP_RANK")}
    assert place(allocation.externally_launched(by_hand)) == ("variables", 3, 1, 4, 2, 1, 2)


def test_torchrun_within_srun_is_torchrun():
    assert allocation.externally_launched(SRUN | TORCHRUN).by == "torchrun"


def test_ranks_of_one_launch_meet_at_the_same_ports_and_those_of_two_do_not():
    def ports(**changed):
        return tuple(allocation.externally_launched(TORCHRUN | changed).ports)

    (launch_ports,) = {ports(RANK=str(rank), GROUP_RANK=str(rank // 2)) for rank in range(4)}
    assert not set(launch_ports) & set(ports(TORCHELASTIC_RUN_ID="s"))


@pytest.mark.parametrize(
    "environ, sentence",
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2, but not which rank of this node"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2, but not which rank"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "without MASTER_ADDR and MASTER_PORT"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,1"}, "give every node as many ranks"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two: "),
        ({**TORCHRUN, "RANK": "first"}, "RANK=first: it must be a number"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR=HOST"),
    ],
)
def test_half_a_launch_is_refused_with_what_to_do(environ, sentence):
    with pytest.raises(ValueError) as refused:
        allocation.externally_launched(environ)
    assert sentence in str(refused.value)


def test_what_slurm_writes_of_nodes():
    assert allocation.first_hostname("n[01-03,7],gpu-a") == "n01" and allocation.first_hostname("") is None
    assert [allocation.first_hostname(hosts) for hosts in ("r[1-2]n[3-4]-ib,x", "gpu-a,b")] == ["r1n3-ib", "gpu-a"]


def test_the_launch_decides_how_many_ranks_there_are():
    launch = allocation.externally_launched(TORCHRUN)
    overrides = joining.effective(["seed=1", "hardware.num_processes=4"], launch)
    assert overrides == ["seed=1", "hardware.num_processes=4", "hardware.nodes=2"]
    for override in ("hardware.num_processes=8", "hardware.nodes=1", "hardware.rendezvous=a:1"):
        with pytest.raises(ValueError, match=f"{override}: torchrun started 4 ranks on 2 node"):
            joining.effective([override], launch)


def test_a_rank_of_a_run_starts_no_run(monkeypatch):
    monkeypatch.setenv(ranks.IN_RUN, "1")
    with pytest.raises(ValueError, match="a rank of a run, which cannot start another"):
        joining.started_by("run")


REPORT = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
bench.training.worker FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-23_10:56:32
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 13726)
  error_file: <N/A>
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_10:56:31
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 13727)  (SIGKILL)
"""


def test_the_report_of_torchrun_names_the_ranks_that_failed():
    began_s = time.mktime((2026, 11, 23, 10, 56, 0, 0, 0, -1))
    first, second = ranks.failures_of_report(REPORT, began_s)
    assert (first["rank"], first["exit_code"], first["failed_at_s"]) == (0, 1, 32)
    assert (second["rank"], second["exit_code"], second["failed_at_s"]) == (1, -9, 31)
    assert ranks.failures_of_report("no report", began_s) == []


# ---- as their user starts them


def torchrun(results, *arguments):
    launch = ("--standalone", "--nproc_per_node=2", f"--log_dir={results}.torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "bench", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=real_runs.REPO, env=real_runs.environment(results), **options)


@pytest.mark.slow
def test_ranks_of_torchrun_are_one_run_with_the_losses_of_our_own_launch(two_rank_run, tmp_path):
    done = torchrun(tmp_path, "run", *real_runs.SHORT, *real_runs.TWO, "seed=5")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = real_runs.folders(tmp_path)
    run, own = real_runs.run_json(folder), real_runs.run_json(two_rank_run)
    assert run["launched_by"] == {"by": "torchrun", "job_id": None}
    assert (run["config_id"], run["world_size"]) == (own["config_id"], 2)
    assert real_runs.losses(folder) == real_runs.losses(two_rank_run)
    assert [line["event"] for line in ledger.read(tmp_path).lines] == ["start", "end"]
    assert done.stdout.count("complete: val_loss") == 1
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["agent.log", "rank0.log", "rank1.log"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("race", "A=", "B=seed=1"), ("run", "-m", "seed=0,1"), ("speedrun",)])
def test_what_ranks_cannot_do_together_is_refused_in_one_line(tmp_path, arguments):
    done = torchrun(tmp_path, *arguments)
    assert done.returncode == 1
    messages = [line for line in done.stderr.splitlines() if "torchrun started 2 ranks" in line]
    assert len(messages) == 1 and "such ranks can only make a run together: start ./run.sh" in messages[0]
    assert real_runs.folders(tmp_path) == [] and not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_rank_of_torchrun_that_fails_is_the_failure_of_the_one_record(tmp_path):
    assert torchrun(tmp_path, "run", *real_runs.SHORT, "optim.lr=1e30").returncode == 1
    (folder,) = real_runs.folders(tmp_path)
    run = real_runs.run_json(folder)
    assert (run["status"], run["failure"]["kind"]) == ("failed", "non_finite_loss")
    assert [line["event"] for line in ledger.read(tmp_path).lines] == ["start", "end"]


def test_torchrun_takes_no_options_from_the_environment(tmp_path):
    """With PET_MAX_RESTARTS=1 torchrun would restart a killed rank, and the run would count as complete."""
    place = ranks.Place(2, 2, master=("127.0.0.1", 29500), by_torchrun=True)
    guarded = type("Guarded", (), {"pid": 0, "cpu_s": None})
    group = ranks.Group(guarded, place, tmp_path, {"PET_MAX_RESTARTS": "1", "PET_RDZV_BACKEND": "c10d", "KEPT": "1"})
    assert [name for name in group._env if name.startswith("PET_")] == [] and group._env["KEPT"] == "1"
    assert "--max-restarts=0" in group._command and "--rdzv-backend=static" in group._command


def test_a_rank_that_no_launcher_started_says_what_to_unset(monkeypatch):
    for name, value in variables("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE=2 and RANK=1 .* alone, or unset WORLD_SIZE, RANK and LOCAL_RANK"):
        joining.refuse("race", [])


def test_a_leader_that_waits_says_for_whom(monkeypatch, capsys):
    """As where WORLD_SIZE and RANK of another job are left in the shell, so that no other rank will come."""
    variables_left = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    monkeypatch.setattr(leader, "QUIET_S", 0.0)
    monkeypatch.setattr(leader.facts, "facts_of", lambda job: {})
    hardware = types.SimpleNamespace(rendezvous_timeout_s=0.5)
    job = types.SimpleNamespace(config=types.SimpleNamespace(hardware=hardware))
    leading = joining.lead_adopted(allocation.externally_launched(variables_left))
    with leading, console.output(), pytest.raises(ValueError, match="1 of 2 processes joined within 0.5 s"):
        leading.gather(job)
    waits = "1 of 2 processes joined (WORLD_SIZE=2 and RANK=0 are set in the environment); at most 0.5 s"
    assert capsys.readouterr().out.count(waits) == 1
