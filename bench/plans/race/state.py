"""Reads how far a race has come from its plan, the ledger and the run folders each time, and nothing else."""

import contextlib
import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

from bench.base import atomic, private
from bench.base.reading import json_file
from bench.base.reading.damage import reading_record
from bench.plans import locks
from bench.plans.race import plan
from bench.record import ledger, race_folder, run_folder

LOCK = ".lock.tmp"  # a name that git ignores
OF_THE_DISK = ("disk_full", "disk_error")
OF_THE_MACHINE = ("agent_killed", "folder_removed", *OF_THE_DISK)  # kinds of failure that are not the arm's fault
PRIVATE = ("overrides", "own", "python", "deviations")  # what of an arm may hold private paths, which plan.json lacks
RUN = re.compile(rf"{race_folder.NAME.pattern}/{race_folder.NAME.pattern}")


class Turn(TypedDict):
    """One run of a plan's order."""

    arm: str
    seed: int
    discarded: bool
    compilation: int  # its number among the arm's compilations


class Plan(TypedDict):
    """The part of plan.json (bench/plans/race/plan.py) that is read here."""

    race_id: str
    arms: dict[str, race_folder.Arm]
    order: list[Turn]
    looks: list[int]
    baseline: str
    n: int


@dataclass
class Slot:
    """One run of the plan's order, and the runs that were started for it."""

    position: int
    arm: str
    seed: int
    discarded: bool
    compilation: int
    attempts: list[tuple[str, str]] = field(default_factory=list)  # ("<track>/<run_id>", status), oldest first

    @property
    def is_done(self) -> bool:
        """Whether it has its run. An interrupted run, or one ended by its machine or a lost node, leaves it open."""
        return self.status in ("complete", "failed")

    @property
    def status(self) -> str | None:
        return self.attempts[-1][1] if self.attempts else None


@dataclass
class State:
    """The state of one race."""

    folder: Path
    results: Path  # the folder that the ledger's names are relative to
    plan: dict[str, Any]  # plan.json; Plan declares what is read here
    lines: list[dict[str, Any]]  # this race's lines of the ledger
    slots: list[Slot]

    @property
    def race_id(self) -> str:
        return str(self.plan["race_id"])

    @functools.cached_property
    def arms(self) -> dict[str, dict[str, Any]]:
        """The arms of the plan with paths as they were typed.

        Raises ValueError if the file with these is not there any more, or not that of the plan.
        """
        if not self.plan.get("typed"):
            return cast(dict[str, dict[str, Any]], self.plan["arms"])
        path = self.folder / race_folder.LOCAL
        typed = atomic.read_json(path, {})
        if private.secret_hash(json.dumps(typed)) != self.plan["typed"]:
            what = "was changed while the race was running" if typed else "is gone, or cannot be read"
            raise ValueError(f"{path}: {what}, and it alone has the arms' paths as they were typed: begin a new race")
        return {name: arm | typed[name] for name, arm in self.plan["arms"].items()}

    def next_slot(self) -> Slot | None:
        """Returns the first open slot, or None."""
        return next((slot for slot in self.slots if not slot.is_done), None)

    def runs(self, arm: str, discarded: bool = False) -> list[str]:
        """Returns the runs in the arm's slots, in the plan's order, including failed ones."""
        mine = [slot for slot in self.slots if slot.arm == arm and slot.discarded == discarded]
        return [slot.attempts[-1][0] for slot in mine if slot.is_done]

    def interrupted(self, arm: str, warm_ups: bool = True) -> list[str]:
        """Returns the runs whose slot was run again, or is still open."""
        mine = [slot for slot in self.slots if slot.arm == arm and (warm_ups or not slot.discarded)]
        return [run for slot in mine for run, _ in (slot.attempts[:-1] if slot.is_done else slot.attempts)]

    def started(self) -> dict[str, int]:
        """Returns {arm: number of slots that are done}, without warm-ups."""
        return {arm: len(self.runs(arm)) for arm in self.plan["arms"]}

    def num_failed(self, arm: str) -> int:
        return sum(slot.status == "failed" for slot in self.slots if slot.arm == arm and not slot.discarded)

    @property
    def looks(self) -> list[dict[str, Any]]:
        looks = [line for line in self.lines if line["event"] == "look"]
        return [{key: line.get(key) for key in ("at", "started", "planned")} for line in looks]

    @property
    def has_unplanned_look(self) -> bool:
        return any(not look["planned"] for look in self.looks)

    @property
    def has_ended(self) -> bool:
        return any(line["event"] == "race_end" for line in self.lines)


def read(folder: str | Path, results: str | Path | None = None, book: ledger.Ledger | None = None) -> State:
    """Reads a race's folder. Raises ValueError if there is no plan, or it is not the one in the ledger.

    results: the folder that the ledger's names are relative to, by default RESULTS of RESULTS/races/RACE. book: its
    ledger.Ledger, if it has been read.
    """
    folder = Path(folder)
    results = folder.parent.parent if results is None else Path(results)
    with reading_record(folder / "plan.json"):
        design = json_file.read(folder / "plan.json", Plan)
        slots = [
            Slot(number, turn["arm"], turn["seed"], turn["discarded"], turn.get("compilation", 0))
            for number, turn in enumerate(design["order"])
        ]
    lines = (book or ledger.read(results)).race_lines(design["race_id"])
    planned = [line.get("plan_sha256") for line in lines if line["event"] == "plan"]
    if planned != [plan.sha256(design)]:
        raise ValueError(f"{folder}/plan.json: is {'not the plan in the' if planned else 'in no'} ledger: restore it")
    for run, events in ledger.runs_of(lines).items():
        position = cast(dict[str, int], events["start"]["race"] or {}).get("position", -1)
        if not RUN.fullmatch(run) or not 0 <= position < len(slots):
            raise ValueError(f"{folder}: the ledger has {run!r} at position {position} of {len(slots)}: it was changed")
        if slots[position].is_done:
            done, status = slots[position].attempts[-1]
            raise ValueError(f"{folder}: run {position + 1} is {done}, {status}, and the ledger has {run} in its place")
        status = "aborted"
        if (end := events["end"]) is not None:
            status = "aborted" if end.get("failure") in OF_THE_MACHINE else str(end["status"])
        else:  # its launcher was killed: the record has the status
            with contextlib.suppress(ValueError):
                status = run_folder.read(results / run)["status"]
        slots[position].attempts.append((run, status))
    return State(folder, results, design, cast(list[dict[str, Any]], lines), slots)


def unfinished(results: str | Path) -> list[Path]:
    """Returns the folders of races that have a plan and no end, oldest first."""
    ended = {line.get("race_id") for line in ledger.read(results).lines if line["event"] == "race_end"}
    folders = sorted(path.parent for path in (Path(results) / race_folder.FOLDER).glob("*/plan.json"))
    return [folder for folder in folders if folder.name not in ended]


def is_running(folder: Path | str) -> bool:
    """Returns whether a process holds the race's lock."""
    return locks.holder(Path(folder) / LOCK) is not None


def locked(folder: str | Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other processes from running this race within the block, which raises leases.Busy if one runs it."""
    return locks.held(Path(folder) / LOCK, "runs this race")


def as_json(
    state: State, status: str, why: str | None, ended_at: str, result: race_folder.Result | None
) -> race_folder.Race:
    """Returns race.json, the outcome of the plan."""
    design, arms = state.plan, {}
    for name, facts in design["arms"].items():
        runs = {"runs": state.runs(name), "warm_up_runs": state.runs(name, True)}
        arms[name] = facts | runs | {"interrupted_runs": state.interrupted(name)}
    return {
        "schema_version": plan.SCHEMA_VERSION,
        "race_id": state.race_id,
        "status": status,
        "why": why,
        "track": design["track"],
        "started_at": design["made_at"],
        "ended_at": ended_at,
        "baseline": design["baseline"],
        "plan": design,
        "plan_sha256": plan.sha256(design),
        "arms": arms,
        "order": [
            {"position": slot.position, **turn, "run": slot.attempts[-1][0] if slot.is_done else None}
            | {"status": slot.status}
            for slot, turn in zip(state.slots, design["order"], strict=True)
        ],
        "looks": state.looks,
        "unplanned_look": state.has_unplanned_look,
        "result": result,
    }
