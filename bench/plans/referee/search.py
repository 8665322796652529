"""A search: its folder, and how far it has come, read from its journal each time, and from nothing else.

results/searches/<search>/
    ledger.jsonl     the journal, with the chain, the count and the fsync of bench/record/ledger.py.  Events:
                     search (settings), calibrated, submitted, refused, confirming, decided, search_end
    submissions/<k>/ what was submitted, read-only from then on
    checks/<k>/      results folder of its short run before the race, checks/champion/ of the champion's
The races lie with all others (results/races/), named after the search and the submission, so that a race that a kill
cut off is found again and resumed.
"""

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from bench.base.metric import VAL_LOSS
from bench.base.paths import user_path
from bench.base.reading import json_file
from bench.base.reading.damage import reading_record
from bench.compare import searching
from bench.compare.searching import Stop
from bench.launch.console import say
from bench.plans import locks
from bench.record import ledger

FOLDER = "searches"
LOCK = ".lock.tmp"  # a name that git ignores
HARMLESS = ("the last, is damaged or unfinished", "a clock was set back, or lines were made up")  # ends of faults
Decision = Literal["keep", "drop", "undecided", "refused"]


class Arm(TypedDict):
    """A contestant: words of ./run.sh run, and the revision of this repository that reads them."""

    overrides: list[str]
    rev: str | None


class Settings(TypedDict):
    """The facts of the line "search"."""

    search: str
    champion: Arm
    on: str
    alpha: float
    effect: float | None  # the gain looked for: % of the time, or in the metric's unit; None: by the calibration
    is_effect_pct: NotRequired[bool]  # whether it was given with a %; absent in older journals
    budget_s: float
    price: float | None  # dollars per device and hour
    trust: bool


class Calibration(TypedDict):
    """The facts of the line "calibrated"."""

    race_id: str
    sd: float  # standard deviation of a run, of log time or in the metric's unit
    effect: float  # the gain that the search looks for, in the same unit
    unit: NotRequired[str]  # of the goal's metric; absent in journals that began before it was kept
    run_s: float  # wall time of one run
    spent_s: float
    devices: int
    is_audited: bool  # whether the champion passed its audits; if so, keeps must pass them
    audits: NotRequired[list[str]]  # the kinds of audits that it passed, each of which a keep must pass
    # training time after which the check of a submission ends a script; None: the champion fails that check
    check_s: NotRequired[float | None]


class Decided(TypedDict):
    """The facts of the lines "decided" and "refused"."""

    submission: int
    decision: Decision
    why: str
    gain: NotRequired[float | None]
    ci95: NotRequired[list[float] | None]
    stage: NotRequired[str]  # race or confirmation, whichever decided it
    cause: NotRequired[str | None]  # what changed most in a step, by the looks of its races
    races: NotRequired[list[str]]
    spent_s: float  # wall time of its runs
    arm: NotRequired[Arm | None]  # the new champion, for a keep


@dataclass
class Submission:
    """A change that was submitted."""

    number: int
    author: str
    note: str
    about: str  # what was submitted, as typed
    arm: Arm
    at: str
    level: float | None = None  # the level of its confirmation, once it has one
    decided: Decided | None = None


@dataclass
class Search:
    """The state of a search."""

    folder: Path
    settings: Settings
    calibration: Calibration | None = None
    submissions: dict[int, Submission] = field(default_factory=dict)
    confirmations: list[Submission] = field(default_factory=list)  # as they began: their levels are the error budget
    has_ended: bool = False
    faults: list[str] = field(default_factory=list)  # faults of the journal's chain and of its count of lines

    @property
    def name(self) -> str:
        return self.settings["search"]

    @property
    def results(self) -> Path:
        return self.folder.parent.parent

    @property
    def kept(self) -> list[Submission]:
        """The keeps, in order: the last is the champion."""
        return [entry for entry in self.submissions.values() if entry.decided and entry.decided["decision"] == "keep"]

    @property
    def champion(self) -> Arm:
        kept = self.kept
        return kept[-1].arm if kept else self.settings["champion"]

    @property
    def open(self) -> list[Submission]:
        return [entry for entry in self.submissions.values() if entry.decided is None]

    @property
    def spent_s(self) -> float:
        """Wall time of all runs, including the calibration's."""
        own = self.calibration["spent_s"] if self.calibration else 0.0
        return own + math.fsum(entry.decided["spent_s"] for entry in self.submissions.values() if entry.decided)

    @property
    def doubt(self) -> str | None:
        """Says what was changed in the journal or removed from it, as no power failure and no clock does; or None."""
        fault = next((fault for fault in self.faults if not fault.endswith(HARMLESS)), None)
        return fault and f"{self.name}: its journal was changed ({fault}): restore it, or begin another search"

    def device_s(self, spent_s: float) -> float:
        """Returns the device-seconds of a wall time: times the number of devices of a run."""
        return spent_s * (self.calibration["devices"] if self.calibration else 1)

    def dollars(self, spent_s: float) -> float | None:
        """Returns the price of a wall time; None if the price of a device is not known."""
        price = self.settings["price"]
        return None if price is None else self.device_s(spent_s) / 3600 * price

    def cost(self, spent_s: float) -> str:
        """Formats a wall time as 120 device-seconds, with dollars if the price is known."""
        dollars = self.dollars(spent_s)
        return f"{self.device_s(spent_s):.0f} device-seconds" + ("" if dollars is None else f", ${dollars:.2f}")

    def stop(self, level: float | None) -> Stop:
        assert self.calibration is not None
        return {"sd": self.calibration["sd"], "effect": self.calibration["effect"], "level": level}

    def next_level(self) -> float:
        """Returns the level of the next confirmation, which depends on those before it, ended or not."""
        ended = [bool(entry.decided and entry.decided["decision"] == "keep") for entry in self.confirmations]
        return searching.level(self.settings["alpha"], ended)

    @property
    def unit(self) -> str:
        """The unit of the goal's metric as it follows a number, " nats"; "" for a metric without one."""
        return f" {self.calibration.get('unit', VAL_LOSS.unit) if self.calibration else VAL_LOSS.unit}".rstrip()

    def shown(self, gain: float) -> str:
        """Formats a gain in the unit of the question."""
        if self.settings["on"] == "loss":
            return f"{abs(gain):.4f}{self.unit} {'better' if gain >= 0 else 'worse'}"
        return f"{abs(100 * math.expm1(-gain)):.2f} % {'less' if gain >= 0 else 'more'} time"


def read(folder: Path) -> Search:
    """Reads a search. Raises ValueError if the folder has no journal, or it does not begin as one."""
    journal = ledger.read(folder)
    lines = cast(list[dict[str, Any]], journal.lines)
    if not lines or lines[0]["event"] != "search":
        raise ValueError(f"{folder.name}: is not a search: ./run.sh referee start begins one")
    lost = ledger.lost_end(journal)
    faults = [*journal.faults, *([f"this machine has {lost}"] if lost else [])]
    with reading_record(folder / ledger.NAME):
        search = Search(folder, json_file.check_kind(lines[0], Settings, folder), faults=faults)
        for line in lines[1:]:
            _enter(search, line)
    return search


def _enter(search: Search, line: dict[str, Any]) -> None:
    match line["event"]:
        case "calibrated":
            search.calibration = json_file.check_kind(line, Calibration, search.folder)
        case "submitted":
            number = line["submission"]
            facts = {key: line[key] for key in ("author", "note", "about", "arm", "at")}
            search.submissions.setdefault(number, Submission(number, **facts))
        case "confirming":
            submission = search.submissions[line["submission"]]
            if submission.level is None:
                submission.level = line["level"]
                search.confirmations.append(submission)
        case "decided" | "refused":
            submission = search.submissions[line["submission"]]
            if submission.decided is None:
                submission.decided = json_file.check_kind(line, Decided, search.folder)
        case "search_end":
            search.has_ended = True


def append(search: Search, event: str, **facts: object) -> Search:
    """Adds a line to the journal, which is on disk on return, and returns the search as it is then."""
    ledger.append(search.folder, event, **facts)
    return read(search.folder)


def find(results: Path, name: str | None = None) -> Path:
    """Returns the folder of the search of this name, or of the newest. Raises ValueError if there is none."""
    folders = sorted(path.parent for path in (results / FOLDER).glob(f"*/{ledger.NAME}"))
    if name is not None:
        folders = [folder for folder in folders if folder.name == name or folder == user_path(name).absolute()]
    if not folders:
        problem = "no search has begun" if name is None else f"{name}: there is no such search"
        raise ValueError(f"{problem}: ./run.sh referee start track=cpu_nano budget=1h begins one")
    return folders[-1]


def locked(folder: Path, waits: str = "waiting for {}, which works on it") -> contextlib.AbstractContextManager[None]:
    """Lets only one process work on a search, or begin one, within the block; others print waits and wait for it."""
    return locks.held(folder / LOCK, "", wait=lambda holder: say("referee", waits.format(holder), always=True))
