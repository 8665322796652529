"""A member starts some ranks of a run whose record another launcher makes: it joins the leader, starts its ranks and
reports how they end.

If the leader is gone, the member ends its ranks; if the member is gone, their guard ends them.  In a SLURM allocation
srun starts one member on each other node:  python -m bench.launch.nodes.member OVERRIDE...  The overrides are the
run's, with hardware.rendezvous.  It prints only why it cannot take part.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.base.paths import REPO, results_root
from bench.config import schema, typed
from bench.launch import ranks, resume
from bench.launch.allocation import Adopted
from bench.launch.nodes import carried, facts, leader
from bench.launch.nodes.store import GONE, MemberStore, values_of
from bench.launch.prepare import Job, frozen, prepare
from bench.machine import code_copy, leases
from bench.machine.signals import Interrupted, Signals, held, raise_interrupted
from bench.record import run_folder

AT_ONCE_S, TELL_S = 2.0, 30.0  # to reach a leader that listens already; and one that must hear of a refusal


class Refused(ValueError):
    """The leader does not start the run or is gone; the message says why."""

    def __init__(self, why: str, exit_code: object = 2):
        super().__init__(why)
        self.exit_code = leases.Busy.exit_code if exit_code == leases.Busy.exit_code else 2


def main(overrides: list[str]) -> int:
    """Returns 0 if the run is complete, 1 if not, 2 if this node cannot take part, 75 if its GPUs are in use."""
    try:
        return follow_nodes(overrides, lambda: prepare(overrides, say=lambda text: None, check_own=False))
    except ValueError as error:
        print(f"node {os.environ.get('SLURMD_NODENAME', '?')}: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))


def follow_adopted(adopted: Adopted, prepared: Callable[[], Job]) -> int:
    """Takes part as a rank above 0 that another launcher started; returns the exit code.

    prepared(): prepares the job on this node; called only by the first rank of each node.
    """
    is_first_of_node = adopted.local_rank == 0 and adopted.node > 0
    where = {"node": adopted.node, "first_rank": adopted.rank, "local_rank": adopted.local_rank, "num_ranks": 1}
    reach = functools.partial(MemberStore, str(adopted.host), adopted.ports, adopted.key)
    message = f"rank {adopted.rank}: rank 0 did not answer within {leader.RENDEZVOUS_S:g} s: see its output"
    return _take_part(reach, leader.RENDEZVOUS_S, message, prepared if is_first_of_node else None, where)


def follow_nodes(overrides: list[str], prepared: Callable[[], Job]) -> int:
    """Takes part as a node that does not have the address of hardware.rendezvous; returns the exit code."""
    rendezvous, timeout = values_of(overrides, "hardware.rendezvous", "hardware.rendezvous_timeout_s")
    host, port = typed.host_and_port(rendezvous)
    timeout_s = leader.RENDEZVOUS_S
    with contextlib.suppress(ValueError):
        timeout_s = float(timeout or "null")
    message = f"hardware.rendezvous={rendezvous}: no run answered there within {timeout_s:g} s"
    message = f"{message}: start the same command on the node that has this address"
    return _take_part(functools.partial(MemberStore, host, [port], str(rendezvous)), timeout_s, message, prepared, {})


def _take_part(
    reach: Callable[[float], MemberStore],
    timeout_s: float,
    why_not: str,
    prepared: Callable[[], Job] | None,
    where: dict[str, int],
) -> int:
    """Takes part in a run; returns the exit code.  Raises ValueError if this process cannot, after telling the leader.

    reach(seconds): connects to the leader's store, or raises TimeoutError; why_not: the message if that takes longer
    than timeout_s.  prepared(): prepares the job on this node; None: another member of the node does that.  where: as
    in Member.run().
    """
    with contextlib.ExitStack() as stack:
        code, job, store = stack.enter_context(code_copy.held(REPO)), None, None
        if prepared:
            store = _reached(reach, AT_ONCE_S)  # joins early, to hear a leader that refuses meanwhile
            try:
                job = stack.enter_context(frozen(prepared()))
                stack.enter_context(leases.held_by_ranks(job.config.hardware))
            except ValueError as error:
                if store := store or _reached(reach, TELL_S):
                    store.send("refused", why=str(error), exit_code=getattr(error, "exit_code", None))
                    store.close()
                raise
            code = job.code
            where = {"local_rank": 0, "num_ranks": job.config.hardware.ranks_of_node} | where
        store = store or _reached(reach, timeout_s)
        if store is None:
            raise ValueError(why_not)
        try:
            return Member(store, job, code).run(where)
        except Interrupted as error:
            print(f"run: {error} ended this node's part of the run: node 0's record says so", file=sys.stderr)
            return 1


def _reached(reach: Callable[[float], MemberStore], timeout_s: float) -> MemberStore | None:
    with contextlib.suppress(TimeoutError):
        return reach(timeout_s)
    return None


class Member:
    """A member.  job: prepared on this node, None if another member has it; code: the folder for the ranks' imports."""

    def __init__(self, store: MemberStore, job: Job | None, code: Path):
        self._store, self._job, self._code = store, job, code
        self._interface = facts.interface_of(store.own_address)
        self._waiting: list[dict[str, Any]] = []  # messages that arrived before they were waited for
        self._group: ranks.Group | None = None
        self._folder: Path | None = None  # this node's folder

    def run(self, where: dict[str, int]) -> int:
        """Takes part until the end of the run; returns the exit code, 0 if the run is complete.

        where: {"node", "first_rank", "local_rank", "num_ranks"}, unless the leader decides them.  Raises Refused if the
        run does not start, Interrupted if a signal ended this process.
        """
        mark = carried.marked(results_root()) if self._job and resume.survives(self._job.config) else None
        own = self._job and facts.facts_of(self._job) | {
            "fabric": facts.network(self._interface),
            "address": self._store.own_address,
            "mark": mark and mark.name,
        }
        why_left = "it ended"
        with raise_interrupted() as signals, contextlib.ExitStack() as stack:
            try:
                self._store.send("hello", **where, facts=own)
                try:
                    if self._job:
                        self._make_folder(self._job)
                    self._group = self._started(self._wait_for("start"), stack)
                except (KeyError, TypeError):
                    raise Refused("node 0 did not send which ranks to start here, and where: see its output") from None
                self._watch(self._group, signals)
                if self._folder is not None:
                    self._wait_for("collect")
                    self._store.send_files({name: self._folder / name for name in carried.names(self._folder)})
                exit_code = self._wait_for("bye").get("exit_code")
                return exit_code if type(exit_code) is int else 1
            except Interrupted as error:
                signals()
                why_left = f"it got {error}"
                self._store.send("interrupted", signal=str(error))
                if self._group is not None:
                    self._group.__exit__(None, None, None)
                    self._store.send("ended", ends=self._group.ends())
                if self._folder is not None:
                    names = [name for name in carried.names(self._folder) if name.startswith("logs/")]
                    self._store.send_files({name: self._folder / name for name in names})
                raise
            finally:
                stack.close()
                self._store.send("left", why=why_left)
                self._store.close()
                for folder in filter(None, (self._folder, mark)):
                    carried.remove(folder)

    def _make_folder(self, job: Job) -> None:
        """Creates this node's folder with the files that its ranks read."""
        inputs = self._wait_for("inputs")
        self._store.send("clock")
        try:
            clock = self._store.measured()
        except RuntimeError as error:
            raise Refused(f"node 0 did not send its clock ({error}): see its output") from None
        shards = {split: [str(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
        launch = inputs["launch"] | {"launcher_pid": os.getpid(), "shards": shards, "t_offset_ns": clock["offset_ns"]}
        launch |= {"own": job.own_folder} if job.own_folder else {}
        if survival := launch.get("survival"):
            survival["folder"] = str((results_root() / job.config.track.name / inputs["run_id"]).resolve())
        carried.clear(results_root())
        self._folder = carried.folder_of(results_root(), inputs["run_id"], inputs["node"])
        try:
            carried.make(self._folder, inputs["texts"], launch)
        except OSError as error:
            why = f"its results folder cannot be written ({error.strerror}): set SPEEDRUN_RESULTS=/path there"
            self._store.send("left", why=why)
            raise Refused(why) from None
        self._store.send("ready", folder=str(self._folder.resolve()), clock=clock)

    def _started(self, start: dict[str, Any], stack: contextlib.ExitStack) -> ranks.Group:
        place = ranks.Place(**start["place"])
        folder, log = self._folder or Path(start["folder"]), f"start{place.first_rank}.log"
        self._log, self._survives = folder / "logs" / log, place.survives
        env = ranks.environment(schema.build(schema.HardwareConfig, start["hardware"]))
        env |= facts.variables(self._interface if place.num_nodes > 1 else None, os.environ)
        guard = stack.enter_context(ranks.Guard(folder, self._code, is_member=True))
        return stack.enter_context(ranks.Group(guard, place, folder, env, log=log))

    def _watch(self, group: ranks.Group, signals: Signals) -> None:
        """Waits until the ranks have ended, and reports it to the leader.  If they write checkpoints, a warning signal
        is passed on to all."""
        has_ended = False
        while not has_ended:
            try:
                signals.check()
                with held():  # so that a warning loses no message
                    message = self._arrived()
                    if message and message["kind"] == "stop":
                        group.stop()
                    elif message:
                        self._waiting.append(message)
                    has_ended = group.has_ended(0.0)
            except Interrupted as error:
                if not self._survives or str(error) not in run_folder.WARNING_SIGNALS:
                    raise
                signals.heed()
                (self._log.parents[1] / run_folder.WARNED).write_text(str(error))
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()
        self._store.send("ended", ends=group.ends())

    def _arrived(self) -> dict[str, Any] | None:
        """Returns the next message, None if there is none yet.  Raises Refused if none will come."""
        message = self._store.arrived()
        if message and message["kind"] == GONE:
            raise Refused(f"node 0 is gone before the run has ended ({message['why']}): see its output")
        return message

    def _wait_for(self, kind: str) -> dict[str, Any]:
        """Waits for the next message of a kind and keeps the others.  Raises Refused if none will come."""
        while True:
            for message in self._waiting:
                if message["kind"] == kind:
                    self._waiting.remove(message)
                    return message
            came = self._arrived()
            if came is None:
                continue
            if came["kind"] == "refuse":
                raise Refused(str(came.get("why", "node 0 starts no run: see its output")), came.get("exit_code"))
            if came["kind"] == "stop" and self._group is None or came["kind"] == "bye" and kind != "bye":
                raise Refused("the run ended before it began: see the output of node 0")
            if came["kind"] != "stop":
                self._waiting.append(came)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
