"""A claim: runs of one config on one track, the races that they are arms of, and the ledger that lists them all.

bench/claims/rules/ decides whether the claim holds.
"""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from bench.base.metric import from_goal, goal_facts
from bench.compare import target
from bench.config import compose, groups, identity, schema
from bench.plans.race import state
from bench.record import ledger, metrics, race_folder, run_folder, step_files
from bench.record.rows import Row, row_of
from bench.record.shape import CALIBRATION, Record

Kind = tuple[str | None, str | None]  # (config_id, source_sha256)
# (passed, evidence) of a rule; passed is None if it does not apply, or is unknown (then the evidence starts NOT_KNOWN)
Judged = tuple[bool | None, str]
NOT_KNOWN = "not known from a log"
GOAL_FACTS = ("metric", "target", "budget")  # keys of run.json["goal"] for goals other than the final val_loss
MIN_SHARED = 2  # validations after step 0 that two logs must share to count as one run
AVERAGED = "val_ema_loss"  # val_loss of averaged weights, by which a log that prints it is judged


@dataclass
class Run:
    """A readable run folder."""

    name: str  # "<track>/<run_id>", as in the ledger
    folder: Path
    record: Record
    is_log: bool  # imported from another program's log, and not a run that the ledger lists

    @classmethod
    def read(cls, book: ledger.Ledger, folder: Path) -> "Run":
        name, record = ledger.name_of(book.results, folder), run_folder.read(folder)
        return cls(name, folder, record, record.get("provenance") == "imported" and name not in book.runs)

    def with_goal(self, goal: schema.GoalConfig) -> "Run":
        """Returns a copy of an imported log's run, which has no goal, with this goal."""
        kept = {name: value for name, value in (self.record.get("goal") or {}).items() if name not in GOAL_FACTS}
        facts = kept | goal_facts(goal.of, goal.target, goal.budget)
        facts |= {
            "stop_at_target": goal.stop_at_target,
            "target_val_loss": goal.target_val_loss,
            "target_gap_nats": goal.target_gap_nats,
        }
        record = cast(Record, {**self.record, "goal": facts})
        if facts.keys() & set(GOAL_FACTS) or (self.record.get("goal") or {}).keys() & set(GOAL_FACTS):
            record["metrics"] = metrics.metrics(record, step_files.read(self.folder))
        return replace(self, record=record)

    @property
    def race_id(self) -> str | None:
        return (self.record.get("race") or {}).get("race_id")

    @property
    def arm(self) -> str:
        """The run's arm in its race; "" without a race."""
        return (self.record.get("race") or {}).get("arm") or ""

    @functools.cached_property
    def validations(self) -> dict[int, float]:
        """{step: value of the goal's metric}.  Raises ValueError if steps.csv cannot be read."""
        return step_files.validations(self.folder, from_goal(self.record.get("goal")).name)

    @property
    def is_discarded(self) -> bool:
        return bool((self.record.get("race") or {}).get("discarded"))

    @functools.cached_property
    def config(self) -> schema.Config:
        """The config in the run's config.yaml.  Raises ValueError if it cannot be read."""
        return schema.recorded(self.folder)


def averaged_of(record: Record) -> dict[int, float]:
    """Returns the {step: val_loss of averaged weights} that a log printed, or {} if it printed none."""
    tails = (record.get("imported") or {}).get("line_tails") or {}
    return {int(step): float(tail[AVERAGED]) for step, tail in tails.items() if AVERAGED in tail}


@dataclass
class ClaimedRace:
    """A race that the claimed runs are an arm of."""

    race_id: str
    arm: str
    state: state.State | None  # None if its plan is missing, or not the one in the ledger
    fault: str | None  # why state is None
    race_json: race_folder.Race | None  # None if it cannot be read


@dataclass
class Unclaimed:
    """Names of started runs that are not claimed, by their relation to the claim."""

    dropped: list[str] = field(default_factory=list)  # same config and code
    excused: list[str] = field(default_factory=list)  # the same or near, but excluded by a plan
    other_code: dict[Kind, list[str]] = field(default_factory=dict)  # same config, other code
    near: list[str] = field(default_factory=list)  # same code and day, nearly the same settings
    unknown: list[str] = field(default_factory=list)  # same code and day, settings no longer known


@dataclass
class Claim:
    track: str
    track_rules: schema.TrackConfig  # the current rules in conf/track/
    runs: list[Run]  # the claimed runs
    ledger: ledger.Ledger
    others: list[Run] = field(default_factory=list)  # runs of the other arms of the same races
    races: list[ClaimedRace] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # names of runs and races that should be there and are not
    claimed_n: int | None = None  # number of runs that the claim states; None if it states none
    table_fault: str | None = None  # what is wrong with the table in a claim folder's README
    is_folder: bool = False  # read from a claim folder
    copies: list[str] = field(default_factory=list)  # names of logs that duplicate claimed ones
    against: "Claim | None" = None  # the result that this one must beat (--against)

    @property
    def is_of_logs(self) -> bool:
        """Whether the runs are imported logs, for which many rules are NOT_KNOWN.  Logs and records are never mixed."""
        return self.runs[0].is_log

    @property
    def may_end_early(self) -> bool:
        """Whether runs may end before their schedules: logs under the z rule, which judges a step that all reached."""
        return self.is_of_logs and self.track_rules.rules.statistic == "z"

    @property
    def rows(self) -> list[Row]:
        """The rows of the claimed runs."""
        return [row_of(run.record) for run in self.runs]

    @functools.cached_property
    def decision(self) -> target.Decision:
        """Whether the runs reach the track's target.  The z rule uses AVERAGED if all logs print it."""
        losses_ids = [step_files.losses_id_of(run.folder) for run in self.runs]
        averaged = [averaged_of(run.record) for run in self.runs]
        curves = lambda: averaged if all(averaged) else [run.validations for run in self.runs]  # noqa: E731
        decided = target.decide_by(self.track_rules, self.rows, curves, losses_ids)
        if self.track_rules.rules.statistic == "z" and all(averaged):
            decided["words"] += f"; by {AVERAGED}, which the logs go by"
        return decided

    @property
    def all_runs(self) -> list[Run]:
        return self.runs + self.others

    @property
    def names(self) -> set[str]:
        return {run.name for run in self.runs}

    @functools.cached_property
    def kinds(self) -> set[Kind]:
        """The distinct (config_id, source_sha256) of the claimed runs."""
        return {(run.record["config_id"], run.record["code"]["source_sha256"]) for run in self.runs}

    def together_with(self, names: Iterable[str]) -> list[str]:
        """Returns what to judge for these runs to be claimed, too: arms of races, RACE:B, and runs outside of races."""
        races = {name: self.ledger.runs[name]["start"]["race"] for name in names}
        theirs = [f"{race['race_id']}:{race['arm']}" if race else name for name, race in races.items()]
        ours = [f"{race.race_id}:{race.arm}" for race in self.races]
        ours += [run.record["run_id"] for run in self.runs if not run.record.get("race")]
        return list(dict.fromkeys([*theirs, *ours]))

    def unclaimed(self) -> Unclaimed:
        """Returns started runs of the same or nearly the same configs that are not claimed."""
        others = Unclaimed()
        runs, claimed_names = self.ledger.runs, self.names
        configs, sources = {config for config, _ in self.kinds}, {source for _, source in self.kinds}
        days = {(runs[name]["start"].get("at") or "")[:10] for name in claimed_names if name in runs}
        shapes = [identity.shape(run.config) for run in self.runs]
        for name, entry in runs.items():
            start = entry["start"]
            race: Mapping[str, Any] = start["race"] or {}
            config, source = kind = (start["config_id"], start["source_sha256"])
            if name in claimed_names or race.get("discarded"):
                continue
            if kind in self.kinds:
                (others.excused if self._is_no_part(name, start, race) else others.dropped).append(name)
            elif config in configs:
                others.other_code.setdefault(kind, []).append(name)
            elif source in sources and (start.get("at") or "")[:10] in days:
                shape = self._shape_of(name, start)
                if shape is None:
                    others.unknown.append(name)
                elif any(identity.are_near(shape, claimed_shape) for claimed_shape in shapes):
                    (others.excused if self._is_no_part(name, start, race) else others.near).append(name)
        return others

    def _shape_of(self, name: str, start: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the run's settings as identity.shape(), from the ledger or its config.yaml, or None."""
        if "shape_id" in start:
            return dict(start)
        with contextlib.suppress(ValueError):
            return identity.shape(schema.recorded(self.ledger.results / name))
        return None

    def _is_no_part(self, name: str, start: Mapping[str, Any], race: Mapping[str, Any]) -> bool:
        """Returns whether a plan excludes this run of the claim's config and code from the claim.

        A run of ./run.sh calibrate can be in no claim, but it shows what its seed gives.
        """
        if race.get("race_id") == CALIBRATION:
            return start.get("seed") not in {run.record["seed"] for run in self.runs}
        claimed = [entry for entry in self.races if entry.race_id == race.get("race_id")]
        if not claimed and not race:  # were some of them claimed, the best could be chosen
            return all(run.race_id for run in self.runs)
        if not claimed:  # the baseline in the plan of another race is no part of it
            lines = self.ledger.race_lines(race["race_id"])
            return any(line["event"] == "plan" and line.get("baseline") == race.get("arm") for line in lines)
        if race.get("arm") not in {entry.arm for entry in claimed}:
            return True
        return any(name in entry.state.interrupted(race["arm"]) for entry in claimed if entry.state)  # was repeated

    def code_of(self, source_sha256: str | None, names: Iterable[str]) -> dict[str, Any] | None:
        """Returns "code" of the first of these runs whose record has this source_sha256, or None."""
        for name in names:
            with contextlib.suppress(ValueError, KeyError):
                code: dict[str, Any] = run_folder.read_raw(self.ledger.results / name)["code"]
                if code["source_sha256"] == source_sha256:
                    return code
        return None


def home(folders: Iterable[Path | str]) -> Path:
    """Returns the results folder of these run folders.  Raises ValueError if they have different ledgers."""
    homes = {ledger.find(folder) or folder.parent.parent for folder in map(Path, folders)}
    if len(homes) > 1:
        raise ValueError(f"{' and '.join(map(str, sorted(homes)))}: each with its own ledger: name runs of one")
    return homes.pop()


def from_folders(folders: Iterable[str | Path], book: ledger.Ledger | None = None, track: str | None = None) -> Claim:
    """Returns a claim of these run folders without discarded warm-up runs.

    book: their ledger; None to read the nearest one above them, which they must share.  track: the track of imported
    logs, which do not name it; ignored for records.  Raises ValueError if the runs cannot be claimed together.
    """
    paths = [Path(folder).absolute() for folder in folders]
    book = book or ledger.read(home(paths))
    runs = _without_baselines([run for run in (Run.read(book, path) for path in paths) if not run.is_discarded], book)
    if not runs:
        raise ValueError(f"{paths[0]}: a discarded warm-up run cannot be claimed: omit it")
    runs, copies = _without_copies(runs)
    tracks = [groups.UPSTREAM_TRACKS.get(run.record["track"], run.record["track"]) for run in runs]
    kinds = {(track if track and run.is_log else its, run.is_log) for run, its in zip(runs, tracks, strict=True)}
    if len(kinds) > 1:
        named = ", ".join(f"{'logs' if is_log else 'records'} of {its}" for its, is_log in sorted(kinds))
        raise ValueError(f"{named} cannot be judged together: name records of one track, or logs")
    track, is_log = kinds.pop()
    if is_log and track not in (choices := groups.choices("track")):
        raise ValueError(f"a log does not name its track: add --track and one of {', '.join(choices)}")
    runs = [run.with_goal(standard(track).goal) if run.is_log else run for run in runs]
    claim = Claim(track, track_rules(track), runs, book, copies=copies)
    for race_id, arm in sorted({(run.race_id, run.arm) for run in runs if run.race_id}):  # ids begin with their time
        _add_race(claim, race_id, arm)
    return claim


def _without_baselines(runs: list[Run], book: ledger.Ledger) -> list[Run]:
    """Removes the runs of a race's baseline if runs of its candidates are there too, as in a publication of the race.

    A baseline is no part of a claim.  Its runs become the claim's others, as the race's plan has them.
    """
    arms: dict[str, set[str]] = {}
    for run in runs:
        arms.setdefault(run.race_id or "", set()).add(run.arm)
    baselines = set()
    for race_id in (race_id for race_id, names in arms.items() if len(names) > 1):
        with contextlib.suppress(ValueError):  # not the plan in the ledger: judge says so
            race = state.read(race_folder.of(book.results, race_id), book.results, book)
            baselines.add((race_id, race.plan["baseline"]))
    return [run for run in runs if (run.race_id, run.arm) not in baselines]


def _without_copies(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Removes logs of the same run, even if one of them is cut.  Returns (runs, names of the removed logs)."""
    kept: list[Run] = []
    copies: list[str] = []
    for run in sorted(runs, key=lambda run: -len(run.validations) if run.is_log else 0):
        if run.is_log and any(other.is_log and are_one(run.validations, other.validations) for other in kept):
            copies.append(run.name)
        else:
            kept.append(run)
    return [run for run in runs if run.name not in copies], copies


def are_one(curve: target.Curve, other: target.Curve) -> bool:
    """Returns whether two logs are of one run: most of the validations that they share are equal as printed.

    Different runs agree rarely: losses of sd 0.0013 printed with four digits are equal in 2 of 100 cases.  One equal
    validation suffices if it is the only one in a log and the other log has more: the log is a summary of the other.
    """
    shared = [step for step in curve if step in other and step > 0]
    num_equal = sum(curve[step] == other[step] for step in shared)
    is_summary = len(curve) == 1 < len(other) and num_equal == 1
    return is_summary or (len(shared) >= MIN_SHARED and num_equal > len(shared) / 2)


def from_race(race: state.State, arm: str, book: ledger.Ledger) -> Claim:
    """Returns a claim of one arm of a race.  Raises ValueError if all of its runs are missing."""
    folders = [book.results / run for run in race.runs(arm) if (book.results / run / "run.json").is_file()]
    if not folders:
        raise ValueError(f"{race.race_id}: no run of {arm} is there: restore the run folders, or race again")
    return from_folders(folders, book)


@functools.cache
def standard(track: str) -> schema.Config:
    """Returns the unchanged config of a run on this track, from conf/.  Raises ValueError for an unknown track."""
    if track not in (choices := groups.choices("track")):
        own = f"a track of somebody's own needs --config-dir DIR, their conf/ with track/{track}.yaml"
        raise ValueError(f"track={track}: unknown track; {own}; choose from {', '.join(choices)}")
    return compose.compose([f"track={track}"])


def track_rules(track: str) -> schema.TrackConfig:
    """Returns the track's current rules from conf/track/."""
    return standard(track).track


def has_target(track: str) -> bool:
    """Returns whether the track has a target, and so keeps records."""
    goal = standard(track).goal
    return goal.target_value is not None or goal.target_gap_nats is not None


def _add_race(claim: Claim, race_id: str, arm: str) -> None:
    results = claim.ledger.results
    claimed = ClaimedRace(race_id, arm, None, None, None)
    claim.races.append(claimed)
    try:
        folder = race_folder.of(results, race_id)
        claimed.state = state.read(folder, results, claim.ledger)
    except ValueError as error:
        claimed.fault = str(error)
        return
    with contextlib.suppress(ValueError):
        claimed.race_json = race_folder.read(folder)
    for name in claimed.state.plan["arms"]:
        for run in claimed.state.runs(name):
            if run in claim.names:
                continue
            try:  # a planned run cannot be excluded from a claim
                (claim.runs if name == arm else claim.others).append(Run.read(claim.ledger, results / run))
            except ValueError:
                claim.missing.append(run)
