"""A results folder as static pages: all runs (filter, sort, compare two), each track's record history, a page a run.

FOLDER/site/index.html opens from a file.  A run's page is made again only when its record or the pages' code changed.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from bench import atomic, utc
from bench.record import listing
from bench.report import repeats, run_page
from bench.web.chart import chart, series_of
from bench.web.page import ASSETS, figure, page, section, soft, table, tag

SCRIPTS = ("uPlot.iife.min.js", "charts.js", "tabulator.min.js", "site.js")
STYLES = ("uPlot.min.css", "tabulator_simple.min.css", "style.css", "site.css")
# fmt: off
COLUMNS = (
    "run_id", "track", "status", "validity", "name", "seed", "model", "optim", "device", "world_size", "val_loss",
    "train_s", "step_avg_ms", "tokens_per_s", "mfu", "peak_mem_gib", "num_steps", "target_reached", "num_deviations",
    "started_at", "race_id", "arm", "commit", "config_id", "session_id", "comparability_id",
)
# fmt: on
HELP = (
    "Click a column's head (or Enter on it) to sort, type below it to filter; numbers take <, > and =. "
    "Tick two runs to compare them."
)
MADE = ".made.json"


def write(results: Path | str, out: Path, say: Callable[[int, int], object] = lambda done, total: None) -> Path:
    """Results folder -> path of the index.  say(done, total) reports progress.  ValueError where there is no run."""
    rows = listing.read_rows([str(results)])
    if not rows:
        remedy = "./speedrun.sh makes some; ./run.sh report results/published shows the published"
        raise ValueError(f"{results}: there is no run in it yet: {remedy}")
    out.mkdir(parents=True, exist_ok=True)
    _copy_assets(out / "assets")
    pages = _write_pages(rows, out, say)
    charts = [chart for track in _tracks(rows) if (chart := history(track, rows))]
    atomic.write_text(out / "index.html", _index(rows, pages, charts, _races(results, out)))
    return out / "index.html"


def history(track, rows):
    """The best train time on a track over time: runs that count and reached the target; None without any."""
    counted = sorted((row for row in rows if _counts(row, track)), key=lambda row: row["started_at"])
    if not counted:
        return None
    times_s = [row["train_s"] for row in counted]
    record_s = list(itertools.accumulate(times_s, min))
    best = counted[times_s.index(record_s[-1])]["run_id"]
    caption = (
        f"{_num(len(counted), 'run')} reached the target, the fastest in {record_s[-1]:.2f} s ({best}); "
        "one run is not a claim: see table --leaderboard"
    )
    series = [series_of("record", record_s, "line"), series_of("run", times_s, "points")]
    when_s = [utc.seconds(row["started_at"]) for row in counted]
    return chart(f"history-{track}", track, caption, "date", "train time, s", when_s, series) | {"dates": True}


def _counts(row, track):
    is_valid = row["status"] == "complete" and row["validity"] == "valid" and not row["num_deviations"]
    is_known = row["started_at"] is not None and row["train_s"] is not None and not row["discarded"]
    return row["track"] == track and row["target_reached"] is True and is_valid and is_known


def _num(count, word):
    return f"{count} {word}{'s' * (count != 1)}"


def _tracks(rows):
    return sorted({row["track"] for row in rows if row["track"]})


def _races(results, out):
    """[(race as a link to its page, status, verdict)], newest first; without those that cannot be read."""
    lines = []
    for path in sorted((Path(results) / "races").glob("*/race.json"), reverse=True):
        try:
            race = json.loads(path.read_bytes())
            against = (race.get("result") or {}).get("against") or {}
            words = "; ".join(f"{name}: {one['words']}" for name, one in against.items()) or race.get("why") or ""
            name, html = race["race_id"], path.with_name("race.html")
            link = tag("a", name, href=quote(os.path.relpath(html, out))) if html.exists() else name
            lines.append((link, str(race["status"]).replace("_", " "), words))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return lines


def _index(rows, pages, charts, races):
    data = {"columns": COLUMNS, "rows": [[_shown(row, column) for column in COLUMNS] for row in rows], "pages": pages}
    tracks = _tracks(rows)
    clear = tag("button", "Clear filters", type="button", id="clear")
    pair = tag("div", "Tick two runs above.", id="pair", role="status", aria_live="polite")
    body = [
        tag("h1", "Results"),
        soft(f"{_num(len(rows), 'run')}, track{'s' * (len(tracks) != 1)} {', '.join(tracks)}. {HELP}"),
        tag("div", clear, tag("span", "", id="shown", role="status"), class_="bar"),
        tag("div", "", id="runs"),
        tag("section", tag("h2", "The two runs you ticked"), pair),
    ]
    if races:
        body.append(section("Races", table(("race", "status", "verdict"), races)))
    if charts:
        body.append(section("Record history", *(figure(chart) for chart in charts)))
    data = {"runs-data": data, "charts": charts}
    return page("Results", *body, data=data, scripts=SCRIPTS, styles=STYLES, assets="assets")


def _shown(row, column):
    if column == "status" and row["discarded"] and row["status"] == "complete":
        return "warm-up"  # of a race's arm: in the ledger, in no mean
    if column == "validity" and row["status"] == "running":
        return None
    return row[column]


def _copy_assets(folder):
    folder.mkdir(exist_ok=True)
    for path in ASSETS.iterdir():
        shutil.copyfile(path, folder / path.name)


def _write_pages(rows, out, say):
    """{run_id: page, relative to the index}; a record that cannot be shown has none."""
    (out / "runs").mkdir(exist_ok=True)
    made, version, pages, others = _made(out / MADE), _version(), {}, repeats.of_rows(rows)
    for done, row in enumerate(rows, 1):
        folder = Path(os.path.join(os.getcwd(), row["folder"]))
        name = f"runs/{row['run_id']}.html"
        stamp = [version, *map(_changed_ns, (folder / "run.json", folder / "analysis.json", folder / "memory"))]
        beside = others[row["run_id"]]
        stamp.append(hashlib.sha256(repr(beside).encode()).hexdigest()[:16])
        if made.get(row["run_id"]) != stamp or not (out / name).exists():
            try:
                ways = {"assets": "../assets", "back": "../index.html", "at": out / "runs"}
                html = run_page.html(folder, **ways, repeats=beside)
                atomic.write_text(out / name, html, durable=False)
            except (ValueError, KeyError, TypeError, AttributeError):  # a damaged record: its row in the table remains
                continue
            made[row["run_id"]] = stamp
        pages[row["run_id"]] = name
        say(done, len(rows))
    atomic.write_json(out / MADE, made, durable=False)
    return pages


def _made(path):
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _changed_ns(path):
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _version():
    """A hash over the rooms that make pages: those of another version are made again."""
    digest = hashlib.sha256()
    for room in ("report", "memory", "web"):
        for path in sorted((Path(__file__).parent.parent / room).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".js", ".css"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
