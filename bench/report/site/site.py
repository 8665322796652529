"""A results folder as static pages: all runs (filter, sort, group, tick), records, races, a page a run.

FOLDER/site/index.html opens from a file.  What was made before is made again only where it changed.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from bench.base import atomic
from bench.report import curve_files
from bench.report.site import packed_pages, race_list, record_chart, run_rows, sweep_list
from bench.web.page import ASSETS, Safe, page, section, soft, table, tag

SCRIPTS = ("charts.js", "tabulator.min.js", "cells.js", "site.js")  # the first for its dark-or-light button
STYLES = ("tabulator_simple.min.css", "style.css", "site.css")
HELP = "A click on a head sorts, words below it filter (numbers take <, > and =), ticked runs stand side by side."


def write(
    results: run_rows.Results,
    out: Path,
    boards: Callable[[], Iterable[record_chart.Board]] = list,
    say: Callable[[int, int], object] = lambda done, total: None,
    num_pages: int = packed_pages.NUM_PAGES,
) -> Path:
    """A results folder that was read, and a function that says what stands on its tracks -> path of the index.

    say(done, total) reports progress.  num_pages: of runs, the newest; those that the leaderboard links have one too.
    ValueError: a folder of the pages is a link.
    """
    for path in (out, *out.glob("*")):  # in a folder that somebody sent it may lead to the reader's own pages
        if path.is_symlink():
            raise ValueError(f"{path}: is a link, and pages are written only into the folder named: remove it")
    out.mkdir(parents=True, exist_ok=True)
    _copy_assets(out / "assets")
    with curve_files.making(out, results.runs) as finish_curves:
        boards, fault = _standing(boards)
    paged = packed_pages.chosen(results.runs, record_chart.linked(boards), num_pages)
    limits = packed_pages.limits(num_pages) if len(paged) < len(results.runs) else ""
    faults = packed_pages.write(paged, out, say)
    packed_pages.write_viewer(out, limits)
    finish_curves(lambda run_id: None if run_id in faults else packed_pages.link(run_id))
    data = {"columns": _packed(run_rows.columns(results, faults))}
    tracks = sorted({str(row["track"]) for _, row in results.runs})
    body = [
        tag("h1", "Results"),
        soft(f"{_about(results, tracks)} {HELP} {limits.format('RUN')}"),
        tag("div", id="bar", class_="bar"),
        tag("div", id="runs"),
        tag("section", id="ticked", aria_label="The ticked runs"),
        section("Records", tag("p", fault)) if fault else record_chart.leaderboard(boards, tracks),
        sweep_list.sweeps(results.folder, results.runs, out),
        race_list.races(results.folder, out),
        _damaged(results, faults),
        tag("noscript", "The list of runs needs scripts; ./run.sh table prints it."),
    ]
    html = page("Results", *body, data={"runs-data": data}, scripts=SCRIPTS, styles=STYLES, assets="assets")
    atomic.write_text(out / "index.html", html)
    return out / "index.html"


def _standing(boards):
    """(boards, None) or ([], why it is not known what stands), whatever is wrong with one record or the ledger."""
    try:
        return list(boards()), None
    except Exception as error:
        return [], f"The leaderboard cannot be made: {error or type(error).__name__}."


def _about(results, tracks):
    words = [f"{_num(results.num_runs, 'run')}, track{'s' * (len(tracks) != 1)} {', '.join(tracks)}."]
    if results.num_copies:
        words.append(f"{_num(results.num_copies, 'copy', 'copies')} of a run not shown.")
    return " ".join(words)


def _num(count, word, words=None):
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def _damaged(results, faults):
    lines = [(Path(path).name, why) for path, why in results.damaged.items()] + sorted(faults.items())
    if not lines:
        return Safe("")
    about = soft("Their numbers are shown as far as run.json can be read; ./run.sh verify RUN says more.")
    return section("Damaged records", about, table(("run", "why"), lines), id="damaged")


def _packed(columns):
    """Columns of few different values as those values and their numbers: a third of the bytes."""
    packed = {}
    for name, values in columns.items():
        distinct = list(dict.fromkeys(values))
        if 2 * len(distinct) > len(values):
            packed[name] = {"values": values}
        else:
            codes = {value: code for code, value in enumerate(distinct)}
            packed[name] = {"values": distinct, "codes": [codes[value] for value in values]}
    return packed


def _copy_assets(folder):
    folder.mkdir(exist_ok=True)
    for path in ASSETS.iterdir():
        with atomic.replacing(folder / path.name, durable=False) as file:  # an error names the folder, not the source
            file.write(path.read_bytes())
