"""Detects from the environment what started this process: a SLURM job, or torchrun, srun or mpirun as one rank.

Within the allocation of a batch script or of salloc, hardware.nodes=N needs no rendezvous and no second command: srun
starts the other nodes' processes for each run (nodes/joining.py), so races and sweeps span nodes as well.  Externally
launched ranks (torch.distributed.run, srun(1), Open MPI's mpirun(1)) are identified by

    torchrun    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
    srun        SLURM_PROCID SLURM_LOCALID SLURM_STEP_NUM_TASKS SLURM_NODEID SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID
    mpirun      OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE

torchrun within srun counts as torchrun.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ASK_S = 5.0  # timeout of scontrol; a job has KillWait to end, 30 s by default
PREEMPTED_EVERY_S = 10.0  # interval of the checks; a useful GraceTime is several times as long
WHY = {  # by the JobState of a job that SLURM is ending, or by its Reason while it is COMPLETING
    "NODE_FAIL": "because a node of it failed",
    "NodeDown": "because a node of it failed",
    "TIMEOUT": "at its time limit",
    "TimeLimit": "at its time limit",
    "PREEMPTED": "because another job preempted it",
    "OUT_OF_MEMORY": "because it took more memory than it asked for",
    "DEADLINE": "at its deadline",
}
NUM_PORTS = 8  # tried in order, because other programs may use some of them
PORTS = range(20000, 32000)  # below the ephemeral ports (Linux: 32768 and above)
KNOWN = "use torchrun, srun or Open MPI's mpirun, or give each process RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR"


# ---- SLURM jobs


@dataclass(frozen=True)
class Allocation:
    """The SLURM allocation of this job."""

    job_id: str
    num_nodes: int
    num_restarts: int  # how often the job was requeued
    array: tuple[str, int] | None = None  # the array's job id, and the number of this task in it

    def facts(self) -> dict[str, Any]:
        """Returns run.json["launched_by"]."""
        array = {"array_job_id": self.array[0], "array_task_id": self.array[1]} if self.array else {}
        return {"by": "slurm", "job_id": self.job_id, "num_restarts": self.num_restarts, **array}


def current(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Returns the allocation of this process, or None outside a SLURM job."""
    if "SLURM_JOB_ID" not in environ:
        return None
    num_nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    array = None
    if environ.get("SLURM_ARRAY_TASK_ID", "").isdigit():
        array = environ.get("SLURM_ARRAY_JOB_ID", environ["SLURM_JOB_ID"]), int(environ["SLURM_ARRAY_TASK_ID"])
    return Allocation(environ["SLURM_JOB_ID"], int(num_nodes), int(environ.get("SLURM_RESTART_COUNT", "0")), array)


@dataclass(frozen=True)
class Ending:
    """How and why SLURM is ending a job."""

    is_requeued: bool  # SLURM will start the job again
    why: str  # text that follows a signal's name; "" if the reason is unknown, for example after scancel
    can_requeue: bool = False  # the job still runs, and SLURM would requeue it on request
    is_preempted: bool = False


def ending(environ: Mapping[str, str] = os.environ) -> Ending:
    """Returns how SLURM is ending the job of this process; nothing is known outside a job."""
    job = current(environ)
    if job is None:
        return Ending(False, "")
    output, _ = scontrol("show", "job", "--oneliner", job.job_id)
    facts = dict(re.findall(r"\b(JobState|Reason|Restarts|PreemptTime|Requeue|BatchFlag)=(\S+)", output))
    if int(facts.get("Restarts", "0")) > job.num_restarts:
        return Ending(True, f": SLURM starts job {job.job_id} again (a lost node, a preemption or scontrol requeue)")
    is_preempted = facts.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
    why = WHY.get(facts.get("JobState", "")) or WHY.get(facts.get("Reason", "")) or is_preempted and WHY["PREEMPTED"]
    can_requeue = [facts.get(name) for name in ("JobState", "Requeue", "BatchFlag")] == ["RUNNING", "1", "1"]
    return Ending(False, f": SLURM ended job {job.job_id}, {why}" if why else "", can_requeue, is_preempted)


@contextlib.contextmanager
def signalled_when_preempted() -> Iterator[None]:
    """Context in which this process gets SIGTERM once SLURM sets its job's PreemptTime: SLURM itself signals only job
    steps, not the processes that the batch script started."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PREEMPTED_EVERY_S):
            if ending().is_preempted:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="preemption", daemon=True)
    if current():
        thread.start()
    try:
        yield
    finally:
        ended.set()


def first_hostname(hosts: str) -> str | None:
    """Returns the first name of a host list, "n[01-03,7],gpu-a" -> "n01", or None if the list is empty."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return first and re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def address_of_first(environ: Mapping[str, str]) -> str | None:
    """Returns the address of the step's first node, which has rank 0: its NodeAddr, else its host name resolved."""
    name = first_hostname(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    if name is None:
        return None
    output, _ = scontrol("show", "node", "--oneliner", name, timeout_s=30)
    if match := re.search(r"\bNodeAddr=(\S+)", output):
        return match[1]
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR")


def scontrol(*arguments: str, timeout_s: float = ASK_S) -> tuple[str, str | None]:
    """Runs scontrol(1).  Returns (its output, why it failed or could not be run, else None)."""
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, done.stderr.strip() or f"scontrol: exit code {done.returncode}" if done.returncode else None


# ---- externally launched ranks


@dataclass(frozen=True)
class Adopted:
    """One of the ranks that an external launcher started: this process."""

    by: str  # torchrun, srun or mpirun; "variables": RANK and the others were set manually
    rank: int
    local_rank: int
    world_size: int
    local_size: int  # ranks on this node
    node: int
    host: str | None  # host of rank 0; None: unknown
    key: str  # identical in all processes of this launch, and only there
    has_store: bool = False  # MASTER_ADDR and MASTER_PORT are given, for torch's process group

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.local_size)

    @property
    def ports(self) -> list[int]:
        """Ports that rank 0's launcher may listen on, derived from the key so that processes need not exchange them."""
        first = int(hashlib.sha256(self.key.encode()).hexdigest(), 16)
        return [PORTS[(first + number) % len(PORTS)] for number in range(NUM_PORTS)]

    def summary(self) -> str:
        """Returns a text such as "torchrun started 2 ranks"."""
        if self.by == "variables":
            return f"WORLD_SIZE={self.world_size} and RANK={self.rank} are set in the environment"
        return f"{self.by} started {self.world_size} ranks"


def externally_launched(environ: Mapping[str, str] = os.environ) -> Adopted | None:
    """Returns which externally launched rank this process is, or None if it is not one.  Raises ValueError if the
    environment variables are incomplete."""
    if "LOCAL_RANK" in environ and "RANK" in environ and "WORLD_SIZE" in environ:
        adopted = _torchrun(environ)
    elif _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ:
        adopted = _srun(environ)
    elif _number(environ, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        adopted = _mpirun(environ)
    else:
        for name in ("WORLD_SIZE", "PMI_SIZE"):
            if _number(environ, name, 1) > 1:
                raise ValueError(f"{name}={environ[name]}, but not which rank of this node this process is: {KNOWN}")
        return None
    if adopted.num_nodes > 1 and adopted.host is None:
        raise ValueError(f"{adopted.summary()} on several nodes: give rank 0's host, mpirun -x MASTER_ADDR=HOST")
    if adopted.num_nodes > 1:
        return adopted
    # works even if the machine cannot resolve its own host name
    return dataclasses.replace(adopted, host="127.0.0.1", local_size=adopted.world_size)


def _torchrun(environ: Mapping[str, str]) -> Adopted:
    world_size, rank = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "variables"
    if by == "variables" and world_size > 1 and not ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        raise ValueError(f"WORLD_SIZE={world_size} without MASTER_ADDR and MASTER_PORT: {KNOWN} and MASTER_PORT")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
    return Adopted(
        by,
        rank,
        _number(environ, "LOCAL_RANK"),
        world_size,
        local_size,
        node=_number(environ, "GROUP_RANK", rank // local_size),
        host=environ.get("MASTER_ADDR"),
        key=_joined(environ, "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        has_store=world_size > 1,
    )


def _srun(environ: Mapping[str, str]) -> Adopted:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    sizes = environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size))
    match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", sizes)  # 2(x3): on each of three nodes two; of others, 2(x2),1
    if match is None:
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={sizes}: give every node as many ranks, srun --ntasks-per-node=N")
    return Adopted(
        "srun",
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_LOCALID"),
        world_size,
        local_size=int(match[1]),
        node=_number(environ, "SLURM_NODEID"),
        host=address_of_first(environ) if int(match[2] or 1) > 1 else None,
        key=_joined(environ, "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    )


def _mpirun(environ: Mapping[str, str]) -> Adopted:
    rank, world_size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size, host = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size), environ.get("MASTER_ADDR")
    key = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Adopted("mpirun", rank, local_rank, world_size, local_size, rank // local_size, host, key)


def _joined(environ: Mapping[str, str], *names: str) -> str:
    return ":".join(environ.get(name, "") for name in names)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise ValueError(f"{name}={value}: it must be a number: {KNOWN}")
    return int(value)
