"""Runs, or their steps, as csv and parquet."""

import csv
import io
import json
import os

from bench.record import listing, run_folder, step_files


def rows_of(folders, of_steps):
    """[{column: value}]: of runs as the table has them, or of all their steps with run_id first."""
    if of_steps:
        ids = {folder: run_folder.read(folder)["run_id"] for folder in folders}
        return [{"run_id": ids[folder]} | row for folder in folders for row in step_files.read(folder)]
    return listing.read_rows([str(folder) for folder in folders])


def as_csv(rows):
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()}
        writer.writerow(cells)
    return out.getvalue()


def _columns(rows):
    return list(dict.fromkeys(column for row in rows for column in row))


def write_parquet(rows, out):
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
