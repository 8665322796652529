"""Runs, or their steps, as csv and parquet."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.record import listing, run_folder, step_files


def rows_of(folders: Sequence[Path | str], of_steps: bool) -> Sequence[Mapping]:
    """[{column: value}]: of runs as the table has them, or of all their steps with run_id first."""
    if of_steps:
        ids = {folder: run_folder.read(folder)["run_id"] for folder in folders}
        return [{"run_id": ids[folder]} | row for folder in folders for row in step_files.read(folder)]
    return listing.read_rows([str(folder) for folder in folders])


def as_csv(rows: Sequence[Mapping]) -> str:
    """Rows, whose keys may differ -> csv with a head; None is an empty cell, a list or dict is JSON in its own."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()}
        writer.writerow(cells)
    return out.getvalue()


def _columns(rows):
    return list(dict.fromkeys(column for row in rows for column in row))


def write_parquet(rows: Sequence[Mapping], out: Path | str) -> None:
    """The same as a parquet file; prints its path.  ValueError without pyarrow, or where out cannot be written."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        hint = "pip install 'pyarrow>=15' into the Python that runs this"
        raise ValueError(f"--to parquet: it needs pyarrow: {hint}") from None
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)})
    try:
        pyarrow.parquet.write_table(table, out)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"--out {out}: cannot be written ({why})") from None
    print(os.path.relpath(out))
