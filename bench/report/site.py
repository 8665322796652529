"""A results folder as a site of static pages: all runs (filter, sort, compare two), each track's record history, a page a run.

FOLDER/site/index.html opens from a file.  A run's page is made again only when its record or this room changed.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

from bench import atomic, utc
from bench.record import listing
from bench.report import run_page
from bench.web.chart import chart, series_of
from bench.web.page import ASSETS, figure, page, section, table, tag

SCRIPTS = ("uPlot.iife.min.js", "charts.js", "tabulator.min.js", "site.js")
STYLES = ("uPlot.min.css", "tabulator_simple.min.css", "style.css", "site.css")
COLUMNS = (
    "run_id",
    "track",
    "status",
    "validity",
    "name",
    "seed",
    "model",
    "optim",
    "device",
    "world_size",
    "val_loss",
    "train_s",
    "step_avg_ms",
    "tokens_per_s",
    "mfu",
    "peak_mem_gib",
    "num_steps",
    "target_reached",
    "num_deviations",
    "started_at",
    "race_id",
    "arm",
    "commit",
    "config_id",
    "session_id",
    "comparability_id",
)
MADE = ".made.json"


def write(results, out, say=lambda done, total: None):
    """Results folder -> path of the index.  say(done, total) hears of the progress.  Raises ValueError for no run at all."""
    rows = listing.read_rows([str(results)])
    if not rows:
        raise ValueError(
            f"{results}: there is no run in it yet: ./speedrun.sh makes some; ./run.sh report results/published shows the published"
        )
    out.mkdir(parents=True, exist_ok=True)
    _copy_assets(out / "assets")
    pages = _write_pages(rows, out, say)
    charts = [chart for track in _tracks(rows) if (chart := history(track, rows))]
    atomic.write_text(out / "index.html", _index(rows, pages, charts, _races(results, out)))
    return out / "index.html"


def history(track, rows):
    """The best train time on a track over the years: runs that count and reached the target; None with none of them."""
    counted = sorted((row for row in rows if _counts(row, track)), key=lambda row: row["started_at"])
    if not counted:
        return None
    best, line = float("inf"), []
    for row in counted:
        best = min(best, row["train_s"])
        line.append(best)
    when_s = [utc.seconds(row["started_at"]) for row in counted]
    series = [series_of("record", line, "line"), series_of("run", [row["train_s"] for row in counted], "points")]
    runs = f"{len(counted)} run{'s' * (len(counted) != 1)}"
    caption = f"{runs} reached the target, the fastest in {best:.2f} s ({counted[line.index(best)]['run_id']}); one run is no claim: see table --leaderboard"
    return chart(f"history-{track}", track, caption, "date", "train time, s", when_s, series) | {"dates": True}


def _counts(row, track):
    reached = (
        row["started_at"] is not None
        and row["status"] == "complete"
        and row["target_reached"] is True
        and row["train_s"] is not None
        and not row["discarded"]
    )
    return row["track"] == track and reached and row["validity"] == "valid" and not row["num_deviations"]


def _tracks(rows):
    return sorted({row["track"] for row in rows if row["track"]})


def _races(results, out):
    """[(race as a link to its page, status, what it said)], newest first; one that cannot be read is left out."""
    found = []
    for path in sorted((Path(results) / "races").glob("*/race.json"), reverse=True):
        try:
            race = json.loads(path.read_bytes())
            against = (race.get("result") or {}).get("against") or {}
            words = "; ".join(f"{name}: {one['words']}" for name, one in against.items()) or race.get("why") or ""
            page_of_race = path.with_name("race.html")
            href = quote(os.path.relpath(page_of_race, out)) if page_of_race.exists() else None
            found.append(
                (
                    tag("a", race["race_id"], href=href) if href else race["race_id"],
                    str(race["status"]).replace("_", " "),
                    words,
                )
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def _index(rows, pages, charts, races):
    data = {"columns": COLUMNS, "rows": [[_shown(row, column) for column in COLUMNS] for row in rows], "pages": pages}
    help_words = "Click a column's head (or Enter on it) to sort, type below it to filter; numbers take <, > and =. Tick two runs to compare them."
    tracks = _tracks(rows)
    body = [
        tag("h1", "Results"),
        tag(
            "p",
            f"{len(rows)} run{'s' * (len(rows) != 1)}, track{'s' * (len(tracks) != 1)} {', '.join(tracks)}. {help_words}",
            class_="soft",
        ),
        tag(
            "div",
            tag("button", "Clear filters", type="button", id="clear"),
            tag("span", "", id="shown", role="status"),
            class_="bar",
        ),
        tag("div", "", id="runs"),
        tag(
            "section",
            tag("h2", "The two runs you ticked"),
            tag("div", "Tick two runs above.", id="pair", role="status", aria_live="polite"),
        ),
    ]
    if races:
        body.append(section("Races", table(("race", "status", "verdict"), races)))
    if charts:
        body.append(section("Record history", *(figure(chart) for chart in charts)))
    return page(
        "Results", *body, data={"runs-data": data, "charts": charts}, scripts=SCRIPTS, styles=STYLES, assets="assets"
    )


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
    made, version, pages = _made(out / MADE), _version(), {}
    for done, row in enumerate(rows, 1):
        folder = Path(os.path.join(os.getcwd(), row["folder"]))
        name = f"runs/{row['run_id']}.html"
        stamp = [version, *map(_changed_ns, (folder / "run.json", folder / "analysis.json", folder / "memory"))]
        if made.get(row["run_id"]) != stamp or not (out / name).exists():
            try:
                atomic.write_text(
                    out / name, run_page.of_run(folder, assets="../assets", back="../index.html"), durable=False
                )
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
    found = hashlib.sha256()
    for room in ("report", "snapshot", "web"):
        for path in sorted((Path(__file__).parent.parent / room).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".js", ".css"):
                found.update(path.read_bytes())
    return found.hexdigest()[:16]
