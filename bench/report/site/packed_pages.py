"""The pages and the curves of many runs in a few files each, which a browser opens from disk, without a server.

runs/run.html?RUN_ID loads the pack of that run, one of 256: NNN.js (JSON {run_id: html}, deflated, in base64), and
becomes its page.  curves.html loads the files of the runs that are chosen, curves/*.js: addCurves("...") of JSON
{run_id: curves.curves_of_run()} in the same form.  A file is made again only where a record in it, or the pages' code,
has changed.  Which runs share one depends on their ids alone: a new run changes one file and not those of all later
runs.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.base import atomic
from bench.base.metric import VAL_LOSS
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.machine import processes
from bench.record.rows import Row
from bench.report import curves, run_page
from bench.web.page import page, tag

Links = Sequence[tuple[str, str]]  # (text, page) of runs of the same config
Runs = Sequence[tuple[str, str]]  # (run id, its folder)
Job = tuple[str, dict[str, tuple[str, list[Any], Links]], dict[str, Any]]  # name, members, what is known of it

NUM_BESIDE = 3  # before, and after
NUM_PAGES = 1000  # of a site: each takes 5 ms and 12 KB (120 steps)
NUM_PACKS = 256  # as in pages.js
MIN_PARALLEL = 64  # packs: fewer are made as fast by one process
RUNS_A_FILE = 64  # of curves, on average
MIN_PARALLEL_CURVES = 500  # runs to read, from which on two processes are quicker
HEAD, TAIL = 'window.packed = "', '";\n'
MADE = ".made.json"
WATCHED = ("run.json", "events.jsonl", "steps.csv", "analysis.json", "memory")
FOLDERS = ("report", "analysis", "web")  # whose code makes a page


def links_by_run(rows: Iterable[Row]) -> dict[str, list[tuple[str, str]]]:
    """Rows (bench/record/rows.py) -> {run_id: [(text, its page beside the run's own)]}, [] for an only run."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["config_id"] or row["run_id"], []).append(row)
    beside = {}
    for group in groups.values():
        group.sort(key=lambda row: row["started_at"] or "")
        links = []
        for row in group:
            started = (row["started_at"] or "an unknown time")[:16].replace("T", " ")
            links.append((f"seed {row['seed']} of {started}", f"run.html?{quote(row['run_id'])}"))
        for num, row in enumerate(group):
            beside[row["run_id"]] = links[max(0, num - NUM_BESIDE) : num] + links[num + 1 : num + 1 + NUM_BESIDE]
    return beside


def write(
    runs: Sequence[tuple[str, Row]], out: Path, say: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, str]:
    """[(run folder, row)] -> {run_id: why it has no page}, of damaged records.  say(done, total) reports progress."""
    home, version = out / "runs", _version()
    packs: dict[str, Any] = {}
    home.mkdir(exist_ok=True)
    beside = links_by_run(row for _, row in runs)
    for folder, row in runs:
        others = beside[row["run_id"]]
        stamp = [version, *(_changed_ns(f"{folder}/{name}") for name in WATCHED), [list(other) for other in others]]
        packs.setdefault(pack_of(row["run_id"]), {})[row["run_id"]] = (folder, stamp, others)
    made, stale = atomic.read_json(home / MADE, {}, plain_file.MAX_LINES_BYTES), []
    for name, members in packs.items():
        known = made.setdefault(name, {})
        is_same = {run_id: entry[0] for run_id, entry in known.items()} == {
            key: entry[1] for key, entry in members.items()
        }
        if not is_same or not (home / f"{name}.js").exists():
            stale.append((name, members, known))
    done = len(runs) - sum(len(members) for _, members, _ in stale)
    with processes.started(functools.partial(_write_pack, home), stale, len(stale) >= MIN_PARALLEL) as written:
        for name, facts in written:
            made[name], done = facts, done + len(facts)
            say(done, len(runs))
    made = {name: made[name] for name in packs}
    for path in home.glob("[0-9]*.js"):
        if path.stem not in packs:
            path.unlink()
    atomic.write_json(home / MADE, made, durable=False)
    return {run_id: fault for facts in made.values() for run_id, (_, fault) in facts.items() if fault}


def chosen(
    runs: Sequence[tuple[str, Row]], linked: Collection[str] = (), num_pages: int = NUM_PAGES
) -> list[tuple[str, Row]]:
    """The [(run folder, row)] that get a page: the newest, and those with these run_ids."""
    newest = sorted((row for _, row in runs), key=lambda row: row["started_at"] or "", reverse=True)[:num_pages]
    ids = {row["run_id"] for row in newest} | set(linked)
    return [(folder, row) for folder, row in runs if row["run_id"] in ids]


def limits(num_pages: int) -> str:
    """What is said where not all runs have a page; {} stands for a run's id."""
    return (
        f"Here are the pages of the newest {num_pages:,} runs and of those that the leaderboard links; "
        "any other is written into its run's folder by ./run.sh report {}."
    )


def link(run_id: str) -> str:
    """From the site's index to the page of a run."""
    return f"runs/run.html?{quote(run_id)}"


def write_viewer(out: Path, limits: str = "") -> None:
    """runs/run.html, which says limits() of a run without a page."""
    body = tag("p", "The page of a run needs scripts.", id="message", role="status", data_limits=limits)
    html = page("A run", body, scripts=("pages.js",), styles=("style.css",), assets="../assets")
    atomic.write_text(out / "runs" / "run.html", html, durable=False)


def pack_of(run_id: str) -> str:
    """The name of a run's pack, which pages.js works out from the id in the same way."""
    number = 0
    for byte in run_id.encode():
        number = (number * 31 + byte) % NUM_PACKS
    return f"{number:03d}"


def _write_pack(home: Path, job: Job) -> tuple[str, dict[str, Any]]:
    """(name, {run_id: (folder, stamp, repeats)}, what is known of it) -> (name, {run_id: [stamp, fault]})."""
    name, members, known = job
    path = home / f"{name}.js"
    before = _unpacked(path) if known else {}
    pages, facts = {}, {}
    for run_id, (folder, stamp, others) in members.items():
        if run_id in before and known.get(run_id) == [stamp, None]:
            html: str | None = before[run_id]
            fault: str | None = None
        else:
            html, fault = _html(folder, home, others)
        facts[run_id] = [stamp, fault]
        if html is not None:
            pages[run_id] = html
    atomic.write_text(path, _packed(pages), durable=False)
    return name, facts


def _html(folder: str, home: Path | str, others: Links = ()) -> tuple[str | None, str | None]:
    """(page, None) or (None, why there is none).  others: (text, link) of runs of the same config."""
    try:
        html = run_page.html(folder, assets="../assets", back="../index.html", at=home, repeats=others, explained=False)
        return html, None
    except Damaged as error:  # says what is wrong, after the path
        return None, str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ")[:300]


def _packed(pages: Mapping[Any, str]) -> str:
    return HEAD + _deflated(pages, 6) + TAIL


def _deflated(value: Mapping[Any, Any], level: int) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), level)).decode()


def _unpacked(path: Path) -> dict[str, str]:
    try:
        packed = plain_file.text(path, plain_file.MAX_LINES_BYTES).removeprefix(HEAD).removesuffix(TAIL)
        return dict(json.loads(zlib.decompress(base64.b64decode(packed))))
    except (ValueError, TypeError, zlib.error):
        return {}


def _changed_ns(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


@functools.cache
def _version() -> str:
    """A hash over the folders that make pages: those of another version are made again."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((Path(__file__).parents[2] / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".js", ".css"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# ---- curves


@contextlib.contextmanager
def making_curves(site: Path, runs: Iterable[tuple[str, Row]]) -> Iterator[Callable[..., Path]]:
    """[(run folder, row)] -> site/curves.html, which needs site/assets, and its files.

    In the block two processes read the steps of many runs; what it gives, called after the block with link(run_id) ->
    from site to the run's page, or None, does the rest and returns the path.
    """
    by_id = sorted({row["run_id"]: (folder, row) for folder, row in runs}.items())
    folder, max_points = site / "curves", curves.points_of(len(by_id))
    folder.mkdir(parents=True, exist_ok=True)
    files = _files([(run_id, run_path) for run_id, (run_path, _) in by_id])
    made = atomic.read_json(folder / MADE, {}, plain_file.MAX_LINES_BYTES)
    stamps = {}
    for name, part in files.items():
        changed = [[run_id, _changed_ns(f"{run_path}/steps.csv")] for run_id, run_path in part]
        stamps[name] = [_version(), max_points, *changed]
    stale = [name for name in files if made.get(name) != stamps[name] or not (folder / f"{name}.js").exists()]
    for path in folder.glob("*.js"):
        if path.stem not in files:
            path.unlink()

    def finish(link: Callable[[str], str | None]) -> Path:
        if stale or made.keys() != stamps.keys():
            atomic.write_text(folder / MADE, json.dumps(stamps), durable=False)
        numbers = {run_id: number for number, part in enumerate(files.values()) for run_id, _ in part}
        newest = sorted((row for _, (_, row) in by_id), key=lambda row: row["started_at"] or "", reverse=True)
        lines = [curves.line_of(row, None, link(row["run_id"]), numbers[row["run_id"]]) for row in newest]
        index, goals = {"columns": curves.COLUMNS, "rows": lines, "files": list(files)}, curves.goals_of(newest)
        atomic.write_text(site / "curves.html", curves.page_of(index, "index.html", "assets", goals), durable=False)
        return site / "curves.html"

    metrics = {run_id: row["metric"] for run_id, (_, row) in by_id if row["metric"] != VAL_LOSS.name}
    jobs = [(folder / f"{name}.js", files[name]) for name in stale]
    are_many = sum(len(part) for _, part in jobs) >= MIN_PARALLEL_CURVES
    with processes.started(functools.partial(_write_curves, max_points, metrics), jobs, are_many) as written:
        yield finish
        list(written)


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


def _write_curves(max_points: int, metrics: Mapping[str, str], job: tuple[Path, Runs]) -> None:
    path, runs = job
    curves_by_run = {}
    for run_id, folder in runs:
        with contextlib.suppress(ValueError):  # damaged: the page says that it has no such values
            curves_by_run[run_id] = curves.curves_of_run(folder, max_points, metrics.get(run_id, VAL_LOSS.name))
    atomic.write_text(path, f'addCurves("{_deflated(curves_by_run, 3)}");\n', durable=False)
