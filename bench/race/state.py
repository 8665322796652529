"""How far a race has come, found out anew each time: from its plan, the ledger and the run folders, and nothing else."""

import contextlib
import fcntl
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.race import plan
from bench.record import ledger, run_folder

FOLDER = "races"
LOCK = ".lock.tmp"  # a name that git ignores
NUM_ATTEMPTS = 10
NAME = re.compile(r"\w[\w.-]*")  # never a way out of the folder: it may come from somebody else's record
RUN = re.compile(rf"{NAME.pattern}/{NAME.pattern}")


@dataclass
class Place:
    """One place of the plan's order, and the runs that were started for it."""

    position: int
    arm: str
    seed: int
    discarded: bool
    attempts: list = field(default_factory=list)  # [(run, status)], oldest first; run is "<track>/<run_id>"

    @property
    def is_done(self):
        """A run that was interrupted leaves its place open; one that failed does not."""
        return bool(self.attempts) and self.attempts[-1][1] in ("complete", "failed")

    @property
    def run(self):
        return self.attempts[-1][0] if self.is_done else None

    @property
    def status(self):
        return self.attempts[-1][1] if self.attempts else None


@dataclass
class State:
    """Of one race."""

    folder: Path
    plan: dict
    lines: list  # of the ledger, this race's
    places: list

    @property
    def race_id(self):
        return self.plan["race_id"]

    def next_place(self):
        """The first place that is open, or None."""
        return next((place for place in self.places if not place.is_done), None)

    def runs(self, arm, discarded=False):
        """The runs that hold a place of this arm, in order of the plan; failed ones too."""
        return [
            place.run for place in self.places if place.arm == arm and place.discarded == discarded and place.is_done
        ]

    def interrupted(self, arm):
        """Runs whose place was raced again, or still is open."""
        mine = [place for place in self.places if place.arm == arm]
        return [run for place in mine for run, _ in (place.attempts[:-1] if place.is_done else place.attempts)]

    def started(self):
        """{arm: number of places that are done}, warm-ups left out."""
        return {arm: len(self.runs(arm)) for arm in self.plan["arms"]}

    def num_failed(self, arm):
        return sum(place.status == "failed" for place in self.places if place.arm == arm and not place.discarded)

    def events(self, name):
        return [line for line in self.lines if line["event"] == name]

    @property
    def looks(self):
        return [
            {"at": line["at"], "started": line["started"], "planned": line["planned"]} for line in self.events("look")
        ]

    @property
    def is_over(self):
        return bool(self.events("race_end"))


def folder_of(results, race_id):
    """Where a race lies.  ValueError for what cannot be a race's id."""
    if not NAME.fullmatch(race_id):
        raise ValueError(f"{race_id!r} is no name of a race")
    return Path(results) / FOLDER / race_id


def locate(word):
    """What a user calls a race -> its folder: a path, or the race's id; None if it is none."""
    try:
        folder = run_folder.locate(word)
    except ValueError:
        return None
    return folder if (folder / "plan.json").is_file() else None


def read(folder, results=None):
    """A race's folder -> State.  ValueError where there is no plan, or it is not the one that the ledger knows."""
    folder = Path(folder)
    results = folder.parent.parent if results is None else Path(results)
    try:
        found = json.loads((folder / "plan.json").read_text())
        places = [
            Place(position, one["arm"], one["seed"], one["discarded"]) for position, one in enumerate(found["order"])
        ]
        arms = {place.arm for place in places}
        assert arms == set(found["arms"]) and found["baseline"] in arms and found["n"] == max(found["looks"])
        lines = ledger.of_race(ledger.read(results), found["race_id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{folder}/plan.json: is no plan of a race ({error!r})") from None
    planned = [line["plan_sha256"] for line in lines if line["event"] == "plan"]
    if planned != [plan.sha256(found)]:
        why = (
            "the ledger knows no such plan"
            if not planned
            else "it is not the plan that the ledger knows: it was changed"
        )
        raise ValueError(f"{folder}/plan.json: {why}")
    for run, told in ledger.runs(lines).items():
        position = told["start"]["race"]["position"]
        if not RUN.fullmatch(run):
            raise ValueError(f"{folder}: the ledger knows a run {run!r}, which is no <track>/<run_id>")
        if not 0 <= position < len(places):
            raise ValueError(f"{folder}: the ledger knows a run at place {position}, the plan has {len(places)} places")
        places[position].attempts.append((run, _status(results, run, told["end"])))
    return State(folder, found, lines, places)


def _status(results, run, end):
    """How the run ended, by the ledger; where that has no end (a killed launcher, a full disk), by its record."""
    if end is not None:
        return end["status"]
    try:
        return run_folder.read(results / run)["status"]
    except ValueError:
        return "aborted"


def unfinished(results):
    """Folders of the races that have a plan and no end, oldest first."""
    over = {line["race_id"] for line in ledger.read(results) if line["event"] == "race_end"}
    folders = sorted(path.parent for path in (Path(results) / FOLDER).glob("*/plan.json"))
    return [folder for folder in folders if folder.name not in over]


def is_raced_now(folder):
    """Whether a process holds the race's lock."""
    try:
        with open(Path(folder) / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never raced, or a file system without locks
        return False
    return False


@contextlib.contextmanager
def locked(folder):
    """Nobody else races this race meanwhile.  ValueError where somebody does."""
    with open(Path(folder) / LOCK, "w") as file:
        for attempts_left in reversed(range(NUM_ATTEMPTS)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not attempts_left:
                    raise ValueError(f"{folder}: another process is racing it") from None
                time.sleep(0.05)  # is_raced_now() of another race holds it for microseconds
            except OSError:
                break  # a file system without locks
        yield


def as_json(state, status, why, ended_at, result):
    """race.json: what became of the plan."""
    known = state.plan
    arms = {
        name: facts
        | {
            "runs": state.runs(name),
            "warm_up_runs": state.runs(name, True),
            "interrupted_runs": state.interrupted(name),
        }
        for name, facts in known["arms"].items()
    }
    order = [
        {
            "position": place.position,
            "arm": place.arm,
            "seed": place.seed,
            "discarded": place.discarded,
            "run": place.run,
            "status": place.status,
        }
        for place in state.places
    ]
    return {
        "schema_version": plan.SCHEMA_VERSION,
        "race_id": state.race_id,
        "status": status,
        "why": why,
        "track": known["track"],
        "started_at": known["made_at"],
        "ended_at": ended_at,
        "baseline": known["baseline"],
        "plan": known,
        "plan_sha256": plan.sha256(known),
        "arms": arms,
        "order": order,
        "looks": state.looks,
        "peeked": any(not look["planned"] for look in state.looks),
        "result": result,
    }
