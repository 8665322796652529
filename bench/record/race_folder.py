"""The race folder, results/races/<race_id>/: plan.json from before its first run, race.json and pages from its end."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from bench.base.paths import REPO, results_root
from bench.base.reading import json_file
from bench.base.reading.damage import reading_record

FOLDER = "races"
CACHES = ".caches.tmp"  # in the folder of a race until it ends: what its compilers keep
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}  # variable: its part of a cache
STAIRCASE = "ladder.html"  # in the folder of a race of the ladder
NAME = re.compile(r"\w[\w.-]*")  # never a way out of the folder: it may come from a foreign record


class Arm(TypedDict, total=False):
    """The plan's facts of an arm, and the names of its runs."""

    overrides: list[str] | None
    name: str | None
    rev: str | None
    commit: str | None
    dirty: bool | None
    config_id: str | None
    runs: list[str] | None
    warm_up_runs: list[str] | None
    interrupted_runs: list[str] | None


class Result(TypedDict, total=False):
    """The verdicts: {candidate: bench.compare.verdict.Comparison}."""

    baseline: str
    against: dict[str, dict[str, Any]] | None


class Race(TypedDict, total=False):
    """race.json: what became of a plan.  A run is "<track>/<run_id>"."""

    schema_version: int
    race_id: str
    status: str  # complete, stopped_early, abandoned
    why: str | None  # for the last two
    track: str
    started_at: str  # UTC, as ended_at
    ended_at: str
    baseline: str
    plan: dict[str, Any] | None  # bench/plans/race/plan.py
    plan_sha256: str
    arms: Required[dict[str, Arm]]
    order: list[dict[str, Any]]  # position, arm, seed, discarded, run, status
    looks: list[dict[str, Any]] | None  # at, started, planned
    unplanned_look: bool  # there was an interim look that the plan has not
    result: Result | None  # None: abandoned
    machine: list[str]  # what was found of it before and after; absent: not measured


def of(results: Path | str, race_id: str) -> Path:
    """The folder of a race.  ValueError if race_id cannot be an id."""
    if not NAME.fullmatch(race_id):
        raise ValueError(f"{race_id!r} cannot be a race's id: ./run.sh race --help says how a race is named")
    return Path(results) / FOLDER / race_id


def what(arm: Mapping[str, Any]) -> str:
    """An arm of a plan or of race.json as text: its overrides and its revision."""
    rev = arm.get("rev")
    return (" ".join(arm.get("overrides") or ()) or "the default") + ("" if rev is None else f" at {rev}")


def about(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """{name: what() of the arm}, without the overrides that all arms share."""
    common = shared(arms)
    own = {name: [word for word in arm.get("overrides") or [] if word not in common] for name, arm in arms.items()}
    return {name: what({**arm, "overrides": own[name]}) for name, arm in arms.items()}


def shared(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Overrides that all arms have, in the order of the first."""
    overrides = [arm.get("overrides") or [] for arm in arms.values()]
    return [override for override in overrides[0] if all(override in others for others in overrides)]


def read(folder: Path | str) -> Race:
    """The race.json of a folder.  ValueError if it is missing or damaged."""
    path = Path(folder) / "race.json"
    if not path.is_file():
        name = Path(folder).name
        raise ValueError(f"{name}: the race has no race.json, it has not ended: race --resume {name}, or --look {name}")
    with reading_record(path):
        return cast(Race, json_file.read(path, Race))


def verdicts_of(race: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """race.json -> {candidate: its Comparison}; {} of a race that was abandoned."""
    against: dict[str, dict[str, Any]] = (race.get("result") or {}).get("against") or {}
    return against


def run_folder_of(folder: Path, run: str) -> Path | None:
    """The folder of a run "<track>/<run_id>": in results/, or beside a race that was moved; None without one."""
    bases = (folder.parent.parent, results_root(), folder, REPO)
    return next((Path(base, run) for base in bases if Path(base, run, "run.json").is_file()), None)
