"""A word of the user -> the runs it means: run folders, globs, run ids, arms of a race, logs of other harnesses."""

import glob
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.eligibility import places_of_runs
from bench.paths import PUBLISHED, REPO, published_root, race_roots, results_root, working_folder
from bench.record import index, run_folder
from bench.record.rows import row_of

SEPARATOR = "vs"


@dataclass
class Arm:
    """All started runs that are compared as one thing."""

    name: str  # as the user typed it, or the arm's name in its race
    rows: list = field(default_factory=list)
    folders: list = field(default_factory=list)  # beside the rows; None for a log
    records: dict = field(default_factory=dict)  # run_id -> record, of runs that lie in no folder
    plan: dict | None = None  # of the race, made before its first run
    race: str | None = None  # the folder of the race
    peeked: bool = False  # somebody looked into the race when no look was planned
    told: dict | None = (
        None  # what the race itself said at its end of this arm; of the baseline, about the first candidate
    )

    def record_of(self, place):
        """The whole record of the run at this place of rows."""
        folder = self.folders[place]
        return self.records[self.rows[place]["run_id"]] if folder is None else run_folder.read(folder)


def of_words(words, on_error=None):
    """What follows the verb -> arms, the baseline first.

    Each word is an arm, a race alone is all of its arms, and "vs" between words makes everything up to it one arm.
    """
    if SEPARATOR in words:
        groups = [[]]
        for word in words:
            groups.append([]) if word == SEPARATOR else groups[-1].append(word)
        if not all(groups):
            raise ValueError(f"{' '.join(words)}: write runs on both sides of {SEPARATOR}")
    elif len(words) == 1:
        race = _race_folder(words[0])
        if race is None:
            raise ValueError(f"{words[0]}: that is one group of runs; give two, A B, or the folder of a race")
        arms = _arms_of_race(race, on_error)
        for arm in arms.values():
            _refuse_empty(words[0], race, arm)
        return list(arms.values())
    else:
        groups = [word.split(",") for word in words]
    paths = {word: _paths(word) for group in groups for word in group}
    everything = [path for found in paths.values() for path in found]
    by_id = [
        word for word, found in paths.items() if not found and _race_folder(word.rpartition(":")[0] or word) is None
    ]
    if by_id and results_root().is_dir():
        everything.append(str(results_root()))
    rows = dict(index.read_rows(everything, on_error, logs_too=True))  # at once, which is quicker than arm by arm
    arms = [_joined(group, paths, rows, on_error) for group in groups]
    if len(arms) > 2 and SEPARATOR not in words and all(len(arm.rows) == 1 for arm in arms):
        raise ValueError(
            f"each of these {len(arms)} words is one run, and one run has no spread: "
            "put quotes around a glob ('results/*/*-s?'), or write A1 A2 A3 vs B1 B2 B3"
        )
    return arms


def _joined(group, paths, rows, on_error):
    parts = [_of_word(word, paths[word], rows, on_error) for word in group]
    if len(parts) == 1:
        return parts[0]
    rows, folders = ([one for part in parts for one in getattr(part, name)] for name in ("rows", "folders"))
    once = places_of_runs(rows)
    records = {run_id: run for part in parts for run_id, run in part.records.items()}
    return Arm(", ".join(group), [rows[place] for place in once], [folders[place] for place in once], records)


def _of_word(word, paths, rows, on_error):
    race, _, name = word.rpartition(":")
    folder = _race_folder(race) if race else None
    if folder is not None:
        arms = _arms_of_race(folder, on_error)
        if name not in arms:
            raise ValueError(f"{word}: the race has no arm {name}; choose from {', '.join(arms)}")
        _refuse_empty(word, folder, arms[name])
        arms[name].name = word
        return arms[name]
    if _race_folder(word) is not None:
        raise ValueError(f"{word}: that is a race with several arms; name one, {word}:B")
    return _of_paths(word, paths, rows) if paths else _by_id(word, rows)


def _bases():
    return working_folder(), REPO, results_root()


def _paths(word):
    """What exists under this name or fits this glob, from where the user stands, the repository or results/."""
    for base in _bases():
        path = os.path.join(base, os.path.expanduser(word))
        if os.path.exists(path):
            return [os.path.dirname(path) if os.path.basename(path) == "run.json" else path]
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(word) else []
        if found:
            return found
    return []


def _of_paths(word, paths, rows):
    """rows: {folder: row} of all run folders in and below the paths of all words."""
    folders = []
    for path in map(os.path.abspath, paths):
        below = [folder for folder in rows if folder.startswith(f"{path}/")]
        folders += [path] if path in rows else [one for one in below if f"/{PUBLISHED}/" not in one[len(path) :]]
    folders = list(dict.fromkeys(folders))
    return _without_warm_up(word, folders, [rows[folder] for folder in folders]) if folders else _of_logs(word, paths)


def _without_warm_up(word, folders, rows):
    """The discarded warm-up runs of races stay in the ledger and count nowhere."""
    kept = [place for place, row in enumerate(rows) if not row["discarded"]]
    if not kept:
        raise ValueError(
            f"{word}: {len(rows)} run{'s' * (len(rows) > 1)}, all of them warm-up runs that were to be discarded"
        )
    once = [kept[number] for number in places_of_runs([rows[place] for place in kept])]
    return Arm(word, [rows[place] for place in once], [folders[place] for place in once])


def _of_logs(word, paths):
    """Logs that other harnesses wrote, each in the first format in which it holds a run; copies of a log count once."""
    from bench import importers

    rows, records = [], {}
    try:
        files = importers.files(paths)
    except ValueError as error:
        raise ValueError(f"{word}: no run folder and no training log is in there ({error})") from None
    for path, part_of in files:
        readings = (importers.read(path, form, part_of)[0] for form in importers.FORMATS)
        for run, steps in next((runs for runs in readings if runs), []):
            rows.append(row_of(run))
            records.setdefault(run["run_id"], run | {"steps": steps})
    if not rows:
        raise ValueError(f"{word}: no run folder and no training log is in there")
    once = [rows[place] for place in places_of_runs(rows)]
    return Arm(word, once, [None] * len(once), records)


def _by_id(word, rows):
    """Part of run ids, a config_id for example: all runs of results/ that bear it, or else all published ones."""
    root = f"{os.path.abspath(results_root())}/"
    folders = [folder for folder, row in rows.items() if word in row["run_id"] and folder.startswith(root)]
    if not folders:
        published = index.read_rows([published_root()]) if published_root().is_dir() else []
        rows = {folder: row for folder, row in published if word in row["run_id"]}
        folders = list(rows)
    if not folders:
        raise ValueError(
            f"{word}: is no folder, no glob that fits and no part of a run id; ./run.sh table lists the runs there are"
        )
    return _without_warm_up(word, folders, [rows[folder] for folder in folders])


# ---- races


def _race_folder(word):
    for base in (*_bases(), *race_roots()):
        path = Path(base, os.path.expanduser(word))
        if (path / "race.json").is_file():
            return path
        if path.name == "race.json" and path.is_file():
            return path.parent
    return None


def _arms_of_race(folder, on_error):
    """race.json -> {name: Arm}; the discarded warm-up runs are not among the runs."""
    try:
        race = json.loads((folder / "race.json").read_bytes())
        lists = {name: arm["runs"] for name, arm in race["arms"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}/race.json: is no race or damaged ({error!r})") from None
    arms, against = {}, (race.get("result") or {}).get("against") or {}
    for name, runs in lists.items():
        folders = [_run_of_race(folder, run) for run in runs]
        rows = index.read_rows([path for path in folders if path is not None], on_error)
        arms[name] = Arm(
            name,
            [row for _, row in rows],
            [path for path, _ in rows],
            plan=race.get("plan"),
            race=str(folder),
            peeked=bool(race.get("peeked")),
            told=against.get(name) or next(iter(against.values()), None),
        )
    return arms


def _refuse_empty(word, folder, arm):
    """ValueError for an arm without a run, with why the race has no verdict in its own words."""
    if not arm.rows:
        why = json.loads((folder / "race.json").read_bytes()).get("why")
        raise ValueError(
            f"{word}: no verdict: {why or 'its runs are not there'} (arm {arm.name} has no run to compare)"
        )


def open_races(arm):
    """Races that runs of the arm belong to and that are not over: {race_id: folder}.  A race named as such is its own matter."""
    found = {}
    for row, folder in zip(arm.rows, arm.folders, strict=True):
        if row["race_id"] and folder and arm.race is None:
            for results in (Path(folder).resolve().parent.parent, results_root()):
                race = results / "races" / row["race_id"]
                if (race / "plan.json").is_file() and not (race / "race.json").is_file():
                    found[row["race_id"]] = race
    return found


def _run_of_race(race, run):
    """Where a run of the race lies: relative to results/ as the race found it, or beside the race when it was moved."""
    for base in (race.parent.parent, results_root(), race, REPO):
        if (Path(base) / run / "run.json").is_file():
            return os.path.join(base, run)
    return None


def of_folders(name, folders, on_error=None):
    """Run folders -> one arm."""
    found = index.read_rows([str(path) for path in folders], on_error)
    return Arm(name, [row for _, row in found], [folder for folder, _ in found])
