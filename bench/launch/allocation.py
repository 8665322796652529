"""What started this process: a job of SLURM, or torchrun, srun or mpirun as one of several ranks; by its variables.

Within an allocation that a batch script or salloc has, hardware.nodes=N needs no rendezvous and no second command: srun
starts the other nodes' part for each run (nodes/leader.py), so that races, sweeps and speedruns span nodes as well.
Ranks that others start (torch.distributed.run, srun(1), Open MPI's mpirun(1)) say which they are by

    torchrun    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
    srun        SLURM_PROCID SLURM_LOCALID SLURM_STEP_NUM_TASKS SLURM_NODEID SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID
    mpirun      OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE

where torchrun within srun is torchrun.
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

ASK_S = 5.0  # for scontrol, while the job has KillWait to end, 30 s where nobody set it
PREEMPTED_EVERY_S = 10.0  # the least that a GraceTime is good for is some of these
WHY = {  # by the state of a job that SLURM is ending, or while that is COMPLETING by its reason
    "NODE_FAIL": "because a node of it failed",
    "NodeDown": "because a node of it failed",
    "TIMEOUT": "at its time limit",
    "TimeLimit": "at its time limit",
    "PREEMPTED": "for another one (preempted)",
    "OUT_OF_MEMORY": "because it took more memory than it asked for",
    "DEADLINE": "at its deadline",
}
NUM_PORTS = 8  # tried one after the other, where another program has some of them
PORTS = range(20000, 32000)  # below those that systems give away by themselves (Linux: 32768 and above)
KNOWN = "use torchrun, srun or Open MPI's mpirun, or give each process RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR"


# ---- a job of SLURM's


@dataclass(frozen=True)
class Allocation:
    """What SLURM gave this job."""

    job_id: str
    num_nodes: int
    num_restarts: int  # how often the job was requeued
    array: tuple[str, int] | None = None  # the job id of its array, and which task of it this is

    def facts(self) -> dict[str, Any]:
        """run.json["launched_by"]."""
        array = {"array_job_id": self.array[0], "array_task_id": self.array[1]} if self.array else {}
        return {"by": "slurm", "job_id": self.job_id, "num_restarts": self.num_restarts, **array}


def found(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation of this process; None outside of a SLURM job."""
    if "SLURM_JOB_ID" not in environ:
        return None
    num_nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    array = None
    if environ.get("SLURM_ARRAY_TASK_ID", "").isdigit():
        array = environ.get("SLURM_ARRAY_JOB_ID", environ["SLURM_JOB_ID"]), int(environ["SLURM_ARRAY_TASK_ID"])
    return Allocation(environ["SLURM_JOB_ID"], int(num_nodes), int(environ.get("SLURM_RESTART_COUNT", "0")), array)


@dataclass(frozen=True)
class Ending:
    """What SLURM says of a job that it is ending."""

    is_requeued: bool  # SLURM starts it again
    why: str  # why it ends, behind a signal's name; "" where that is not known, as after scancel
    can_requeue: bool = False  # it still runs, and SLURM would start it again if asked
    is_preempted: bool = False


def ending(environ: Mapping[str, str] = os.environ) -> Ending:
    """How SLURM ends the job that this process runs in; outside of a job nothing is known."""
    job = found(environ)
    if job is None:
        return Ending(False, "")
    facts = dict(
        re.findall(r"\b(JobState|Reason|Restarts|PreemptTime|Requeue|BatchFlag)=(\S+)", _scontrol("job", job.job_id))
    )
    if int(facts.get("Restarts", "0")) > job.num_restarts:
        return Ending(True, f": SLURM starts job {job.job_id} again (a lost node, a preemption or scontrol requeue)")
    is_preempted = facts.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
    why = WHY.get(facts.get("JobState", "")) or WHY.get(facts.get("Reason", "")) or is_preempted and WHY["PREEMPTED"]
    can_requeue = [facts.get(name) for name in ("JobState", "Requeue", "BatchFlag")] == ["RUNNING", "1", "1"]
    return Ending(False, f": SLURM ended job {job.job_id}, {why}" if why else "", can_requeue, is_preempted)


def requeue(job: Allocation) -> str | None:
    """Have SLURM start this job again, which ends it; why it does not, or None."""
    try:
        done = subprocess.run(["scontrol", "requeue", job.job_id], capture_output=True, text=True, timeout=ASK_S)
        return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


@contextlib.contextmanager
def signalled_when_preempted() -> Iterator[None]:
    """In this block a job of SLURM's whose PreemptTime is set gets SIGTERM, once: SLURM tells its steps alone, and not
    what the batch script started itself."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PREEMPTED_EVERY_S):
            if ending().is_preempted:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="preemption", daemon=True)
    if found():
        thread.start()
    try:
        yield
    finally:
        ended.set()


def first_hostname(word: str) -> str | None:
    """The first name of a host list, "n[01-03,7],gpu-a" -> "n01".  None: it is empty."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", word)
    return first and re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def address_of_first(environ: Mapping[str, str]) -> str | None:
    """Address of the step's first node, where rank 0 is: its NodeAddr, else its name if that can be looked up."""
    name = first_hostname(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    if name is None:
        return None
    if match := re.search(r"\bNodeAddr=(\S+)", _scontrol("node", name, timeout_s=30)):
        return match[1]
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR")


def _scontrol(what: str, name: str, timeout_s: float = ASK_S) -> str:
    """What scontrol shows of it; "" where it does not."""
    try:
        command = ["scontrol", "show", what, "--oneliner", name]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ---- externally launched ranks


@dataclass(frozen=True)
class Adopted:
    """This process among those that a launcher started."""

    by: str  # torchrun, srun, mpirun; "variables": somebody set RANK and its like
    rank: int
    local_rank: int
    world_size: int
    local_size: int  # ranks on this node
    node: int
    host: str | None  # where rank 0 is; None: not known
    key: str  # the same in all processes of this launch, and in no other
    job_id: str | None = None  # SLURM's
    has_store: bool = False  # MASTER_ADDR and MASTER_PORT are given, for torch's process group

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.local_size)

    @property
    def ports(self) -> list[int]:
        """Where rank 0's launcher may listen: from the key, so that no process need say it to another."""
        first = int(hashlib.sha256(self.key.encode()).hexdigest(), 16)
        return [PORTS[(first + number) % len(PORTS)] for number in range(NUM_PORTS)]

    def summary(self) -> str:
        """E.g. "torchrun started 2 ranks"."""
        return f"{self.by} started {self.world_size} ranks"


def externally_launched(environ: Mapping[str, str] = os.environ) -> Adopted | None:
    """None where nobody started this process as one of several ranks.  ValueError: somebody did, and it is not clear
    how."""
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
    if adopted.num_nodes > 1:
        return adopted
    # also where the machine cannot look its own name up
    return dataclasses.replace(adopted, host="127.0.0.1", local_size=adopted.world_size)


def tasks_per_node(word: str) -> list[int]:
    """SLURM_STEP_TASKS_PER_NODE, "2(x3),1" -> [2, 2, 2, 1].  ValueError."""
    sizes: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={word}: not as SLURM writes it, 2(x3),1")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


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
    sizes = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    if len(set(sizes)) > 1:
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={sizes}: use as many ranks on each node: srun --ntasks-per-node=N")
    return Adopted(
        "srun",
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_LOCALID"),
        world_size,
        local_size=sizes[0],
        node=_number(environ, "SLURM_NODEID"),
        host=address_of_first(environ) if len(sizes) > 1 else None,
        key=_joined(environ, "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        job_id=environ.get("SLURM_JOB_ID"),
    )


def _mpirun(environ: Mapping[str, str]) -> Adopted:
    rank, world_size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size, host = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size), environ.get("MASTER_ADDR")
    if host is None and local_size < world_size:
        what = f"mpirun started {world_size} ranks on several nodes"
        raise ValueError(f"{what}: give mpirun -x MASTER_ADDR=HOST, rank 0's")
    key = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Adopted("mpirun", rank, local_rank, world_size, local_size, rank // local_size, host, key)


def _joined(environ: Mapping[str, str], *names: str) -> str:
    return ":".join(environ.get(name, "") for name in names)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    word = environ.get(name)
    if word is None and default is not None:
        return default
    if word is None or not word.isdigit():
        raise ValueError(f"{name}={word}: it must be a number: {KNOWN}")
    return int(word)
