"""A lab's queue: commands in a folder that its machines share, each taken by one agent, run there to its end.

    queue/waiting/ID.json             a command, as it was submitted; its owner is whose it is
    queue/taken/ID@TOKEN.json         the same file, taken by an agent: by a rename, which one process alone can do
    queue/taken/ID@TOKEN.lease        touched by that agent while it lives
    queue/ended/ID@TOKEN.json         what became of it there; exit_code null: it was given back, or its agent was lost
    queue/logs/ID.log                 what it printed
    queue/budgets.yaml                what users may spend, if the lab has written it

A lease is lost when another agent has seen it untouched for LEASE_S by its own clock; that agent puts the command back.
An agent that finds its command gone ends what it runs.
"""

import contextlib
import errno
import json
import math
import os
import pwd
import secrets
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, TypedDict, cast

from bench.base import atomic, credentials
from bench.base.paths import working_folder
from bench.base.reading import json_file, plain_file, yaml_file
from bench.base.reading.damage import BAD, Damaged, reading_record
from bench.config import groups

FOLDER = "queue"  # of a results folder
LEASE_S = 120.0  # longer than an agent needs to end what it runs
MAX_LOST = 3  # agents: then the command is what ends them
RACE_WAITS_S = 3600.0  # for the machine that it began on
LIMITS = ("gpu_hours", "usd")
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # which say nothing of an entry
STATES = ("waiting", "taken", "ended", "logs")


class Entry(NamedTuple):
    """A command that was submitted."""

    id: str
    user: str
    num_gpus: int
    command: list[str]
    env: dict[str, str]
    token: str | None = None  # of the agent that has it

    @property
    def name(self) -> str:
        return self.id if self.token is None else f"{self.id}@{self.token}"

    @property
    def short(self) -> str:
        """With which the name of its race ends."""
        return f"-{self.id.rpartition('-')[2]}"


class Submitted(TypedDict):
    """A file of waiting/ and taken/."""

    num_gpus: int
    command: list[str]  # a verb and its arguments
    env: dict[str, str]  # variables of the submitter's that say what the arguments mean


class Outcome(TypedDict):
    """What an agent made of an entry."""

    id: str
    user: str
    exit_code: int | None  # None: it was given back or lost, and waits again
    why: str
    num_gpus: int
    hours: float
    usd: float | None  # None: the agent had no --usd-per-hour
    ended_s: float  # since 1970


@dataclass
class Queue:
    """The queue of a results folder."""

    folder: Path
    _watched: dict[str, tuple[float | None, float]] = field(default_factory=dict)  # a lease's mtime, since when
    _looked_s: float = 0.0  # at the leases, by time.monotonic()

    # ---- who submits

    def submit(self, command: list[str], num_gpus: int) -> str:
        """Adds a command -> its id.  ValueError: it holds a credential, or the folder cannot be written."""
        for word in command:
            if credentials.found(word):
                raise ValueError(f"{word.partition('=')[0]}: looks like a credential, and others can read the queue")
        kept = {"SPEEDRUN_CWD": working_folder()}
        kept |= {name: os.environ[name] for name in (groups.VARIABLE, groups.NAME_VARIABLE) if name in os.environ}
        id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self._make()
        _write(self._path("waiting", id), Submitted(num_gpus=num_gpus, command=command, env=kept))
        return id

    def cancel(self, id: str) -> None:
        """Removes an entry that waits, or ends one that runs once its agent sees it.  ValueError: there is none."""
        for state in ("taken", "waiting", "taken"):
            for entry in [each for each in self._entries(state) if each.id == id]:
                with contextlib.suppress(FileNotFoundError):  # it has just been taken, or has ended
                    self._path(state, entry.name).unlink()
                    return
        raise ValueError(f"{id}: neither waits nor runs: ./run.sh submit --list shows what does")

    # ---- what there is

    def waiting(self) -> list[Entry]:
        """The oldest first."""
        return self._entries("waiting")

    def taken(self) -> list[Entry]:
        return self._entries("taken")

    def outcomes(self) -> list[Outcome]:
        found = []
        for path in sorted((self.folder / "ended").glob("*.json")):
            with contextlib.suppress(*BAD):
                found.append(cast(Outcome, json_file.read(path, Outcome)))
        return found

    def _entries(self, state: str) -> list[Entry]:
        found = []
        for path in sorted((self.folder / state).glob("*.json")):
            with contextlib.suppress(Damaged):  # it was just taken, or is no entry
                found.append(_entry(path))
        return found

    def unreadable(self) -> list[str]:
        """Why files of waiting/ are no entries for this user, a sentence each."""
        why = []
        for path in sorted((self.folder / "waiting").glob("*.json")):
            try:
                _entry(path)
            except Damaged as error:
                why += [str(error)] * path.exists()
        return why

    def order(self) -> list[Entry]:
        """fair() of the entries that wait, without those of users who have used up a budget.

        ValueError: budgets.yaml makes no sense.
        """
        recent, budgets = self.recent(), self.budgets()
        within = [each for each in self.waiting() if not over_budget(recent, budgets, each.user)]
        return fair(within, self.taken(), recent)

    def recent(self) -> list[Outcome]:
        """The outcomes of the days that count."""
        since_s = datetime.now(UTC).timestamp() - 86400 * self.budgets()["days"]
        return [each for each in self.outcomes() if each["ended_s"] > since_s]

    def budgets(self) -> dict[str, Any]:
        """days, limits of every user, and users: {name: limits of theirs}.  ValueError: as of order()."""
        path = self.folder / "budgets.yaml"
        given = yaml_file.read(path) if path.exists() else {}
        users = {} if given.get("users") is None else given["users"]
        if not isinstance(users, dict) or not all(isinstance(limits, dict) for limits in users.values()):
            raise ValueError(f"{path}: users: {users}: write limits by name: users: {{ann: {{gpu_hours: 100}}}}")
        of_all = {name: value for name, value in given.items() if name != "users"}
        for table, names in ((of_all, ("days", *LIMITS)), *((limits, LIMITS) for limits in users.values())):
            for name, value in table.items():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if name not in names or not is_number or not 0 <= value < math.inf:
                    raise ValueError(f"{path}: {name}: {value}: use numbers of 0 or more for {', '.join(names)}")
        return {"days": 30} | of_all | {"users": {str(name): limits for name, limits in users.items()}}

    # ---- agents

    def take(self, entry: Entry) -> Entry | None:
        """The entry, if it is this process that got it.  OSError: this user may not take it."""
        mine = entry._replace(token=secrets.token_hex(4))
        self._lease(mine).touch()
        try:
            os.rename(self._path("waiting", entry.id), self._path("taken", mine.name))
        except FileNotFoundError:  # another agent has it; or a network file system said so of a rename that it did
            if not self._path("taken", mine.name).exists():
                self._lease(mine).unlink(missing_ok=True)
                return None
        except OSError:
            self._lease(mine).unlink(missing_ok=True)
            raise
        return mine

    def keep(self, entry: Entry) -> bool:
        """Says that this agent lives.  False: it was believed lost, and somebody else may have the entry, or the entry
        was cancelled."""
        try:
            os.utime(self._lease(entry))
        except FileNotFoundError:
            return False
        return self._path("taken", entry.name).exists()

    def end(self, entry: Entry, exit_code: int | None, why: str, hours: float, usd: float | None) -> None:
        """The entry's command has ended; exit_code None: it waits again."""
        known: Any = {"id": entry.id, "user": entry.user, "num_gpus": entry.num_gpus}
        known |= {"exit_code": exit_code, "why": why, "hours": hours, "usd": usd}
        _write(self._path("ended", entry.name), known | {"ended_s": datetime.now(UTC).timestamp()})
        self._leave(entry, exit_code)

    def has_outcome(self, entry: Entry) -> bool:
        """Whether somebody has said what became of an entry of this agent's."""
        return self._path("ended", entry.name).exists()

    def give_back(self, entry: Entry) -> None:
        """The entry waits again, and nothing is written: for a full disk."""
        self._leave(entry, None)

    def put_back_lost(self, at_once: bool = False) -> list[Entry]:
        """Entries whose agents are lost wait again -> those that this process put back, or ended after MAX_LOST.

        at_once: believe the file system's clock, where nobody looks again.
        """
        lost = []
        for entry in self._silent(at_once):
            known_s = _mtime_s(self._lease(entry))
            ended = self._path("ended", entry.name)
            if ended.exists():  # it was lost between the end and its file's
                self._leave(entry, atomic.read_json(ended, {}).get("exit_code"))
                continue
            num_lost = sum(each["id"] == entry.id and each["why"] == "its agent was lost" for each in self.outcomes())
            try:
                began_s = self._path("taken", entry.name).stat().st_ctime  # of the rename
            except FileNotFoundError:
                continue
            hours = 0.0 if known_s is None else max(0.0, known_s - began_s) / 3600
            self.end(entry, 1 if num_lost + 1 >= MAX_LOST else None, "its agent was lost", hours, None)
            lost.append(entry)
        return lost

    def _silent(self, at_once: bool) -> list[Entry]:
        """Those whose lease nobody has touched for LEASE_S while this process looked.

        A pause of the whole machine does not count: the watch begins again afterwards.
        """
        now_s, taken = time.monotonic(), self.taken()
        if now_s - self._looked_s > LEASE_S / 2:
            self._watched.clear()
        known = {entry.name: _mtime_s(self._lease(entry)) for entry in taken}
        before, self._looked_s = self._watched, now_s
        self._watched = {
            name: before[name] if name in before and before[name][0] == mtime_s else (mtime_s, now_s)
            for name, mtime_s in known.items()
        }
        if not at_once:
            return [entry for entry in taken if now_s - self._watched[entry.name][1] >= LEASE_S]
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".now-") as probe:
            file_system_s = os.stat(probe.name).st_mtime
        return [entry for entry in taken if file_system_s - (known[entry.name] or 0.0) >= LEASE_S]

    def _leave(self, entry: Entry, exit_code: int | None) -> None:
        try:
            if exit_code is None:
                os.rename(self._path("taken", entry.name), self._path("waiting", entry.id))
            else:
                self._path("taken", entry.name).unlink()
        except FileNotFoundError:  # another agent was as quick
            pass
        self._lease(entry).unlink(missing_ok=True)

    def idle_s(self, entry: Entry) -> float:
        """Seconds since the entry, which waits, was submitted or given back, by this machine's clock."""
        return max(0.0, datetime.now(UTC).timestamp() - self._path("waiting", entry.id).stat().st_ctime)

    def log(self, entry: Entry) -> Path:
        return self.folder / "logs" / f"{entry.id}.log"

    def opened_log(self, entry: Entry) -> IO[bytes]:
        """To be appended to: log(), or where that is another user's or no plain file, one of this agent's.  OSError."""
        try:
            return _opened_log(self.log(entry))
        except OSError as error:
            if error.errno in OF_THE_DISK:
                raise
            return _opened_log(self.log(entry).with_stem(entry.name))

    def check_trust(self) -> None:
        """Makes the folder.  ValueError: anybody on the machine may write into it, or this user may not."""
        self._make()
        for state in ("", *STATES):
            if not os.access(self.folder / state, os.R_OK | os.W_OK | os.X_OK):
                raise ValueError(f"{self.folder / state}: cannot be written: ask its owner for chmod -R g+rwX")
            if (self.folder / state).stat().st_mode & stat.S_IWOTH:
                remedy = f"chmod -R o-w {self.folder}; a group of people who trust each other may"
                raise ValueError(f"{self.folder / state}: anybody may write there: {remedy}")

    def _make(self) -> None:
        for name in STATES:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def _path(self, state: str, name: str) -> Path:
        return self.folder / state / f"{name}.json"

    def _lease(self, entry: Entry) -> Path:
        return self.folder / "taken" / f"{entry.name}.lease"


def fair(waiting: Iterable[Entry], taken: Iterable[Entry], recent: Iterable[Outcome]) -> list[Entry]:
    """Whose turn it is: who has the fewest GPUs at work, then who has had the fewest hours of one; a user's own by age.

    A command without a GPU counts as one.
    """
    at_work, hours = Counter[str](), dict[str, float]()
    for entry in taken:
        at_work[entry.user] += max(1, entry.num_gpus)
    for each in recent:
        hours[each["user"]] = hours.get(each["user"], 0.0) + max(1, each["num_gpus"]) * each["hours"]
    return sorted(waiting, key=lambda each: (at_work[each.user], hours.get(each.user, 0.0), each.id))


def spent(outcomes: Iterable[Outcome], user: str) -> dict[str, float]:
    """What a user has had, by LIMITS."""
    own = [each for each in outcomes if each["user"] == user]
    gpu_hours = sum(each["num_gpus"] * each["hours"] for each in own)
    return {"gpu_hours": gpu_hours, "usd": sum(each["usd"] or 0.0 for each in own)}


def over_budget(recent: Sequence[Outcome], budgets: Mapping[str, Any], user: str) -> str | None:
    """The budget that a user has used up, in words; None: there is some left, or none was set."""
    limits = dict(budgets) | dict(budgets["users"].get(user, {}))
    for name, used in spent(recent, user).items():
        if name in limits and used >= limits[name]:
            return f"{user} has used {used:.4g} of {limits[name]:g} {name} in {budgets['days']:g} days"
    return None


def _entry(path: Path) -> Entry:
    """Of a file of waiting/ or taken/.  Damaged: it is none."""
    id, _, token = path.stem.partition("@")
    with reading_record(path):
        submitted = cast(Submitted, json_file.read(path, Submitted))
        if submitted["num_gpus"] < 0:
            raise ValueError(f"{path}: num_gpus: {submitted['num_gpus']}: use 0 or more")
        return Entry(id, _name_of(path.stat().st_uid), **submitted, token=token or None)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic.replacing(path) as file:
        _share(file.fileno(), path.parent)
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def _opened_log(path: Path) -> IO[bytes]:
    file = open(path, "ab", opener=lambda name, flags: plain_file.open_now(name, flags | os.O_NOFOLLOW))  # noqa: SIM115
    with contextlib.suppress(PermissionError):  # another user's
        _share(file.fileno(), path.parent)
    return file


def _share(fd: int, folder: Path) -> None:
    """The group that may write into the folder may read the file, whatever the umask."""
    if folder.stat().st_mode & stat.S_IWGRP:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IRGRP)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _mtime_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
