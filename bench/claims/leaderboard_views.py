"""Renders the leaderboard as blocks of a Document, for ./run.sh table --leaderboard and the results site."""

import collections
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.base import stats, text_table, utc
from bench.base.paths import PUBLISHED, results_root, shown
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.claims import leaderboard
from bench.claims.leaderboard import Board, Entry, Step
from bench.compare import comparison, eligibility
from bench.config import groups
from bench.record import configs, named, store
from bench.record.rows import Row
from bench.report.site import files
from bench.report.site.site import Standing
from bench.web.chart import Spec, chart, series_of
from bench.web.document import Block, Chart, Document, Lines, Section, Table, link, texts

MAX_ENTRIES = 20  # most entries shown per track and device in a text
OPTIONAL = ("by", "certificate", "settings")  # columns that are omitted where no entry has one
CERTIFICATE = (
    "A certificate is the outcome of ./run.sh replay; 'claimed' marks one of a published record, which "
    "judge --replayed checks on this machine."
)
NO_LOSS = "failed, invalid or still running"
MAX_CHANGES, MAX_VALUE_CHARS = 6, 24  # most changed settings named for a record, and their longest value
MAX_SETTINGS_CHARS = 90  # most of an entry's settings that a row shows
# {setting that names a choice: the group in which it is typed}; other settings of the group follow from the choice
CHOICES = {"model.arch": "model", "optim.name": "optim", "optim.schedule.name": "schedule", "data.source": "data"}
TRAINED = ("model", "script", "optim", "data", "stages", "goal")  # groups of settings in the order of their interest
UNTRAINED = re.compile(r"(instruments|track)\.|hardware\.(rendezvous|\w+_timeout_s|price_usd_per_hour|sandbox)$")
BY = re.compile(r"^By: *(?!\(to be written\))(\S.*)$", re.M)  # author line in the README of a publication or a claim


def text(folders: Iterable[str] = (), is_md: bool = True, on_error: Callable[[str], None] | None = None) -> str:
    """Returns the leaderboard of these folders (default: results/), in Markdown or for a terminal."""
    paths = [named.folder(name) for name in folders] or [results_root()]
    runs = list(store.read_rows([path for path in paths if path.is_dir()], on_error))
    if board := texts(_sections(leaderboard.boards(runs, paths)), is_md):
        return board
    where = ", ".join(f"{shown(path)}/" for path in paths)
    published = f"./run.sh table --leaderboard results/{PUBLISHED} shows the published"
    if not runs:
        return f"no runs in {where} yet; {published}"
    known_tracks, counts = set(groups.choices("track")), collections.Counter[str]()
    for _, row in runs:
        why = f"on {row['track']}, which has no target" if eligibility.is_complete(row) else NO_LOSS
        counts[leaderboard.why_excluded(row, known_tracks) or why] += 1
    whys = "; ".join(f"{count} {why}" for why, count in counts.most_common())
    return f"{where}: {text_table.counted(len(runs), 'run')}, none of them counts: {whys}; {published}"


def standing(runs: Sequence[tuple[str, Row]], paths: Iterable[Path]) -> Standing:
    """Returns the section of the results site.  runs: (run folder, row) of all runs in the results folders paths."""
    boards = leaderboard.boards(runs, paths)
    sections: list[Block] = [*_sections(boards)]
    if others := sorted({str(row["track"]) for _, row in runs} - {board.track for board in boards}):
        sections.append(Lines([f"No records, because the track has no rules: {', '.join(others)}."], True))
    linked = {_first_run(entry) for board in boards for entry in board.entries}
    return Standing(Section("Records", sections).html(), linked, Document("", [], sections).charts)


def _sections(boards: Iterable[Board]) -> list[Section]:
    """Returns a section for each track and device, those with a record first in each track."""
    sections = list[Section]()
    for board in boards:
        places = dict.fromkeys(entry.place for entry in board.entries)
        for place in sorted(places, key=lambda place: not any(entry.place == place for entry, *_ in board.records)):
            title = f"{board.track} on {place or 'an unknown device'}"
            sections.append(Section(title, _blocks(board, place, f"records-{len(sections)}")))
    return sections


def _blocks(board: Board, place: str | None, chart_id: str) -> list[Block]:
    judged, about = board.track_rules.rules.judged, f"{board.track_rules.about}. {board.needed}".replace("`", "")
    entries = [entry for entry in board.entries if entry.place == place]
    about += f" {CERTIFICATE}" * any(entry.certificate for entry in entries)
    records = [step for step in board.records if step[0].place == place]
    listed = Section(f"All entries ({len(entries)})", [_entries(entries, judged)], is_folded=True)
    if not records:
        return [Lines([f"{about} No record yet."], is_soft=True), listed]
    drawn = [Chart(_chart(chart_id, judged, [entry for entry, *_ in records]))] * (len(records) > 1)
    return [Lines([about], is_soft=True), *drawn, _records(records, judged), *_changes(records), listed]


def _entries(entries: Sequence[Entry], judged: str) -> Table:
    heads = ["entry", "settings", "config_id", "n", _score_head(judged), "sd", "val_loss", "p", "status"]
    heads += ["certificate", "last run"]
    rows = []
    for entry in entries:
        numbers = [_number(entry.losses["mean"], ".4f"), _number(entry.losses["p"], ".2g")]
        n = f"{len(entry.rows)}" + (f", {entry.num_lost} failed" if entry.num_lost else "")
        sd = None if judged == "steps" else _number(stats.sd(entry.times_s), ".3f")
        ends = [entry.status, entry.certificate, entry.last_run[:10]]
        name = link(entry.first["name"] or "", files.link(_first_run(entry)))
        rows.append([name, _settings(entry), entry.first["config_id"], n, _score(entry), sd, *numbers, *ends])
    right = [*[False] * 3, *[True] * 5, *[False] * 3]
    return _table(heads, rows, right, limit=MAX_ENTRIES, more=" slower ones: ./run.sh table --group")


def _settings(entry: Entry) -> str:
    """Returns what was typed for the entry's first run beside the track, its name and its seed, cut to fit a column."""
    own = [setting for setting in _typed(entry) if not setting.startswith(("track=", "name=", "seed="))]
    return text_table.middle(" ".join(own), MAX_SETTINGS_CHARS)


def _typed(entry: Entry) -> list[str]:
    with contextlib.suppress(Damaged):
        return configs.as_typed(Path(entry.folders[0]))
    return []


def _records(records: Sequence[Step], judged: str) -> Table:
    """Returns a table of records, the newest first."""
    heads = ["record", _score_head(judged), "change", "measured", "entry", "by", "since", "n", "val_loss"]
    heads += ["certificate", "config_id", "commit"]
    rows = []
    for entry, _, change in reversed(records):
        cells = [str(entry.number), _score(entry), _number(change["change_pct"], "+.2f", " %"), change["measured"]]
        name = link(entry.first["name"] or "", files.link(_first_run(entry)))
        cells += [name, _who(entry.book.results), entry.since[:10]]
        cells += [str(len(entry.rows)), _number(entry.losses["mean"], ".4f"), entry.certificate]
        rows.append([*cells, entry.first["config_id"], (entry.first["commit"] or "")[:8]])
    right = [True, True, True, False, False, False, False, True, True, False, False, False]
    return _table(heads, rows, right, style="records")


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[bool], **facts: Any) -> Table:
    """Returns a Table without the columns of OPTIONAL that are empty."""
    kept = [at for at, head in enumerate(heads) if head not in OPTIONAL or any(row[at] for row in rows)]
    shown = [[row[at] for at in kept] for row in rows]
    return Table([heads[at] for at in kept], shown, [right[at] for at in kept], **facts)


def _chart(id: str, judged: str, entries: Sequence[Entry]) -> Spec:
    """Returns a chart of the record by date; each point links to the page of its first run."""
    measure, unit = ("steps", "steps") if judged == "steps" else ("train time", "s")
    scores = [f"{_score(entry)} {unit}" for entry in entries]
    labels = [
        f"#{entry.number}  {score}  {entry.first['name']}  {entry.since[:10]}"
        for entry, score in zip(entries, scores, strict=True)
    ]
    values = [entry.score for entry in entries]
    links = [files.link(_first_run(entry)) for entry in entries]
    series = [series_of("the record", values, "stepped"), series_of("records", values, "points", labels, links)]
    caption = f"from {scores[0]} to {scores[-1]} in {len(entries)} records"
    dates_s = [utc.seconds(entry.since) for entry in entries]
    spec = chart(id, f"Record {measure} by date", caption, "date (UTC)", f"{measure}, {unit}", dates_s, series)
    return spec | {"dates": True}


def _score_head(judged: str) -> str:
    return "steps" if judged == "steps" else "train_s"


def _score(entry: Entry) -> str | None:
    return _number(entry.score, "," if entry.judged == "steps" else ",.3f")


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _first_run(entry: Entry) -> str:
    """Returns the run id of the entry's first counted run, or of its first run if none is counted."""
    return (entry.counted or entry.rows)[0]["run_id"]


def _changes(records: Sequence[Step]) -> list[Table]:
    """Returns a table of what each record changed in the one before it, the newest first; [] if that is nothing."""
    changes = [(entry.number, _what_changed(before, entry)) for entry, before, _ in reversed(records) if before]
    rows = [[str(number), what] for number, what in changes if what]
    return [Table(["record", "what changed since the one before"], rows, [True, False])] if rows else []


def _what_changed(before: Entry, entry: Entry) -> str:
    """Returns what differs: the settings that change training, or without any the others; code; environment.

    Settings that were typed for either record are first, then the choices of a model or an optimizer.
    """
    differing = comparison.differing_folders(before.folders[0], entry.folders[0])
    settings = [fact for fact in differing if fact["kind"] == "config"]
    settings = [fact for fact in settings if not UNTRAINED.match(fact["what"])] or settings
    typed = {setting.partition("=")[0].lstrip("+~") for setting in (*_typed(before), *_typed(entry))}
    settings.sort(key=lambda fact: (CHOICES.get(fact["what"], fact["what"]) not in typed, *_rank(fact["what"])))
    shown = [f"{fact['what']} {_plain(fact['a'])} → {_plain(fact['b'])}" for fact in settings]
    num_more = len(settings) - MAX_CHANGES
    shown = shown[:MAX_CHANGES] if num_more > 1 else shown
    shown += [text_table.counted(num_more, "more setting")] if num_more > 1 else []
    shown += ["the code"] * (before.first["source_sha256"] != entry.first["source_sha256"])
    return ", ".join(shown + ["the environment (driver, torch, data ...)"] * (before.setting != entry.setting))


def _rank(setting: str) -> tuple[int, bool]:
    group = setting.partition(".")[0]
    return TRAINED.index(group) if group in TRAINED else len(TRAINED), setting not in CHOICES


def _plain(values: list[Any]) -> str:
    text = " or ".join(value if isinstance(value, str) else json.dumps(value) for value in values)
    return text_table.middle(text, MAX_VALUE_CHARS)


def _who(results: Path) -> str | None:
    """Returns the author from the line "By: ..." of the README beside the ledger, or None."""
    match = BY.search(plain_file.text_or_empty(results / "README.md"))
    return match and match[1].strip()[:100]
