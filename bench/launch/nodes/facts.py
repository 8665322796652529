"""What a node has that its run depends on: code, packages, data and machine, which are compared; its network; and what
its leader knows of a member.

The network as this node has it: which interface leads to the others, how fast, what else there is.
"""

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
from bench.machine import code_state, environment

Clock = dict[str, Any]  # measured()'s
MAX_UTC_OFFSET_S = 5.0  # between nodes; NTP keeps clocks within a tenth of a second
NUM_QUESTIONS = 12  # about another node's clock
INFINIBAND = Path("/sys/class/infiniband")
ALIKE = {  # what all nodes must have alike: (what a person calls it, what to do)
    "source_sha256": ("code", "check out the same commit, with the same changes, on every node"),
    "torch": ("torch", "install the same requirements.lock on every node"),
    "python": ("Python", "use the same Python on every node"),
    "data_sha256": ("data", "the shards differ: ./run.sh data show NAME on every node"),
    "seed": ("seed", "give the same seed= on every node"),
    "config_id": ("config", "give the same settings on every node; where machines differ, hardware.num_threads too"),
    "copy": ("code", "check out the same commit, with the same bench/, models/ and conf/, on every node"),
}


def facts_of(job: Job) -> dict[str, Any]:
    """What nodes must have alike (ALIKE), and their environments."""
    import torch  # the one that this node's store has loaded, as its ranks will

    env = environment.environment()
    files = job.dataset.train + job.dataset.val
    return {
        "source_sha256": job.source_sha256,
        "copy": job.code.name,
        "commit": code_state.state(job.code, job.own_sources, REPO)["commit"],
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
    """What differs between two processes and what to do, "code, 1a2b instead of 3c4d: ..."; None: nothing."""
    for name, (what, remedy) in ALIKE.items():
        if theirs.get(name) != ours[name]:
            return f"{what}, {_short(theirs.get(name))} instead of {_short(ours[name])}: {remedy}"
    return None


def _short(value: object) -> str:
    """A version, the beginning of a hash, or of several hashes of all of them."""
    if isinstance(value, list):
        value = hashlib.sha256("".join(value).encode()).hexdigest()
    return str(value)[:12] if value is not None else "none"


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address, eth0; None where that is not known."""
    import psutil  # 40 ms, which a launcher on one node does not need

    for name, addresses in psutil.net_if_addrs().items():
        if address in [known.address for known in addresses]:
            return name
    return None


def network(interface: str | None) -> dict[str, Any]:
    """{"interface", "mtu_bytes", "speed_mbit_per_s", "infiniband": [{"device", "rate"}]}; None: the driver does not
    say."""
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
    """Makes gloo and NCCL use it too, unless the user chose: their default is what the host's name leads to."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in environ}


def own_address(host: str) -> str:
    """The address of this machine from which that host is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


FACTS = ("environment", "used", "commit", "host_hash", "fabric", "address")  # of a node, that the record shows


@dataclass
class Peer:
    """A member as the leader knows it."""

    number: int  # in the store
    node: int
    first_rank: int
    num_ranks: int
    local_rank: int
    facts: dict[str, Any] | None  # of the first of each node
    folder: str | None = None
    clock: Clock | None = None  # measured()
    files: carried.Incoming | None = None  # of the first of each node, once the run begins
    has_ended: bool = False
    has_sent_files: bool = False
    has_left: bool = False
    is_lost: bool = False

    @property
    def name(self) -> str:
        return f"node {self.node}, rank {self.first_rank}"


def peer_of(number: int, hello: Mapping[str, Any]) -> Peer:
    """A member from its hello; what that does not say of its place, the leader decides.

    KeyError, TypeError, ValueError: it is no hello.
    """
    node, first_rank, num_ranks, local_rank = (
        int(hello.get(name, 0)) for name in ("node", "first_rank", "num_ranks", "local_rank")
    )
    own = hello["facts"] and {name: hello["facts"][name] for name in (*FACTS, *ALIKE)}
    return Peer(number, node, first_rank, num_ranks, local_rank, own)


def clock_fault(peer: Peer) -> str | None:
    """A sentence about a node whose clock is far from the leader's, None: it is not."""
    ahead_s = -(peer.clock or {}).get("utc_offset_s", 0.0)
    if abs(ahead_s) <= MAX_UTC_OFFSET_S:
        return None
    where = f"node {peer.node}'s clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} node 0's"
    return f"{where}: set both by NTP; the run's times are measured without it, those in that node's logs are off"


def clock_of(message: Mapping[str, Any]) -> Clock:
    """The clock in a message, as measured() returns it.  KeyError, TypeError, ValueError: there is none."""
    clock = message["clock"]
    return {name: clock[name] + 0 for name in ("offset_ns", "round_trip_ns", "utc_offset_s")}


def measured(
    ask: Callable[[int], dict[str, Any]],
    now_ns: Callable[[], int] = time.perf_counter_ns,
    utc_s: Callable[[], float] = time.time,
) -> Clock:
    """{"offset_ns", "round_trip_ns", "utc_offset_s"}: what to add to this node's clock readings to have the leader's.

    ask(number) -> {"t_ns", "utc_s"}.  Cristian's method ("Probabilistic clock synchronization", Distributed Computing
    3, 1989): of several questions the one that was answered soonest; the other clock read what it read in the middle,
    give or take half of that round trip.
    """
    readings = []
    for number in range(NUM_QUESTIONS):
        asked_ns = now_ns()
        answer = ask(number)
        back_ns, back_utc_s = now_ns(), utc_s()
        trip_ns = back_ns - asked_ns
        offset_ns = answer["t_ns"] - (asked_ns + back_ns) // 2
        utc_offset_s = round(answer["utc_s"] - back_utc_s + trip_ns / 2e9, 6)
        readings.append({"offset_ns": offset_ns, "round_trip_ns": trip_ns, "utc_offset_s": utc_offset_s})
    return min(readings, key=lambda reading: reading["round_trip_ns"])
