"""curves.html of a site, and curves/*.js beside it: the curves of all runs, some runs a file, loaded when chosen.

A file is addCurves("..."): JSON {run_id: curves.packed()}, deflated, in base64.  It is made again only
when steps.csv of one of its runs changed.  Which runs share a file depends on their ids alone: a new run changes
one file and not those of all later runs.
"""

import base64
import contextlib
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.reading import plain_file
from bench.machine import processes
from bench.record.rows import Row
from bench.report import curves

Runs = Sequence[tuple[str, str]]  # (run id, its folder)

RUNS_A_FILE = 64  # on average
MIN_PARALLEL = 500  # runs to read, from which on two processes are quicker
MADE = ".made.json"


def write(site: Path, runs: Iterable[tuple[str, Row]], link: Callable[[str], str | None] = lambda run_id: None) -> Path:
    """[(run folder, row)] -> site/curves.html, which needs site/assets.  Its path.

    link(run_id): from site to the run's page, or None.
    """
    with making(site, runs) as finish:
        pass
    return finish(link)


@contextlib.contextmanager
def making(site: Path, runs: Iterable[tuple[str, Row]]) -> Iterator[Callable[..., Path]]:
    """write() in two parts: in the block two processes read the steps of many runs; what it gives, called by link after
    the block, does the rest."""
    by_id = sorted({row["run_id"]: (folder, row) for folder, row in runs}.items())
    files = _files([(run_id, folder) for run_id, (folder, _) in by_id])
    (site / "curves").mkdir(parents=True, exist_ok=True)

    stamps, jobs = _stale(site / "curves", files, curves.points_of(len(by_id)))

    def finish(link: Callable[[str], str | None]) -> Path:
        if stamps:
            atomic.write_text(site / "curves" / MADE, json.dumps(stamps), durable=False)
        numbers = {run_id: number for number, part in enumerate(files.values()) for run_id, _ in part}
        newest = sorted((row for _, (_, row) in by_id), key=lambda row: row["started_at"] or "", reverse=True)
        lines = [curves.line_of(row, None, link(row["run_id"]), numbers[row["run_id"]]) for row in newest]
        index = {"columns": curves.COLUMNS, "rows": lines, "files": list(files)}
        atomic.write_text(site / "curves.html", curves.page_of(index, "index.html", "assets"), durable=False)
        return site / "curves.html"

    are_many = sum(len(part) for _, part in jobs) >= MIN_PARALLEL
    with processes.started(functools.partial(_write_file, curves.points_of(len(by_id))), jobs, are_many) as made:
        yield finish
        list(made)


def _files(runs: Runs) -> dict[str, Runs]:
    """[(run id, folder)] by id -> {name of a file: its runs}; a file ends after an id whose hash says so."""
    files: dict[str, Runs] = {}
    part: list[tuple[str, str]] = []
    for run in runs:
        part.append(run)
        if zlib.crc32(run[0].encode()) % RUNS_A_FILE == 0 or run is runs[-1]:
            files[f"{zlib.crc32(part[0][0].encode()):08x}"] = part
            part = []
    return files


def _stale(
    folder: Path, files: dict[str, Runs], max_points: int
) -> tuple[dict[str, list[Any]], list[tuple[Path, Runs]]]:
    """({name: stamps} or {} where nothing changed, [(path, runs)] to write); files of other runs are removed."""
    made, code = atomic.read_json(folder / MADE, {}, plain_file.MAX_LINES_BYTES), f"{_code():08x}"
    stamps = {name: [code, max_points, *map(_stamp, part)] for name, part in files.items()}
    stale = [name for name in files if made.get(name) != stamps[name] or not (folder / f"{name}.js").exists()]
    for path in folder.glob("*.js"):
        if path.stem not in files:
            path.unlink()
    jobs = [(folder / f"{name}.js", files[name]) for name in stale]
    return stamps if stale or made.keys() != stamps.keys() else {}, jobs


def _write_file(max_points: int, job: tuple[Path, Runs]) -> None:
    path, runs = job
    result = {}
    for run_id, folder in runs:
        with contextlib.suppress(ValueError):  # damaged: the page says that it has no such values
            result[run_id] = curves.packed(curves.curves_of_run(folder, max_points))
    words = base64.b64encode(zlib.compress(json.dumps(result, separators=(",", ":")).encode(), 3)).decode()
    atomic.write_text(path, f'addCurves("{words}");\n', durable=False)


def _stamp(run: tuple[str, str]) -> list[Any]:
    run_id, folder = run
    try:
        stat = os.stat(f"{folder}/steps.csv")
    except OSError:
        return [run_id]
    return [run_id, stat.st_size, stat.st_mtime_ns]


@functools.cache
def _code() -> int:
    """Of the code that makes curves: files of other code are made again."""
    return zlib.crc32(Path(curves.__file__).read_bytes() + Path(__file__).read_bytes())
