"""Reads a race's folder, results/races/<race_id>/: plan.json is written before its first run, race.json at its end."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from bench.base.paths import REPO, results_root
from bench.base.reading import json_file
from bench.base.reading.damage import Damaged, reading_record
from bench.record import ledger

FOLDER = "races"
LOCAL = ".local.tmp"  # {arm: its overrides ...} with private paths, for this machine until the race ends
CACHES = ".caches.tmp"  # compilers' caches, in the folder of a race until it ends
ARMS = "RACE_ARMS"  # variable of the runs of a race: the folders of its arms' scripts
DEFAULT = "the default"
WHOLE_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")  # of a commit
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}  # {variable: subfolder of CACHES}
STAIRCASE = "ladder.html"  # the page in the folder of a race of the ladder
ARM = re.compile(r"[A-Z][A-Za-z0-9_]*")  # an arm's name
NAME = re.compile(r"\w[\w.-]*")  # no slashes or "..": the id may come from a foreign record


class Arm(TypedDict, total=False):
    """An arm as planned, and the names of its runs."""

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
    """race.json, the outcome of a plan.  A run is named "<track>/<run_id>"."""

    schema_version: int
    race_id: str
    status: str  # complete, stopped_early, abandoned
    why: str | None  # for stopped_early and abandoned
    track: str
    started_at: str  # UTC, like ended_at
    ended_at: str
    baseline: str
    plan: dict[str, Any] | None  # bench/plans/race/plan.py
    plan_sha256: str
    arms: Required[dict[str, Arm]]
    order: list[dict[str, Any]]  # position, arm, seed, discarded, run, status
    looks: list[dict[str, Any]] | None  # at, started, planned
    unplanned_look: bool  # whether there was an interim look that is not in the plan
    result: Result | None  # None if the race was abandoned
    machine: list[str]  # observations about the machine before and after; absent if not measured


def of(results: Path | str, race_id: str) -> Path:
    """Returns the folder of a race.  Raises ValueError if race_id cannot be an id."""
    if not NAME.fullmatch(race_id):
        raise ValueError(f"{race_id!r} cannot be a race's id: ./run.sh race --help says how a race is named")
    return Path(results) / FOLDER / race_id


def is_open(results: Path, race_id: str) -> bool:
    """Returns whether a race has begun and not ended, so that nobody may look at its runs."""
    race = results / FOLDER / race_id
    return (race / "plan.json").is_file() and not (race / "race.json").is_file()


def describe(arm: Mapping[str, Any], of_revisions: bool = False) -> str:
    """Describes an arm of a plan or of race.json: its overrides and its code, which may be the checkout's."""
    rev, overrides = arm.get("rev"), " ".join(arm.get("overrides") or ())
    if rev is None and of_revisions:
        checkout = "this checkout" + ", with uncommitted changes" * bool(arm.get("dirty"))
        return f"{overrides} in {checkout}" if overrides else checkout
    return (overrides or DEFAULT) + ("" if rev is None else f" at {rev}")


def about(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns {name: describe() of the arm}, without the overrides that all arms share."""
    common = shared(arms)
    own = {name: [text for text in arm.get("overrides") or [] if text not in common] for name, arm in arms.items()}
    of_revisions = any(arm.get("rev") is not None for arm in arms.values())
    abouts = {name: describe({**arm, "overrides": own[name]}, of_revisions) for name, arm in arms.items()}
    return {name: "no other setting" if common and text == DEFAULT else text for name, text in abouts.items()}


def commit_of(arm: Mapping[str, Any]) -> str | None:
    """Returns the commit that an arm is, of a script's repository or of the harness; None if it is none."""
    revs = [word.partition("=")[2] for word in arm.get("overrides") or () if word.startswith("script.rev=")]
    return revs[-1] if revs else arm.get("commit") if arm.get("rev") else None


def shared(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the overrides that all arms have, in the order of the first arm."""
    overrides = [arm.get("overrides") or [] for arm in arms.values()]
    return [override for override in overrides[0] if all(override in others for others in overrides)]


def read(folder: Path | str) -> Race:
    """Returns the race.json of a folder.  Raises ValueError if it is missing or damaged."""
    path = Path(folder).absolute() / "race.json"
    if not path.is_file():
        name = path.parent.name
        if _end_sha256(path):
            remedy = f"restore it from a copy, or read the verdict of its runs: race --look {name}"
            raise ValueError(f"{name}: its race.json is missing, though the race has ended: {remedy}")
        raise ValueError(f"{name}: the race has no race.json, it has not ended: race --resume {name}, or --look {name}")
    with reading_record(path):
        return cast(Race, json_file.read(path, Race))


def vouched(folder: Path | str) -> Race:
    """Returns the race.json of a folder, as read().  Raises Damaged if the ledger beside it names another one."""
    path = Path(folder).absolute() / "race.json"
    race, sha256 = read(folder), _end_sha256(path)
    if sha256 and sha256 != ledger.sha256_of(path):
        raise Damaged(f"{path}: is not the one that the ledger has from the end of the race: restore it")
    return race


def _end_sha256(path: Path) -> str | None:
    """Returns what the ledger beside the races says of a race.json, None if it has no end of this race."""
    book = path.parent.parent.parent / ledger.NAME
    if not book.is_file():
        return None
    state = book.stat()
    return _ends(book.parent, state.st_size, state.st_mtime_ns).get(path.parent.name)


@functools.lru_cache(maxsize=4)
def _ends(results: Path, size: int, mtime_ns: int) -> dict[str, str | None]:
    """Returns {race_id: sha256 of the race.json that was written last} of a ledger in this state."""
    lines = ledger.lines_with(results, re.compile(rb'"race_end"'))
    return {line["race_id"]: line.get("race_json_sha256") for line in lines if "race_id" in line}


def verdicts_of(race: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {candidate: its Comparison} from race.json; {} for a race that was abandoned."""
    against: dict[str, dict[str, Any]] = (race.get("result") or {}).get("against") or {}
    return against


def run_folder_of(folder: Path, run: str) -> Path | None:
    """Returns the folder of a run "<track>/<run_id>": in results/, or beside a race that was moved; None if missing."""
    bases = (folder.parent.parent, results_root(), folder, REPO)
    return next((Path(base, run) for base in bases if Path(base, run, "run.json").is_file()), None)
