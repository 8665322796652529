"""The leaderboard: what stands on each track, and how its record came down.  ./run.sh table --leaderboard

An entry is all runs of one config and code on one kind of machine that one ledger has.  It is made from run folders,
races and the ledger alone; what would be a record is judged first (bench/claims/rules/), and becomes one if accepted.
"""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.base import stats
from bench.claims import claim as claims
from bench.claims.rules import rulebook
from bench.compare import target
from bench.config import schema
from bench.record import certificates, ledger, race_folder
from bench.record.rows import Row


@dataclass
class Entry:
    """Repeats of one config and code in one setting."""

    rows: list  # complete, oldest first; suspect ones too, whose losses count
    folders: list
    num_lost: int  # runs of the same config and code that failed or are invalid
    book: ledger.Ledger  # that has them
    judged: str = "time"  # by which it is placed, or "steps"
    status: str = ""
    since: str | None = None  # when it had the runs that a record takes
    number: int | None = None  # of the record, among those on its device

    def __post_init__(self):
        self.first, self.last_run = self.rows[0], self.rows[-1]["started_at"]
        self.counted = [row for row in self.rows if self.judged == "steps" or row["validity"] == "valid"]
        self.times_s = [row["train_s"] for row in self.counted]
        self.train_s = stats.mean(self.times_s) if self.times_s else None
        self.score = max(row["num_steps"] for row in self.rows) if self.judged == "steps" else self.train_s
        self.place = "any device" if self.judged == "steps" else self.first["device"]  # where a record stands
        self.kind = (self.first["config_id"], self.first["source_sha256"])

    @functools.cached_property
    def certificate(self) -> str | None:
        """What the replays of its runs showed."""
        return certificates.of_several(map(certificates.outcome, self.folders))

    @functools.cached_property
    def losses(self):
        """What bench.compare.target says of the runs against the track's target."""
        return target.of_repeats(self.rows, target.p_value_of(self.first["track"]))


@dataclass
class Board:
    """What stands on a track."""

    track: str
    track_rules: schema.TrackConfig
    entries: list[Entry]  # best first; those without a time that counts at the end
    records: list[tuple[Entry, Entry | None, dict]]  # progression()

    @property
    def needed(self) -> str:
        """What a record takes, a sentence; words between ` are commands."""
        asked = self.track_rules.rules
        device = f" on {asked.num_gpus} x {asked.gpu}" if asked.gpu else ""
        best = ", in fewer steps than the one before" * (asked.judged == "steps")
        runs = f"{self.track_rules.repeats} valid runs{device}{best}"
        return f"A record takes {runs}, the target, and every rule of `./run.sh judge`."


def boards(runs: Iterable[tuple[str, Row]], paths: Iterable[Path]) -> list[Board]:
    """[(run folder, row)] of these results folders -> a Board of each track that has a target, by name."""
    races, made = races_of(paths), []
    for track, entries in sorted(by_track(runs).items()):
        track_rules = claims.track_rules(track)
        if not claims.has_target(track):
            continue
        records = progression(entries, track_rules, races)
        entries = sorted(entries, key=lambda entry: (entry.score is None, entry.score or 0, entry.last_run))
        made.append(Board(track, track_rules, entries, records))
    return made


def by_track(runs: Iterable[tuple[str, Row]]) -> dict[str, list[Entry]]:
    """[(folder, row)] -> {track: [Entry]}; runs in the open division, warm-up runs and unknown tracks are in none."""
    known = set(claims.tracks())
    groups, lost, seen, homes = {}, {}, set(), {}
    for folder, row in runs:
        parent = folder.rpartition("/")[0]
        if parent not in homes:
            homes[parent] = ledger.home([folder])
        home = homes[parent]
        if row["num_deviations"] or row["discarded"] or row["track"] not in known:
            continue
        if (home, row["run_id"]) in seen:  # a copy
            continue
        seen.add((home, row["run_id"]))
        kind = (row["track"], row["config_id"], row["source_sha256"], home)
        if row["status"] == "complete" and row["validity"] != "invalid":
            groups.setdefault((*kind, row["comparability_id"]), []).append((row, folder))
        elif row["status"] != "running":
            lost[kind] = lost.get(kind, 0) + 1
    tracks, read = {}, functools.cache(ledger.read)
    for key, members in _without_copies(groups).items():
        members.sort(key=lambda member: member[0]["started_at"])
        rows, folders = zip(*members, strict=True)
        judged = claims.track_rules(key[0]).rules.judged
        entry = Entry(list(rows), list(folders), lost.get(key[:4], 0), read(key[3]), judged)
        tracks.setdefault(key[0], []).append(entry)
    return tracks


def _without_copies(groups):
    """Without groups whose runs are all in another: an older publication of the repeats, a claim of published runs."""
    kept, of_kind = {}, {}
    for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        *kind, _, comparability_id = key
        larger = of_kind.setdefault((*kind, comparability_id), [])
        run_ids = {row["run_id"] for row, _ in members}
        if not any(run_ids <= other for other in larger):
            larger.append(run_ids)
            kept[key] = members
    return kept


# ---- records


def progression(entries, track_rules, races=(), judge=None):
    """Entries of a track -> [(entry, record before it or None, comparison())], oldest first; each gets its status."""
    best, records = {}, []
    order = _order(entries, track_rules, races)
    for entry in sorted(entries, key=order):
        entry.since = order(entry)[0]
        before = best.get(entry.place)
        entry.status = _why_no_record(entry, track_rules, before, judge or failed_rule)
        if not entry.status:
            entry.status, entry.number = "record", before.number + 1 if before else 1
            best[entry.place] = entry
            if before:
                before.status = "was a record"
            records.append((entry, before, comparison(before, entry, races)))
    return records


def _order(entries, track_rules, races):
    """Key to sort entries by: when each had the runs that a record takes.

    Later runs of an old record, as another's baseline, make it no younger.  The arms of one race came at once: the
    baseline first, whichever run happened to be the last.
    """
    baselines = {race["race_id"]: race["baseline"] for race in races}
    begun = {}
    for row in (row for entry in entries for row in entry.rows if row["race_id"]):
        begun[row["race_id"]] = min(row["started_at"], begun.get(row["race_id"], row["started_at"]))

    def order(entry):
        row = (entry.counted or entry.rows)[: track_rules.repeats][-1]
        race_id = row["race_id"]
        if race_id not in begun:
            return row["started_at"], False
        return begun[race_id], row["arm"] != baselines.get(race_id)

    return order


def _why_no_record(entry, track_rules, before, judge):
    num_runs, num_counted = track_rules.repeats, len(entry.counted)
    if num_counted < num_runs:
        num_suspect = len(entry.rows) - num_counted
        return f"too few runs, {num_counted} of {num_runs}" + f" ({num_suspect} suspect)" * bool(num_suspect)
    if entry.losses["passed"] is False:
        return "target not reached"
    same_setting = before is not None and entry.first["comparability_id"] == before.first["comparability_id"]
    if same_setting and entry.kind == before.kind:
        return "repeats the record"
    if before is not None and entry.score >= before.score:
        return "no fewer steps than the record" if entry.judged == "steps" else "slower than the record"
    failed = judge(entry)
    return f"refused: {failed}" if failed else ""


def failed_rule(entry: Entry) -> str | None:
    """A rule of ./run.sh judge that the entry's runs fail, the quickest to find; None: they keep them all."""
    try:
        return rulebook.first_failed(claims.of_folders(entry.folders, entry.book))
    except ValueError as error:
        return str(error)


def races_of(paths: Iterable[Path]) -> list[race_folder.Race]:
    """race.json of all races that have a verdict, in these results folders or folders of publications."""
    result = []
    for path in map(Path, paths):
        for file in sorted((*path.glob("races/*/race.json"), *path.glob("*/races/*/race.json"))):
            with contextlib.suppress(ValueError):  # judge says what is wrong with it
                race = race_folder.read(file.parent)
                result += [race] if race.get("result") else []
    return result


def comparison(before: Entry | None, entry: Entry, races: Sequence[race_folder.Race]) -> dict:
    """{"change_pct", "measured"}: of a race of the two in one session if there was one, else of the means."""
    if before is None:
        return {"change_pct": None, "measured": "the first"}
    if entry.judged == "steps":
        return {"change_pct": 100 * (entry.score / before.score - 1), "measured": "in steps"}
    for race in reversed(races):
        kinds = {name: (arm["config_id"], arm["source_sha256"]) for name, arm in race["arms"].items()}
        for name, result in race["result"]["against"].items():
            of_both = kinds.get(name) == entry.kind and kinds.get(race["baseline"]) == before.kind
            if of_both and result["time"]["ci95_pct"]:
                low, high = result["time"]["ci95_pct"]
                return {
                    "change_pct": result["time"]["change_pct"],
                    "measured": f"raced, 95 % {low:+.2f} to {high:+.2f}",
                }
    same = entry.first["comparability_id"] == before.first["comparability_id"]
    change_pct = 100 * (entry.train_s / before.train_s - 1)
    return {"change_pct": change_pct, "measured": "not in one session" if same else "in another setting"}
