"""Who takes part in a run: ranks that torchrun, srun or mpirun started, or nodes on which the same command was given.

One process coordinates (rank 0's, or the node that has the address of hardware.rendezvous) and makes the record; the
others are members: each starts the ranks that are its own and writes no record.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.base.paths import REPO, results_root
from bench.config import schema, typed
from bench.launch import ranks
from bench.launch.nodes import adopted, channel, fabric
from bench.launch.nodes.adopted import Adopted
from bench.launch.nodes.coordinator import Coordinator
from bench.launch.nodes.member import Hello, Member
from bench.launch.prepare import Job, frozen
from bench.machine import code_copy, code_state, environment
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


# ---- the coordinator's side


def lead_adopted(adopted: Adopted) -> Coordinator:
    """Rank 0 of those that another launcher started.  ValueError: nothing can listen here."""
    try:
        listener = channel.listen("127.0.0.1" if adopted.num_nodes == 1 else None, adopted.ports)
    except OSError as error:
        ports = f"{adopted.ports[0]} to {adopted.ports[-1]}"
        raise ValueError(
            f"{adopted.words()}, and no port of {ports} is free ({error.strerror}): start it again"
        ) from None
    return Coordinator(listener, adopted.key, adopted.world_size - 1, own_ranks=1, is_adopted=True)


def lead_nodes(job: Job) -> Coordinator | None:
    """The coordinator where this machine has the address of hardware.rendezvous; None: another node has it."""
    hardware = job.config.hardware
    host, port = typed.host_and_port(hardware.rendezvous)
    try:
        listener = channel.listen(host, [port])
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise ValueError(f"hardware.rendezvous={hardware.rendezvous}: {error.strerror}: give HOST:PORT") from None
    own_ranks = hardware.num_processes // hardware.nodes
    return Coordinator(listener, hardware.rendezvous, hardware.nodes - 1, own_ranks, is_adopted=False)


def gather(coordinator: Coordinator, job: Job) -> None:
    """Wait until all take part, and see that they are alike.  ValueError."""
    coordinator.gather(facts_of(job), job.config.hardware.rendezvous_timeout_s or RENDEZVOUS_S)


def facts_of(job: Job) -> dict:
    """What nodes must have alike (coordinator.ALIKE), and their environments."""
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


# ---- a member's side


def follow_adopted(adopted: Adopted, prepared: Callable[[], Job]) -> int:
    """A rank that another launcher started, but for the first -> exit code.

    prepared(): the job as this node has it, asked by the first rank of each node alone.
    """
    is_leader = adopted.local_rank == 0 and adopted.node > 0
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(frozen(prepared())) if is_leader else None
        code = job.code if job else stack.enter_context(code_copy.held(REPO))
        return _follow_adopted(adopted, job, code)


def _follow_adopted(adopted, job, code):
    hello = Hello(adopted.node, adopted.rank, 1, adopted.local_rank, facts_of(job) if job else None)
    if adopted.host is None:
        raise ValueError(f"{adopted.words()}, and where rank 0 is cannot be found: give every rank MASTER_ADDR=HOST")
    try:
        connection = channel.connect(adopted.host, adopted.ports, adopted.key, RENDEZVOUS_S)
    except TimeoutError:
        raise ValueError(f"rank {adopted.rank}: no answer of rank 0 in {RENDEZVOUS_S:g} s: see what it says") from None
    return _follow(connection, adopted.key, hello, job, code, keep_master=adopted.has_store)


def follow_nodes(job: Job) -> int:
    """A node that has not the address of hardware.rendezvous -> exit code."""
    with frozen(job) as job:
        return _follow_node(job)


def _follow_node(job):
    hardware = job.config.hardware
    host, port = typed.host_and_port(hardware.rendezvous)
    hello = Hello(None, None, hardware.num_processes // hardware.nodes, 0, facts_of(job))
    timeout_s = hardware.rendezvous_timeout_s or RENDEZVOUS_S
    try:
        connection = channel.connect(host, [port], hardware.rendezvous, timeout_s)
    except TimeoutError:
        what = f"hardware.rendezvous={hardware.rendezvous}: no run waits there (tried for {timeout_s:g} s)"
        raise ValueError(f"{what}: start the same command on the node that has this address") from None
    return _follow(connection, hardware.rendezvous, hello, job, job.code, keep_master=False)


def _follow(connection, key, hello, job, code, keep_master):
    member = Member(connection, key, hello, results_root())

    def env(start: dict) -> Mapping[str, str]:
        variables = ranks.environment(schema.build(schema.HardwareConfig, start["hardware"]))
        variables |= fabric.variables(member.interface if start["num_nodes"] > 1 else None, os.environ)
        return variables

    def launch(inputs: dict) -> dict:
        shards = {split: [str(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
        own = {"launcher_pid": os.getpid(), "shards": shards, "t_offset_ns": inputs["t_offset_ns"]}
        own |= {"own": job.own_folder} if job.own_folder else {}
        return inputs["launch"] | own

    return member.run(ranks.WORKER, env, launch, code, keep_master)


def slurm_node() -> str:
    """The name of this node of the allocation, for people."""
    return os.environ.get("SLURMD_NODENAME", "?")


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
