"""What a user named, run folders or folders of them -> the rows of their runs."""

import os
import sys

from bench.paths import results_root
from bench.record import index, run_folder


def read_rows(folders):
    """Words of the user, none for results/ -> one row (a dict by COLUMNS) for each run, by track, then time.

    A folder that cannot be read is named on standard error and left out.
    """
    root = results_root()
    paths = [run_folder.locate(word) for word in folders] or ([root] if root.is_dir() else [])
    rows, from_here = [], {}  # parent -> the same from where the user stands
    for folder, row in index.read_rows(paths, lambda message: print(f"table: left out: {message}", file=sys.stderr)):
        parent, _, name = folder.rpartition("/")
        if parent not in from_here:
            from_here[parent] = os.path.relpath(parent or "/")
        row["folder"] = name if from_here[parent] == "." else f"{from_here[parent]}/{name}"
        rows.append(row)
    return sorted(rows, key=lambda row: (row["track"] or "", row["started_at"] or "", row["run_id"]))
