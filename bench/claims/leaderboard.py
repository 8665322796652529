"""The leaderboard: the entries of each track, and the history of its record.  ./run.sh table --leaderboard

An entry consists of all runs of one config and code on one kind of machine in one ledger.  It is computed from run
folders, races and the ledger alone.  A candidate becomes a record only if it passes the rules in bench/claims/rules/.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from bench.base import stats
from bench.claims import claim as claims
from bench.claims.rules import rulebook
from bench.compare import eligibility, target
from bench.config import groups, schema
from bench.record import certificates, ledger, race_folder, step_files
from bench.record.rows import Row

# {(track, config_id, source_sha256, results folder, comparability_id): [(row, folder)]}
Groups = dict[tuple[Any, ...], list[tuple[Row, str]]]


@dataclass
class Entry:
    """Repeats of one config and code in one setting."""

    rows: list[Row]  # complete runs, oldest first; suspect ones are included, because their losses count
    folders: list[str]
    num_lost: int  # runs of the same config and code that failed or are invalid
    book: ledger.Ledger  # the ledger that lists the runs
    judged: str = "time"  # what entries are ranked by: time or steps
    status: str = ""
    since: str = ""  # when it had the runs that a record needs, by _order()
    number: int | None = None  # number of the record among those on its device; None if it never was a record

    def __post_init__(self) -> None:
        by_steps = self.judged == "steps"
        self.first, self.last_run = self.rows[0], _started(self.rows[-1])
        self.counted = [row for row in self.rows if by_steps or row["validity"] == "valid"]
        self.times_s = eligibility.times_s(self.counted)
        self.train_s = stats.mean(self.times_s) if self.times_s else None
        num_steps = [row["num_steps"] for row in self.rows if row["num_steps"] is not None]
        most_steps = max(num_steps) if len(num_steps) == len(self.rows) else None  # None if unknown for some run
        self.score = self.losses["step"] or most_steps if by_steps else self.train_s  # "step" is set by the z rule
        self.place = "any device" if by_steps else self.first["device"]  # each place has its own record
        self.setting = self.first["comparability_id"]
        self.kind = (self.first["config_id"], self.first["source_sha256"])

    def change_pct(self, before: "Entry") -> float | None:
        """Returns the change of the score in %, or None if an entry has no score."""
        return 100 * (self.score / before.score - 1) if self.score is not None and before.score else None

    def is_better_than(self, before: "Entry") -> bool:
        return self.score is not None and before.score is not None and self.score < before.score

    @functools.cached_property
    def certificate(self) -> str | None:
        """The outcomes of replays of its runs, summarized."""
        return certificates.summarized(map(certificates.outcome, self.folders))

    @functools.cached_property
    def losses(self) -> target.Decision:
        """The decision of bench.compare.target on whether the runs reach the track's target."""
        curves = lambda: list(map(_curve, self.folders))  # noqa: E731
        return target.decide_by(claims.track_rules(self.first["track"] or ""), self.rows, curves)


def _curve(folder: str) -> target.Curve:
    """Returns a run's validations, {} if its steps.csv is damaged."""
    with contextlib.suppress(ValueError):
        return step_files.validations(folder)
    return {}


def _started(row: Row) -> str:
    return row["started_at"] or ""


class Change(TypedDict):
    """How a record differs from the previous one."""

    change_pct: float | None
    measured: str  # how the change was measured: in a race of the two, or from their means


Step = tuple[Entry, Entry | None, Change]  # (record, the previous record, change) in a progression


@dataclass
class Board:
    """The entries and records of a track."""

    track: str
    track_rules: schema.TrackConfig
    entries: list[Entry]  # best first; entries without a score last
    records: list[Step]  # as progression() returns them

    @property
    def needed(self) -> str:
        """A sentence on what a record requires, with a command in backquotes."""
        rules = self.track_rules.rules
        device = f" on {rules.num_gpus} x {rules.gpu}" if rules.gpu else ""
        best = ", in fewer steps than the one before" * (rules.judged == "steps")
        runs = f"{self.track_rules.repeats} valid runs{device}{best}"
        return f"A record takes {runs}, the target, and every rule of `./run.sh judge`."


def boards(runs: Iterable[tuple[str, Row]], paths: Iterable[Path]) -> list[Board]:
    """Returns a Board of each track with a target, by name.  runs: (run folder, row) in the results folders paths."""
    races, listed = races_of(paths), []
    for track, entries in sorted(by_track(runs).items()):
        track_rules = claims.track_rules(track)
        if not claims.has_target(track):
            continue
        records = progression(entries, track_rules, races)
        entries = sorted(entries, key=lambda entry: (entry.score is None, entry.score or 0, entry.last_run))
        listed.append(Board(track, track_rules, entries, records))
    return listed


def by_track(runs: Iterable[tuple[str, Row]]) -> dict[str, list[Entry]]:
    """Groups (folder, row) pairs into {track: [Entry]}, without copies and runs for which there is a why_excluded()."""
    known_tracks = set(groups.choices("track"))
    by_kind: Groups = {}
    num_failed: collections.Counter[tuple[Any, ...]] = collections.Counter()
    seen: set[tuple[Path, str]] = set()
    homes: dict[str, Path] = {}
    for folder, row in runs:
        parent = folder.rpartition("/")[0]
        if parent not in homes:
            homes[parent] = claims.home([folder])
        home = homes[parent]
        if why_excluded(row, known_tracks) or (home, row["run_id"]) in seen:  # the latter is a copy
            continue
        seen.add((home, row["run_id"]))
        kind = (row["track"], row["config_id"], row["source_sha256"], home)
        if eligibility.is_complete(row):
            by_kind.setdefault((*kind, row["comparability_id"]), []).append((row, folder))
        elif row["status"] != "running":
            num_failed[kind] += 1
    tracks: dict[str, list[Entry]] = {}
    read = functools.cache(ledger.read)
    for key, members in _without_copies(by_kind).items():
        members.sort(key=lambda member: _started(member[0]))
        rows, folders = zip(*members, strict=True)
        track, _, _, home, _ = key
        judged = claims.track_rules(track).rules.judged
        tracks.setdefault(track, []).append(Entry(list(rows), list(folders), num_failed[key[:4]], read(home), judged))
    return tracks


def why_excluded(row: Row, known_tracks: set[str]) -> str | None:
    """Returns why a run can belong to no entry, however it ended, or None if it can."""
    if row["track"] not in known_tracks:
        return "on tracks that conf/track/ does not have"
    if row["num_deviations"]:
        return "in the open division"
    if row["provenance"] == "imported":
        return "logs, which do not show whether rules were kept"
    return "a warm-up" if row["discarded"] else None


def _without_copies(groups: Groups) -> Groups:
    """Omits groups whose runs are all in another one, such as an older publication or a claim of published runs."""
    kept: Groups = {}
    by_kind: dict[tuple[Any, ...], list[set[str]]] = {}
    for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        *kind, _, comparability_id = key
        larger = by_kind.setdefault((*kind, comparability_id), [])
        run_ids = {row["run_id"] for row, _ in members}
        if not any(run_ids <= other for other in larger):
            larger.append(run_ids)
            kept[key] = members
    return kept


# ---- records


def progression(
    entries: Sequence[Entry],
    track_rules: schema.TrackConfig,
    races: Sequence[race_folder.Race] = (),
    judge: Callable[[Entry], str | None] | None = None,
) -> list[Step]:
    """Returns the records among a track's entries, oldest first, and sets the entries' status.  judge: failed_rule."""
    records: list[Step] = []
    order, baselines = _order(entries, track_rules, races), {race["race_id"]: race["baseline"] for race in races}
    for entry in sorted(entries, key=order):
        entry.since = order(entry)[0]
        earlier = [record for record, _, _ in records if record.place == entry.place]
        before = earlier[-1] if earlier else None
        entry.status = _why_no_record(entry, track_rules, earlier, judge or failed_rule)
        is_baseline = all(row["race_id"] and row["arm"] == baselines.get(row["race_id"]) for row in entry.rows)
        if not entry.status and earlier and is_baseline:
            entry.status = "the baseline of a race"  # which nobody claims, though another machine may be faster
        if not entry.status:
            entry.status, entry.number = "record", (before.number or 0) + 1 if before else 1
            if before:
                before.status = "was a record"
            records.append((entry, before, comparison(before, entry, races)))
    return records


def _order(
    entries: Sequence[Entry], track_rules: schema.TrackConfig, races: Sequence[race_folder.Race]
) -> Callable[[Entry], tuple[str, bool]]:
    """Returns a sort key: (when an entry had the runs that a record needs, whether it was a candidate then).

    Later runs of an old record, as another's baseline, do not change its date.  The arms of a race share the date of
    its first run, with the baseline before the candidates.
    """
    baselines = {race["race_id"]: race["baseline"] for race in races}
    begun: dict[str, str] = {}
    for row in (row for entry in entries for row in entry.rows if row["race_id"]):
        race_id = str(row["race_id"])
        begun[race_id] = min(_started(row), begun.get(race_id, _started(row)))

    def order(entry: Entry) -> tuple[str, bool]:
        row = (entry.counted or entry.rows)[: track_rules.repeats][-1]
        race_id = row["race_id"]
        if race_id not in begun:
            return _started(row), False
        return begun[race_id], row["arm"] != baselines.get(race_id)

    return order


def _why_no_record(
    entry: Entry, track_rules: schema.TrackConfig, earlier: Sequence[Entry], judge: Callable[[Entry], str | None]
) -> str:
    """Returns why an entry is no record, or "".  earlier: the records of its place, oldest first."""
    num_runs, num_counted = track_rules.repeats, len(entry.counted)
    if num_counted < num_runs:
        num_suspect = len(entry.rows) - num_counted
        return f"too few runs, {num_counted} of {num_runs}" + f" ({num_suspect} suspect)" * bool(num_suspect)
    if entry.losses["passed"] is False:
        return "target not reached"
    if any(entry.kind == record.kind for record in earlier):  # another session or setting, not another program
        return "repeats the record" if entry.kind == earlier[-1].kind else "repeats an earlier record"
    if earlier and not entry.is_better_than(earlier[-1]):
        return "no fewer steps than the record" if entry.judged == "steps" else "slower than the record"
    failed = judge(entry)
    return f"refused: {failed}" if failed else ""


def failed_rule(entry: Entry) -> str | None:
    """Returns the first rule of ./run.sh judge that the entry's runs fail, or None if they pass all."""
    try:
        return rulebook.first_failed(claims.from_folders(entry.folders, entry.book))
    except ValueError as error:
        return str(error)


def races_of(paths: Iterable[Path]) -> list[race_folder.Race]:
    """Reads race.json of all races with a verdict in these results folders, or folders of publications."""
    races = []
    for path in map(Path, paths):
        for file in sorted((*path.glob("races/*/race.json"), *path.glob("*/races/*/race.json"))):
            with contextlib.suppress(ValueError):  # judge reports what is wrong with it
                races.append(race_folder.read(file.parent))
    return [race for race in races if race.get("result")]


def comparison(before: Entry | None, entry: Entry, races: Sequence[race_folder.Race]) -> Change:
    """Returns the change from the previous record, from a race of the two if there is one, else from their means."""
    if before is None:
        return {"change_pct": None, "measured": "the first"}
    if entry.judged == "steps":
        return {"change_pct": entry.change_pct(before), "measured": "in steps"}
    for race in reversed(races):
        kinds = {name: (arm["config_id"], arm["source_sha256"]) for name, arm in race["arms"].items()}
        if kinds.get(race["baseline"]) != before.kind:
            continue
        for name, verdict in race["result"]["against"].items():
            time = verdict["time"]
            if kinds.get(name) == entry.kind and time["ci95_pct"]:
                low, high = time["ci95_pct"]
                return {"change_pct": time["change_pct"], "measured": f"raced, 95 % {low:+.2f} to {high:+.2f}"}
    measured = "not in one session" if entry.setting == before.setting else "times of two environments"
    return {"change_pct": entry.change_pct(before), "measured": measured}
