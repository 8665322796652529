"""Resolves the names that users type to folders.  Every command that reads results uses this module.

    a path              of a run, a race, a claim, a folder of runs, logs; also a run.json, a race.json, a quoted glob
    part of a run id    every run whose id contains it, for example a config_id
    part of a race id   the race; for a command that takes runs, the runs of its arms
    RACE:ARM            one arm of a race
    part of a sweep id  the sweep; for a command that takes runs, its runs
    ONE,OTHER           both

Paths are relative to the user's working folder, the repository or results/.  Ids are looked up among this machine's own
results, then among the published ones: first runs, then races, then sweeps.
"""

import difflib
import functools
import glob
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.base import escape
from bench.base.paths import REPO, published_root, race_roots, results_root, shared, working_folder
from bench.record import certificates, race_folder, rows, run_folder, store, sweep

CLAIM = "claim.yaml"  # the file that marks a folder as a claim
MAX_LISTED = 5  # how many sweeps a refusal lists, the newest ones
OF_RACES = ("plan.json", "race.json")  # either file marks a folder as a race
FILES = ("run.json", "race.json")  # the path of such a file means its folder


class Named(NamedTuple):
    """A name that the user typed, and what it means."""

    text: str
    paths: list[Path]  # at least one; all exist
    arm: str | None = None  # ARM in RACE:ARM
    by_id: bool = False  # whether the text is part of the paths' run ids

    @property
    def race(self) -> Path | None:
        """The folder of the race, if the name means one."""
        return self._with(*OF_RACES)

    @property
    def claim(self) -> Path | None:
        """The folder of the claim, if the name means one."""
        return self._with(CLAIM)

    @property
    def holders(self) -> list[Path]:
        """The paths; for a race, an arm or a sweep its run folders.  Raises ValueError without such an arm or runs."""
        if self.sweep is not None:
            folders = [point.folder for point in sweep.points(self.sweep) if point.folder is not None]
        else:
            folders = self.paths if self.race is None else self._runs_of_race(self.race)
        if not folders:
            raise ValueError(f"{self.text}: none of its runs is there: start it again, or restore them beside it")
        return folders

    def check_arm(self, arms: Collection[str]) -> None:
        """Raises ValueError if the name is RACE:ARM, and ARM is not among the race's arms."""
        if self.arm not in (None, *arms):
            raise ValueError(f"{self.text}: the race has no arm {self.arm}; choose from {', '.join(arms)}")

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep, if the name means one."""
        return self._with(sweep.NAME)

    def _with(self, *names: str) -> Path | None:
        """Returns the path if there is only one and it is a folder with one of these files, else None."""
        return self.paths[0] if len(self.paths) == 1 and _has(self.paths[0], *names) else None

    def _runs_of_race(self, folder: Path) -> list[Path]:
        """Returns the run folders of a race or of its arm, without warm-up runs.

        A race that has not ended has no race.json; its runs are those whose records name it.
        """
        if (folder / "race.json").is_file():
            arms = {name: facts["runs"] or [] for name, facts in race_folder.read(folder)["arms"].items()}
        else:
            arms = {}
            counting = store.opened([folder.parent.parent]).rows("race_id = ? AND discarded IS NOT 1", [folder.name])
            for row in sorted(counting.values(), key=lambda row: row["run_id"]):
                arms.setdefault(str(row["arm"]), []).append(f"{row['track']}/{row['run_id']}")
        self.check_arm(sorted(arms))
        runs = [run for name in arms if self.arm in (None, name) for run in arms[name]]
        return [path for run in runs if (path := race_folder.run_folder_of(folder, run))]

    @property
    def path(self) -> Path:
        """The only file or folder.  Raises ValueError if there are several."""
        if len(self.paths) > 1:
            problem = f"is part of {len(self.paths)} run ids" if self.by_id else f"fits {len(self.paths)} paths"
            raise ValueError(f"{self.text}: {problem}, {self.paths[0].name} among them: ./run.sh table lists the runs")
        return self.paths[0]


class Lookup:
    """Resolves names.  The run ids are read once, when the first name needs them."""

    def find(self, text: str) -> Named:
        """Resolves a name without commas.  Raises ValueError if nothing has this name."""
        if not text:
            raise ValueError("'': an empty word, or a comma too many, names no run: ./run.sh table lists the runs")
        if paths := _paths(text):
            return Named(text, paths)
        for folders in (self._own, self._published):
            names = [text] if text in folders else sorted(name for name in folders if text in name)
            if names:
                return Named(text, [Path(folders[name]) for name in names], by_id=True)
        if race := _race(text):
            return Named(text, [race])
        if sweep_found := _one_with(text, sweep.folders(), "sweep"):
            return Named(text, [sweep_found])
        name, _, arm = text.rpartition(":")
        if name and arm and (race := _race(name)):
            return Named(text, [race], arm)
        races = [path.name for root in race_roots() for path in root.glob("*") if _has(path, *OF_RACES)]
        ids = [*self._own, *self._published, *races, *(folder.name for folder in sweep.folders())]
        near = difflib.get_close_matches(text, ids, n=3, cutoff=0.75)
        question = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"{text}: is not a path, a glob that matches, or part of the id of a run, a race or a sweep: "
            f"{question}./run.sh table lists the runs{_known_sweeps()}"
        )

    def find_all(self, names: Iterable[str]) -> list[Named]:
        """Resolves names and lists of names with commas.  Raises ValueError if nothing has one of the names."""
        lists = (name.split(",") if "," in name and not _paths(name) else [name] for name in names)
        return [self.find(part) for parts in lists for part in parts]

    @functools.cached_property
    def _own(self) -> dict[str, str]:
        return _runs_below(results_root())

    @functools.cached_property
    def _published(self) -> dict[str, str]:
        return _runs_below(published_root())


def find(names: Iterable[str]) -> list[Named]:
    """Resolves names as Lookup.find_all() does."""
    return Lookup().find_all(names)


def folder(name: str) -> Path:
    """Returns the folder that a name means.  Raises ValueError if it means none, several, or a file."""
    path = Lookup().find(name).path
    run_folder.refuse_no_folder(path)
    return path


def sweep_folder(name: str) -> Path:
    """Returns the folder of the sweep that a name means.  Raises ValueError if it means none."""
    folder = Lookup().find(name).sweep or _one_with(name, sweep.folders(), "sweep")
    if folder is None:
        raise ValueError(f"{name}: is not a sweep{_known_sweeps() or ': ./run.sh run -m makes one'}")
    return folder


def runs(names: Iterable[str]) -> list[Path]:
    """Returns the run folders in and below what names mean, without duplicates.  Raises ValueError if one has none."""
    folders: list[Path] = []
    for named in find(names):
        below = list(run_folder.find_runs(named.holders))
        if not below:
            raise ValueError(f"{named.text}: there is no run.json in or below it: ./run.sh table lists the runs")
        folders += below
    return list(dict.fromkeys(folders))


def _paths(pattern: str) -> list[Path]:
    """Returns the path with this name, or those that match this glob; [] if there are none."""
    name = os.path.expanduser(pattern)
    bases: tuple[str | Path, ...] = (working_folder(), REPO, results_root())
    for base in (*bases, *race_roots()):
        path = Path(base, name)
        if path.exists():
            return [path.parent if path.name in FILES and path.is_file() else path]
    if glob.has_magic(pattern):
        for base in bases:
            if fitting := sorted(glob.glob(os.path.join(base, name), recursive=True)):
                return [Path(path) for path in fitting]
    return []


def _has(folder: Path, *names: str) -> bool:
    return any((folder / name).is_file() for name in names)


def _race(name: str) -> Path | None:
    """Returns the folder of the race with this path or part of an id, or None.  Raises ValueError if several fit."""
    for path in _paths(name):
        return path if _has(path, *OF_RACES) else None
    for root in race_roots():
        if race := _one_with(name, [path for path in sorted(root.glob("*")) if _has(path, *OF_RACES)], "race"):
            return race
    return None


def _one_with(part: str, folders: Iterable[Path], kind: str) -> Path | None:
    """Returns the folder whose name contains the part, or None.  Raises ValueError if there are several."""
    fitting = [folder for folder in folders if part in folder.name]
    if len(fitting) > 1:
        raise ValueError(f"{part}: is part of {len(fitting)} {kind} ids: {', '.join(path.name for path in fitting)}")
    return fitting[0] if fitting else None


def _known_sweeps() -> str:
    names = [folder.name for folder in sorted(sweep.folders(), key=lambda folder: folder.stat().st_mtime)]
    omitted = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"; sweeps: {', '.join(names[-MAX_LISTED:])}{omitted}" if names else ""


def _runs_below(root: Path) -> dict[str, str]:
    """Returns {run id: folder as text}; for a run that was published twice, the first folder."""
    folders = sorted(store.opened([root]).folders(), reverse=True) if root.is_dir() else []
    return {folder.rpartition("/")[2]: folder for folder in folders}


def report_excluded(verb: str, message: str) -> None:
    """Prints a line on standard error that says that a command excludes a record, and why."""
    print(f"{verb}: excluded: {escape.line(message)}", file=sys.stderr)


def store_of(names: Iterable[str]) -> store.Store:
    """Opens the runs that names mean, or without names those of results/, as a database.  Reports unreadable runs."""
    root = results_root()
    folders = [path for named in find(names) for path in named.holders] or ([root] if root.is_dir() else [])
    return store.opened(folders, functools.partial(report_excluded, "table"))


def rows_of_names(names: Iterable[str]) -> list[rows.ListedRow]:
    """Returns the rows of the runs that names mean (see store_of), sorted by track and time."""
    return listed(store_of(names).rows())


def listed(row_by_folder: Mapping[str, rows.Row]) -> list[rows.ListedRow]:
    """Sorts rows, {absolute folder: row}, by track and time, and adds their folders relative to the working folder."""
    rows_found: list[rows.ListedRow] = []
    before: dict[str, str] = {}  # {parent folder: its path relative to the working folder, ending in /}
    for folder, row in row_by_folder.items():
        parent, _, name = folder.rpartition("/")
        if parent not in before:
            before[parent] = shared(folder).removesuffix(name)
        rows_found.append({**row, "folder": before[parent] + name, "certificate": certificates.outcome(folder)})
    return sorted(rows_found, key=lambda row: (row["track"] or "", row["started_at"] or "", row["run_id"]))
