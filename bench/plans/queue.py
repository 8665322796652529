"""A lab's queue: commands in a folder that its machines share; one agent takes each command and runs it to its end.

    queue/waiting/ID.json       a command as it was submitted; it belongs to the owner of the file
    queue/taken/ID@TOKEN.json   the same file once an agent has it: renamed, which only one process can do
    queue/taken/ID@TOKEN.lease  touched by that agent while it lives
    queue/cancelled/ID          empty; the owner of the file has cancelled the command
    queue/ended/ID@TOKEN.json   how it ended at that agent; exit_code null: it was given back, or its agent was lost
    queue/logs/ID.log           what it printed
    queue/budgets.yaml          what users may spend, if the lab has written it (bench/plans/shares.py)

A lease is lost when another agent has seen it untouched for LEASE_S by its own clock; that agent puts the command back.
An agent ends its command when it finds the command cancelled, or the command's file gone.
"""

import contextlib
import errno
import json
import os
import pwd
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, NotRequired, TypedDict, cast

import msgspec

from bench.base import atomic, credentials
from bench.base.paths import REPO, working_folder
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import BAD, Damaged, reading_record
from bench.config import groups
from bench.machine import code_copy

FOLDER = "queue"  # the name of the folder in a results folder
LEASE_S = 120.0  # longer than an agent needs to end what it runs
MAX_LOST = 3  # lost agents after which the command is assumed to end them
RACE_WAITS_S = 3600.0  # how long a race waits for the machine that it began on
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # of the disk, not of an entry
STATES = ("waiting", "taken", "cancelled", "ended", "logs")


class Entry(NamedTuple):
    """A command that was submitted."""

    id: str
    user: str
    num_gpus: int
    command: list[str]
    env: dict[str, str]
    code: str | None = None  # code() of the checkout that it was submitted from; None: an old entry
    token: str | None = None  # of the agent that has taken it

    @property
    def name(self) -> str:
        return self.id if self.token is None else f"{self.id}@{self.token}"

    @property
    def short(self) -> str:
        """The end of the name of its race."""
        return f"-{self.id.rpartition('-')[2]}"


class Submitted(TypedDict):
    """The content of a file in waiting/ or taken/."""

    num_gpus: Annotated[int, msgspec.Meta(ge=0)]
    command: list[str]  # a verb and its arguments
    env: dict[str, str]  # the submitter's variables that the arguments depend on
    code: NotRequired[str]


class Outcome(TypedDict):
    """How an entry ended at an agent."""

    id: str
    user: str
    exit_code: int | None  # None: it was given back or its agent was lost, and it waits again
    why: str
    num_gpus: int
    hours: float
    usd: float | None  # None: the agent had no --usd-per-hour
    ended_s: float  # seconds since 1970
    at_least: NotRequired[bool]  # whether its agent may have used more after its last sign of life


class Lease(TypedDict):
    """The content of a file that an agent touches while it has an entry."""

    began_s: float  # by the file system's clock, like the time at which the file was touched
    usd_per_hour: float | None  # price of the entry


@dataclass
class Queue:
    """The queue of a results folder."""

    folder: Path
    _watched: dict[str, tuple[float | None, float]] = field(default_factory=dict)  # (a lease's mtime, since when)
    _looked_s: float = 0.0  # the last look at the leases, by time.monotonic()

    # ---- who submits

    def submit(self, command: list[str], num_gpus: int) -> str:
        """Adds a command and returns its id. Raises ValueError for a credential, OSError if the folder is read-only."""
        for text in command:
            if credentials.find(text):
                raise ValueError(f"{text.partition('=')[0]}: looks like a credential, and others can read the queue")
        kept = {"SPEEDRUN_CWD": working_folder()}
        kept |= {name: os.environ[name] for name in (groups.VARIABLE, groups.NAME_VARIABLE) if name in os.environ}
        id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self._make()
        _write(self._path("waiting", id), Submitted(num_gpus=num_gpus, command=command, env=kept, code=code()))
        return id

    def cancel(self, id: str) -> Entry:
        """Ends a waiting entry, or marks a running one for its agent to end. Raises ValueError if there is none."""
        entries = [entry for entry in [*self.waiting(), *self.taken()] if entry.id == id]
        if not entries:
            raise ValueError(f"{id}: no such entry is waiting or running: ./run.sh submit --list shows them")
        self._make()
        with contextlib.suppress(FileExistsError):  # it was cancelled before, perhaps by another user
            (self.folder / "cancelled" / id).touch(exist_ok=False)
        for entry in self.waiting():  # also if its agent has given it back only now
            if entry.id == id:
                self.take(entry)
        return entries[0]

    def cancelled(self, entry: Entry) -> str | None:
        """Returns why a cancelled entry ends, such as "cancelled by ann"; None if it is not cancelled."""
        try:
            return f"cancelled by {_name_of((self.folder / 'cancelled' / entry.id).stat().st_uid)}"
        except FileNotFoundError:
            return None

    # ---- what there is

    def waiting(self) -> list[Entry]:
        """Returns the waiting entries, the oldest first."""
        return self._entries("waiting")

    def taken(self) -> list[Entry]:
        """Returns the entries that agents have, including cancelled ones, whose commands may still run."""
        return self._entries("taken")

    def outcomes(self) -> list[Outcome]:
        outcomes = []
        for path in sorted((self.folder / "ended").glob("*.json")):
            with contextlib.suppress(*BAD):
                outcomes.append(cast(Outcome, json_file.read(path, Outcome)))
        return outcomes

    def unreadable(self) -> list[str]:
        """Returns why files of waiting/ cannot be read as entries, one sentence per file."""
        faults: list[str] = []
        self._entries("waiting", faults)
        return faults

    def _entries(self, state: str, faults: list[str] | None = None) -> list[Entry]:
        entries = []
        for path in sorted((self.folder / state).glob("*.json")):
            try:
                entries.append(_entry(path))
            except Damaged as error:  # it was taken a moment ago, or is not an entry
                if faults is not None and path.exists():
                    faults.append(str(error))
        return entries

    # ---- agents

    def take(self, entry: Entry, usd_per_hour: float | None = None) -> Entry | None:
        """Takes the entry at this price; returns None if another agent has it. Ends it if cancelled. Raises OSError."""
        mine = entry._replace(token=secrets.token_hex(4))
        self._lease(mine).touch()
        try:
            os.rename(self._path("waiting", entry.id), self._path("taken", mine.name))
        except FileNotFoundError:  # another agent has it, or NFS reported a successful rename as failed
            if not self._path("taken", mine.name).exists():
                self._lease(mine).unlink(missing_ok=True)
                return None
        except OSError:
            self._lease(mine).unlink(missing_ok=True)
            raise
        try:
            began_s = self._path("taken", mine.name).stat().st_ctime  # the time of the rename
            _write(self._lease(mine), Lease(began_s=began_s, usd_per_hour=usd_per_hour))
        except OSError as error:  # of the file system; or it was cancelled at once
            if error.errno in OF_THE_DISK:  # a command would fail too
                self.give_back(mine)
                raise
        if why := self.cancelled(mine):
            self.end(mine, 1, why, 0.0, 0.0)
            return None
        return mine

    def keep(self, entry: Entry) -> bool:
        """Renews the agent's lease. Returns False if another agent may have taken the entry, or it was cancelled."""
        try:
            os.utime(self._lease(entry))
        except FileNotFoundError:
            return False
        names = os.listdir(self.folder / "taken")  # listed, because NFS caches look-ups of single files
        return f"{entry.name}.json" in names and entry.id not in os.listdir(self.folder / "cancelled")

    def end(
        self, entry: Entry, exit_code: int | None, why: str, hours: float | None = None, usd: float | None = None
    ) -> bool:
        """Records how the entry's command ended. Returns False if another process has moved the entry already.

        exit_code None: the entry waits again, unless it was cancelled. hours None: its agent was lost, and an existing
        outcome is kept.
        """
        path, outcome = self._path("ended", entry.name), self.so_far(entry) | {"exit_code": exit_code, "why": why}
        if hours is None:
            _write_first(path, outcome)
            outcome = atomic.read_json(path, outcome)
        else:
            outcome |= {"hours": hours, "usd": usd, "at_least": False}
        is_cancelled = outcome["exit_code"] is None and self.cancelled(entry) is not None
        if is_cancelled:
            outcome |= {"exit_code": 1, "why": str(self.cancelled(entry))}
        if is_cancelled or hours is not None:
            _write(path, outcome)
        return self._leave(entry, outcome["exit_code"])

    def so_far(self, entry: Entry) -> Outcome:
        """Returns the outcome of a taken entry as of its agent's last sign of life."""
        path, hours, usd = self._lease(entry), 0.0, None
        with contextlib.suppress(*BAD):
            lease = cast(Lease, json_file.read(path, Lease))
            hours = max(0.0, path.stat().st_mtime - lease["began_s"]) / 3600
            usd = None if lease["usd_per_hour"] is None else lease["usd_per_hour"] * hours
        outcome: Any = {"id": entry.id, "user": entry.user, "num_gpus": entry.num_gpus, "hours": hours, "usd": usd}
        outcome |= {"exit_code": None, "why": "it runs", "ended_s": datetime.now(UTC).timestamp(), "at_least": True}
        return cast(Outcome, outcome)

    def has_outcome(self, entry: Entry) -> bool:
        """Returns whether an outcome of the entry at this agent has been recorded."""
        return self._path("ended", entry.name).exists()

    def give_back(self, entry: Entry) -> None:
        """Puts the entry back to wait without recording an outcome, for when the disk is full."""
        self._leave(entry, None)

    def put_back_lost(self, at_once: bool = False) -> list[Entry]:
        """Puts entries of lost agents back, or ends them after MAX_LOST. Returns those that this process has moved.

        at_once: judge leases by the file system's clock, because this process will not look again.
        """
        lost = []
        for entry in self.silent(at_once):
            num_lost = sum(past["id"] == entry.id and past["why"] == "its agent was lost" for past in self.outcomes())
            if self.end(entry, 1 if num_lost + 1 >= MAX_LOST else None, "its agent was lost"):
                lost.append(entry)
        return lost

    def silent(self, at_once: bool) -> list[Entry]:
        """Returns the entries whose lease was not renewed for LEASE_S while this process watched.

        A pause of the whole machine does not count, because the watch begins again afterwards.  at_once: see
        put_back_lost().
        """
        now_s, taken = time.monotonic(), self.taken()
        if now_s - self._looked_s > LEASE_S / 2:
            self._watched.clear()
        mtimes: dict[str, float | None] = dict.fromkeys(entry.name for entry in taken)
        for entry in taken:
            with contextlib.suppress(FileNotFoundError):
                mtimes[entry.name] = self._lease(entry).stat().st_mtime
        before, self._looked_s = self._watched, now_s
        self._watched = {
            name: before[name] if name in before and before[name][0] == mtime_s else (mtime_s, now_s)
            for name, mtime_s in mtimes.items()
        }
        if not at_once:
            return [entry for entry in taken if now_s - self._watched[entry.name][1] >= LEASE_S]
        file_system_s = atomic.clock_s(self.folder)
        return [entry for entry in taken if file_system_s - (mtimes[entry.name] or 0.0) >= LEASE_S]

    def _leave(self, entry: Entry, exit_code: int | None) -> bool:
        """Moves the entry out of taken/, to wait again or to its end. Returns False if another agent was faster."""
        waits, is_moved = entry._replace(token=None), True
        try:
            if exit_code is None:
                os.rename(self._path("taken", entry.name), self._path("waiting", waits.name))
            else:
                self._path("taken", entry.name).unlink()
        except FileNotFoundError:
            is_moved = False
        self._lease(entry).unlink(missing_ok=True)
        if is_moved and exit_code is None and self.cancelled(entry):  # since it was put back
            self.take(waits)
        return is_moved

    def idle_s(self, entry: Entry) -> float:
        """Returns the seconds since a waiting entry was submitted or given back, by this machine's clock."""
        return max(0.0, datetime.now(UTC).timestamp() - self._path("waiting", entry.id).stat().st_ctime)

    def log(self, entry: Entry) -> Path:
        return self.folder / "logs" / f"{entry.id}.log"

    def opened_log(self, entry: Entry) -> IO[bytes]:
        """Opens log() for appending, as agents of other users in the queue's group can too. Raises OSError, also for a
        link, which may lead to a file of this user's, and for a pipe."""
        file = open(self.log(entry), "ab", opener=plain_file.open_here)  # noqa: SIM115
        with contextlib.suppress(PermissionError):  # another user's
            _share(file.fileno(), self.log(entry).parent, stat.S_IRGRP | stat.S_IWGRP)
        return file

    def check_trust(self) -> None:
        """Makes the folder. Raises ValueError if everybody may write into it, or this user may not."""
        self._make()
        for state in ("", *STATES):
            folder = self.folder / state
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise ValueError(f"{folder}: cannot be written: mount it writable, or ask its owner for chmod -R g+rwX")
            if folder.stat().st_mode & stat.S_IWOTH:
                remedy = f"chmod -R o-w {self.folder}; only a group whose members trust each other may write"
                raise ValueError(f"{folder}: everybody can write there: {remedy}")

    def _make(self) -> None:
        for name in STATES:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def _path(self, state: str, name: str) -> Path:
        return self.folder / state / f"{name}.json"

    def _lease(self, entry: Entry) -> Path:
        return self.folder / "taken" / f"{entry.name}.lease"


def code() -> str:
    """Returns a hash of this checkout's bench/, models/ and conf/ as they are now."""
    return code_copy.content_of(REPO).sha256


def _entry(path: Path) -> Entry:
    """Returns the entry in a file of waiting/ or taken/. Raises Damaged if the file holds none."""
    id, _, token = path.stem.partition("@")
    with reading_record(path):
        submitted = cast(Submitted, json_file.read(path, Submitted))
        return Entry(id, _name_of(path.stat().st_uid), **submitted, token=token or None)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic.replacing(path) as file:
        _share(file.fileno(), path.parent)
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def _write_first(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file unless it exists already."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(draft, content)
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:
        if not draft.exists():
            raise
        if not path.exists():  # a file system without hard links
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _share(fd: int, folder: Path, rights: int = stat.S_IRGRP) -> None:
    """Gives the group rights to the file, whatever the umask, if it may write into the folder."""
    if folder.stat().st_mode & stat.S_IWGRP:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | rights)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
