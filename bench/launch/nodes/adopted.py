"""Which launcher started this process as one of several ranks: torchrun, srun, mpirun, or the variables by hand.

    torchrun    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
    srun        SLURM_PROCID SLURM_LOCALID SLURM_STEP_NUM_TASKS SLURM_NODEID SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID
    mpirun      OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE

(torch.distributed.run, srun(1) and Open MPI's mpirun(1).)  torchrun within srun is torchrun.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from bench.launch import allocation

NUM_PORTS = 8  # tried in turn, where another program has some of them
PORTS = range(20000, 32000)  # below those that systems give away by themselves (Linux: 32768 and above)
KNOWN = "use torchrun, srun or Open MPI's mpirun, or give each process RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR"


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

    def words(self) -> str:
        """E.g. "torchrun started 2 ranks"."""
        return f"{self.by} started {self.world_size} ranks"


def found(environ: Mapping[str, str] = os.environ) -> Adopted | None:
    """None where nobody started this process as one of several ranks.  ValueError: somebody did, and it is not clear
    how."""
    if "LOCAL_RANK" in environ and "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ:
        return _srun(environ)
    if _number(environ, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        return _mpirun(environ)
    for name in ("WORLD_SIZE", "PMI_SIZE"):
        if _number(environ, name, 1) > 1:
            raise ValueError(f"{name}={environ[name]}, but not which rank of this node this process is: {KNOWN}")
    return None


def _torchrun(environ):
    world_size, local_rank = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_RANK")
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "variables"
    local_size, host = _number(environ, "LOCAL_WORLD_SIZE", world_size), environ.get("MASTER_ADDR")
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    key = ":".join(environ.get(name, "") for name in names)
    if by == "variables" and world_size > 1 and not ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        raise ValueError(f"WORLD_SIZE={world_size} without MASTER_ADDR and MASTER_PORT: {KNOWN} and MASTER_PORT")
    rank = _number(environ, "RANK")
    node = _number(environ, "GROUP_RANK", rank // local_size)
    return _of_one_node(by, rank, local_rank, world_size, local_size, node, host, key, has_store=world_size > 1)


def _srun(environ):
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    node = _number(environ, "SLURM_NODEID")
    sizes = allocation.tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    if len(set(sizes)) > 1:
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={sizes}: use as many ranks on each node: srun --ntasks-per-node=N")
    key = ":".join(environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    host = allocation.address_of_first(environ) if len(sizes) > 1 else None
    where = ("srun", rank, _number(environ, "SLURM_LOCALID"), world_size, sizes[0], node, host, key)
    return _of_one_node(*where, job_id=environ.get("SLURM_JOB_ID"))


def _mpirun(environ):
    rank, world_size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size)
    host = environ.get("MASTER_ADDR")
    if host is None and local_size < world_size:
        raise ValueError(
            f"mpirun started {world_size} ranks on several nodes: give mpirun -x MASTER_ADDR=HOST, rank 0's"
        )
    key = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    return _of_one_node("mpirun", rank, local_rank, world_size, local_size, rank // local_size, host, key)


def _of_one_node(by, rank, local_rank, world_size, local_size, node, host, key, **more):
    if local_size >= world_size:
        host, local_size = "127.0.0.1", world_size  # also where the machine cannot look its own name up
    return Adopted(by, rank, local_rank, world_size, local_size, node, host, key, **more)


def _number(environ, name, default=None):
    word = environ.get(name)
    if word is None and default is not None:
        return default
    if word is None or not word.isdigit():
        raise ValueError(f"{name}={word}: it must be a number: {KNOWN}")
    return int(word)
