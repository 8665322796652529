"""The leaderboard as the results site shows it: a track's records and entries on each device, as plain values."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from bench.base import stats
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.claims import leaderboard
from bench.compare import comparison
from bench.record.rows import Row
from bench.report.site.record_chart import Board, Entry, Record

MAX_CHANGES = 4  # of a record's config that are named
BY = re.compile(r"^By: *(?!\(to be written\))(\S.*)$", re.M)  # in the README of a publication or a claim


def of_folders(runs: Iterable[tuple[str, Row]], paths: Iterable[Path]) -> list[Board]:
    """[(run folder, row)] of these results folders -> a board of each track that has a target, and of each device."""
    boards = []
    for board in leaderboard.boards(runs, paths):
        for device in dict.fromkeys(entry.place for entry in board.entries):
            of_device = [one for one in board.records if one[0].place == device]
            boards.append(
                Board(
                    track=board.track,
                    device=device,
                    judged=board.track_rules.rules.judged,
                    about=f"{board.track_rules.about}. {board.needed}".replace("`", ""),
                    records=[_record(*one) for one in of_device],
                    entries=[_entry(entry) for entry in board.entries if entry.place == device],
                )
            )
    return sorted(boards, key=lambda board: (board["track"], not board["records"]))


def _record(entry, before, against):
    return Record(
        number=entry.number,
        since=entry.since,
        what=_what_changed(before, entry),
        who=_who(entry.book.results),
        change_pct=against["change_pct"],
        measured=against["measured"],
        **_entry(entry),
    )


def _entry(entry):
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


def _what_changed(before, entry):
    """The config's settings that differ from the record before, and whether the code does; None for the first."""
    if before is None:
        return None
    result = comparison.differing_folders(before.folders[0], entry.folders[0])
    changes = [f"{one['what']} {_plain(one['a'])} → {_plain(one['b'])}" for one in result if one["kind"] == "config"]
    more = len(changes) - MAX_CHANGES
    changes = changes[:MAX_CHANGES] + ([f"{more} settings more"] if more > 0 else [])
    if before.first["source_sha256"] != entry.first["source_sha256"]:
        changes.append("the code")
    if before.first["comparability_id"] != entry.first["comparability_id"]:
        changes.append("the setting (driver, torch, data ...)")
    return ", ".join(changes) or None


def _plain(values):
    return " or ".join(value if isinstance(value, str) else json.dumps(value) for value in values)


def _who(results):
    """Who made it: what a line "By: ..." of the README beside the ledger says; None without one."""
    try:
        result = BY.search(plain_file.text(Path(results) / "README.md"))
    except Damaged:
        return None
    return result and result[1].strip()[:100]
