"""The leaderboard: what stands on each track, and how its record came down.  ./run.sh table --leaderboard

An entry is all runs of one config and code on one kind of machine that one ledger knows.  It is made from run folders,
races and the ledger alone; what would be a record is judged first (bench/claims/rules/), and only what is accepted becomes one.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import stats, text_table
from bench.claims import claim as claims
from bench.claims import rules
from bench.paths import results_root
from bench.record import index, ledger, run_folder

MAX_ENTRIES = 20  # shown of a track
COLUMNS = ("entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", "device", "commit", "last run")
RECORDS = ("record", "since", "entry", "config_id", "train_s", "change", "measured", "n", "device", "commit")


def main(args):
    """./run.sh table --leaderboard [FOLDER...] [--md]"""
    print(
        text(
            args.folder,
            "github" if args.md else "simple",
            lambda message: print(f"table: left out: {message}", file=sys.stderr),
        )
    )
    return 0


@dataclass
class Entry:
    """Repeats of one thing on one setting."""

    rows: list  # complete, oldest first; suspect ones too, whose losses count
    folders: list
    num_lost: int  # runs of the same config and code that failed or are invalid
    status: str = ""
    since: str | None = None  # when it had the runs that a record takes

    def __post_init__(self):
        self.first, self.last_run = self.rows[0], self.rows[-1]["started_at"]
        self.counted = [row for row in self.rows if row["validity"] == "valid"]
        self.times_s = [row["train_s"] for row in self.counted]
        self.losses = [row["val_loss"] for row in self.rows if row["val_loss"] is not None]

    @property
    def kind(self):
        return self.first["config_id"], self.first["source_sha256"]

    @property
    def train_s(self):
        return stats.mean(self.times_s) if self.times_s else None

    def p(self):
        """That the mean val_loss is below the target, one-sided; None without a target or a spread."""
        target = self.first["target_val_loss"]
        return None if target is None or len(self.losses) < 2 else stats.one_sample_t_less(self.losses, target)[1]

    def reaches(self, law):
        """Whether the runs reach the track's target, as bench/record/verdict.py would say; None: there is no target."""
        if self.first["stop_at_target"]:
            return all(row["target_reached"] for row in self.rows)
        p = self.p()
        return None if self.first["target_val_loss"] is None else p is not None and p < law.p_value


def text(folders=(), form="github", on_error=None):
    """The leaderboard of results/, or of these folders, in Markdown or for a terminal."""
    paths = [run_folder.locate(folder) for folder in folders] or [results_root()]
    parts = []
    for track, entries in sorted(
        by_track(index.read_rows([path for path in paths if Path(path).is_dir()], on_error)).items()
    ):
        law = claims.law(track)
        if law.rules.num_runs is None:
            continue  # nothing to win there
        records = progression(entries, law, races_of(paths))
        parts += [_heading(track, law, form), _standing(entries, form), _records(records, form)]
    return (
        "\n\n".join(parts)
        if parts
        else "no runs yet; ./run.sh table --leaderboard results/published shows the published"
    )


def by_track(found):
    """[(folder, row)] -> {track: [Entry]}; runs in the open division, warm-up runs and unknown tracks are in none."""
    known = set(claims.tracks())
    groups, lost, seen, homes = {}, {}, set(), {}
    for folder, row in found:
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
    tracks = {}
    for key, members in _without_copies(groups).items():
        members.sort(key=lambda member: member[0]["started_at"])
        rows, folders = zip(*members, strict=True)
        tracks.setdefault(key[0], []).append(Entry(list(rows), list(folders), lost.get(key[:4], 0)))
    return tracks


def _without_copies(groups):
    """Without groups whose runs are all in another: an older publication of the same repeats, a claim of published runs."""
    kept, of_thing = {}, {}
    for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        *thing, _, comparability_id = key
        larger = of_thing.setdefault((*thing, comparability_id), [])
        run_ids = {row["run_id"] for row, _ in members}
        if not any(run_ids <= other for other in larger):
            larger.append(run_ids)
            kept[key] = members
    return kept


# ---- records


def progression(entries, law, races=(), judge=None):
    """Entries of one track -> [(entry, the record before it on the same device or None, how they were compared)], oldest first.

    Gives every entry its status.  judge(entry) is the list of rules that it fails.
    """
    best, records = {}, []
    order = _order(entries, law, races)
    for entry in sorted(entries, key=order):
        entry.since = order(entry)[0]
        before = best.get(entry.first["device"])
        entry.status = _why_no_record(entry, law, before, judge or failed_rules)
        if not entry.status:
            entry.status = "record"
            best[entry.first["device"]] = entry
            if before:
                before.status = "was a record"
            records.append((entry, before, comparison(before, entry, races)))
    return records


def _order(entries, law, races):
    """Key to sort entries by: when each had the runs that a record takes.

    Later runs of an old record, as another's baseline, make it no younger.  The arms of one race came at once: the
    baseline first, whichever run happened to be the last.
    """
    baselines = {race["race_id"]: race["baseline"] for race in races}
    begun = {}
    for row in (row for entry in entries for row in entry.rows if row["race_id"]):
        begun[row["race_id"]] = min(row["started_at"], begun.get(row["race_id"], row["started_at"]))

    def order(entry):
        row = (entry.counted or entry.rows)[: law.rules.num_runs][-1]
        race_id = row["race_id"]
        return (
            (begun[race_id], row["arm"] != baselines.get(race_id)) if race_id in begun else (row["started_at"], False)
        )

    return order


def _why_no_record(entry, law, before, judge):
    if len(entry.times_s) < law.rules.num_runs:
        suspect = len(entry.rows) - len(entry.times_s)
        return f"too few runs, {len(entry.times_s)} of {law.rules.num_runs}" + (
            f" ({suspect} suspect)" if suspect else ""
        )
    if entry.reaches(law) is False:
        return "target not reached"
    if before is not None and _thing(entry) == _thing(before):
        return "repeats the record"
    if before is not None and entry.train_s >= before.train_s:
        return "slower than the record"
    failed = judge(entry)
    return f"refused: {failed[0]}" + (f" and {len(failed) - 1} more" if len(failed) > 1 else "") if failed else ""


def _thing(entry):
    return *entry.kind, entry.first["comparability_id"]


def failed_rules(entry):
    """The rules of ./run.sh judge that the entry's runs fail."""
    try:
        return [rule["rule"] for rule in rules.check(claims.of_folders(entry.folders)) if rule["passed"] is False]
    except ValueError as error:
        return [str(error)]


def races_of(paths):
    """race.json of all races that have a verdict, in these results folders or folders of publications."""
    found = []
    for path in map(Path, paths):
        for file in sorted((*path.glob("races/*/race.json"), *path.glob("*/races/*/race.json"))):
            try:
                race = json.loads(file.read_text())
                if race["result"]:
                    found.append(race)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # judge says what is wrong with it
    return found


def comparison(before, entry, races):
    """{"change_pct", "measured"}: of a race of the two in one sitting if there was one, else of the means."""
    if before is None:
        return {"change_pct": None, "measured": "the first"}
    for race in reversed(races):
        kinds = {name: (arm["config_id"], arm["source_sha256"]) for name, arm in race["arms"].items()}
        for name, found in race["result"]["against"].items():
            if (
                kinds.get(name) == entry.kind
                and kinds.get(race["baseline"]) == before.kind
                and found["time"]["ci95_pct"]
            ):
                low, high = found["time"]["ci95_pct"]
                return {"change_pct": found["time"]["change_pct"], "measured": f"raced, 95 % {low:+.2f} to {high:+.2f}"}
    same = entry.first["comparability_id"] == before.first["comparability_id"]
    change_pct = 100 * (entry.train_s / before.train_s - 1)
    return {"change_pct": change_pct, "measured": "not in one sitting" if same else "in another setting"}


# ---- words


def _heading(track, law, form):
    asked = law.rules
    device = f" on {asked.num_gpus} x {asked.gpu}" if asked.gpu else ""
    about = f"{law.about}. A record takes {asked.num_runs} valid runs{device}, the target, and every rule of `./run.sh judge`."
    return f"### {track}\n\n{about}" if form == "github" else f"{track}: {about.replace('`', '')}"


def _standing(entries, form):
    """Best time first; entries without a time that counts at the end."""
    ordered = sorted(entries, key=lambda entry: (entry.train_s is None, entry.train_s or 0, entry.last_run))
    more = len(ordered) - MAX_ENTRIES
    cells = [
        [
            entry.first["name"],
            entry.first["config_id"],
            f"{len(entry.rows)}" + (f", {entry.num_lost} lost" if entry.num_lost else ""),
            "" if entry.train_s is None else f"{entry.train_s:,.3f}",
            "" if (sd := stats.sd(entry.times_s)) is None else f"{sd:.3f}",
            f"{stats.mean(entry.losses):.4f}" if entry.losses else "",
            "" if (p := entry.p()) is None else f"{p:.2g}",
            entry.status,
            entry.first["device"] or "",
            (entry.first["commit"] or "")[:8],
            entry.last_run[:10],
        ]
        for entry in ordered[:MAX_ENTRIES]
    ]
    shown = text_table.render(
        COLUMNS, cells, [False, False, True, True, True, True, True, False, False, False, False], form
    )
    return shown + (f"\n\nand {more} slower ones: ./run.sh table --group" if more > 0 else "")


def _records(records, form):
    if not records:
        return "No record yet."
    cells = [
        [
            str(number),
            entry.since[:10],
            entry.first["name"],
            entry.first["config_id"],
            f"{entry.train_s:,.3f}",
            "" if against["change_pct"] is None else f"{against['change_pct']:+.2f} %",
            against["measured"],
            str(len(entry.rows)),
            entry.first["device"] or "",
            (entry.first["commit"] or "")[:8],
        ]
        for number, (entry, _, against) in enumerate(records, 1)
    ]
    return text_table.render(RECORDS, cells, [True, False, False, False, True, True, False, True, False, False], form)
