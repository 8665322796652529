"""The members of a run as its coordinator knows them, and whether they are like it."""

import hashlib
from dataclasses import dataclass, field

from bench.launch.nodes.channel import Channel

ALIKE = {  # what all nodes must have alike: (what a person calls it, what to do)
    "source_sha256": ("code", "check out the same commit, with the same changes, on every node"),
    "torch": ("torch", "install the same requirements.lock on every node"),
    "python": ("Python", "use the same Python on every node"),
    "data_sha256": ("data", "the shards differ: ./run.sh data show NAME on every node"),
    "config_id": ("config", "give the same settings on every node; where machines differ, hardware.num_threads too"),
    "copy": ("code", "check out the same commit, with the same bench/, models/ and conf/, on every node"),
}


@dataclass
class Peer:
    """A member as the coordinator knows it."""

    channel: Channel
    node: int
    first_rank: int
    num_ranks: int
    local_rank: int
    facts: dict | None
    folder: str | None = None
    clock: dict | None = None  # clocks.measure() at the start
    clock_at_end: dict | None = None
    left: set = field(default_factory=set)  # its ranks that still run
    is_gone: bool = False

    @property
    def words(self):
        return f"node {self.node}, rank {self.first_rank}"


def difference(theirs: dict, ours: dict) -> str | None:
    """Of two processes' facts: what is not alike and what to do, "code, 1a2b instead of 3c4d: ..."; None: nothing."""
    for name, (words, remedy) in ALIKE.items():
        if theirs.get(name) != ours[name]:
            return f"{words}, {_short(theirs.get(name))} instead of {_short(ours[name])}: {remedy}"
    return None


def _short(value):
    """A version, the beginning of a hash, or of several hashes of all of them."""
    if isinstance(value, list):
        value = hashlib.sha256("".join(value).encode()).hexdigest()
    return str(value)[:12] if value is not None else "none"
