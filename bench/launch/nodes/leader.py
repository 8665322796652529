"""The leader makes the record of a run over several launchers: it gathers the others, starts all ranks and ends them.

The others (member.py) are on other nodes, or belong to ranks that torchrun, srun or mpirun started.  The launcher's
loop uses a Leader as it uses ranks.Group for the ranks of one machine.

  gather(): all members have joined and match this process, or all are refused
         -> started(): the nodes' folders are created and their clocks measured, then every rank starts
         -> has_ended(), then the nodes' files are collected; bye() when the record is written
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from bench.base import atomic
from bench.base.paths import results_root
from bench.base.text_table import counted
from bench.config import schema
from bench.launch import allocation, ranks, resume
from bench.launch.allocation import Adopted
from bench.launch.console import say
from bench.launch.nodes import carried, facts
from bench.launch.nodes.facts import Peer, clock_of, peer_of
from bench.launch.nodes.store import GONE, LOST_AFTER_S, LeaderStore
from bench.launch.prepare import Job
from bench.machine import leases
from bench.record import failures, run_folder

RENDEZVOUS_S = 300.0  # enough for nodes that a person starts one after another
REMEDY = "start the same command everywhere, check that the port can be reached, or raise hardware.rendezvous_timeout_s"
TICK_S, QUIET_S = 0.1, 10.0  # QUIET_S: of waiting, after which it says for what
STOP_S = LOST_AFTER_S + 10.0  # for ranks of other nodes to end, or for these nodes to count as lost
REFUSE_S = 10.0  # for members that have not joined yet
SAY_S = 1.0  # for a member's thread to read a message
LEAVE_S = 5.0  # for members to read that the run is over
COLLECT_S = 600.0  # for the next piece of a file, from a node that shows signs of life
NO_SENSE = (KeyError, TypeError, ValueError, OverflowError)  # raised for a message whose fields are wrong, or infinite


class Leader:
    """Context that, when it is left, ends everything that is left on any node.

    listener: from store.listen(); key: a text that only the processes of this run share; still(): returns why members
    that have not joined never will, None if they may; secret: as in LeaderStore.
    """

    _job: Job  # set by gather(), as are _own, the facts of this node
    _folder: Path  # set by started()

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        num_members: int,
        adopted: Adopted | None,
        still: Callable[[], str | None] = lambda: None,
        secret: str | None = None,
    ):
        self._store = LeaderStore(listener, key, secret)
        self._num_members, self._adopted, self._still = num_members, adopted, still
        self._own_ranks, self._peers = 1, dict[int, Peer]()  # set by gather()
        self._stack = contextlib.ExitStack()
        self._group: ranks.Group | None = None
        self._has_begun = False  # whether members have been ordered to start their ranks
        # how the run ended; the first of each kind counts
        self.failures: list[dict[str, Any]] = []  # as Group.failures, but of all nodes
        self._lost: str | None = None
        self._interrupted: str | None = None
        self._own_is_known = False
        self._bad_files: list[str] = []
        self._exit_code = 1  # of members, unless bye() is called
        self._came_s = 0.0  # when the last piece of a file arrived

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        for peer in self._peers.values():
            self._store.tell(peer.number, "bye", exit_code=self._exit_code)
        until_s = time.monotonic() + LEAVE_S
        while any(not (peer.has_left or peer.is_lost) for peer in self._peers.values()) and time.monotonic() < until_s:
            self._take(TICK_S)
        self._store.close()

    @property
    def _nodes(self) -> list[Peer]:
        """The first member of each other node, which creates the node's folder."""
        return [peer for peer in self._peers.values() if peer.facts is not None]

    # ---- before the run

    def gather(self, job: Job) -> None:
        """Waits for all members.  Refuses all and raises ValueError if one is missing or differs from this process."""
        self._job, self._own = job, facts.facts_of(job)
        if not self._adopted:
            self._num_members, self._own_ranks = (job.config.hardware.nodes or 1) - 1, job.config.hardware.ranks_of_node
        timeout_s = job.config.hardware.rendezvous_timeout_s or RENDEZVOUS_S
        begin_s, say_after_s = time.monotonic(), QUIET_S
        wanted = counted(self._num_members + 1, "process" if self._adopted else "node")
        while len(self._peers) < self._num_members:
            joined, waited_s = f"{len(self._peers) + 1} of {wanted} joined", time.monotonic() - begin_s
            if why := self._still():
                self._refuse_all(f"{why} before every node had joined: see its output")
            if waited_s > timeout_s:
                self._refuse_all(f"{joined} within {timeout_s:g} s: {REMEDY}")
            if waited_s > say_after_s:
                by, say_after_s = f" ({self._adopted.summary()})" if self._adopted else "", timeout_s
                say("waiting", f"{joined}{by}; at most {timeout_s:g} s")
            self._join()
        for peer in self._nodes:
            where = f"node {peer.node}" if self._adopted else "a node"
            if why := facts.difference(peer.facts or {}, self._own):
                self._refuse_all(f"{where} has another {why}")
            if resume.survives(job.config) and not carried.is_seen(results_root(), (peer.facts or {})["mark"]):
                self._refuse_all(f"{where} has {carried.NOT_SHARED}, or remove resume= and checkpoint.every_min=")
        if not self._adopted:  # numbered in order of arrival
            first_rank = self._own_ranks
            for node, peer in enumerate(self._peers.values(), 1):
                peer.node, peer.first_rank = node, first_rank
                first_rank += peer.num_ranks
        self._peers = dict(sorted(self._peers.items(), key=lambda item: item[1].first_rank))

    def _join(self) -> None:
        for number, message in self._store.take():
            if message["kind"] == GONE:
                self._refuse_all(f"a node cannot join: {message['why']}", number)
            if message["kind"] == "refused":
                self._refuse_all(f"another node refuses: {message.get('why')}", number, code=message.get("exit_code"))
            if message["kind"] == "hello":
                try:
                    self._peers[number] = peer_of(number, message)
                except NO_SENSE:
                    self._refuse_all("a node cannot join: its first message is malformed", number)
        for number, peer in list(self._peers.items()):
            if self._store.silent_s(number) > LOST_AFTER_S:
                if self._adopted:
                    self._refuse_all(f"rank {peer.first_rank} ended before the run began: see its output")
                del self._peers[number]
        time.sleep(TICK_S)

    def refuse(self, error: ValueError) -> None:
        """Tells all members, including those that join within some seconds, why there will be no run."""
        until_s = time.monotonic() + REFUSE_S
        with contextlib.suppress(ValueError):
            while len(self._store.members) < self._num_members and time.monotonic() < until_s:
                self._join()
            self._refuse_all(str(error), code=getattr(error, "exit_code", None))

    def _refuse_all(self, why: str, *others: int, code: object = None) -> NoReturn:
        """others: members that are not peers yet; code: exit code for all, of leases.Busy, or anything else for 2."""
        for number in {*self._peers, *self._store.members, *others}:
            self._store.tell(number, "refuse", why=why, exit_code=code)
        time.sleep(SAY_S)  # by then members that are still preparing have heard it
        raise leases.Busy(why) if code == leases.Busy.exit_code else ValueError(why)

    # ---- the run

    def record_facts(self) -> dict[str, Any]:
        """Returns "launched_by" and "nodes" of run.json: who started the ranks, and each node's clock and network."""
        size, slurm = self._job.config.hardware.ranks_of_node, allocation.current()
        own = self._own | {"fabric": facts.network(self._interface())}
        nodes = {0: (own, None)} | {peer.node: (peer.facts or {}, peer.clock) for peer in self._nodes}
        rows = [
            {"node": node, "ranks": list(range(node * size, (node + 1) * size)), "clock": clock}
            | {name: node_facts[name] for name in ("host_hash", "commit", "fabric")}
            | {"environment": node_facts["used"]}
            for node, (node_facts, clock) in sorted(nodes.items())
        ]
        by: dict[str, Any] = slurm.facts() if slurm else {"by": "nodes", "job_id": None}
        if self._adopted:
            by["by"] = self._adopted.by
        return {"launched_by": by} | ({"nodes": rows} if len(rows) > 1 else {})

    @contextlib.contextmanager
    def started(self, folder: Path, env: dict[str, str], guard: ranks.Guard, survives: bool) -> Iterator["Leader"]:
        """Context in which all ranks run; when it is left, they are ended and their files are collected.  survives: as
        in ranks.Place."""
        self._folder, adopted, hardware = folder, self._adopted, self._job.config.hardware
        earlier = carried.of_earlier_segments(folder)
        for peer in self._nodes:
            peer.files = carried.Incoming(folder, earlier)
            if peer.facts:
                atomic.write_json(folder / f"environment.node{peer.node}.json", peer.facts["environment"])
        master = None
        if not (adopted and adopted.has_store):
            host = (adopted and adopted.host) or self._store.host
            master = host, self._stack.enter_context(ranks.reserved_port(host))
        num_nodes = hardware.nodes or 1
        place = ranks.Place(
            self._own_ranks,
            hardware.num_processes or 1,
            local_size=hardware.ranks_of_node,
            num_nodes=num_nodes,
            master=master,
            by_torchrun=not adopted,
            survives=survives,
        )
        try:
            if self._are_ready(folder):
                self._start_members(folder, place)
                variables = facts.variables(self._interface(), os.environ) if hardware.nodes else {}
                self._group = self._stack.enter_context(ranks.Group(guard, place, folder, env | variables))
            yield self
        finally:
            self._stop_all()
            until_s = time.monotonic() + STOP_S
            while not self.has_ended(0.2) and time.monotonic() < until_s:
                pass
            if self._has_begun:
                self._collect()
            self._stack.close()
            self._group = None  # if a member gets a signal later, there is nothing to stop here

    def _are_ready(self, folder: Path) -> bool:
        """Waits until every other node has created its folder and measured its clock; returns whether all have."""
        texts = {name: (folder / name).read_text() for name in ("config.yaml", "run.json")}
        own = atomic.read_json(folder / run_folder.LAUNCH, {})
        launch = {name: own[name] for name in ("secrets", "survival") if name in own}
        for peer in self._nodes:
            self._store.tell(peer.number, "inputs", run_id=folder.name, node=peer.node, texts=texts, launch=launch)
        until_s = time.monotonic() + LOST_AFTER_S
        while any(peer.folder is None for peer in self._nodes) and not self._lost:
            self._take(TICK_S)
            if time.monotonic() > until_s:
                late = next(peer for peer in self._nodes if peer.folder is None)
                self._lost = f"{late.name}, did not create its folder within {LOST_AFTER_S:g} s"
        for why in filter(None, map(facts.clock_fault, self._nodes)):
            say("warn", why, always=True)
        return not self._lost

    def _start_members(self, folder: Path, place: ranks.Place) -> None:
        folders = {0: str(folder.resolve())} | {peer.node: peer.folder for peer in self._nodes}
        hardware, self._has_begun = schema.to_dict(self._job.config.hardware), True
        for peer in self._peers.values():
            where = {name: getattr(peer, name) for name in ("num_ranks", "first_rank", "local_rank", "node")}
            start = {"folder": folders[peer.node], "place": vars(place) | where, "hardware": hardware}
            self._store.tell(peer.number, "start", **start)

    def has_ended(self, within_s: float) -> bool:
        """Waits at most within_s; returns whether all ranks have ended.  A failed rank or a lost node ends them all."""
        until_s = time.monotonic() + within_s
        while True:
            if self._group is None:
                return True
            own_has_ended = self._group.has_ended(0.0)
            if own_has_ended and not self._own_is_known:
                self._own_is_known = True
                self._ended(self._group.ends())
            if own_has_ended and all(peer.has_ended for peer in self._peers.values()):
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._take(min(left_s, TICK_S))
            for peer in self._peers.values():
                if not peer.has_ended and self._store.silent_s(peer.number) > LOST_AFTER_S:
                    self._lose(peer, f"it sent nothing for {LOST_AFTER_S:g} s")

    def exit_code(self) -> int:
        """Returns 0 if all ranks ended well.  Call it after has_ended()."""
        return 1 if self.failures or self.failure else 0

    @property
    def failure(self) -> dict[str, Any] | None:
        """The failure that only this process knows of (a lost node, or a signal that ended a node), or None."""
        for kind, why in (("interrupted", self._interrupted), ("node_lost", self._lost)):
            if why:
                return failures.failure(kind, why, None, failures.last_step(self._folder))
        return None

    def _stop_all(self) -> None:
        if self._group is not None:
            self._group.stop()
        for peer in self._peers.values():
            if not peer.has_ended:
                self._store.tell(peer.number, "stop")

    def _collect(self) -> None:
        """Collects the files of other nodes into the record's folder."""
        for peer in self._nodes:
            if not peer.folder or peer.is_lost:
                continue
            self._store.tell(peer.number, "collect")
            if why := self._hindrance(peer):
                peer.is_lost = True
                if peer.files and (name := peer.files.undo()):
                    self._bad_files.append(f"node {peer.node}, {name}: not in the record: only a part of it arrived")
                problem = f"node {peer.node} was lost after its ranks had ended, and its files may be missing"
                self._bad_files.append(f"{problem}: {why}")
        for peer in self._nodes:
            if peer.is_lost and peer.folder and peer.files:
                carried.rescue(Path(peer.folder), peer.files)
            for rank in range(peer.first_rank, peer.first_rank + peer.num_ranks):
                carried.on_own_clock(self._folder, rank, (peer.clock or {}).get("offset_ns", 0) / 1e9)

    def _hindrance(self, peer: Peer) -> str | None:
        """Waits until a node has sent all its files.  Returns None, or why it does not send them."""
        self._came_s = time.monotonic()
        while not peer.has_sent_files:
            if peer.has_left:
                return "it left"
            if self._store.silent_s(peer.number) > LOST_AFTER_S:
                return f"it sent no sign of life for {LOST_AFTER_S:g} s"
            if time.monotonic() - self._came_s > COLLECT_S:
                return f"it sent no part of a file for {COLLECT_S:g} s"
            self._take(TICK_S)
        return None

    def _keep(self, peer: Peer, name: str, message: Mapping[str, Any]) -> None:
        """Writes a piece of a file from this node to the record."""
        self._came_s = time.monotonic()
        if peer.files is None:
            raise ValueError("no run has begun, or this member has no files")
        try:
            if "why" in message:
                raise OSError(message["why"])
            peer.files.add(name, message.get("data", b""), message["is_last"])
        except (OSError, ValueError) as error:
            peer.files.undo()
            self._bad_files.append(f"node {peer.node}, {name[:200]}: not in the record: {error}")

    def complete(self, run: dict[str, Any]) -> None:
        """Adds to the record what record_facts() did not know yet: the clocks, and the files that did not arrive."""
        at = {"rank": None, "instrument": "nodes", "edge": "after the run"}
        run["warnings"] += [at | {"error": warning} for warning in self._bad_files]
        peer_by_node = {peer.node: peer for peer in self._nodes}
        for row in run.get("nodes", [])[1:]:
            peer = peer_by_node[row["node"]]
            row["clock"] = peer.clock
            if why := facts.clock_fault(peer):
                run["warnings"].append(at | {"edge": "start", "error": why})

    def bye(self, run: dict[str, Any]) -> None:
        """Sets the exit code of the members, once the record is finished: 0 if the run is complete, else 1."""
        self._exit_code = 0 if run["status"] == "complete" else 1

    def _interface(self) -> str | None:
        """Returns the interface of this node on the route to the others."""
        first = next((peer.facts for peer in self._nodes), None)
        return facts.interface_of(facts.own_address(first["address"])) if first else None

    # ---- what arrives

    def _take(self, within_s: float) -> None:
        """Handles the messages that have arrived, or waits if there are none."""
        came = self._store.take()
        for number, message in came:
            if peer := self._peers.get(number):
                try:
                    self._heed(peer, message)
                except NO_SENSE:
                    self._lose(peer, f"its message {message['kind'][:40]!r} is malformed")
        if not came:
            time.sleep(within_s)

    def _heed(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Handles a message.  Raises one of NO_SENSE if it is malformed."""
        kind = message["kind"]
        if kind == GONE:
            peer.has_left = True
            self._lose(peer, message["why"])
        elif kind == "clock":
            try:
                self._store.answer_clock(peer.number)
            except RuntimeError:
                self._lose(peer, "it stopped measuring its clock")
        elif kind == "ready":
            peer.folder, peer.clock = str(message["folder"]), clock_of(message)
        elif kind == "ended":
            ends = [(int(rank), int(exit_code)) for rank, exit_code in message["ends"]]
            peer.has_ended = True
            self._ended(ends)
        elif kind == "piece":
            self._keep(peer, message["name"], message)
        elif kind == "files_end":
            peer.has_sent_files = True
        elif kind == "interrupted":
            self._interrupted = self._interrupted or f"{peer.name} got {message['signal']}"
            self._stop_all()
        elif kind == "left":
            peer.has_left = True
            if not peer.has_ended:
                self._lose(peer, message["why"])

    def _lose(self, peer: Peer, why: str) -> None:
        peer.has_ended = peer.is_lost = True
        self._lost = self._lost or f"{peer.name} is lost: {why}"
        self._stop_all()

    def _ended(self, ends: Sequence[tuple[int, int]]) -> None:
        """Notes [(rank, exit code)] of the ranks of one launcher that failed first."""
        for rank, exit_code in ends:
            self.failures.append({"rank": rank, "exit_code": exit_code, "failed_at_s": time.monotonic()})
        if ends:
            self._stop_all()
