"""Other runs of the same config that the page of a run leads to: the nearest in time, so that a new run changes few."""

from collections.abc import Iterable
from urllib.parse import quote

NUM_BESIDE = 3  # before, and after


def of_rows(rows: Iterable[dict]) -> dict[str, list[tuple[str, str]]]:
    """Rows (bench/record/rows.py) -> {run_id: [(words, its page beside the run's own)]}, [] for an only run."""
    groups = {}
    for row in rows:
        groups.setdefault(row["config_id"] or row["run_id"], []).append(row)
    result = {}
    for group in groups.values():
        group.sort(key=lambda row: row["started_at"] or "")
        links = [(_words(row), f"run.html?{quote(row['run_id'])}") for row in group]
        for num, row in enumerate(group):
            result[row["run_id"]] = links[max(0, num - NUM_BESIDE) : num] + links[num + 1 : num + 1 + NUM_BESIDE]
    return result


def _words(row):
    return f"seed {row['seed']} of {(row['started_at'] or 'an unknown time')[:16].replace('T', ' ')}"
