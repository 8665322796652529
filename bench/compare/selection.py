"""Turns the arguments of a comparison into its arms, which are groups of started runs."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.base.paths import PUBLISHED, results_root
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged, reading_record
from bench.base.text_table import counted
from bench.compare.eligibility import index_of_runs
from bench.record import configs, named, race_folder, run_folder, step_files, store
from bench.record.rows import Row, row_of
from bench.record.shape import Record
from bench.record.step_files import StepRow

MAX_DETECTED_LINES = 5_000  # at the end of a log, by which its format is found
SEPARATOR = "vs"
OnError = Callable[[str], None] | None


@dataclass
class Arm:
    """All started runs of one side of a comparison; rows and folders have the same length."""

    name: str  # as the user typed it, or the arm's name in its race
    rows: list[Row] = field(default_factory=list)
    folders: list[str | None] = field(default_factory=list)  # None for a log
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # {run_id: record} of runs without a folder
    plan: Mapping[str, Any] | None = None  # plan of the race, made before its first run
    race: str | None = None  # folder of the race
    unplanned_look: bool = False  # whether results of the race were shown at an interim analysis that was not planned
    num_run_again: int = 0  # how many of its runs in the race were interrupted and run again
    # the Comparison of this arm in race.json; for the baseline, that of its first candidate
    reported: Mapping[str, Any] | None = None
    damaged: dict[str, str] = field(default_factory=dict)  # {run_id: why its steps could not be read}
    in_race: tuple[str, str] | None = None  # (name, overrides) in the race
    warm_ups: Sequence[str | Path] = ()  # folders of discarded warm-up runs, the first of which has the arm's traces

    def record_of(self, number: int) -> Mapping[str, Any]:
        """Returns the whole record of the run with this index in rows."""
        folder = self.folders[number]
        return self.records[self.rows[number]["run_id"]] if folder is None else run_folder.read(folder)

    def steps_of(self, number: int) -> list[dict[str, Any]]:
        """Returns the rows of the run's steps.csv, or a log's imported steps; [] if they are damaged."""
        folder = self.folders[number]
        if folder is None:
            return self.record_of(number).get("steps") or []
        try:
            return step_files.read(folder)
        except Damaged as error:
            self.damaged[self.rows[number]["run_id"]] = str(error)
            return []


def arms_from_words(arguments: Sequence[str], on_error: OnError = None) -> list[Arm]:
    """Turns command-line arguments into arms, the baseline first.

    Each word is an arm, a race alone stands for all its arms, and "vs" separates arms of several words each.  What
    cannot be read is skipped and reported to on_error(message).  Raises ValueError if there is nothing to compare.
    """
    sides: list[list[str]] = [[]] if SEPARATOR in arguments else [[argument] for argument in arguments]
    for argument in arguments if SEPARATOR in arguments else ():
        sides.append([]) if argument == SEPARATOR else sides[-1].append(argument)
    if not all(sides):
        raise ValueError(f"{' '.join(arguments)}: write runs on both sides of {SEPARATOR}")
    selected = _Selected(sides, on_error)
    if len(sides) == 1:
        only, *others = selected.groups[0]
        if others or only.race is None:
            raise ValueError(f"{arguments[0]}: this is a single group of runs: name two, A B, or a race")
        return selected.arms_of_race(only)
    arms = [selected.arm(group) for group in selected.groups]
    if len(arms) > 2 and SEPARATOR not in arguments and all(len(arm.rows) == 1 for arm in arms):
        raise ValueError(f"{len(arms)} words are one run each, without a spread: quote a glob, or write A1 A2 vs B1 B2")
    return arms


def arm_from_each(names: Sequence[str], on_error: OnError = None) -> list[Arm]:
    """Turns each word into an arm, or a race into arms RACE:ARM, for commands that show runs without comparing them.

    What cannot be read is skipped and reported to on_error(message).  Raises ValueError if there is no run.
    """
    selected, arms = _Selected([[typed] for typed in names], on_error), list[Arm]()
    for group in selected.groups:
        if len(group) == 1 and group[0].race and group[0].arm is None:
            by_name = _arms_of_race(group[0].race, on_error)
            arms += [replace(arm, name=f"{group[0].race.name}:{name}") for name, arm in by_name.items()]
        else:
            arms.append(selected.arm(group))
    if not any(arm.rows for arm in arms):
        raise ValueError(f"{' '.join(names)}: no run of it is there: ./run.sh table lists the runs")
    return arms


def arm_from_folders(name: str, folders: Iterable[str | Path], on_error: OnError = None, **race_facts: Any) -> Arm:
    """Reads run folders as one arm, from the records themselves rather than from the store.

    race_facts: plan and other fields of Arm that a race has.  What cannot be read is skipped
    and reported to on_error(message).  Raises ValueError if a path is not a folder.
    """
    arm = Arm(name, **race_facts)
    for folder in sorted(set(map(os.path.abspath, folders))):
        run_folder.refuse_no_folder(folder)
        try:
            with reading_record(folder):
                arm.rows.append(row_of(run_folder.read(folder), configs.read(folder)))
                arm.folders.append(folder)
        except Damaged as error:
            if on_error:
                on_error(str(error))
    return arm


class _Selected:
    """What each side of a comparison names.  Rows are read once for all sides, which is faster than arm by arm."""

    def __init__(self, sides: Iterable[Sequence[str]], on_error: OnError) -> None:
        lookup = named.Lookup()
        self.groups, self._on_error = [lookup.find_all(side) for side in sides], on_error
        paths = dict[Path, None]()
        for match in (match for group in self.groups for match in group if not match.race):
            # for runs found by id, their parent folders, which the store answers fastest
            paths |= dict.fromkeys((path.parent for path in match.paths) if match.by_id else match.holders)
        self._rows: dict[str, Row] = dict(store.read_rows(list(paths), on_error, logs_too=True))

    def arm(self, group: Sequence[named.Named]) -> Arm:
        """Returns everything that group names as one arm.  Raises ValueError if it has no run."""
        parts = [self._part(match) for match in group]
        if len(parts) == 1:
            return parts[0]
        rows = [row for part in parts for row in part.rows]
        folders = [folder for part in parts for folder in part.folders]
        records = {run_id: run for part in parts for run_id, run in part.records.items()}
        return _once(", ".join(part.name for part in parts), rows, folders, records)

    def arms_of_race(self, meant: named.Named, with_baseline: bool = True) -> list[Arm]:
        """Returns the arms of RACE, or the baseline and ARM of RACE:ARM.  Raises ValueError if an arm has no run."""
        assert meant.race is not None
        arms = _arms_of_race(meant.race, self._on_error)
        meant.check_arm(arms)
        wanted = {meant.arm} | ({next(iter(arms))} if with_baseline else set())
        chosen = [arm for arm in arms.values() if meant.arm is None or arm.name in wanted]
        for arm in chosen:
            if not arm.rows:
                why = race_folder.read(meant.race).get("why") or "its runs are not there"
                raise ValueError(f"{meant.text}: no verdict: {why} (arm {arm.name} has no run to compare)")
        return chosen

    def _part(self, meant: named.Named) -> Arm:
        if meant.race is None:
            return _arm_from_paths(meant.text, meant.holders, self._rows)
        if meant.arm is None:
            raise ValueError(f"{meant.text}: this race has several arms: name one, {meant.text}:B")
        (arm,) = self.arms_of_race(meant, with_baseline=False)
        return replace(arm, name=meant.text)


def _once(
    name: str, rows: list[Row], folders: Sequence[str | None], records: dict[str, dict[str, Any]] | None = None
) -> Arm:
    """Returns an arm of these runs without duplicates."""
    once = index_of_runs(rows)
    return Arm(name, [rows[number] for number in once], [folders[number] for number in once], records or {})


def _arm_from_paths(name: str, paths: Iterable[Path], rows: Mapping[str, Row]) -> Arm:
    folders: list[str] = []
    for path in map(str, paths):
        path = path if path in rows else os.path.abspath(path)
        if path in rows:
            folders.append(path)
        else:
            below = (folder for folder in rows if folder.startswith(f"{path}/"))
            folders += [folder for folder in below if f"/{PUBLISHED}/" not in folder[len(path) :]]
    folders = list(dict.fromkeys(folders))
    if not folders:
        if any(True for path in paths for _ in run_folder.walk(os.path.abspath(path))):
            raise ValueError(f"{name}: none of its records can be read: restore run.json")  # its logs are not imported
        return _arm_from_logs(name, paths)
    kept = [folder for folder in folders if not rows[folder]["discarded"]]  # warm-up runs of races are never compared
    if not kept:
        raise ValueError(f"{name}: {counted(len(folders), 'run')}, all of them discarded warm-up runs")
    return _once(name, [rows[folder] for folder in kept], kept)


def _runs_of_log(path: Path, part_of: Path | None) -> list[tuple[Record, list[StepRow]]]:
    """Returns the runs of a log in the first format in which one is complete, or else that finds any: that which
    understands most of its lines comes first."""
    from bench.record.importers import dialects

    lines = plain_file.text(path, dialects.MAX_BYTES, errors="replace").splitlines()[-MAX_DETECTED_LINES:]
    forms = dict.fromkeys([dialects.detect(lines) or dialects.NAMES[0], *dialects.NAMES])
    readings = list[list[tuple[Record, list[StepRow]]]]()
    for form in forms:
        readings.append(dialects.read_file(path, form, part_of)[0])
        if any(run["status"] == "complete" for run, _ in readings[-1]):
            return readings[-1]
    return next((runs for runs in readings if runs), [])


def _arm_from_logs(name: str, paths: Iterable[Path]) -> Arm:
    """Imports logs of other harnesses; copies of a log count once."""
    from bench.record.importers import dialects

    rows: list[Row] = []
    records: dict[str, dict[str, Any]] = {}
    try:
        files = dialects.files_of(paths)
    except ValueError as error:
        raise ValueError(f"{name}: it holds no run folder and no training log ({error})") from None
    for path, part_of in files:
        for run, steps in _runs_of_log(path, part_of):
            rows.append(row_of(run))
            records.setdefault(run["run_id"], run | {"steps": steps})
    if not rows:
        raise ValueError(f"{name}: it holds no run folder and no training log")
    return _once(name, rows, [None] * len(rows), records)


# ---- races


def _arms_of_race(folder: Path, on_error: OnError) -> dict[str, Arm]:
    """Returns {name: Arm} of a race, whose rows leave out the discarded warm-up runs."""
    race = race_folder.vouched(folder)
    arms: dict[str, Arm] = {}
    against = race_folder.verdicts_of(race)
    with reading_record(Path(folder) / "race.json"):
        about = race_folder.about(race["arms"])
        folders_of = {
            name: [
                [path for run in runs or () if (path := race_folder.run_folder_of(folder, run)) is not None]
                for runs in (arm["runs"], arm.get("warm_up_runs"))
            ]
            for name, arm in race["arms"].items()
        }
    for name, (folders, warm_ups) in folders_of.items():
        arms[name] = arm_from_folders(
            name,
            folders,
            on_error,
            warm_ups=warm_ups,
            in_race=(name, about[name]),
            plan=race.get("plan"),
            race=str(folder),
            unplanned_look=bool(race.get("unplanned_look")),
            num_run_again=len(race["arms"][name].get("interrupted_runs") or ()),
            reported=against.get(name) or next(iter(against.values()), None),
        )
    return arms


def called(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Returns (name, description) of each arm: its name and overrides if all are of one race, else A, B, C ..."""
    callings = [arm.in_race for arm in arms if arm.in_race is not None]
    if len({arm.race for arm in arms}) == 1 and len(set(callings)) == len(arms):
        return callings
    letters = [chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "") for number in range(len(arms))]
    return list(zip(letters, (arm.name for arm in arms), strict=True))


def open_races(arm: Arm) -> list[str]:
    """Returns the ids of unfinished races that the arm's runs belong to, unless the arm was selected by its race."""
    race_ids = set()
    for row, folder in zip(arm.rows, arm.folders, strict=True):
        if row["race_id"] and folder and arm.race is None:
            for results in (Path(folder).resolve().parent.parent, results_root()):
                if race_folder.is_open(results, row["race_id"]):
                    race_ids.add(row["race_id"])
    return sorted(race_ids)
