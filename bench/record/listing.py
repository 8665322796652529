"""What a user named, run folders or folders of them -> the rows of their runs."""

import sys
from collections.abc import Iterable

from bench.base.paths import results_root, shown
from bench.base.reading import damage
from bench.record import certificates, index, named, rows


def excluded(verb: str, message: str) -> None:
    """Says on standard error that a verb goes on without a record, and why, in one line."""
    print(f"{verb}: excluded: {damage.one_line(message)}", file=sys.stderr)


def report(message: str) -> None:
    """Of a record that cannot be read."""
    excluded("table", message)


def read_rows(words: Iterable[str]) -> list[rows.Row]:
    """Words of the user, none for results/ -> the rows of their runs, by track, then time.

    They have "folder" and "certificate" (its outcome; None: none) as well.  Unreadable ones are reported.
    """
    root = results_root()
    paths = [path for one in named.find(words) for path in one.holders] or ([root] if root.is_dir() else [])
    result, before = [], {}  # parent -> what stands before the name, from where the user stands
    for folder, row in index.read_rows(paths, report):
        parent, _, name = folder.rpartition("/")
        if parent not in before:
            before[parent] = shown(folder).removesuffix(name)
        row["folder"] = before[parent] + name
        row["certificate"] = certificates.outcome(folder)
        result.append(row)
    return sorted(result, key=lambda row: (row["track"] or "", row["started_at"] or "", row["run_id"]))
