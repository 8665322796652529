"""Takes commands from a lab's queue (bench/plans/queue.py) and runs them on this machine, one at a time."""

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
from bench.plans.queue import FOLDER, OF_THE_DISK, RACE_WAITS_S, Entry, Queue, code
from bench.plans.race import planning, runner, state
from bench.record import race_folder

LOOK_EVERY_S = 5.0  # how often the agent looks at the queue
TICK_S = 0.5
BEAT_S = 5.0
BUSY_WAITS_S = 60.0  # the first wait after the machine was busy; each further wait is twice as long
ENV = ("SPEEDRUN_CWD", groups.VARIABLE, groups.NAME_VARIABLE, "CUDA_VISIBLE_DEVICES")  # variables that an entry may set
PRICE = "hardware.price_usd_per_hour"
END_WITHIN_S = 30.0  # the command ends its workers, then finishes its records
LEFT = "the machine that it began on did not come back"  # why a race was abandoned; its entry begins another one


@dataclass
class Agent:
    """Runs commands of the queue in the folder results whose verb is in verbs. usd_per_hour is the price of a GPU, or
    of the machine for commands without one; None if unknown."""

    results: Path
    usd_per_hour: float | None
    verbs: tuple[str, ...]

    def __post_init__(self) -> None:
        self.queue = Queue(self.results / FOLDER)
        self._taken: Entry | None = None
        self._began_s = 0.0
        self._exit_code: int | None = None  # of the taken entry, once its command has ended by itself
        self._busy: dict[str, tuple[int, float]] = {}  # {id: (how often the machine was busy, until when it waits)}
        self._reported = set[str]()
        self._session_id = environment.session_id(environment.environment())

    def go(self, once: bool) -> int:
        """Works until interrupted, or with `once` runs one entry. Returns its exit code, 0 if nothing could begin.

        Raises ValueError if the queue cannot be trusted or its budgets are malformed.
        """
        self.queue.check_trust()
        with raise_interrupted() as signals:
            try:
                while True:
                    try:
                        exit_code = self._run_next(signals, once)
                    except (OSError, ValueError) as error:  # an error of the queue, not of an entry
                        if once:
                            raise
                        exit_code, self._taken = None, None  # the lease of an entry that was taken runs out
                        self._report_once(str(error))
                    if once:
                        if exit_code is None:
                            say("queue", "no waiting entry can start here now")
                        return exit_code or 0
                    if exit_code is None:
                        signals.check()
                        time.sleep(LOOK_EVERY_S)
            finally:
                signals()
                if self._taken is not None:
                    self._end(self._taken, "it was given back" if self._exit_code is None else "it ended")

    def _run_next(self, signals: Signals, once: bool) -> int | None:
        """Runs the next entry and returns its exit code; None if no entry can begin now."""
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
        """Prints a reason why the agent cannot work, the first time that it occurs."""
        if text not in self._reported:
            say("queue", escape.line(text), always=True)
            self._reported.add(text)

    @contextlib.contextmanager
    def _next(self) -> Iterator[Entry | None]:
        """Yields the next entry for this machine, taken, with its GPUs leased; None if there is none now.

        The first that fits this machine is waited for, so that one that needs many GPUs is not passed over for ever.
        """
        waiting = shares.order(self.queue)
        own_code = code() if waiting else None
        for entry in waiting:
            if entry.code not in (None, own_code):
                remedy = "start an agent from that checkout, or cancel the entry and submit it from theirs"
                why = f"{entry.id}: waits, because it was submitted from other code than this agent's: {remedy}"
                if why not in self._reported:
                    with contextlib.suppress(OSError), self.queue.opened_log(entry) as log:
                        log.write(f"{why}\n".encode())
                self._report_once(why)
            elif entry.command[:1] and entry.command[0] in self.verbs and self._may_begin(entry):
                with leases.free(entry.num_gpus) as devices:
                    if devices is None:
                        break
                    entry.env["CUDA_VISIBLE_DEVICES"] = ",".join(device.name for device in devices)
                    try:
                        with held():
                            self._exit_code, self._began_s = None, time.monotonic()
                            self._taken = self.queue.take(entry, self._usd_per_hour(entry))
                    except OSError as error:
                        self._report_once(f"{entry.id}: cannot be taken: {error.strerror}")
                        continue
                    if self._taken is not None:
                        yield self._taken
                        return
                    end_cancelled(self.queue, entry)  # if whoever cancelled it was killed before that
        yield None

    def _may_begin(self, entry: Entry) -> bool:
        """Returns whether this machine has the GPUs and, if the entry has begun a race, may resume or replace it."""
        if entry.num_gpus > len(gpus.devices()) or time.monotonic() < self._busy.get(entry.id, (0, 0.0))[1]:
            return False
        if (race := race_of(self.queue, entry)) is None:
            return True
        if state.is_running(race):  # its agent was believed lost, but it goes on
            return False
        try:
            planning.enter(race, self.results)
            if self._goes_on_here(race):
                return True
        except (OSError, ValueError):  # the command begins, and reports what is wrong
            return True
        with contextlib.suppress(FileNotFoundError):
            return self.queue.idle_s(entry) > RACE_WAITS_S
        return False

    def _goes_on_here(self, race: Path) -> bool:
        """Returns whether a race was begun in this machine's session, or has ended and would only show its answer."""
        begun = state.read(race, self.results)
        return begun.has_ended or bool(begun.plan["session_id"] == self._session_id)

    # ---- one entry

    def _run(self, entry: Entry, signals: Signals) -> int:
        """Runs a taken entry and returns its exit code, 1 if it was given back."""
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
                self._wait(f"{entry.id} has ended, but that cannot be recorded: {error}", signals)

    def _wait(self, why: str, signals: Signals) -> None:
        self._report_once(why)
        signals.check()
        time.sleep(LOOK_EVERY_S)

    def _run_command(self, entry: Entry, signals: Signals) -> str:
        """Runs the command until it ends or this agent loses the entry. Returns why it ended."""
        command = self._command(entry)
        env = os.environ | {name: entry.env[name] for name in ENV if name in entry.env}
        env["SPEEDRUN_RESULTS"] = str(self.results)
        program = [sys.executable, "-m", "bench", *command]
        with self.queue.opened_log(entry) as out:
            message = f"{entry.id} of {entry.user}: {shlex.join(command)}, log {shown(Path(out.name))}"
            say("queue", escape.line(message), always=True)
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
                with contextlib.suppress(OSError):  # a folder that does not answer for a moment ends no command
                    if not self.queue.keep(entry):
                        break
                    self._put_back_lost()
            time.sleep(TICK_S)

    def _end(self, entry: Entry, why: str) -> int:
        """Records how an entry ended, unless this agent has lost it. Returns the exit code, 1 if there is none."""
        with held():
            exit_code = self._exit_code
            end_cancelled(self.queue, entry)
            if not self.queue.keep(entry) and self.queue.has_outcome(entry):
                exit_code, why = None, "another agent took it over, as this one seemed lost"
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
        """Returns the verb and arguments: a race begun here is resumed, one begun elsewhere is abandoned first."""
        command, usd_per_hour = list(entry.command), self._usd_per_hour(entry)
        if usd_per_hour and not any(argument.startswith(PRICE) for argument in command):  # a price of 0 is none
            command.append(f"{PRICE}={usd_per_hour:g}")
        if (race := race_of(self.queue, entry)) is not None:
            if self._goes_on_here(race):
                return ["race", "--resume", race.name, *command[1:]]
            runner.finish(race, self.results, "abandoned", LEFT)
        if command[0] == "race":
            names = [argument.removeprefix("name=") for argument in command if argument.startswith("name=")]
            command = [argument for argument in command if not argument.startswith("name=")]
            command.append(f"name={(names or ['race'])[-1]}{entry.short}")
        return command


def race_of(queue: Queue, entry: Entry) -> Path | None:
    """Returns the latest race that an entry has begun; None if there is none, or it was abandoned as LEFT."""
    folders = sorted(path.parent for path in (queue.folder.parent / race_folder.FOLDER).glob("*/plan.json"))
    own = [path for path in folders if path.name.rpartition("-")[0].endswith(entry.short)]
    if not own or atomic.read_json(own[-1] / "race.json", {}).get("why") == LEFT:
        return None
    return own[-1] if entry.command[:1] == ["race"] else None


def end_cancelled(queue: Queue, entry: Entry) -> None:
    """Abandons the race of a cancelled entry, so that nothing resumes it. A running race is left to its agent."""
    if (why := queue.cancelled(entry)) is None or (race := race_of(queue, entry)) is None or state.is_running(race):
        return
    try:
        with state.locked(race):
            if not state.read(race, queue.folder.parent).has_ended:
                runner.finish(race, queue.folder.parent, "abandoned", why)
    except (OSError, ValueError) as error:
        remedy = f"its owner can end it with ./run.sh race --abandon {race.name}"
        say("queue", escape.line(f"{race.name} has not been ended: {error}: {remedy}"), always=True)
