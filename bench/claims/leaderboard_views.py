"""Views of the leaderboard: a table for a terminal or Markdown, and plain values for the results site.

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
from bench.compare import comparison
from bench.config import groups
from bench.record import named, store
from bench.record.rows import Row
from bench.report.site.record_chart import Board, Entry, Record

MAX_ENTRIES = 20  # shown of a track
CERTIFICATE = "certificate"  # a column where something has one
# fmt: off
COLUMNS = (
    "entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", CERTIFICATE, "device", "commit", "last run",
)
NUMBERS = ("record", "n", "train_s", "sd", "val_loss", "p", "change")
RECORDS = (
    "record", "since", "entry", "config_id", "train_s", "change", "measured", "n", CERTIFICATE, "device", "commit",
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
    names = ["steps" if name == "train_s" and judged == "steps" else name for name in columns]
    cells = [[row[name] for name in columns] for row in rows]
    return text_table.render(names, cells, [name in NUMBERS for name in columns], form)


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
        why = f"on {row['track']}, which has no target" if leaderboard.has_loss(row) else NO_LOSS
        counts[leaderboard.why_excluded(row, known_tracks) or why] += 1
    whys = "; ".join(f"{count} {why}" for why, count in counts.most_common())
    return f"{where}: {text_table.counted(len(rows), 'run')}, none of them counts: {whys}; {published}"


def site_boards(runs: Iterable[tuple[str, Row]], paths: Iterable[Path]) -> list[Board]:
    """[(run folder, row)] of these results folders -> a board of each track that has a target, and of each device."""
    boards = []
    for board in leaderboard.boards(runs, paths):
        for device in dict.fromkeys(entry.place for entry in board.entries):
            boards.append(
                Board(
                    track=board.track,
                    device=device,
                    judged=board.track_rules.rules.judged,
                    about=f"{board.track_rules.about}. {board.needed}".replace("`", ""),
                    records=[_record(*step) for step in board.records if step[0].place == device],
                    entries=[_entry(entry) for entry in board.entries if entry.place == device],
                )
            )
    return sorted(boards, key=lambda board: (board["track"], not board["records"]))


def _record(entry: leaderboard.Entry, before: leaderboard.Entry | None, change: leaderboard.Change) -> Record:
    return {
        "number": entry.number or 0,
        "since": entry.since,
        "what": _what_changed(before, entry),
        "who": _who(entry.book.results),
        "change_pct": change["change_pct"],
        "measured": change["measured"],
        **_entry(entry),
    }


def _entry(entry: leaderboard.Entry) -> Entry:
    counted = entry.counted or entry.rows
    return Entry(
        name=entry.first["name"],
        config_id=entry.first["config_id"],
        run_ids=[row["run_id"] for row in counted],
        n=len(entry.rows),
        num_lost=entry.num_lost,
        train_s=entry.train_s,
        score=entry.score,
        sd_s=stats.sd(entry.times_s),
        val_loss=entry.losses["mean"],
        p=entry.losses["p"],
        status=entry.status,
        certificate=entry.certificate,
        last_run=entry.last_run,
        commit=entry.first["commit"],
    )


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
