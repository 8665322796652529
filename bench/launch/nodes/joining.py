"""Who takes part in a run: ranks that torchrun, srun or mpirun started, or nodes on which the same command was given.

One launcher leads (rank 0's, or that of the node that has the address of hardware.rendezvous) and makes the record
(leader.py); the others are members: each starts the ranks that are its own and writes no record (member.py).
"""

import os
import sys
import time
from pathlib import Path

from bench.base.paths import REPO
from bench.launch import ranks
from bench.launch.nodes import adopted
from bench.launch.nodes.adopted import Adopted
from bench.launch.prepare import Job
from bench.machine import code_state, environment
from bench.training.instruments import registry

SAY_S = 3.0  # for rank 0 to say why: torchrun ends all ranks when the first of them does
RENDEZVOUS_S = 300.0  # for nodes that a person starts by hand, one after the other


def started_by(verb: str) -> Adopted | None:
    """The launcher that started this process as one of several ranks; None: nobody did.  ValueError: within a run."""
    if ranks.IN_RUN in os.environ:
        raise ValueError(f"{verb}: this process is a rank of a run, and no run starts another: start it by itself")
    return adopted.found()


def effective(overrides: list[str], adopted: Adopted | None) -> list[str]:
    """Overrides with what the launcher that started the ranks has decided.  ValueError: they say something else."""
    if adopted is None:
        return overrides
    decided = {"hardware.num_processes": adopted.world_size}
    if adopted.num_nodes > 1:
        decided["hardware.nodes"] = adopted.num_nodes
    rest = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "hardware.rendezvous" or key in decided and value not in ("null", str(decided[key])):
            raise ValueError(
                f"{word}: {adopted.words()} on {adopted.num_nodes} node(s): remove it, or start ./run.sh alone"
            )
        if key not in decided:
            rest.append(word)
    return [*rest, *(f"{key}={value}" for key, value in decided.items())]


def check(job: Job, adopted: Adopted | None) -> None:
    """ValueError where this job cannot be what these ranks do together."""
    hardware = job.config.hardware
    several = adopted.words() if adopted else f"hardware.nodes={hardware.nodes}" if hardware.nodes else None
    if several and job.script:
        what = f"{several}, but script={job.script.typed} is started by a torchrun of the harness' own"
        raise ValueError(f"{what}: ./run.sh run script={job.script.typed} hardware.num_processes=N, on one node")
    around = registry.program(job.config.instruments, Path(), hardware.device)
    if several and around:
        remedy = f"start {around[0]} around each rank yourself, with +instruments=nvtx in place of profile=nsys"
        raise ValueError(f"{several}: the harness cannot start ranks within {around[0]} here: {remedy}")
    if hardware.nodes and not adopted and hardware.rendezvous is None and "SLURM_JOB_ID" not in os.environ:
        raise ValueError(
            f"hardware.nodes={hardware.nodes}: where do they meet?  Give hardware.rendezvous=HOST:PORT, an address of "
            "the node that is to make the record, and the same command on every node; or cluster=slurm"
        )


def facts_of(job: Job) -> dict:
    """What nodes must have alike (leader.ALIKE), and their environments."""
    env = environment.environment()
    files = job.dataset.train + job.dataset.val
    return {
        "source_sha256": job.source_sha256,
        "copy": job.code.name,
        "commit": code_state.state(job.code, job.own_sources, REPO)["commit"],
        "torch": env["packages"].get("torch"),
        "python": env["python"],
        "data_sha256": [file.sha256 for file in files],
        "config_id": job.config_id,
        "environment": env | {"env": environment.env_variables(ranks.environment(job.config.hardware))},
        "used": environment.summary(env, job.config.hardware),
        "host_hash": environment.host_hash(),
    }


def is_follower(adopted: Adopted | None) -> bool:
    """Whether another process of this launch makes the record, and says what is to be said."""
    return adopted is not None and adopted.rank > 0


def refuse(verb: str, words: list[str]) -> None:
    """Of a verb that makes several runs: ValueError where this process is one of several ranks; the others exit."""
    by_hand = next((word for word in words if "hardware.rendezvous=" in word), None)
    if by_hand:
        what = f"{by_hand}: nodes that are started by hand meet for one run"
        raise ValueError(f"{what}: for several, ./run.sh {verb} in a SLURM job of as many nodes, or cluster=slurm")
    result = started_by(verb)
    if result is None or result.world_size == 1:
        return
    if is_follower(result):
        time.sleep(SAY_S)
        sys.exit(2)
    raise ValueError(f"{result.words()}, and a run is all that they can do together: start ./run.sh {verb} alone")
