"""An agent of a lab's queue: takes commands from bench/plans/queue.py and runs them on this machine, one at a time."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.base import atomic, escape
from bench.base.paths import REPO, shown
from bench.config import groups
from bench.launch.console import say
from bench.machine import environment, gpus, leases, processes
from bench.machine.signals import Signals, held, raise_interrupted
from bench.plans import shares
from bench.plans.queue import FOLDER, OF_THE_DISK, RACE_WAITS_S, Entry, Queue
from bench.plans.race import planning, runner, state
from bench.record import race_folder

LOOK_EVERY_S = 5.0  # at the queue
TICK_S = 0.5
BEAT_S = 5.0
BUSY_WAITS_S = 60.0  # then twice as long, and so on
ENV = ("SPEEDRUN_CWD", groups.VARIABLE, groups.NAME_VARIABLE, "CUDA_VISIBLE_DEVICES")  # what an entry may set
PRICE = "hardware.price_usd_per_hour"
END_WITHIN_S = 30.0  # the command ends its workers, then finishes its records
LEFT = "the machine that it began on did not come back"  # why a race was abandoned that its entry begins again


@dataclass
class Agent:
    """results: the folder whose queue it works on; usd_per_hour: the price of a GPU of this machine, or of the machine
    for what needs none, None: not known; verbs: what it runs."""

    results: Path
    usd_per_hour: float | None
    verbs: tuple[str, ...]

    def __post_init__(self) -> None:
        self.queue = Queue(self.results / FOLDER)
        self._taken: Entry | None = None
        self._began_s = 0.0
        self._exit_code: int | None = None  # of what was taken, once it has ended by itself
        self._busy: dict[str, tuple[int, float]] = {}  # by id: how often it was so here, until when it waits
        self._reported = set[str]()
        self._session_id = environment.session_id(environment.environment())

    def go(self, once: bool) -> int:
        """Works until it is interrupted; once: one entry, or none where none can be begun now -> its exit code.

        ValueError: the queue is not to be trusted, or its budgets make no sense.
        """
        self.queue.check_trust()
        with raise_interrupted() as signals:
            try:
                while True:
                    try:
                        exit_code = self._one(signals, once)
                    except (OSError, ValueError) as error:  # of the queue, not of an entry
                        if once:
                            raise
                        exit_code, self._taken = None, None  # should there be one, its lease ends
                        self._report_once(str(error))
                    if once:
                        if exit_code is None:
                            say("queue", "nothing that waits can be begun here now")
                        return exit_code or 0
                    if exit_code is None:
                        signals.check()
                        time.sleep(LOOK_EVERY_S)
            finally:
                signals()
                if self._taken is not None:
                    self._end(self._taken, "it was given back" if self._exit_code is None else "it ended")

    def _one(self, signals: Signals, once: bool) -> int | None:
        """Runs the next entry -> its exit code; None: there is none now."""
        self._put_back_lost(once)
        for why in self.queue.unreadable():
            self._report_once(f"skipped: {why}")
        with self._next() as entry:
            return None if entry is None else self._run(entry, signals)

    def _put_back_lost(self, at_once: bool = False) -> None:
        for lost in self.queue.put_back_lost(at_once):
            say("queue", f"{lost.id} of {lost.user}: its agent was lost", always=True)
            end_cancelled(self.queue, lost)

    def _report_once(self, text: str) -> None:
        """Prints what keeps it from working, the first time."""
        if text not in self._reported:
            say("queue", escape.line(text), always=True)
            self._reported.add(text)

    @contextlib.contextmanager
    def _next(self) -> Iterator[Entry | None]:
        """The entry that this machine is to run, taken, with as many GPUs leased; None: there is none now.

        The first that fits this machine is waited for, so that one that needs many GPUs is not passed over for ever.
        """
        for entry in shares.order(self.queue):
            if entry.command[:1] and entry.command[0] in self.verbs and self._may_begin(entry):
                with leases.free(entry.num_gpus) as devices:
                    if devices is None:
                        break
                    entry.env["CUDA_VISIBLE_DEVICES"] = ",".join(device.name for device in devices)
                    try:
                        with held():
                            self._exit_code, self._began_s = None, time.monotonic()
                            self._taken = self.queue.take(entry, self._usd_per_hour(entry))
                    except OSError as error:
                        self._report_once(f"{entry.id}: cannot be taken: {error}")
                        continue
                    if self._taken is not None:
                        yield self._taken
                        return
                    end_cancelled(self.queue, entry)  # if whoever cancelled it was killed before that
        yield None

    def _may_begin(self, entry: Entry) -> bool:
        """Whether this machine has what it needs, and a race that it began is this machine's, has ended, or waited long
        enough."""
        if entry.num_gpus > len(gpus.devices()) or time.monotonic() < self._busy.get(entry.id, (0, 0.0))[1]:
            return False
        if (race := race_of(self.queue, entry)) is None:
            return True
        if state.is_running(race):  # its agent was believed lost, and only slept
            return False
        try:
            planning.enter(race, self.results)
            if self._goes_on_here(race):
                return True
        except (OSError, ValueError):  # it is begun, and ends with what is wrong
            return True
        with contextlib.suppress(FileNotFoundError):
            return self.queue.idle_s(entry) > RACE_WAITS_S
        return False

    def _goes_on_here(self, race: Path) -> bool:
        """Whether a race was begun on this machine, or has ended and would only show its answer."""
        known = state.read(race, self.results)
        return known.has_ended or bool(known.plan["session_id"] == self._session_id)

    # ---- one entry

    def _run(self, entry: Entry, signals: Signals) -> int:
        """Runs an entry that was taken -> its exit code, 1 where it was given back."""
        try:
            why = self._run_command(entry, signals)
        except (OSError, ValueError) as error:
            why = str(error)
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                with held():
                    self.queue.give_back(entry)
                    end_cancelled(self.queue, entry)
                    self._taken = None
                self._wait(f"{entry.id} waits again: {why}", signals)
                return 1
            self._exit_code = 2
        while True:
            try:
                return self._end(entry, why)
            except OSError as error:
                if error.errno not in OF_THE_DISK:
                    raise
                self._wait(f"{entry.id} has ended, which cannot be written: {error}", signals)

    def _wait(self, why: str, signals: Signals) -> None:
        self._report_once(why)
        signals.check()
        time.sleep(LOOK_EVERY_S)

    def _run_command(self, entry: Entry, signals: Signals) -> str:
        """Run the command until it ends or this agent has lost the entry -> why it ended."""
        command = self._command(entry)
        env = os.environ | {name: entry.env[name] for name in ENV if name in entry.env}
        env["SPEEDRUN_RESULTS"] = str(self.results)
        program = [sys.executable, "-m", "bench", *command]
        with self.queue.opened_log(entry) as out:
            what = f"{entry.id} of {entry.user}: {shlex.join(command)}, log {shown(Path(out.name))}"
            say("queue", escape.line(what), always=True)
            with processes.child(program, REPO, env, out, END_WITHIN_S) as child:
                try:
                    self._watch(entry, child, signals)
                finally:
                    self._exit_code = child.poll()  # before the block ends it
        if self._exit_code != leases.Busy.exit_code:
            return "it ended"
        self._exit_code = None
        num_busy, _ = self._busy.get(entry.id, (0, 0.0))
        self._busy[entry.id] = num_busy + 1, time.monotonic() + min(BUSY_WAITS_S * 2**num_busy, RACE_WAITS_S)
        return "the machine was busy"

    def _watch(self, entry: Entry, child: subprocess.Popen[bytes], signals: Signals) -> None:
        beat_s = time.monotonic()
        while child.poll() is None:
            signals.check()
            if time.monotonic() - beat_s > BEAT_S:
                beat_s = time.monotonic()
                if not self.queue.keep(entry):
                    break
                with contextlib.suppress(OSError):
                    self._put_back_lost()
            time.sleep(TICK_S)

    def _end(self, entry: Entry, why: str) -> int:
        """Says what became of an entry, unless this agent has lost it -> the exit code, 1 for none."""
        with held():
            exit_code = self._exit_code
            end_cancelled(self.queue, entry)
            if not self.queue.keep(entry) and self.queue.has_outcome(entry):
                exit_code, why = None, "this agent was believed lost, and lost it"
            else:
                if exit_code is None and not self.queue.keep(entry):
                    exit_code, why = 1, self.queue.cancelled(entry) or "its file was removed"
                hours, usd_per_hour = (time.monotonic() - self._began_s) / 3600, self._usd_per_hour(entry)
                self.queue.end(entry, exit_code, why, hours, None if usd_per_hour is None else usd_per_hour * hours)
                end_cancelled(self.queue, entry)  # if it was cancelled only now
                why = self.queue.cancelled(entry) or why
            self._taken = None
            text = f"{entry.id}: {why}{'' if exit_code is None else f', exit code {exit_code}'}"
            say("queue", escape.line(text), always=True)
        return 1 if exit_code is None else exit_code

    def _usd_per_hour(self, entry: Entry) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * max(1, entry.num_gpus)

    def _command(self, entry: Entry) -> list[str]:
        """Its verb and arguments: a race that it has begun goes on; one that it began elsewhere is abandoned."""
        command, usd_per_hour = list(entry.command), self._usd_per_hour(entry)
        if usd_per_hour and not any(word.startswith(PRICE) for word in command):  # a run has a price or none, never 0
            command.append(f"{PRICE}={usd_per_hour:g}")
        if (race := race_of(self.queue, entry)) is not None:
            if self._goes_on_here(race):
                return ["race", "--resume", race.name, *command[1:]]
            runner.finish(race, self.results, "abandoned", LEFT)
        if command[0] == "race":
            names = [word.removeprefix("name=") for word in command if word.startswith("name=")]
            command = [word for word in command if not word.startswith("name=")]
            command.append(f"name={(names or ['race'])[-1]}{entry.short}")
        return command


def race_of(queue: Queue, entry: Entry) -> Path | None:
    """The latest race that an entry has begun, which may have ended; None: there is none, or the machine LEFT it."""
    folders = sorted(path.parent for path in (queue.folder.parent / race_folder.FOLDER).glob("*/plan.json"))
    ours = [path for path in folders if path.name.rpartition("-")[0].endswith(entry.short)]
    if not ours or atomic.read_json(ours[-1] / "race.json", {}).get("why") == LEFT:
        return None
    return ours[-1] if entry.command[:1] == ["race"] else None


def end_cancelled(queue: Queue, entry: Entry) -> None:
    """Abandons the race of an entry that was cancelled, so that nothing resumes it; one that runs is its agent's."""
    if (why := queue.cancelled(entry)) is None or (race := race_of(queue, entry)) is None or state.is_running(race):
        return
    try:
        with state.locked(race):
            if not state.read(race, queue.folder.parent).has_ended:
                runner.finish(race, queue.folder.parent, "abandoned", why)
    except (OSError, ValueError) as error:
        remedy = f"its owner can end it with ./run.sh race --abandon {race.name}"
        say("queue", escape.line(f"{race.name} has not been ended: {error}: {remedy}"), always=True)
