"""What is claimed: some runs of one config on one track, the races they were raced in, and the ledger that knows them all.

Reads run folders, races and the ledger; bench/claims/rules/ says whether the claim holds.
"""

import contextlib
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

from bench.config import compose, schema
from bench.race import state as race_state
from bench.record import ledger, run_folder


@dataclass
class Run:
    """A run folder that can be read."""

    name: str  # "<track>/<run_id>", as the ledger calls it
    folder: Path
    record: dict

    @property
    def race_id(self):
        return (self.record.get("race") or {}).get("race_id")

    @property
    def is_discarded(self):
        return bool((self.record.get("race") or {}).get("discarded"))

    @functools.cached_property
    def config(self):
        """The run's own config.yaml.  ValueError where it is none."""
        try:
            return schema.read(self.folder)
        except (OSError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.name}: config.yaml cannot be read ({error})") from None


@dataclass
class Race:
    """A race that the claimed runs are an arm of."""

    race_id: str
    arm: str
    state: race_state.State | None  # None: its plan is not there, or not the one that the ledger knows
    fault: str | None  # why not
    result: dict | None  # race.json


@dataclass
class Claim:
    track: str
    law: schema.TrackConfig  # as conf/track/ has it now
    data: schema.DataConfig  # the track's
    runs: list  # the claimed
    others: list = field(default_factory=list)  # of the other arms of the same races
    races: list = field(default_factory=list)
    missing: list = field(default_factory=list)  # names of runs that belong here and are not
    lines: list = field(default_factory=list)  # of the ledger
    faults: list = field(default_factory=list)  # of the ledger
    claimed_n: int | None = None  # None: nobody claims a number
    results: Path | None = None  # the folder that the ledger's names start from
    table_fault: str | None = None  # of a claim folder's README
    is_folder: bool = False

    @property
    def all_runs(self):
        return self.runs + self.others

    @property
    def names(self):
        return {run.name for run in self.runs}

    @functools.cached_property
    def started(self):
        """{run: {"start", "end"}} of the whole ledger."""
        return ledger.runs(self.lines)

    @functools.cached_property
    def kinds(self):
        """(config_id, source_sha256) of the claimed runs."""
        return {(run.record["config_id"], run.record["code"]["source_sha256"]) for run in self.runs}

    def code_of(self, source_sha256, names):
        """A record's "code" with this source_sha256, from the first of these runs whose folder has it; None: no folder has."""
        for name in names:
            with contextlib.suppress(ValueError, KeyError):
                code = run_folder.read_raw(self.results / name)["code"]
                if code["source_sha256"] == source_sha256:
                    return code
        return None


def of_folders(folders, results=None):
    """Run folders that are claimed together -> Claim.  Discarded warm-up runs among them are left to their race.

    The ledger is the nearest one, upwards, and the same for all.  ValueError where nothing can be claimed.
    """
    folders = [Path(folder).absolute() for folder in folders]
    results = Path(results) if results else ledger.home(folders)
    runs = [run for run in (_run(results, folder) for folder in folders) if not run.is_discarded]
    if not runs:
        raise ValueError(f"{folders[0]}: these are discarded warm-up runs, which claim nothing")
    tracks = {run.record["track"] for run in runs}
    if len(tracks) > 1:
        raise ValueError(f"runs of {len(tracks)} tracks, {', '.join(sorted(tracks))}: a claim is made on one")
    track = tracks.pop()
    known = {"lines": ledger.read(results), "faults": ledger.faults(results), "results": results}
    claim = Claim(track, law(track), standard(track).data, runs, **known)
    for race_id, arm in dict.fromkeys((run.race_id, run.record["race"]["arm"]) for run in runs if run.race_id):
        _add_race(claim, results, race_id, arm)
    return claim


def of_race(folder, arm):
    """One arm of a race -> Claim: the runs that hold its places; those that are gone are missing."""
    folder = Path(folder)
    results = folder.parent.parent
    state = race_state.read(folder, results)
    there = [results / run for run in state.runs(arm) if (results / run / "run.json").is_file()]
    if not there:
        raise ValueError(f"{folder.name}: no run of {arm} is there")
    return of_folders(there, results)


def tracks():
    """Names of the tracks that conf/ has."""
    return compose.choices("track")


@functools.cache
def standard(track):
    """A race on this track with nothing changed, as conf/ has it now.  ValueError for a track that it does not have."""
    if track not in tracks():
        raise ValueError(f"track={track}: there is no such track; choose from {', '.join(tracks())}")
    return compose.compose([f"track={track}"])


def law(track):
    """What conf/track/ says now."""
    return standard(track).track


def _run(results, folder):
    found = run_folder.read(folder)
    return Run(ledger.name_of(results, folder), folder, found)


def _add_race(claim, results, race_id, arm):
    try:
        folder = race_state.folder_of(results, race_id)
        state = race_state.read(folder, results)
    except ValueError as error:
        claim.races.append(Race(race_id, arm, None, str(error), None))
        return
    try:
        result = json.loads((folder / "race.json").read_text())
    except (OSError, ValueError):
        result = None
    claim.races.append(Race(race_id, arm, state, None, result))
    for name in state.plan["arms"]:
        for run in state.runs(name):
            if run in claim.names:
                continue
            try:
                found = _run(results, results / run)
            except ValueError:
                claim.missing.append(run)
                continue
            if name == arm:
                claim.runs.append(found)  # it was planned with the others: nobody may leave it out
            else:
                claim.others.append(found)
