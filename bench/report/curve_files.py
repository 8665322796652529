"""curves.html of a site, and curves/*.js beside it: the curves of all runs, some runs a file, loaded when chosen.

A file is made again only when steps.csv of one of its runs changed.  Which runs share a file hangs on their ids alone,
so that a new run changes one file and not those of all later runs.
"""

import functools
import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench import atomic
from bench.record.rows import Row
from bench.report import curve_data, curves
from bench.web.page import json_block

RUNS_A_FILE = 64  # on average
MIN_PARALLEL = 500  # runs to read, from which on two processes are quicker
MADE = ".made.json"


def write(site: Path, rows: Iterable[Row], pages: Mapping[str, str] | None = None) -> Path:
    """Rows with "folder" (record/listing.read_rows) -> site/curves.html, which needs site/assets.  Its path.

    pages: {run_id: link to its page, relative to site}; a run without one has no link.
    """
    rows = sorted({row["run_id"]: row for row in rows}.values(), key=lambda row: row["run_id"])
    files = _files(rows)
    numbers = {row["run_id"]: number for number, part in enumerate(files.values()) for row in part}
    (site / "curves").mkdir(parents=True, exist_ok=True)
    _write_files(site / "curves", files, curves.points_of(len(rows)))
    newest = sorted(rows, key=lambda row: row["started_at"] or "", reverse=True)
    lines = [curves.line_of(row, None, (pages or {}).get(row["run_id"]), numbers[row["run_id"]]) for row in newest]
    index = {"columns": curves.COLUMNS, "rows": lines, "files": list(files)}
    html = curves.page_of(index, back="index.html", assets="assets")
    atomic.write_text(site / "curves.html", html, durable=False)
    return site / "curves.html"


def _files(rows):
    """Rows by run id -> {name of a file: its rows}; a file ends after an id whose hash says so."""
    files, part = {}, []
    for row in rows:
        part.append(row)
        if zlib.crc32(row["run_id"].encode()) % RUNS_A_FILE == 0:
            files[_name(part)] = part
            part = []
    return files | ({_name(part): part} if part else {})


def _name(part):
    return f"{zlib.crc32(part[0]['run_id'].encode()):08x}"


def _write_files(folder, files, max_points):
    made, code = _made(folder), f"{_code():08x}"
    stamps = {name: [code, max_points, *map(_stamp, part)] for name, part in files.items()}
    stale = [name for name in files if made.get(name) != stamps[name] or not (folder / f"{name}.js").exists()]
    for path in folder.glob("*.js"):
        if path.stem not in files:
            path.unlink()
    jobs = [(folder / f"{name}.js", [(row["run_id"], row["folder"]) for row in files[name]]) for name in stale]
    make = functools.partial(_write_file, max_points)
    num_runs = sum(len(runs) for _, runs in jobs)
    if num_runs < MIN_PARALLEL or threading.active_count() > 1 or not hasattr(os, "fork"):
        for job in jobs:
            make(job)
    else:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(make, jobs, chunksize=4)
    if stale or made.keys() != stamps.keys():
        atomic.write_text(folder / MADE, json.dumps(stamps), durable=False)


def _write_file(max_points, job):
    path, runs = job
    found = {run_id: curve_data.packed(curve_data.of_run(folder, max_points)) for run_id, folder in runs}
    atomic.write_text(path, f"addCurves({json_block(found)});\n", durable=False)


def _made(folder):
    try:
        return dict(json.loads((folder / MADE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _stamp(row):
    try:
        stat = os.stat(f"{row['folder']}/steps.csv")
    except OSError:
        return [row["run_id"]]
    return [row["run_id"], stat.st_size, stat.st_mtime_ns]


@functools.cache
def _code():
    """Of the code that makes curves: files of other code are made again."""
    return zlib.crc32(Path(curve_data.__file__).read_bytes() + Path(__file__).read_bytes())
