"""A member of a run over several launchers as its leader knows it: read from its hello, written into the record."""

from dataclasses import dataclass

FACTS = {"environment", "used", "commit", "host_hash", "fabric", "address"}  # of a node, that the record shows


@dataclass
class Peer:
    """A member as the leader knows it."""

    number: int  # in the store
    node: int
    first_rank: int
    num_ranks: int
    local_rank: int
    facts: dict | None  # of the first of each node
    folder: str | None = None
    clock: dict | None = None  # store.measured() at the start
    clock_at_end: dict | None = None
    has_ended: bool = False
    has_left: bool = False
    is_interrupted: bool = False
    is_lost: bool = False

    @property
    def name(self):
        return f"node {self.node}, rank {self.first_rank}"


def peer_of(number, hello, is_adopted):
    """A member from its hello.  None: it is no hello."""
    names = ("node", "first_rank", "num_ranks", "local_rank", "facts")
    values = [hello.get(name) for name in names]
    node, first_rank, num_ranks, local_rank, own = values
    numbers = [num_ranks, local_rank, *([node, first_rank] if is_adopted else [])]
    is_whole = own is None or isinstance(own, dict) and own.keys() >= FACTS and isinstance(own["address"], str)
    return Peer(number, *values) if is_whole and all(type(number) is int for number in numbers) else None


def clock_of(message):
    """As store.measured() gives it.  KeyError, TypeError, ValueError: it is none."""
    clock = message["clock"]
    return {name: clock[name] + 0 for name in ("offset_ns", "round_trip_ns", "utc_offset_s")}


def record_row(number, num_ranks, of_node, peer):
    """A node in run.json["nodes"]."""
    return {
        "node": number,
        "ranks": list(range(number * num_ranks, (number + 1) * num_ranks)),
        "host_hash": of_node["host_hash"],
        "commit": of_node["commit"],
        "environment": of_node["used"],
        "fabric": of_node["fabric"],
        "clock": None if peer is None else peer.clock,
        "clock_at_end": None,
    }
