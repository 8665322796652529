"""Node 0's launcher to the processes of the other ranks: gathers and compares them, starts all at once, ends them all.

listen -> gather(): every member has said hello, and is like this process, or all are refused
       -> begin(): the nodes' folders are made and their clocks compared, then every rank starts
       -> tick() until all ranks have ended, collect() their files, bye() when the record is written
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.base.text_table import counted
from bench.launch import ranks
from bench.launch.nodes import carried, channel, clocks, fabric
from bench.launch.nodes.channel import GONE, LOST_AFTER_S, Channel
from bench.launch.nodes.peers import Peer, difference

COLLECT_S = 600.0  # for files that a node's ranks left, traces of gigabytes among them
STOP_S = 20.0  # for ranks of other nodes to end, some seconds more than their own grace
REFUSE_S = 10.0  # for those that are still on their way


class Coordinator:
    """connection: listening.  own: facts of this process, as a member's; num_ranks: that this process starts itself.

    A context; leaving it ends everything that is left on any node.
    """

    def __init__(self, listener, key: str, num_members: int, own_ranks: int, is_adopted: bool):
        self.host = listener.getsockname()[0]
        self._listener, self._key, self._num_members = listener, key, num_members
        self._own_ranks, self._is_adopted = own_ranks, is_adopted
        self._inbox, self._channels, self.peers = queue.Queue(), [], []
        self._own = self._folder = None
        self._own_known = False
        self._closing = False
        self.still = lambda: None  # words where those that have not joined never will
        self.exit_codes = []  # {"rank", "exit_code", "failed_at_s"} of every rank that failed
        self.lost = self.interrupted = None  # words, of the first
        self.bad_files = []  # sentences: files of other nodes that could not be stored
        channel.keep_alive(self._channels)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._closing = True
        if self._own is not None:
            self._own.__exit__(*exc_info)
        for one in list(self._channels):
            one.close()
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while not self._closing:
                connection, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    channel.greet(connection, self._key)
                    answers = {"clock": clocks.answer}
                    self._channels.append(Channel(connection, self._inbox, answers, self._store))

    # ---- before the run

    def gather(self, facts: dict, timeout_s: float) -> None:
        """Until all members have joined.  ValueError, after all have been refused: one is missing, or is not alike."""
        until_s = time.monotonic() + timeout_s
        while len(self.peers) < self._num_members:
            if why := self.still():
                self._refuse_all(f"{why}, and not every node had joined: see what it says")
            if time.monotonic() > until_s:
                result, wanted = len(self.peers) + 1, counted(self._num_members + 1, self._kind)
                self._refuse_all(
                    f"{result} of {wanted} came together in {timeout_s:g} s: start the same command on every node, see "
                    "that this address and port can be reached, or raise hardware.rendezvous_timeout_s"
                )
            self._take_one(self._join)
        for peer in self.peers:
            where = f"node {peer.node}" if self._is_adopted else "a node"
            if peer.facts is not None and (why := difference(peer.facts, facts)):
                self._refuse_all(f"{where} has another {why}")
        first_rank = self._own_ranks
        for node, peer in enumerate(self.peers, 1):
            if not self._is_adopted:  # in the order of their arrival
                peer.node, peer.first_rank = node, first_rank
                first_rank += peer.num_ranks
            peer.left = set(range(peer.first_rank, peer.first_rank + peer.num_ranks))
        self.peers.sort(key=lambda peer: peer.first_rank)

    @property
    def _kind(self):
        return "process" if self._is_adopted else "node"

    def _join(self, one, message):
        if message["kind"] == "hello" and message.get("token") == channel.token(self._key, "member"):
            names = ("node", "first_rank", "num_ranks", "local_rank", "facts")
            self.peers.append(Peer(one, **{name: message[name] for name in names}))
        elif message["kind"] == GONE:
            gone = [peer for peer in self.peers if peer.channel is one]
            if gone and self._is_adopted:
                self._refuse_all(f"rank {gone[0].first_rank} ended before the run began: see what it says")
            self.peers = [peer for peer in self.peers if peer.channel is not one]

    def refuse(self, why: str) -> None:
        """Tell all members, also those that come within some seconds, that there will be no run."""
        until_s = time.monotonic() + REFUSE_S
        while len(self.peers) < self._num_members and self._is_adopted and time.monotonic() < until_s:
            with contextlib.suppress(ValueError):
                self._take_one(self._join)
        with contextlib.suppress(ValueError):
            self._refuse_all(why)

    def _refuse_all(self, why):
        for peer in self.peers:
            peer.channel.send("refuse", why=why)
        raise ValueError(why)

    # ---- the run

    def begin(
        self,
        folder: Path,
        texts: dict[str, str],
        launch: dict,
        words: tuple[str, ...],
        env: Mapping[str, str],
        master: tuple[str, int] | None,
        shared: dict,
        guard: ranks.Guard,
    ) -> None:
        """Start all ranks.  texts: {name: what the workers read}; env: of this process' ranks; master: where torch
        meets; shared: what a member must know to start its ranks; guard: of this process' ranks.
        """
        self._folder = folder
        leaders = [peer for peer in self.peers if peer.facts is not None]
        for peer in leaders:
            peer.channel.send("inputs", run_id=folder.name, node=peer.node, texts=texts, launch=launch)
        until_s = time.monotonic() + LOST_AFTER_S
        while any(peer.folder is None for peer in leaders) and self.lost is None:
            self._take_one(self._take)
            if time.monotonic() > until_s:
                self.lost = f"{next(peer.words for peer in leaders if peer.folder is None)}, made no folder"
        if self.lost is not None:
            return
        folders = {0: str(folder.resolve())} | {peer.node: peer.folder for peer in leaders}
        for peer in self.peers:
            where = {name: getattr(peer, name) for name in ("node", "first_rank", "num_ranks", "local_rank")}
            peer.channel.send("start", folder=folders[peer.node], master=master, **shared, **where)
        place = ranks.Place(
            self._own_ranks,
            shared["world_size"],
            local_size=shared["local_size"],
            num_nodes=shared["num_nodes"],
            master=master,
            by_torchrun=not self._is_adopted,
        )
        self._own = ranks.Group(guard, place, folder, env, words)
        self._own.__enter__()

    def has_ended(self, within_s: float) -> bool:
        """Whether all ranks have.  When one fails, or a node is lost, all the others are ended too."""
        until_s = time.monotonic() + within_s
        while True:
            own_ended = self._own is None or self._own.has_ended(0.0)
            if own_ended and self._own is not None and not self._own_known:
                self._own_known = True
                for failed in self._own.failures:
                    self._ended(failed["rank"], failed["exit_code"])
                if self._own.exit_code() and not self._own.failures:
                    self._ended(0, self._own.exit_code())
            if own_ended and not any(peer.left for peer in self.peers):
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._take_one(self._take, min(left_s, 0.1))
            for peer in self.peers:
                if not peer.is_gone and peer.left and time.monotonic() - peer.channel.heard_s > LOST_AFTER_S:
                    self._lose(peer, f"said nothing for {LOST_AFTER_S:g} s")

    def stop(self) -> None:
        """End all ranks everywhere; returns when they have ended, or their nodes are lost."""
        self._stop_ranks()
        until_s = time.monotonic() + STOP_S
        while not self.has_ended(0.2) and time.monotonic() < until_s:
            pass

    def collect(self) -> None:
        """The files of other nodes into the record's folder."""
        leaders = [peer for peer in self.peers if peer.facts is not None and peer.folder and not peer.is_gone]
        for peer in leaders:
            peer.channel.send("collect")
        until_s = time.monotonic() + COLLECT_S
        while any(peer.clock_at_end is None and not peer.is_gone for peer in leaders) and time.monotonic() < until_s:
            self._take_one(self._take)
        carried.rescue([Path(peer.folder) for peer in self.peers if peer.is_gone and peer.folder], self._folder)
        for peer in leaders:
            for rank in range(peer.first_rank, peer.first_rank + peer.num_ranks):
                carried.on_own_clock(self._folder, rank, (peer.clock or {}).get("offset_ns", 0) / 1e9)

    def bye(self, exit_code: int) -> None:
        """The record is written: every member may end, with this exit code."""
        for peer in self.peers:
            peer.channel.send("bye", exit_code=exit_code)

    def interface(self) -> str | None:
        """Of this node, to the others."""
        return fabric.interface_of(self.peers[0].channel.own_address) if self.peers else None

    # ---- what arrives

    def _take_one(self, use: Callable, timeout_s: float = 0.2):
        with contextlib.suppress(queue.Empty):
            use(*self._inbox.get(timeout=timeout_s))

    def _take(self, one, message):
        peer = next((peer for peer in self.peers if peer.channel is one), None)
        if peer is None:
            return
        kind = message["kind"]
        if kind == "ready":
            peer.folder, peer.clock = message["folder"], message["clock"]
        elif kind == "ended":
            peer.left.discard(message["rank"])
            self._ended(message["rank"], message["exit_code"])
        elif kind == "carried":
            peer.clock_at_end = message["clock"]
        elif kind == "interrupted":
            self.interrupted = self.interrupted or f"{peer.words} got {message['signal']}"
            self._stop_ranks()
        elif kind == GONE and not peer.is_gone:
            self._lose(peer, message["why"])

    def _lose(self, peer, why):
        peer.is_gone = True
        if peer.left:
            self.lost = self.lost or f"{peer.words} is lost: {why}"
            peer.left = set()
            self._stop_ranks()

    def _ended(self, rank, exit_code):
        if exit_code:
            self.exit_codes.append({"rank": rank, "exit_code": exit_code, "failed_at_s": time.monotonic()})
            self._stop_ranks()

    def _stop_ranks(self):
        if self._own is not None:
            self._own.stop()
        for peer in self.peers:
            if peer.left:
                peer.channel.send("stop")

    def _store(self, message, chunks):
        """From a channel's thread: a file of another node."""
        try:
            carried.store(self._folder, message["name"], chunks)
        except (OSError, ValueError, TypeError) as error:
            self.bad_files.append(str(error))
