"""A results folder as static pages: all runs (filter, sort, group, select), records, races, and a page per run.

FOLDER/site/index.html needs no server.  Existing pages are updated only if their content changed.  A run whose record
cannot be read is listed with what is wrong with it.
"""

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from bench.base import atomic, private
from bench.base.text_table import counted
from bench.record import certificates, configs, race_folder, store, sweep
from bench.record.rows import COLUMNS as OF_A_ROW
from bench.record.rows import Row
from bench.report import race_page, sweep_page, sweep_results, table_groups
from bench.report.site import files
from bench.web.chart import Spec
from bench.web.document import Document, badge
from bench.web.page import ASSETS, CHART_SCRIPTS, CHART_STYLES, Safe, join, page, section, soft, table, tag

# fmt: off
TABLE_COLUMNS = (  # columns that a user can choose, in this order; site.js has the default ones
    "val_loss", "train_s", "step_avg_ms", "tokens_per_s", "name", "track", "device", "started_at", "run_id", "status",
    "validity", "why", "certificate", "metric", "score", "config_id", "seed", "model", "size", "num_params", "optim",
    "data", "num_shards", "epochs", "world_size", "mfu", "peak_mem_gib", "energy_j", "mean_power_w", "throttled_frac",
    "num_steps", "step_ms_p50", "step_ms_p95", "compile_s", "wall_s", "cost_usd", "cost_usd_to_target",
    "energy_kj_to_target", "target_reached", "num_deviations", "dtype", "torch", "sweep_id", "race_id", "arm", "commit",
    "source", "provenance", "session_id", "comparability_id",
)
WRITTEN = ("index.html", "curves.html", "assets", "runs", "curves", "races", "sweeps")
NUM_HEADLINE = 4  # columns before those of the settings that differ
# fmt: on
OF_THE_SITE = ("short", "group", "counts", "page")  # fields of each row that are no columns
UNREAD: dict[str, Any] = dict.fromkeys(OF_A_ROW)
RACE_HEAD = ("started", "race", "arm", "verdict", "train time against the baseline")
SWEEP_HEAD = ("started", "sweep", "over", "runs", "best of those tried")
SCRIPTS = (*CHART_SCRIPTS, "tabulator.min.js", "cells.js", "site.js")
STYLES = (*CHART_STYLES, "tabulator_simple.min.css", "site.css")
HELP = "Click a header to sort, type below it to filter (numbers take <, > and =), tick runs to compare them."
Line = tuple[object, ...]  # cells of a table's row
RUN_ID = re.compile(r"(\d{8})T(\d{6})Z-(.*?)(-s\d+|-r\d+)(?:-m[0-9a-f]{6})?(-\d+)?")


class Standing(NamedTuple):
    """The leaderboard, as bench/claims/leaderboard_views.py draws it."""

    records: Safe = Safe("")  # the section of the page
    linked: Set[str] = frozenset()  # run_ids of the runs whose pages the section links
    charts: Sequence[Spec] = ()  # charts in the section


@dataclass
class Results:
    """The runs of a results folder."""

    folder: Path
    runs: list[tuple[str, Row]]  # (run folder, row) by track, then time, without copies
    damaged: dict[str, str]  # {folder of a run that cannot be read: why}
    num_copies: int  # copies of runs that were omitted

    @property
    def num_runs(self) -> int:
        """Number of runs, including damaged ones."""
        return len(self.runs) + len(self.damaged)


def read(folder: Path | str) -> Results:
    """Reads the runs of a results folder.  Raises ValueError if there is none."""
    opened_store = store.opened([folder])
    listed = list(opened_store.rows().items())
    damaged = {path: why.removeprefix(path).lstrip("/: ") for path, why in sorted(opened_store.faults.items())}
    if not listed and not damaged:
        remedy = "./speedrun.sh makes some; ./run.sh report results/published shows the published"
        raise ValueError(f"{folder}: there is no run in it yet: {remedy}")
    listed.sort(
        key=lambda folder_and_row: (
            folder_and_row[1]["track"] or "",
            folder_and_row[1]["started_at"] or "",
            folder_and_row[1]["run_id"],
        )
    )
    by_id: dict[str, tuple[str, Row]] = {}
    for path, row in listed:
        by_id.setdefault(row["run_id"], (path, row))
    return Results(Path(folder), list(by_id.values()), damaged, len(listed) - len(by_id))


def table_columns(results: Results, pages: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Returns {column: values of all runs} of TABLE_COLUMNS, the settings in which the runs differ, and OF_THE_SITE.

    pages: {run_id: None, or why there is no page} of the runs that should have a page.
    """
    rows: list[Any] = [row for _, row in results.runs]
    for row, (path, _) in zip(rows, results.runs):
        row["certificate"] = certificates.outcome(path)
    varied = [name for name in configs.varied(rows) if name not in TABLE_COLUMNS]
    configs.add(rows, varied)
    group_of: dict[str, int] = {}
    counts: set[str] = set()
    for number, members in enumerate(table_groups.members_of(rows)):
        group_of |= {row["run_id"]: number for row in members}
        counts |= {row["run_id"] for row in table_groups.counted(members)}
    shown = []
    for row in rows:
        run_id = row["run_id"]
        settings = {name: row[name] for name in varied}
        settings |= {name: " ".join(map(str, cell)) for name, cell in settings.items() if isinstance(cell, list)}
        page = files.link(run_id) if run_id in pages and not pages[run_id] else None
        places = {"group": group_of[run_id], "counts": run_id in counts, "page": page}
        shown.append(_shown(row, pages.get(run_id)) | settings | places)
    for path, why in results.damaged.items():
        parent, name = os.path.split(path)
        facts = {"run_id": name, "name": name, "track": os.path.basename(parent), "status": "damaged", "why": why}
        shown.append(UNREAD | facts | {"source": None, "group": -1, "counts": False, "page": None})
    for row, short in zip(shown, short_ids([row["run_id"] for row in shown]), strict=True):
        row["short"] = short
    names = (*TABLE_COLUMNS[:NUM_HEADLINE], *varied, *TABLE_COLUMNS[NUM_HEADLINE:], *OF_THE_SITE)
    return {name: [row.get(name) for row in shown] for name in names}


def _shown(row: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
    shown = {name: row.get(name) for name in TABLE_COLUMNS}
    shown |= {"why": row["failure"], "source": row["source_sha256"] and row["source_sha256"][:8]}
    if fault:
        shown |= {"status": "damaged", "why": fault}
    elif row["discarded"] and row["status"] == "complete":
        shown["status"] = "warm-up"  # of a race's arm; it is in no mean
    if row["status"] != "complete":
        shown["validity"] = None  # only complete runs have numbers that can be valid
    return shown


def short_ids(run_ids: Sequence[str]) -> list[str]:
    """Returns time of day, config_id and seed of each run, or the whole id if that is ambiguous."""
    shorts = []
    for run_id in run_ids:
        if match := RUN_ID.fullmatch(run_id):
            date, time, name, seed, copy = match.groups()
            rest = f"{name.rpartition('-')[2]}{seed}{copy or ''}"
            shorts.append(rest if date == "00000000" else f"{time}-{rest}")  # zeros: a log without a start time
        else:
            shorts.append(run_id)
    num_alike = Counter(shorts)
    return [short if num_alike[short] == 1 else run_id for short, run_id in zip(shorts, run_ids, strict=True)]


# ---- the pages


def write(
    results: Results,
    out: Path,
    standing: Callable[[], Standing] = Standing,
    say: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Writes the site into the folder out and returns the path of its index.

    standing: makes the leaderboard.  say(done, total): reports progress.  Raises ValueError if out, or something in it,
    is a symbolic link, or if out has a file or folder of these names that is not of a site.
    """
    for path in (out, *out.glob("*")):  # in a folder sent by others, a link may lead to the reader's own files
        if path.is_symlink():
            raise ValueError(f"{path}: is a link, and pages are written only into the folder named: remove it")
    if not (out / "runs" / files.MADE).exists() and (there := [name for name in WRITTEN if (out / name).exists()]):
        raise ValueError(f"{out / there[0]}: was there before and would be replaced: name a new folder with --out")
    (out / "runs").mkdir(parents=True, exist_ok=True)
    (out / "runs" / files.MADE).touch()  # first, so that an interrupted site is known as one
    (out / "assets").mkdir(exist_ok=True)
    for asset in ASSETS.iterdir():
        with atomic.replacing(out / "assets" / asset.name, durable=False) as file:  # an error names the copy
            file.write(asset.read_bytes())
    try:
        records, linked, charts = standing()
    except Exception as error:  # a fault in a record or the ledger must not hide the runs
        fault = f"The leaderboard cannot be made: {error or type(error).__name__}."
        records, linked, charts = Standing(section("Records", tag("p", fault)))
    paged = files.chosen(results.runs, linked)
    pages = files.write_pages(paged, out, say)
    files.write_curves(out, results.runs, [run_id for run_id, fault in pages.items() if fault is None])
    data = {"runs-data": {"columns": _packed(table_columns(results, pages))}, "charts": list(charts)}
    tracks = sorted({str(row["track"]) for _, row in results.runs})
    about = f"{counted(results.num_runs, 'run')}, track{'s' * (len(tracks) != 1)} {', '.join(tracks)}."
    if results.num_copies:
        about += f" {results.num_copies:,} {'copy' if results.num_copies == 1 else 'copies'} of a run not shown."
    if len(paged) < len(results.runs):
        about += f" The newest {files.NUM_PAGES:,} runs and those that the leaderboard links have pages here; "
        about += "./run.sh report RUN writes the page of any other into its folder."
    body = [
        tag("h1", "Results"),
        soft(f"{about} {HELP}"),
        tag("div", id="bar", class_="bar"),
        tag("div", id="runs"),
        tag("section", id="ticked", aria_label="The ticked runs"),
        records,
        sweeps(results.folder, results.runs, out),
        races(results.folder, out),
        _damaged(results, pages),
        tag("noscript", "The list of runs needs JavaScript; ./run.sh table prints it."),
    ]
    html = page("Results", *body, data=data, scripts=SCRIPTS, styles=STYLES, assets="assets")
    atomic.write_text(out / "index.html", html)
    return out / "index.html"


def _damaged(results: Results, pages: Mapping[str, str | None]) -> Safe:
    lines = [(Path(path).name, why) for path, why in results.damaged.items()]
    lines += sorted((run_id, why) for run_id, why in pages.items() if why)
    if not lines:
        return Safe("")
    about = soft("Their numbers are shown as far as run.json can be read; ./run.sh verify RUN says more.")
    return section("Damaged records", about, table(("run", "why"), lines), id="damaged")


def _packed(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Encodes columns with few distinct values as those values and an index per row: a third of the bytes."""
    packed = {}
    for name, values in columns.items():
        distinct = list(dict.fromkeys(values))
        if 2 * len(distinct) > len(values):
            packed[name] = {"values": values}
        else:
            codes = {value: code for code, value in enumerate(distinct)}
            packed[name] = {"values": distinct, "codes": [codes[value] for value in values]}
    return packed


def races(results: Path | str, out: Path) -> Safe:
    """Returns the section of the races, newest first, in this folder of results or publications; "" without any.

    A race that has no page gets one in out/races/.
    """
    paths = [*Path(results).glob("races/*/race.json"), *Path(results).glob("*/races/*/race.json")]
    folders: dict[str, Path] = {}
    for path in sorted(paths):
        folders.setdefault(path.parent.name, path.parent)  # a race may be in two publications
    read = [_race_lines(folder, out) for folder in folders.values()]
    lines = [
        line for _, lines in sorted(read, key=lambda lines_of_race: lines_of_race[0], reverse=True) for line in lines
    ]
    if not lines:
        return Safe("")
    about = soft("Each arm of a race against its baseline, newest first, with 95 % intervals.")
    return section("Races", about, table(RACE_HEAD, lines, class_="races"), id="races")


def _race_lines(folder: Path, out: Path) -> tuple[str, list[Line]]:
    """Returns (start, a line for each arm), or a line that says why the race cannot be read."""
    try:
        race = race_folder.vouched(folder)
        started = str(race["started_at"])
        href = _page_of(folder, race_page.NAME, out, "races", race_page.document)
        link = join([tag("a", race["race_id"], href=href)])
        if stairs := race_page.staircase(folder, out, race):
            link = join([link, stairs.markup], "; ")
        at, against = started[:16].replace("T", " "), race_folder.verdicts_of(race)
        if not against:
            return started, [(at, link, None, _badge(str(race["status"]), "soft"), race.get("why"))]
        lines: list[Line] = []
        for name, comparison in against.items():
            arms = f"{name} against {race['baseline']}"
            lines.append((at, link, arms, badge(str(comparison.get("verdict"))).markup, _change(comparison)))
        return started, lines
    except Exception as error:  # a fault in one race must not hide the others
        message = f"{type(error).__name__}: {error}"[:300]
        return folder.name, [(None, folder.name, None, _badge("damaged", "bad"), message)]


def _change(comparison: Mapping[str, Any]) -> object:
    """Returns a change such as "-0.50 % [-0.73, -0.27]" above its sentence."""
    time = comparison.get("time") or {}
    if time.get("change_pct") is None or not comparison.get("comparable", True):
        return comparison.get("words")
    interval = time.get("ci95_pct")
    size = f"{time['change_pct']:+.2f} %" + (f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else "")
    return tag("div", tag("b", size), tag("div", comparison.get("words"), class_="soft"))


def _badge(label: str, colour: str) -> Safe:
    return tag("span", label.replace("_", " "), class_=f"badge {colour}")


def _page_of(folder: Path, name: str, out: Path, kind: str, make: Callable[[Path, Path], Document]) -> str:
    """Returns the link from the index to the page of a race or sweep, which is made in out/KIND/ if it is missing."""
    path = folder / name
    if not path.exists() or private.way(path, out) is None:
        path = out / kind / f"{folder.name}.html"
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, make(folder, path.parent).html(), durable=False)
    return quote(os.path.relpath(path, out))


def sweeps(results: Path | str, runs: Sequence[tuple[str, Row]], out: Path) -> Safe:
    """Returns the section of the sweeps in this results folder, newest first; "" without any.

    runs: (absolute folder, row) of all its runs.  A sweep that has no page gets one in out/sweeps/.
    """
    lines = [_sweep_line(folder, runs, out) for folder in sweep.folders(results)]
    if not lines:
        return Safe("")
    lines.sort(key=lambda line: str(line[0] or ""), reverse=True)
    about = soft("Runs of all combinations of some values, newest first.  The best of many is partly luck: no verdict.")
    return section("Sweeps", about, table(SWEEP_HEAD, lines, class_="races"), id="sweeps")


def _sweep_line(folder: Path, runs: Sequence[tuple[str, Row]], out: Path) -> Line:
    try:
        swept = sweep_results.read(folder, runs)
        make = functools.partial(sweep_page.document, results=swept)
        link = tag("a", folder.name, href=_page_of(folder, sweep_page.NAME, out, "sweeps", make))
        complete = sum(row["status"] == "complete" for row in swept.rows)
        counts = f"{complete} complete" + "".join(
            f", {num} {label}" for num, label in ((len(swept.lost), "lost"), (len(swept.not_run), "not run")) if num
        )
        over = " × ".join(f"{len(values)} {key}" for key, values in swept.axes.items())
        started = swept.facts["started_at"][:16].replace("T", " ")
        return started, link, over, counts, sweep_results.best(swept).partition("; ")[0]
    except Exception as error:  # a fault in one sweep must not hide the others
        return None, folder.name, None, _badge("damaged", "bad"), f"{type(error).__name__}: {error}"[:300]
