"""Why the leaderboard is empty: what kept each run from it."""

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.base import text_table
from bench.base.paths import PUBLISHED, shown
from bench.claims import claim
from bench.record.rows import Row


def words(rows: Sequence[Row], paths: Iterable[Path]) -> str:
    """rows of the runs in these folders, none of which stands on the leaderboard -> a sentence with the reasons."""
    where = ", ".join(f"{shown(path)}/" for path in paths)
    published = f"./run.sh table --leaderboard results/{PUBLISHED} shows the published"
    if not rows:
        return f"no runs in {where} yet; {published}"
    known = set(claim.tracks())
    counts = collections.Counter(_why(row, known) for row in rows).most_common()
    whys = "; ".join(f"{count} {why}" for why, count in counts)
    return f"{where}: {text_table.counted(len(rows), 'run')}, none of them counts: {whys}; {published}"


def _why(row, known):
    if row["track"] not in known:
        return "on tracks that conf/track/ does not have"
    if row["num_deviations"]:
        return "in the open division"
    if row["discarded"]:
        return "a warm-up"
    if row["status"] != "complete" or row["validity"] == "invalid":
        return "failed, invalid or still running"
    return f"on {row['track']}, which has no target"
