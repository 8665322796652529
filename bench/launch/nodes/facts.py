"""What a node contributes to a run: the code, packages, data and machine, which must match; its network interface and
its clock; and what the leader knows about each member."""

import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.base.paths import REPO
from bench.launch import ranks
from bench.launch.nodes import carried
from bench.launch.prepare import Job
from bench.machine import environment, git

Clock = dict[str, Any]  # as measured() returns it
MAX_UTC_OFFSET_S = 5.0  # largest difference between nodes; NTP keeps clocks within a tenth of a second
NUM_QUESTIONS = 12  # per measurement of another node's clock
INFINIBAND = Path("/sys/class/infiniband")
ALIKE = {  # what must be the same on all nodes: (name for messages, remedy)
    "source_sha256": ("code", "check out the same commit, with the same changes, on every node"),
    "torch": ("torch", "install the same requirements.lock on every node"),
    "python": ("Python", "use the same Python on every node"),
    "data_sha256": ("data", "the shards differ: ./run.sh data show NAME on every node"),
    "seed": ("seed", "give the same seed= on every node"),
    "config_id": ("config", "give the same settings on every node; where machines differ, hardware.num_threads too"),
    "copy": ("code", "check out the same commit, with the same bench/, models/ and conf/, on every node"),
}


def facts_of(job: Job) -> dict[str, Any]:
    """Returns what must be the same on all nodes (ALIKE), and this node's environment."""
    import torch  # the version that this node's store and ranks use

    env = environment.environment()
    files = job.dataset.train + job.dataset.val
    return {
        "source_sha256": job.source_sha256,
        "copy": job.code.name,
        "commit": (git.ask(REPO, "rev-parse", "--verify", "HEAD") or "").strip() or None,
        "torch": torch.__version__,
        "python": env["python"],
        "data_sha256": [file.sha256 for file in files],
        "config_id": job.config_id,
        "seed": job.config.seed,
        "environment": env | {"env": environment.env_variables(ranks.environment(job.config.hardware))},
        "used": environment.summary(env, job.config.hardware),
        "host_hash": environment.host_hash(),
    }


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Returns what differs and what to do, such as "code, 1a2b instead of 3c4d: ...", or None if nothing differs."""
    for name, (fact, remedy) in ALIKE.items():
        if theirs.get(name) != ours[name]:
            return f"{fact}, {_short(theirs.get(name))} instead of {_short(ours[name])}: {remedy}"
    return None


def _short(value: object) -> str:
    """Returns a version, the beginning of a hash, or for several hashes the beginning of a hash of all."""
    if isinstance(value, list):
        value = hashlib.sha256("".join(value).encode()).hexdigest()
    return str(value)[:12] if value is not None else "none"


def interface_of(address: str) -> str | None:
    """Returns the interface that has this IPv4 address, such as eth0, or None if it is not found."""
    import psutil  # its import takes 40 ms; launchers on one node do not need it

    for name, addresses in psutil.net_if_addrs().items():
        if address in [candidate.address for candidate in addresses]:
            return name
    return None


def network(interface: str | None) -> dict[str, Any]:
    """Returns {"interface", "mtu_bytes", "speed_mbit_per_s", "infiniband": [{"device", "rate"}]}; None if the driver
    does not report a value."""
    import psutil

    ports = sorted(INFINIBAND.glob("*/ports/*/rate"))
    stats = psutil.net_if_stats().get(interface or "")
    return {
        "interface": interface,
        "mtu_bytes": stats.mtu if stats else None,
        "speed_mbit_per_s": (stats.speed or None) if stats else None,
        "infiniband": [{"device": path.parents[2].name, "rate": environment.text_of(path)} for path in ports],
    }


def variables(interface: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that make gloo and NCCL use this interface, unless the user chose one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in environ}


def own_address(host: str) -> str:
    """Returns this machine's address on the route to host.  Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


# facts of a node that the record shows; and the mark by which node 0 sees whether they share their results folder
FACTS = ("environment", "used", "commit", "host_hash", "fabric", "address", "mark")


@dataclass
class Peer:
    """A member as the leader knows it."""

    number: int  # its number in the store
    node: int
    first_rank: int
    num_ranks: int
    local_rank: int
    facts: dict[str, Any] | None  # only of the first member of each node
    folder: str | None = None
    clock: Clock | None = None  # as measured() returns it
    files: carried.Incoming | None = None  # only of the first member of each node, once the run begins
    has_ended: bool = False
    has_sent_files: bool = False
    has_left: bool = False
    is_lost: bool = False

    @property
    def name(self) -> str:
        return f"node {self.node}, rank {self.first_rank}"


def peer_of(number: int, hello: Mapping[str, Any]) -> Peer:
    """Creates a Peer from a hello.  If the hello leaves its place open, the leader decides it.

    Raises KeyError, TypeError or ValueError if the hello is malformed.
    """
    node, first_rank, num_ranks, local_rank = (
        int(hello.get(name, 0)) for name in ("node", "first_rank", "num_ranks", "local_rank")
    )
    own = hello["facts"] and {name: hello["facts"][name] for name in (*FACTS, *ALIKE)}
    return Peer(number, node, first_rank, num_ranks, local_rank, own)


def clock_fault(peer: Peer) -> str | None:
    """Returns a sentence if the node's clock is far from the leader's, else None."""
    ahead_s = -(peer.clock or {}).get("utc_offset_s", 0.0)
    if abs(ahead_s) <= MAX_UTC_OFFSET_S:
        return None
    where = f"node {peer.node}'s clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} node 0's"
    return f"{where}: set both by NTP; the run's times are measured without it, those in that node's logs are off"


def clock_of(message: Mapping[str, Any]) -> Clock:
    """Returns the clock in a message, as measured() does.  Raises KeyError, TypeError or ValueError without one."""
    clock = message["clock"]
    return {name: clock[name] + 0 for name in ("offset_ns", "round_trip_ns", "utc_offset_s")}


def measured(
    ask: Callable[[int], dict[str, Any]],
    now_ns: Callable[[], int] = time.perf_counter_ns,
    utc_s: Callable[[], float] = time.time,
) -> Clock:
    """Returns {"offset_ns", "round_trip_ns", "utc_offset_s"}, which turn this node's clock readings into the leader's.

    ask(number) -> {"t_ns", "utc_s"}.  Cristian's method ("Probabilistic clock synchronization", Distributed Computing
    3, 1989): only the fastest answer counts, and the other clock is taken to have been read in the middle of that round
    trip, give or take half of it.
    """
    readings = []
    for number in range(NUM_QUESTIONS):
        asked_ns = now_ns()
        clock = ask(number)
        back_ns, back_utc_s = now_ns(), utc_s()
        trip_ns = back_ns - asked_ns
        offset_ns = clock["t_ns"] - (asked_ns + back_ns) // 2
        utc_offset_s = round(clock["utc_s"] - back_utc_s + trip_ns / 2e9, 6)
        readings.append({"offset_ns": offset_ns, "round_trip_ns": trip_ns, "utc_offset_s": utc_offset_s})
    return min(readings, key=lambda reading: reading["round_trip_ns"])
