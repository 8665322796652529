"""The ranks of a run that other processes start too, as its launcher sees them: all of them begun, ended, collected.

As ranks.OfAgent for the watching loop; facts() are run.json["nodes"].
"""

import contextlib
import os
from pathlib import Path

from bench.base import atomic
from bench.config import schema
from bench.launch import allocation, initial_record, joining, ranks
from bench.launch.nodes import fabric
from bench.launch.nodes.adopted import Adopted
from bench.launch.nodes.coordinator import Coordinator
from bench.launch.prepare import Job
from bench.record import failures


class OfNodes:
    """A context from the gathered members to the end of the run; coordinator's own context is around it."""

    def __init__(self, coordinator: Coordinator, job: Job, adopted: Adopted | None):
        self._coordinator, self._job, self._adopted = coordinator, job, adopted
        self._folder = None

    def facts(self) -> dict:
        """{"launched_by", "nodes"} of run.json: who started the ranks, and each node with its clock and network."""
        job, adopted, first = self._job, self._adopted, self._coordinator
        own = joining.facts_of(job)
        hardware, leaders = job.config.hardware, [peer for peer in first.peers if peer.facts is not None]
        size = hardware.ranks_of_node
        rows = [_node(0, size, own | {"fabric": fabric.facts(first.interface())}, None)]
        rows += [_node(peer.node, size, peer.facts, peer) for peer in sorted(leaders, key=lambda peer: peer.node)]
        by = {"by": adopted.by, "job_id": adopted.job_id} if adopted else {"by": "nodes", "job_id": None}
        if adopted is None and (job_of_slurm := allocation.found()):
            by = job_of_slurm.facts()
        return {"launched_by": by} | ({"nodes": rows} if len(rows) > 1 else {})

    @contextlib.contextmanager
    def started(self, folder: Path, env: dict, guard: ranks.Guard):
        """A context that yields this, with every rank begun; leaving it ends them and brings home what they wrote."""
        self._folder = folder
        job, adopted = self._job, self._adopted
        hardware = job.config.hardware
        for peer in self._coordinator.peers:
            if peer.facts is not None:
                atomic.write_json(folder / f"environment.node{peer.node}.json", peer.facts["environment"])
        shared = {
            "hardware": schema.to_dict(hardware),
            "world_size": hardware.num_processes,
            "local_size": hardware.ranks_of_node,
            "num_nodes": hardware.nodes or 1,
        }
        own = dict(env)
        if hardware.nodes:
            own |= fabric.variables(self._coordinator.interface(), os.environ)
        texts = {name: (folder / name).read_text() for name in ("config.yaml", "run.json")}
        master = contextlib.nullcontext()
        if not (adopted and adopted.has_store):
            master = _master(adopted.host if adopted else self._coordinator.host)
        launched = initial_record.of_secrets(job)
        with master as where:
            self._coordinator.begin(folder, texts, launched, ranks.WORKER, own, where, shared, guard)
            try:
                yield self
            finally:
                self._coordinator.stop()
                self._coordinator.collect()

    def bye(self, run: dict) -> None:
        """The record is finished: every process of the run ends, with an exit code that says whether it is complete."""
        self._coordinator.bye(0 if run["status"] == "complete" else 1)

    def has_ended(self, within_s: float) -> bool:
        """Whether all ranks end within so many seconds."""
        return self._coordinator.has_ended(within_s)

    @property
    def failures(self) -> list[dict]:
        """Group.failures of all nodes."""
        return self._coordinator.exit_codes

    def exit_code(self) -> int:
        """0 where all ended well.  After has_ended()."""
        return 1 if self._coordinator.exit_codes or self.failure else 0

    @property
    def failure(self) -> dict | None:
        """What only this process knows: that a node was lost, or that a signal ended one."""
        step = failures.last_step(self._folder)
        if self._coordinator.interrupted:
            return failures.failure("interrupted", self._coordinator.interrupted, None, step)
        if self._coordinator.lost:
            return failures.failure("node_lost", self._coordinator.lost, None, step)
        return None

    def complete(self, run: dict) -> None:
        """Put into the record what was known later than facts(): clocks, and files that could not be brought home."""
        words = self._coordinator.bad_files
        at = {"rank": None, "instrument": "nodes", "edge": "after the run"}
        run["warnings"] += [at | {"error": one} for one in words]
        of_node = {peer.node: peer for peer in self._coordinator.peers if peer.facts is not None}
        for row in run.get("nodes", [])[1:]:
            peer = of_node[row["node"]]
            row["clock"], row["clock_at_end"] = peer.clock, peer.clock_at_end


@contextlib.contextmanager
def of_allocation(job: Job):
    """A context that yields OfNodes over the SLURM allocation that this process runs in, gathered.

    ValueError: there is none, or its nodes are not alike.
    """
    result = allocation.found()
    if result is None:
        what = f"hardware.nodes={job.config.hardware.nodes}"
        raise ValueError(f"{what}: several runs span nodes within a SLURM job: cluster=slurm submits one")
    with allocation.led(job, result) as coordinator:
        joining.gather(coordinator, job)
        yield OfNodes(coordinator, job, None)


def _node(number, num_ranks, facts, peer):
    return {
        "node": number,
        "ranks": list(range(number * num_ranks, (number + 1) * num_ranks)),
        "host_hash": facts["host_hash"],
        "commit": facts["commit"],
        "environment": facts["used"],
        "fabric": facts["fabric"],
        "clock": None if peer is None else peer.clock,
        "clock_at_end": None,
    }


@contextlib.contextmanager
def _master(host):
    """Where torch's process group meets: on this node."""
    with ranks.reserved_port(host) as port:
        yield host, port
