"""Runs, or their steps, as csv and parquet."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.base.paths import shown
from bench.base.reading import damage
from bench.base.reading.damage import Damaged, of_record
from bench.record import named, run_folder, step_files

T = TypeVar("T")


def rows_of(folders: Sequence[Path | str], of_steps: bool) -> Sequence[Mapping[str, Any]]:
    """[{column: value}]: of runs as the table has them, or of all their steps with run_id first."""
    if of_steps:
        runs = of_each(folders, lambda folder: (run_folder.read(folder)["run_id"], step_files.read(folder)))
        return [{"run_id": run_id} | row for run_id, rows in runs for row in rows]
    return _some(named.rows_of_words([str(folder) for folder in folders]), folders)


def _some(found: Sequence[T], folders: Sequence[Path | str]) -> Sequence[T]:
    if folders and not found:
        raise ValueError(f"{folders[0]}: no record of {len(folders)} can be read: ./run.sh verify says what is wrong")
    return found


def of_each(folders: Iterable[Path | str], make: Callable[[Any], T]) -> Sequence[T]:
    """make(folder) of each run folder; a damaged record is excluded, on standard error.  ValueError: all are."""
    made, folders = [], list(folders)
    for folder in folders:
        try:
            with of_record(folder):
                made.append(make(folder))
        except Damaged as error:
            named.report_excluded("export", str(error))
    return _some(made, folders)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows, whose keys may differ -> csv with a head; None is an empty cell, a list or dict is JSON in its own."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return damage.one_line(value) if isinstance(value, str) else value


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def write_parquet(rows: Sequence[Mapping[str, Any]], out: Path | str) -> None:
    """The same as a parquet file; prints its path.  ValueError without pyarrow, or where out cannot be written."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        hint = "pip install 'pyarrow>=15' into the Python that runs this"
        raise ValueError(f"--to parquet: it needs pyarrow: {hint}") from None
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)})
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ValueError(f"--to parquet: a column has values of several kinds ({error}): use --to csv") from None
    try:
        pyarrow.parquet.write_table(table, out)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"--out {out}: cannot be written ({why})") from None
    print(shown(out))
