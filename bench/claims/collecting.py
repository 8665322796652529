"""Collects results of several machines in one folder: joins their ledgers, and copies their runs and races.

collect() works in this order, so that it can be killed at any moment and repeated:
 1. It reads the place's ledger once, after the count of its lines.  If the ledger is damaged, or has a run or race that
    differs from one here by the same name, it is refused, and nothing is changed.
 2. It adds the ledger lines that are missing here (record/joining.py), all or none.
 3. It copies each finished run that is missing here to .collecting/, checks it against the ledger and by every rule of
    verify, and moves it to its final path.  Plans and results of races follow.

If it is repeated, it reads the place's ledgers, what they list as new, and its sweeps.  A run brings its
certificate.json and audit.json, and the replays and audits that these name, which have their own ledgers.  Such a
certificate or audit remains a claim of that place; to rely on it, repeat it here.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bench.base import atomic
from bench.base.paths import PUBLISHED, shown
from bench.base.reading import damage, json_file, plain_file
from bench.base.reading.place import Place
from bench.base.text_table import counted, some
from bench.compare import calibration
from bench.machine import passports
from bench.plans import locks
from bench.plans.race import plan
from bench.record import certificates, joining, ledger, line_count, race_folder, run_folder, sweep, verification
from bench.record.ledger import Ledger, Line, StartedRun
from bench.report import race_page, sweep_page

OF_CHECKS = (certificates.REPLAYS, certificates.AUDITS_FOLDER)  # results folders inside a results folder
POINTS = re.compile(r"points[\w.]*\.jsonl")
STAGING, LOCK = ".collecting", ".collect.lock"  # in the folder that receives the results
NOT_TRACKS = (
    *(PUBLISHED, race_folder.FOLDER, sweep.FOLDER, certificates.REPLAYS, calibration.FOLDER, passports.FOLDER),
    *("jobs", "queue", "searches", "site"),  # of rooms that this one does not import
)
ENDED = ("failed", "stopped")  # of runs that are part of a race or sweep as complete ones are
RUN = re.compile(r"(?![.])[^/\0\n]{1,100}/(?![.])[^/\0\n]{1,200}")
NUM_AT_ONCE = 4  # files of a run that are copied in parallel


@dataclass
class Collected:
    """What was collected from a place."""

    num_lines: int = 0  # lines of its ledger
    num_new_lines: int = 0
    names: list[str] = field(default_factory=list)  # its runs that are here now
    new_names: set[str] = field(default_factory=set)
    num_races: int = 0  # races whose plan is here now
    num_sweeps: int = 0
    num_checks: int = 0  # runs of its replays and audits that are here now
    num_unfinished: int = 0  # runs without an end in the ledger: still running, or killed
    num_imported: int = 0  # imported logs, which are in no ledger
    refused: list[str] = field(default_factory=list)  # sentences on what was refused

    def __str__(self) -> str:
        parts = [
            f"{counted(len(self.names), 'run')} ({len(self.new_names)} new)",
            counted(self.num_races, "race"),
            *([counted(self.num_sweeps, "sweep")] if self.num_sweeps else []),
            *([counted(self.num_checks, "rerun")] if self.num_checks else []),
            f"{counted(self.num_lines, 'ledger line')} ({self.num_new_lines} new)",
        ]
        parts += [f"{counted(self.num_unfinished, 'run')} without an end"] if self.num_unfinished else []
        parts += [f"{counted(self.num_imported, 'imported log')} left there"] if self.num_imported else []
        return ", ".join(parts)


def collect(place: Place, into: Path, without: Collection[str] = ()) -> Collected:
    """Copies what a place has and the results folder into lacks.  without: roles of files that are not copied.

    Raises ValueError if the place cannot be read or is refused as a whole, and then changes nothing.  Raises OSError if
    into cannot be written.
    """
    if place.folder and into.resolve().is_relative_to(place.folder.resolve()):
        raise ValueError(f"{place}: the folder to collect into is this one, or in it: collect --into another one")
    with _alone(into):
        is_more_beside = _has_news(place, into)
        collected = _collect(place, into, without)
        # a sweep on several machines becomes one here, with a file of points for each place
        mark = hashlib.sha256(str(place.folder.resolve() if place.folder else place).encode()).hexdigest()[:8]
        for sweep_id in filter(race_folder.NAME.fullmatch, place.names(sweep.FOLDER)):
            with _refusing(collected, where := f"{sweep.FOLDER}/{sweep_id}"):
                collected.num_sweeps += _take_sweep(place, into / where, where, f"points.{mark}.jsonl")
        for name in collected.names:
            if name in collected.new_names or is_more_beside:
                _take_beside(place, into, name)
        for part in OF_CHECKS:
            with _refusing(collected, part):
                if place.read(f"{part}/{ledger.NAME}"):
                    checks = _collect(place.below(part), into / part, without)
                    collected.num_checks += len(checks.names)
                    collected.refused += [f"{part}/{sentence}" for sentence in checks.refused]
    return collected


@contextlib.contextmanager
def _refusing(collected: Collected, part: str) -> Iterator[None]:
    """Records a ValueError in this block as a refusal of this part of a place, so that the others are copied."""
    try:
        yield
    except ValueError as error:
        collected.refused.append(f"{part}: {error}")


def _collect(place: Place, into: Path, without: Collection[str]) -> Collected:
    """Collects the ledger, runs and races of one results folder.  Raises as collect() does."""
    content, theirs = _ledgers(place, into)
    collected = Collected(len(theirs.lines), joining.join(into, content))
    for name, run in (union := ledger.read(into)).runs.items():
        if name not in theirs.runs:
            continue
        if run["end"] is None or run["end"].get("run_json_sha256") is None:
            collected.num_unfinished += 1
            continue
        their_end = theirs.runs[name]["end"]
        if their_end is None or their_end["sha256"] != run["end"]["sha256"]:
            continue  # an older state of a run that was resumed; this folder has the later one
        try:
            if _take_run(place, into, name, run, union.lines, without):
                collected.new_names.add(name)
            collected.names.append(name)
        except damage.BAD as error:
            if isinstance(error, OSError) and error.errno in plain_file.FULL:
                raise
            collected.refused.append(f"{name}: {error}")
    _take_races(place, into, theirs, collected)
    _look_for_others(place, into, collected)
    return collected


@contextlib.contextmanager
def _alone(into: Path) -> Iterator[None]:
    """Locks the folder against other collectors, and removes what a killed one left half copied."""
    into.mkdir(parents=True, exist_ok=True)
    with locks.held(into / LOCK, "is collecting into it"):
        try:
            shutil.rmtree(into / STAGING, ignore_errors=True)
            yield
        finally:
            shutil.rmtree(into / STAGING, ignore_errors=True)


def _ledgers(place: Place, into: Path) -> tuple[bytes, Ledger]:
    """Returns (complete lines of the place's ledger, the parsed ledger).  Raises ValueError if it cannot be joined."""
    counts = None
    with contextlib.suppress(ValueError):  # a damaged line count is ignored
        # read before the ledger, which may grow meanwhile
        counts = json_file.parsed(place.read(line_count.NAME) or b"null", line_count.NAME)
    content = place.read(ledger.NAME, plain_file.MAX_LINES_BYTES)
    if not content or b"\n" not in content:
        raise ValueError(f"{place}: has no {ledger.NAME}, so no record there can be checked: name a results folder")
    content = content[: content.rindex(b"\n") + 1]  # drop a line that is being written
    theirs, own = ledger.from_bytes(into, content), ledger.read(into)
    if own.faults:
        raise ValueError(f"{shown(into)}: its own ledger is not whole: {some(own.faults)}: restore it first")
    if fault := joining.fault_of(theirs, counts):
        raise ValueError(f"{place}: {fault}: nothing was collected from it; restore it there")
    if names := joining.clashes(own, theirs):
        both = f"{place}/{names[0]} and {shown(into / names[0])} have the same name but differ"
        raise ValueError(f"{both} ({len(names)} such): nothing was collected from it; collect it --into another folder")
    return content, theirs


# ---- runs


def _take_run(
    place: Place, into: Path, name: str, run: StartedRun, lines: Sequence[Line], without: Collection[str]
) -> bool:
    """Copies a run and returns whether it is new here.  lines: the joined ledger.  Raises ValueError if refused."""
    target, end = into / name, run["end"]
    assert end is not None
    if not RUN.fullmatch(name) or name.partition("/")[0] in NOT_TRACKS:
        raise ValueError("is not <track>/<run_id>")
    if is_there := (target / "run.json").is_file():
        own_sha256 = ledger.sha256_of(target / "run.json")
        if own_sha256 == end["run_json_sha256"]:
            return False
        if own_sha256 not in [line.get("run_json_sha256") for line in lines if line.get("run") == name]:
            raise ValueError(f"{place}/{name} and {shown(target)} have the same name but differ; both are kept")
    staged = into / STAGING / target.name
    try:
        _copy_run(place, name, staged, run, without)
        rules = verification.report(staged)["rules"]
        if end["status"] in ENDED:  # a run that failed is part of its race
            rules = [rule for rule in rules if rule["rule"] != "is complete"]
        if failed := [f"{rule['rule']}: {rule['evidence']}" for rule in rules if not rule["passed"]]:
            raise ValueError(f"fails verify: {some(failed, separator='; ')}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_there:  # an earlier state of the same run, which was resumed since
            os.rename(target, staged.with_name(f"{target.name}.earlier"))
        try:
            os.rename(staged, target)
        except OSError as error:
            raise ValueError(f"{shown(target)} is in the way ({error.strerror}): move it") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return True


def _is_within(folder: Path, path: str) -> bool:
    return (folder / path).resolve().is_relative_to(folder.resolve())


def _copy_run(place: Place, name: str, staged: Path, run: StartedRun, without: Collection[str]) -> None:
    """Copies run.json and the files that it lists.  Raises ValueError if one is missing or contradicts the ledger."""
    content = place.read(f"{name}/run.json")
    if content is None or run["end"] is None or ledger.sha256_of_bytes(content) != run["end"]["run_json_sha256"]:
        raise ValueError(f"its run.json is {'missing' if content is None else 'not the one in the ledger'}: restore it")
    staged.mkdir(parents=True)
    atomic.write_bytes(staged / "run.json", content)
    record = run_folder.read_raw(staged)
    if record.get("ledger_sha256") != run["start"]["sha256"]:
        raise ValueError("the ledger's line of its start is not the one that it names")
    files = [artifact for artifact in record["artifacts"] if artifact["role"] not in without]
    for artifact in files:
        parts = PurePosixPath(artifact["path"]).parts
        if not parts or parts[0] == "/" or ".." in parts or parts == ("run.json",) or artifact["num_bytes"] < 0:
            raise ValueError(f"lists {artifact['path'][:100]!r}, which is no file of a run")
        is_bound = bool(artifact.get("sha256"))  # so that it can be nothing but the run's, wherever it lies
        if place.folder and not is_bound and not _is_within(place.folder / name, artifact["path"]):
            raise ValueError(f"its {artifact['path']} is a link that leads out of its folder, which is not followed")

    def copy(artifact: dict[str, Any]) -> None:
        try:
            place.copy(f"{name}/{artifact['path']}", staged / artifact["path"], artifact["num_bytes"])
        except damage.Missing:
            role = artifact["role"]
            remedy = f" (published records lack such files: use --without {role})"
            remedy *= role in verification.LOCAL_ROLES
            raise ValueError(f"its {artifact['path']} is not there{remedy}") from None
        sha256 = artifact.get("sha256")
        if sha256 and ledger.sha256_of(staged / artifact["path"]) != sha256:  # before anything can quote it
            raise ValueError(f"its {artifact['path']} is not the one that its run.json lists: it was changed")

    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for copied in [pool.submit(copy, artifact) for artifact in files]:
            copied.result()


# ---- races, and records outside the ledger


def _take_races(place: Place, into: Path, theirs: Ledger, collected: Collected) -> None:
    """Copies the plan of each race in the place's ledger, and race.json of those that have ended."""
    ends = {line.get("race_id"): line.get("race_json_sha256") for line in theirs.lines if line["event"] == "race_end"}
    for line in theirs.lines:
        if line["event"] != "plan":
            continue
        race_id = line.get("race_id", "")
        with _refusing(collected, f"{race_folder.FOLDER}/{race_id}"):
            folder = race_folder.of(into, race_id)
            _take_file(place, folder, "plan.json", _plan_sha256, line.get("plan_sha256"))
            ended = ends.get(race_id)
            if ended and _take_file(place, folder, "race.json", ledger.sha256_of_bytes, ended):
                race_page.write(folder)
            collected.num_races += 1


def _take_file(place: Place, folder: Path, name: str, digest: Callable[[bytes], str], sha256: str | None) -> bool:
    """Copies a race's file and returns whether it is new here.  Raises ValueError if missing or unlike the ledger."""
    is_there = (folder / name).exists()
    if is_there and digest(plain_file.content(folder / name)) == sha256:
        return False
    content = place.read(f"{race_folder.FOLDER}/{folder.name}/{name}")
    if content is None or digest(content) != sha256:
        raise ValueError(f"{name} is {'missing' if content is None else 'not the one in the ledger'}: restore it")
    if is_there:
        raise ValueError(f"{shown(folder / name)} is another one, not that of the ledger; both are kept")
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(folder / name, content)
    return True


def _plan_sha256(content: bytes) -> str:
    return plan.sha256(json_file.parsed(content, "plan.json", dict[str, Any]))


def _look_for_others(place: Place, into: Path, collected: Collected) -> None:
    """Reports records that the place's ledger does not list; they are not copied."""
    tracks = [track for track in place.names() if not track.startswith(".") and track not in NOT_TRACKS]
    names = [f"{track}/{run_id}" for track in tracks for run_id in place.names(track) if not run_id.startswith(".")]
    # read again, after the folders, as runs may have begun since it was joined
    theirs = ledger.from_bytes(into, place.read(ledger.NAME, plain_file.MAX_LINES_BYTES) or b"")
    for name in names:
        if name not in theirs.runs:
            with contextlib.suppress(ValueError):  # not a record
                record = json_file.parsed(place.read(f"{name}/run.json") or b"{}", name, dict[str, Any])
                if record.get("provenance") == "imported":
                    collected.num_imported += 1
                elif "run_id" in record:
                    why = "is not in the ledger there: it came from elsewhere, or lines were lost"
                    collected.refused.append(f"{name}: {why}")


# ---- certificates, audits and sweeps


def _has_news(place: Place, into: Path) -> bool:
    """Returns whether a ledger of the place's replays or audits ends with a line that this folder lacks."""
    for part in OF_CHECKS:
        theirs, own = (place.read(f"{part}/{ledger.NAME}", plain_file.MAX_LINES_BYTES), into / part / ledger.NAME)
        last = (theirs or b"").rstrip(b"\n").rpartition(b"\n")[2]
        if last and (not own.exists() or last not in plain_file.content(own, plain_file.MAX_LINES_BYTES)):
            return True
    return False


def _take_beside(place: Place, into: Path, name: str) -> None:
    """Copies a run's certificate.json and audit.json if it has none here; invalid ones are skipped."""
    for file, kind in ((certificates.FILE, certificates.Certificate), (certificates.AUDIT_FILE, certificates.Audit)):
        if not (into / name / file).exists() and (content := place.read(f"{name}/{file}")) is not None:
            with contextlib.suppress(ValueError):
                json_file.parsed(content, file, kind)
                atomic.write_bytes(into / name / file, content)


def _take_sweep(place: Place, folder: Path, where: str, points: str) -> bool:
    """Copies a sweep and returns whether it is here now.  where: its path in the place; points: name of its file."""
    into = folder.parent.parent
    has_news = False
    for name, kind in ((sweep.NAME, sweep.Facts), (sweep.STUDY, sweep.Study)):
        if (content := place.read(f"{where}/{name}")) is None:
            continue
        theirs = json_file.parsed(content, name, kind)
        if not (folder / name).exists() or _progress(json_file.read(folder / name, kind)) < _progress(theirs):
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(folder / name, content)
            has_news = True
    if not (folder / sweep.NAME).exists():
        return False
    files = filter(POINTS.fullmatch, place.names(where, files=True))
    lines = [line for name in files for line in (place.read(f"{where}/{name}") or b"").splitlines(keepends=True)]
    runs = [(line, json_file.parsed(line, where, sweep.Kept)["folder"]) for line in lines]
    kept = [line for line, name in runs if RUN.fullmatch(name) and (into / name / "run.json").is_file()]
    has_points = kept and (not (folder / points).exists() or plain_file.content(folder / points) != b"".join(kept))
    if has_points:
        atomic.write_bytes(folder / points, b"".join(kept))
    if has_news or has_points or not (folder / sweep_page.NAME).exists():
        sweep_page.write(folder)
    return True


def _progress(facts: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a sort key by which the later state of a sweep.json or study.json is the greater one."""
    if "race_id" in facts:  # a study
        return facts["race_id"] is not None, facts["num_trials"] is not None
    return max(facts["started_at"], facts["ended_at"] or ""), facts["ended_at"] is not None
