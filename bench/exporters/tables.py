"""Runs, or their steps, as csv and parquet."""

import csv
import io
import json
import os

from bench.record import listing, run_folder, step_files


def rows_of(folders, of_steps):
    """[{column: value}]: of runs as the table has them, or of all their steps with run_id first."""
    if of_steps:
        return [
            {"run_id": run_folder.read(folder)["run_id"]} | row for folder in folders for row in step_files.read(folder)
        ]
    return listing.read_rows([str(folder) for folder in folders])


def as_csv(rows):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()}
        for row in rows
    )
    return out.getvalue()


def write_parquet(rows, out):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            "--to parquet: it needs pyarrow: pip install 'pyarrow>=15' into the Python that runs this"
        ) from None
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    try:
        pyarrow.parquet.write_table(table, out)
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot be written ({os.strerror(error.errno) if error.errno else error})"
        ) from None
    print(os.path.relpath(out))
