"""Determines who takes part in a run: ranks that torchrun, srun or mpirun started, or nodes with the same command.

One launcher leads (that of rank 0, or of the node that has the address of hardware.rendezvous) and makes the record
(leader.py).  The others are members: each starts its own ranks and writes no record (member.py).
"""

import contextlib
import errno
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bench.base.paths import REPO
from bench.config import typed
from bench.launch import allocation, ranks
from bench.launch.allocation import Adopted
from bench.launch.nodes import store
from bench.launch.nodes.leader import RENDEZVOUS_S, TICK_S, Leader
from bench.launch.prepare import Job
from bench.machine import leases, processes
from bench.training.instruments import registry

SAY_S = 3.0  # gives rank 0 time to print why, before torchrun ends all ranks because one has ended
SRUN_GRACE_S, SRUN_END_S = 20.0, 15.0  # time for srun to end after SIGTERM, and by itself
OF_SRUN = ("SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE")  # would change what is read here


def started_by(verb: str) -> Adopted | None:
    """Returns this process's place among externally launched ranks, or None.  Raises ValueError if this process is a
    rank of one of our runs."""
    if ranks.IN_RUN in os.environ:
        raise ValueError(f"{verb}: this process is a rank of a run, which cannot start another: start it separately")
    return allocation.externally_launched()


def effective(overrides: list[str], adopted: Adopted | None) -> list[str]:
    """Returns the overrides with what the external launcher decided.  Raises ValueError if they contradict it."""
    if adopted is None:
        return overrides
    decided = {"hardware.num_processes": adopted.world_size}
    if adopted.num_nodes > 1:
        decided["hardware.nodes"] = adopted.num_nodes
    rest, places = [], f"{adopted.summary()} on {adopted.num_nodes} node(s)"
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "hardware.rendezvous" or key in decided and value not in ("null", str(decided[key])):
            raise ValueError(f"{override}: {places}: remove it, or start ./run.sh alone")
        if key not in decided:
            rest.append(override)
    return [*rest, *(f"{key}={value}" for key, value in decided.items())]


def check(job: Job, adopted: Adopted | None) -> None:
    """Raises ValueError if these ranks cannot do this job together."""
    hardware = job.config.hardware
    several = adopted.summary() if adopted else f"hardware.nodes={hardware.nodes}" if hardware.nodes else None
    if several and job.script:
        raise ValueError(f"{several}: script={job.script.typed} starts its own ranks: give hardware.num_processes=N")
    around = registry.program(job.config.instruments, Path(), hardware.device)
    if several and around:
        raise ValueError(f"{several}: start {around[0]} around each rank yourself, with +instruments=nvtx")
    if hardware.nodes and not adopted and hardware.rendezvous is None and "SLURM_JOB_ID" not in os.environ:
        remedy = "hardware.rendezvous=HOST:PORT, of the node that makes the record, on every node; or cluster=slurm"
        raise ValueError(f"hardware.nodes={hardware.nodes}: where do they meet?  Give {remedy}")


def refuse(verb: str, arguments: list[str]) -> None:
    """For a verb that makes several runs: raises ValueError if this is rank 0 of several ranks; other ranks exit."""
    manual = next((argument for argument in arguments if "hardware.rendezvous=" in argument), None)
    if manual:
        remedy = "use a SLURM job, or cluster=slurm"
        raise ValueError(f"{manual}: nodes that are started manually join for one run: {remedy}")
    adopted = started_by(verb)
    if adopted is None or adopted.world_size == 1:
        return
    if adopted.rank > 0 and adopted.by != "variables":  # rank 0 says it for all, if somebody started them together
        time.sleep(SAY_S)
        sys.exit(2)
    unset = ", or unset WORLD_SIZE, RANK and LOCAL_RANK" * (adopted.by == "variables")
    why = f"{adopted.summary()}, and such ranks can only make a run together"
    raise ValueError(f"{why}: start ./run.sh {verb} alone{unset}")


# ---- the leader


def lead_adopted(adopted: Adopted) -> Leader:
    """Returns the leader, in rank 0 of externally launched ranks.  Raises ValueError if no port is free."""
    try:
        listener = store.listen("127.0.0.1" if adopted.num_nodes == 1 else None, adopted.ports)
    except OSError as error:
        ports = f"{adopted.ports[0]} to {adopted.ports[-1]}"
        raise ValueError(
            f"{adopted.summary()}, and no port of {ports} is free ({error.strerror}): start it again"
        ) from None
    return Leader(listener, adopted.key, adopted.world_size - 1, adopted)


def lead_nodes(overrides: list[str]) -> Leader | None:
    """Returns the leader if this machine has the address of hardware.rendezvous; None if another node has it, or the
    overrides name none.

    It listens from now on, so that it hears of nodes that are ready earlier, or that refuse.
    """
    rendezvous, num_nodes = is_node_of(overrides), store.values_of(overrides, "hardware.nodes")[0]
    if rendezvous is None or num_nodes is None:
        return None
    host, port = typed.host_and_port(rendezvous)
    try:
        listener = store.listen(host, [port])
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise ValueError(f"hardware.rendezvous={rendezvous}: {error.strerror}: give HOST:PORT") from None
    return Leader(listener, rendezvous, int(num_nodes) - 1, None)


def is_node_of(overrides: list[str]) -> str | None:
    """Returns the address of hardware.rendezvous, or None if the overrides lack it or hardware.nodes."""
    rendezvous, num_nodes = store.values_of(overrides, "hardware.rendezvous", "hardware.nodes")
    return None if rendezvous == "null" or not (num_nodes or "").isdecimal() else rendezvous


@contextlib.contextmanager
def leader_of_allocation(job: Job) -> Iterator[Leader]:
    """Context that yields the leader of a run over this process's SLURM allocation, after srun has started the other
    nodes' processes and all have joined.

    Raises ValueError if there is no allocation, it has too few nodes, or the nodes differ.
    """
    num_nodes = job.config.hardware.nodes or 1
    srun_each, host = _srun_each(num_nodes), allocation.address_of_first(os.environ)
    listener = store.listen(host, [0])
    rendezvous = f"{host}:{listener.getsockname()[1]}"
    overrides = [override for override in job.overrides if not override.startswith("hardware.rendezvous=")]
    follow = [sys.executable, "-m", "bench.launch.nodes.member", *overrides, f"hardware.rendezvous={rendezvous}"]
    secret = secrets.token_hex(32)
    command = [*srun_each, "--wait=30", "--unbuffered", *follow]
    with processes.child(command, REPO, _exported({store.KEY: secret}), None, SRUN_GRACE_S) as srun:

        def still() -> str | None:
            return None if srun.poll() is None else f"srun ended with exit code {srun.returncode}"

        with Leader(listener, rendezvous, num_nodes - 1, None, still, secret) as leading:
            leading.gather(job)
            yield leading
        with contextlib.suppress(subprocess.TimeoutExpired):
            srun.wait(SRUN_END_S)  # by now its tasks end by themselves


@contextlib.contextmanager
def leased(num_gpus: int, num_nodes: int) -> Iterator[None]:
    """Context in which GPUs are leased on every node of a race, for all its runs: this many on each, none on a CPU.

    Raises leases.Busy if another process has one of them, ValueError if the other nodes cannot be reached.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(leases.held(num_gpus))
        if num_gpus and num_nodes > 1:
            out = stack.enter_context(tempfile.TemporaryFile())
            command = [*_srun_each(num_nodes), sys.executable, "-m", "bench.machine.leases", str(num_gpus)]
            child = processes.child(command, REPO, _exported({}), out, SRUN_GRACE_S, stdin=subprocess.PIPE)
            srun = stack.enter_context(child)
            stack.enter_context(leases.held_elsewhere(_leases_of(srun, out, num_nodes - 1)))
        yield


def _leases_of(srun: subprocess.Popen[bytes], out: IO[bytes], num_others: int) -> str:
    """Waits until each other node has leased its GPUs; returns the value of leases.INHERITED for them."""
    until_s, names = time.monotonic() + RENDEZVOUS_S, list[str]()
    while len(names) < num_others:
        has_ended = srun.poll() is not None
        lines = os.pread(out.fileno(), 2**20, 0).decode(errors="replace").rpartition("\n")[0].splitlines()
        for why in (line.removeprefix(leases.BUSY) for line in lines if line.startswith(leases.BUSY)):
            raise leases.Busy(why)
        if has_ended or time.monotonic() > until_s:
            cause = f"srun ended with exit code {srun.returncode}" if has_ended else f"no answer in {RENDEZVOUS_S:g} s"
            raise ValueError(f"the other nodes could not lease their GPUs: {cause}: {' '.join(lines[-3:])}")
        names = [line.removeprefix(leases.HELD) for line in lines if line.startswith(leases.HELD)]
        time.sleep(TICK_S)
    return " ".join(names)


def _srun_each(num_nodes: int) -> list[str]:
    """Returns the beginning of a command that starts a program on each other node of this process's allocation.  Raises
    ValueError if there is no allocation, or it has too few nodes."""
    own, others = allocation.current(), num_nodes - 1
    if own is None or num_nodes > own.num_nodes:
        here = "no SLURM job" if own is None else f"job {own.job_id} has {own.num_nodes} node(s)"
        raise ValueError(f"hardware.nodes={num_nodes}: {here}: give sbatch --nodes={num_nodes}, or cluster=slurm")
    node = (f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--relative=1")
    return ["srun", "--overlap", *node, "--kill-on-bad-exit=1"]


def _exported(variables: dict[str, str]) -> dict[str, str]:
    """Returns srun's environment without OF_SRUN.  It passes these variables and the leases to its tasks even in a job
    submitted with --export=NONE."""
    env = {name: value for name, value in os.environ.items() if name not in OF_SRUN} | variables
    names = ",".join([*variables, leases.INHERITED])
    exported = env.get("SLURM_EXPORT_ENV", "ALL")
    if exported != "ALL":
        env["SLURM_EXPORT_ENV"] = names if exported in ("NONE", "NIL") else f"{exported},{names}"
    return env
