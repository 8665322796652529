"""A process that runs some ranks of a run which another process coordinates: joins, starts them, reports, ends.

It writes no record.  When the coordinator is gone, its ranks end; when it is gone, its ranks end with it.
"""

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.launch import ranks as local
from bench.launch.nodes import carried, channel, clocks, fabric
from bench.launch.nodes.channel import GONE, LOST_AFTER_S, Channel
from bench.machine.signals import Interrupted, raise_interrupted

TICK_S = 0.2


class Refused(ValueError):
    """The coordinator does not start the run; the message is its reason."""


@dataclass(frozen=True)
class Hello:
    """What a member says of itself.  None: the coordinator decides, or another member of the node has said it."""

    node: int | None
    first_rank: int | None
    num_ranks: int
    local_rank: int
    facts: dict | None  # what must be alike on all nodes, and the node's environment; None: not this node's leader


class Member:
    """connection: greeted.  folder: the results folder of this node.  env: node's config -> variables of its ranks."""

    def __init__(self, connection, key: str, hello: Hello, results: Path):
        self._inbox = queue.Queue()
        self._channel = Channel(connection, self._inbox)
        channel.keep_alive([self._channel])
        self._results, self._is_leader, self._waiting = results, hello.facts is not None, []
        self._by_torchrun = hello.first_rank is None  # else another launcher has started this process as a rank
        self.interface = fabric.interface_of(self._channel.own_address)
        facts = hello.facts and hello.facts | {"fabric": fabric.facts(self.interface)}
        said = hello.__dict__ | {"facts": facts}
        self._channel.send("hello", token=channel.token(key, "member"), **said)

    def run(
        self,
        words: tuple[str, ...],
        env: Callable[[dict], Mapping[str, str]],
        launch: Callable[[dict], dict],
        code: Path,
        keep_master: bool,
    ) -> int:
        """To the end of the run.  Exit code: 0 where it is complete.

        words: a rank's program but for the folder; env(start) -> the variables of all its ranks, launch(inputs) -> its
        launch file, of what the coordinator sent; code: the folder that the ranks import from.  Refused: the run does
        not start; Interrupted: a signal ended this process.
        """
        ranks = folder = None
        with raise_interrupted() as signals, contextlib.ExitStack() as stack:
            try:
                if self._is_leader:
                    inputs = self._wait_for("inputs")
                    clock = self._measured()
                    carried.clear(self._results)
                    folder = carried.folder_of(self._results, inputs["run_id"], inputs["node"])
                    carried.make(folder, inputs["texts"], launch(inputs | {"t_offset_ns": clock["offset_ns"]}))
                    self._channel.send("ready", folder=str(folder.resolve()), clock=clock)
                start = self._wait_for("start")
                place = local.Place(
                    start["num_ranks"],
                    start["world_size"],
                    start["first_rank"],
                    start["local_rank"],
                    start["local_size"],
                    start["node"],
                    start["num_nodes"],
                    None if keep_master else tuple(start["master"]),
                    by_torchrun=self._by_torchrun,
                )
                node_folder = Path(start["folder"])
                guard = stack.enter_context(local.Guard(node_folder, code, is_member=True))
                log = f"start{start['first_rank']}.log"
                ranks = stack.enter_context(local.Group(guard, place, node_folder, env(start), words, log))
                self._watch(ranks, place, signals)
                self._remove_empty_log(start)
                if folder is not None:
                    self._carry(folder)
                return self._wait_for("bye")["exit_code"]
            except Interrupted as error:
                signals()
                self._channel.send("interrupted", signal=str(error))
                if ranks is not None:
                    ranks.__exit__(None, None, None)
                    self._report(ranks, place)
                if folder is not None:
                    carried_logs = [name for name in carried.names(folder) if name.startswith("logs/")]
                    self._send_files(folder, carried_logs)
                raise
            finally:
                stack.close()
                if folder is not None:
                    carried.remove(folder)
                self._channel.close()

    def _watch(self, ranks, place, signals):
        """Until the ranks have ended, and the coordinator knows."""
        while not ranks.has_ended(0.0):
            signals.check()
            for message in self._arrived():
                if message["kind"] == GONE:
                    raise Refused(f"node 0 is gone ({message['why']}): its ranks here are ended")
                if message["kind"] == "stop":
                    ranks.stop()
        self._report(ranks, place)

    def _report(self, ranks, place):
        failed = {one["rank"]: one["exit_code"] for one in ranks.failures}
        if ranks.exit_code() and not failed:
            failed = {place.first_rank: ranks.exit_code()}
        for rank in range(place.first_rank, place.first_rank + place.num_ranks):
            self._channel.send("ended", rank=rank, exit_code=failed.get(rank, 0))

    def _arrived(self):
        """Messages of the next TICK_S; a coordinator that has been silent for too long is gone."""
        waiting, self._waiting = self._waiting, []
        yield from waiting
        if time.monotonic() - self._channel.heard_s > LOST_AFTER_S:
            yield {"kind": GONE, "why": f"nothing heard for {LOST_AFTER_S:g} s"}
        try:
            yield self._inbox.get(timeout=TICK_S)[1]
        except queue.Empty:
            return

    def _wait_for(self, kind):
        """The next message of a kind; others wait.  Refused."""
        kept = []
        while True:
            for message in self._arrived():
                if message["kind"] == kind:
                    self._waiting = kept
                    return message
                if message["kind"] == "refuse":
                    raise Refused(message["why"])
                if message["kind"] == GONE:
                    raise Refused(f"node 0 is gone before the run has ended ({message['why']}): see what it says")
                kept.append(message)

    def _measured(self):
        def ask(number):
            self._channel.send("clock", number=number)
            return self._wait_for("clock_is")

        return clocks.measure(ask)

    def _carry(self, folder):
        """When all ranks of the node have ended: its files, and the clock once more."""
        self._wait_for("collect")
        self._send_files(folder, list(carried.names(folder)))
        self._channel.send("carried", clock=self._measured())

    def _send_files(self, folder, names):
        for name in names:
            if (folder / name).stat().st_size:
                self._channel.send_file(folder / name, name)

    def _remove_empty_log(self, start):
        path = Path(start["folder"]) / "logs" / f"start{start['first_rank']}.log"
        if path.exists() and not path.stat().st_size:
            path.unlink()
