"""The files of a site that are made from runs, which a browser opens from disk without a server.

runs/RUN_ID.html is the page of a run.  curves.html overlays the curves of selected runs, which it loads from
curves/*.js.  Each of these calls addCurves("...") with JSON {run_id: curves.curves_of_run()}, deflated, in base64.  A
file is rewritten only if a record in it, or the code that makes pages, has changed.  Which runs share a file of curves
depends on their ids alone, so a new run changes only one of these files.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.metric import VAL_LOSS
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.machine import processes
from bench.record.rows import Row
from bench.report import curves, run_page

Runs = Sequence[tuple[str, Row]]  # (run folder, its row)

NUM_PAGES = 1000  # most new pages of a site: each takes 5 ms and 20 KB (120 steps)
MIN_PARALLEL = 64  # one process makes fewer files as fast
NUM_CURVE_FILES = 256
MADE = ".made.json"  # in each folder: {file: [stamp of its inputs, why it could not be made or null]}
WATCHED = ("run.json", "events.jsonl", "steps.csv", "analysis.json", "memory")
FOLDERS = ("report", "analysis", "web")  # folders of bench/ whose code makes pages
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}", re.ASCII)


def link(run_id: str) -> str:
    """Returns the address of a run's page relative to the site's index."""
    return f"runs/{page_name(run_id)}"


def page_name(run_id: str) -> str:
    """Returns the name of a run's page in runs/; an id that is not safe as a file name is replaced by its hash."""
    name = run_id if PLAIN_NAME.fullmatch(run_id) else hashlib.sha256(run_id.encode()).hexdigest()[:32]
    return f"{name}.html"


def chosen(runs: Runs, linked: Collection[str]) -> list[tuple[str, Row]]:
    """Returns the runs that get a page: the newest, and those with the run_ids in linked."""
    newest = sorted((row for _, row in runs), key=lambda row: row["started_at"] or "", reverse=True)[:NUM_PAGES]
    ids = {row["run_id"] for row in newest} | set(linked)
    return [(folder, row) for folder, row in runs if row["run_id"] in ids]


def write_pages(
    runs: Runs, site: Path, say: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, str | None]:
    """Writes the page of each run and returns {run_id: None, or why a damaged record has no page}.

    say(done, total): reports progress.
    """
    folders = {page_name(row["run_id"]): folder for folder, row in runs}
    stamps = {name: [_changed_ns(f"{folder}/{file}") for file in WATCHED] for name, folder in folders.items()}
    faults = _update(site / "runs", ".html", stamps, functools.partial(_write_page, site / "runs"), folders, say)
    return {row["run_id"]: faults[page_name(row["run_id"])] for _, row in runs}


def _write_page(home: Path, job: tuple[str, str]) -> tuple[str, str | None]:
    """Writes the page of a job (file, run folder); returns (file, None or why a damaged record has no page)."""
    name, folder = job
    try:
        html = run_page.html(folder, assets="../assets", back="../index.html", at=home, explained=False)
    except Damaged as error:  # the message starts with the path
        (home / name).unlink(missing_ok=True)
        return name, str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ")[:300]
    atomic.write_text(home / name, html, durable=False)
    return name, None


def write_curves(site: Path, runs: Runs, linked: Collection[str] = ()) -> Path:
    """Writes site/curves.html, which needs site/assets, and the files of its curves; returns its path.

    linked: run_ids of the runs that have a page.
    """
    by_id = {row["run_id"]: (folder, row) for folder, row in runs}
    max_points, folder = curves.points_of(len(by_id)), site / "curves"
    jobs: dict[str, list[tuple[str, str, str]]] = {}
    for run_id, (run_path, row) in sorted(by_id.items()):
        jobs.setdefault(_curve_file(run_id), []).append((run_id, run_path, row["metric"] or VAL_LOSS.name))
    stamps = {
        name: [max_points, *([run_id, _changed_ns(f"{path}/steps.csv")] for run_id, path, _ in members)]
        for name, members in jobs.items()
    }
    _update(folder, ".js", stamps, functools.partial(_write_curve_file, folder, max_points), jobs)
    newest = sorted((row for _, row in by_id.values()), key=lambda row: row["started_at"] or "", reverse=True)
    files = {name: number for number, name in enumerate(jobs)}
    pages = {run_id: link(run_id) for run_id in linked}
    lines = [curves.line_of(row, None, pages.get(row["run_id"]), files[_curve_file(row["run_id"])]) for row in newest]
    index = {"columns": curves.COLUMNS, "rows": lines, "files": [name.removesuffix(".js") for name in jobs]}
    html = curves.page_of(index, "index.html", "assets", curves.goals_of(newest))
    atomic.write_text(site / "curves.html", html, durable=False)
    return site / "curves.html"


def _curve_file(run_id: str) -> str:
    return f"{zlib.crc32(run_id.encode()) % NUM_CURVE_FILES:03d}.js"


def _write_curve_file(
    folder: Path, max_points: int, job: tuple[str, Sequence[tuple[str, str, str]]]
) -> tuple[str, None]:
    name, members = job
    curves_by_run = {}
    for run_id, path, score in members:
        with contextlib.suppress(ValueError):  # damaged: the page shows that it has no values
            curves_by_run[run_id] = curves.curves_of_run(path, max_points, score)
    packed = zlib.compress(json.dumps(curves_by_run, separators=(",", ":")).encode(), 3)
    atomic.write_text(folder / name, f'addCurves("{base64.b64encode(packed).decode()}");\n', durable=False)
    return name, None


# ---- files that are remade if something changed


def _update(
    folder: Path,
    suffix: str,
    stamps: Mapping[str, Any],
    make: Callable[[tuple[str, Any]], tuple[str, str | None]],
    jobs: Mapping[str, Any],
    say: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, str | None]:
    """Makes the files whose stamp has changed, and removes those that it made before and that have no stamp now.

    stamps: {file: stamp of its inputs}.  make: takes (file, its job) and returns (file, fault or None).  Returns
    {file: why it could not be made, or None}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamps = {name: [_version(), stamp] for name, stamp in stamps.items()}
    made_before = atomic.read_json(folder / MADE, {}, plain_file.MAX_LINES_BYTES)
    entries = {name: kept for name, kept in made_before.items() if name in stamps and kept[0] == stamps[name]}
    entries = {name: kept for name, kept in entries.items() if kept[1] or (folder / name).exists()}
    stale = [(name, jobs[name]) for name in stamps if name not in entries]
    with processes.started(make, stale, len(stale) >= MIN_PARALLEL) as written:
        for name, fault in written:
            entries[name] = [stamps[name], fault]
            say(len(entries), len(stamps))
    for path in folder.glob(f"*{suffix}"):
        if path.name in made_before and path.name not in stamps:
            path.unlink()
    atomic.write_json(folder / MADE, entries, durable=False)
    return {name: fault for name, (_, fault) in entries.items()}


def _changed_ns(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


@functools.cache
def _version() -> str:
    """Returns a hash of the code that makes pages, so that pages of another version are remade."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((Path(__file__).parents[2] / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".js", ".css"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
