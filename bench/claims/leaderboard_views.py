"""Views of the leaderboard: a table for a terminal or Markdown, and a section of the results site with its chart.

./run.sh table --leaderboard
"""

import collections
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.base import stats, text_table
from bench.base.paths import PUBLISHED, results_root, shown
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.claims import leaderboard
from bench.compare import comparison, eligibility
from bench.config import groups
from bench.record import named, store
from bench.record.rows import Row
from bench.report.site import packed_pages
from bench.report.site.record_chart import Record, stepped
from bench.report.site.site import Standing
from bench.web.page import Safe, details, section, soft, table, tag

MAX_ENTRIES = 20  # shown of a track
MAX_ON_SITE, MAX_LOGS = 50, 3  # entries of a track and device; runs of a record that are linked
CERTIFICATE = "certificate"  # a column where something has one
# fmt: off
COLUMNS = (
    "entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", CERTIFICATE, "device", "commit", "last run",
)
NUMBERS = ("record", "n", "train_s", "sd", "val_loss", "p", "change")
RECORDS = (
    "record", "since", "entry", "config_id", "train_s", "change", "measured", "n", CERTIFICATE, "device", "commit",
)
ON_SITE = ("entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", CERTIFICATE, "last run")
RECORDS_ON_SITE = (
    "#", "train_s", "change", "what changed", "who", "date", "runs", "val_loss", CERTIFICATE, "logs",
)
# fmt: on
NO_LOSS = "failed, invalid or still running"
MAX_CHANGES = 4  # of a record's config that are named
BY = re.compile(r"^By: *(?!\(to be written\))(\S.*)$", re.M)  # in the README of a publication or a claim


def text(folders: Iterable[str] = (), form: str = "github", on_error: Callable[[str], None] | None = None) -> str:
    """The leaderboard of these folders, as typed (none: results/).  form: github, or simple for a terminal."""
    paths = [named.folder(word) for word in folders] or [results_root()]
    runs = list(store.read_rows([path for path in paths if path.is_dir()], on_error))
    parts = []
    for board in leaderboard.boards(runs, paths):
        judged, about = board.track_rules.rules.judged, f"{board.track_rules.about}. {board.needed}"
        is_md = form == "github"
        parts.append(f"### {board.track}\n\n{about}" if is_md else f"{board.track}: {about.replace('`', '')}")
        parts.append(_table(COLUMNS, [_cells(entry) for entry in board.entries[:MAX_ENTRIES]], judged, form))
        if len(board.entries) > MAX_ENTRIES:
            parts.append(f"and {len(board.entries) - MAX_ENTRIES} slower ones: ./run.sh table --group")
        parts.append(_records(board.records, judged, form))
    return "\n\n".join(parts) or why_empty([row for _, row in runs], paths)


def _records(records: list[leaderboard.Step], judged: str, form: str) -> str:
    if not records:
        return "No record yet."
    rows = []
    for entry, _, against in records:
        own = {"record": str(entry.number), "since": entry.since[:10], "n": str(len(entry.rows))}
        change = {"change": _number(against["change_pct"], "+.2f", " %"), "measured": against["measured"]}
        rows.append(_cells(entry) | own | change)
    return _table(RECORDS, rows, judged, form)


def _cells(entry: leaderboard.Entry) -> dict[str, str]:
    is_steps = entry.judged == "steps"
    return {
        "entry": entry.first["name"] or "",
        "config_id": entry.first["config_id"] or "",
        "n": f"{len(entry.rows)}" + (f", {entry.num_lost} failed" if entry.num_lost else ""),
        "train_s": _number(entry.score, "," if is_steps else ",.3f"),
        "sd": "" if is_steps else _number(stats.sd(entry.times_s), ".3f"),
        "val_loss": _number(entry.losses["mean"], ".4f"),
        "p": _number(entry.losses["p"], ".2g"),
        "status": entry.status,
        CERTIFICATE: entry.certificate or "",
        "device": entry.first["device"] or "",
        "commit": (entry.first["commit"] or "")[:8],
        "last run": entry.last_run[:10],
    }


def _table(wanted: Sequence[str], rows: list[dict[str, str]], judged: str, form: str) -> str:
    columns = [name for name in wanted if name != CERTIFICATE or any(row[CERTIFICATE] for row in rows)]
    cells = [[row[name] for name in columns] for row in rows]
    return text_table.render(_heads(columns, judged), cells, [name in NUMBERS for name in columns], form)


def _heads(columns: Sequence[str], judged: str) -> list[str]:
    return ["steps" if name == "train_s" and judged == "steps" else name for name in columns]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def why_empty(rows: Sequence[Row], paths: Iterable[Path]) -> str:
    """rows of the runs in these folders, none of which is on the leaderboard -> a sentence with the reasons."""
    where = ", ".join(f"{shown(path)}/" for path in paths)
    published = f"./run.sh table --leaderboard results/{PUBLISHED} shows the published"
    if not rows:
        return f"no runs in {where} yet; {published}"
    known_tracks, counts = set(groups.choices("track")), collections.Counter[str]()
    for row in rows:
        why = f"on {row['track']}, which has no target" if eligibility.is_complete(row) else NO_LOSS
        counts[leaderboard.why_excluded(row, known_tracks) or why] += 1
    whys = "; ".join(f"{count} {why}" for why, count in counts.most_common())
    return f"{where}: {text_table.counted(len(rows), 'run')}, none of them counts: {whys}; {published}"


# ---- on the results site


def standing(runs: Sequence[tuple[str, Row]], paths: Iterable[Path]) -> Standing:
    """[(run folder, row)] of these results folders -> what the site shows of each track that has a target."""
    boards = leaderboard.boards(runs, paths)
    shown = [(board, place) for board in boards for place in dict.fromkeys(entry.place for entry in board.entries)]
    shown.sort(key=lambda on: (on[0].track, not any(entry.place == on[1] for entry, *_ in on[0].records)))
    parts, linked = list[Safe](), set[str]()
    for board, place in shown:
        parts += _section(board, place, linked)
    if others := sorted({str(row["track"]) for _, row in runs} - {board.track for board, _ in shown}):
        parts.append(soft(f"No record is kept of {', '.join(others)}: this project has no rules for it."))
    return Standing(section("Records", *parts, id="records") if parts else Safe(""), linked)


def _section(board: leaderboard.Board, place: str | None, linked: set[str]) -> list[Safe]:
    """A track on one device.  linked: gets the run_ids of its links."""
    judged, about = board.track_rules.rules.judged, f"{board.track_rules.about}. {board.needed}".replace("`", "")
    records = [step for step in board.records if step[0].place == place]
    entries = [entry for entry in board.entries if entry.place == place]
    title = tag("h3", f"{board.track} on {place or 'an unknown device'}")
    lines = [_linked(entry, linked) for entry in entries[:MAX_ON_SITE]]
    listed = details(f"All entries ({len(entries)})", table(_heads(ON_SITE, judged), lines))
    if not records:
        return [title, soft(f"{about} No record yet."), listed]
    marks = [
        Record(entry.number or 0, entry.first["name"], entry.since, entry.score or 0.0, _pages(entry)[0][1])
        for entry, *_ in records
    ]
    chart = stepped(marks, judged) if len(marks) > 1 else Safe("")
    rows = [_record(*step, linked) for step in reversed(records)]
    return [title, soft(about), chart, table(_heads(RECORDS_ON_SITE, judged), rows, class_="records"), listed]


def _pages(entry: leaderboard.Entry) -> list[tuple[str, str]]:
    """(run_id, the site's link to its page) of the runs whose times count, else of all."""
    return [(row["run_id"], packed_pages.link(row["run_id"])) for row in entry.counted or entry.rows]


def _linked(entry: leaderboard.Entry, linked: set[str]) -> list[object]:
    cells, (run_id, href) = _cells(entry), _pages(entry)[0]
    linked.add(run_id)
    return [tag("a", cells["entry"], href=href), *(cells[name] or None for name in ON_SITE[1:])]


def _record(
    entry: leaderboard.Entry, before: leaderboard.Entry | None, change: leaderboard.Change, linked: set[str]
) -> list[object]:
    cells, pages = _cells(entry), _pages(entry)[:MAX_LOGS]
    linked.update(run_id for run_id, _ in pages)
    what = _what_changed(before, entry) or ("the first" if change["change_pct"] is None else None)
    logs = [part for number, (_, href) in enumerate(pages, 1) for part in (tag("a", str(number), href=href), " ")]
    changed = _number(change["change_pct"], "+.2f", " %")
    return [
        entry.number,
        tag("b", cells["train_s"] or None),
        tag("span", changed, title=change["measured"]) if changed else None,
        tag("span", tag("b", cells["entry"]), f": {what}" if what else ""),
        _who(entry.book.results),
        entry.since[:10],
        len(entry.rows),
        cells["val_loss"] or None,
        cells[CERTIFICATE] or None,
        tag("span", *logs),
    ]


def _what_changed(before: leaderboard.Entry | None, entry: leaderboard.Entry) -> str | None:
    """The settings that differ from the previous record, and whether the code does; None for the first."""
    if before is None:
        return None
    changes = [
        f"{differing['what']} {_plain(differing['a'])} → {_plain(differing['b'])}"
        for differing in comparison.differing_folders(before.folders[0], entry.folders[0])
        if differing["kind"] == "config"
    ]
    num_more = len(changes) - MAX_CHANGES
    changes = changes[:MAX_CHANGES] + ([f"{num_more} settings more"] if num_more > 0 else [])
    if before.first["source_sha256"] != entry.first["source_sha256"]:
        changes.append("the code")
    if before.setting != entry.setting:
        changes.append("the setting (driver, torch, data ...)")
    return ", ".join(changes) or None


def _plain(values: list[Any]) -> str:
    return " or ".join(value if isinstance(value, str) else json.dumps(value) for value in values)


def _who(results: Path) -> str | None:
    """Who made it, from the line "By: ..." of the README beside the ledger; None without one."""
    try:
        match = BY.search(plain_file.text(results / "README.md"))
    except Damaged:
        return None
    return match and match[1].strip()[:100]
