"""A results folder as static pages: all runs (filter, sort, group, tick), records, races, a page a run.

FOLDER/site/index.html opens from a file.  What was made before is made again only where it changed.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.base import atomic
from bench.record import race_folder, sweep
from bench.record.rows import Row
from bench.report import curve_files, race_page, sweep_page, sweep_results
from bench.report.site import packed_pages, record_chart, run_rows
from bench.web.document import badge, marked_up
from bench.web.page import ASSETS, Safe, join, page, section, soft, table, tag

Boards = Callable[[], Iterable[record_chart.Board]]
Line = tuple[object, ...]  # of a table

RACE_HEAD = ("started", "race", "arm", "verdict", "train time against the baseline")
SWEEP_HEAD = ("started", "sweep", "over", "runs", "best of those tried")
SCRIPTS = ("charts.js", "tabulator.min.js", "cells.js", "site.js")  # the first for its dark-or-light button
STYLES = ("tabulator_simple.min.css", "style.css", "site.css")
HELP = "A click on a head sorts, words below it filter (numbers take <, > and =), ticked runs stand side by side."


def write(
    results: run_rows.Results,
    out: Path,
    boards: Boards = list,
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
        standing, fault = _standing(boards)
    paged = packed_pages.chosen(results.runs, record_chart.linked(standing), num_pages)
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
        section("Records", tag("p", fault)) if fault else record_chart.leaderboard(standing, tracks),
        sweeps(results.folder, results.runs, out),
        races(results.folder, out),
        _damaged(results, faults),
        tag("noscript", "The list of runs needs scripts; ./run.sh table prints it."),
    ]
    html = page("Results", *body, data={"runs-data": data}, scripts=SCRIPTS, styles=STYLES, assets="assets")
    atomic.write_text(out / "index.html", html)
    return out / "index.html"


def _standing(boards: Boards) -> tuple[list[record_chart.Board], str | None]:
    """(boards, None) or ([], why it is not known what stands), whatever is wrong with one record or the ledger."""
    try:
        return list(boards()), None
    except Exception as error:
        return [], f"The leaderboard cannot be made: {error or type(error).__name__}."


def _about(results: run_rows.Results, tracks: Sequence[str]) -> str:
    words = [f"{_num(results.num_runs, 'run')}, track{'s' * (len(tracks) != 1)} {', '.join(tracks)}."]
    if results.num_copies:
        words.append(f"{_num(results.num_copies, 'copy', 'copies')} of a run not shown.")
    return " ".join(words)


def _num(count: int, word: str, words: str | None = None) -> str:
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def _damaged(results: run_rows.Results, faults: Mapping[str, str]) -> Safe:
    lines = [(Path(path).name, why) for path, why in results.damaged.items()] + sorted(faults.items())
    if not lines:
        return Safe("")
    about = soft("Their numbers are shown as far as run.json can be read; ./run.sh verify RUN says more.")
    return section("Damaged records", about, table(("run", "why"), lines), id="damaged")


def _packed(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
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


def _copy_assets(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in ASSETS.iterdir():
        with atomic.replacing(folder / path.name, durable=False) as file:  # an error names the folder, not the source
            file.write(path.read_bytes())


def races(results: Path | str, out: Path) -> Safe:
    """The section of the races in this results folder, or in its folders where it holds publications; "" without any.

    Newest first.  A race whose page was never made gets one, in out/races/.
    """
    paths = [*Path(results).glob("races/*/race.json"), *Path(results).glob("*/races/*/race.json")]
    result: dict[str, Path] = {}
    for path in sorted(paths):
        result.setdefault(path.parent.name, path.parent)  # the same race may lie in two publications
    read = [_race_lines(folder, out) for folder in result.values()]
    lines = [line for _, lines in sorted(read, key=lambda one: one[0], reverse=True) for line in lines]
    if not lines:
        return Safe("")
    about = soft("Each arm of a race against its baseline, newest first; the intervals are of 95 %.")
    return section("Races", about, table(RACE_HEAD, lines, class_="races"), id="races")


def _race_lines(folder: Path, out: Path) -> tuple[str, list[Line]]:
    """(start, a line for each arm); a race that cannot be read says why."""
    try:
        race = race_folder.read(folder)
        started = str(race["started_at"])
        link = join([tag("a", race["race_id"], href=_race_page(folder, out)), _staircase(folder, out, race)])
        return started, _verdict_lines(race, started[:16].replace("T", " "), link)
    except Exception as error:  # whatever is wrong with one race, the others are shown
        words = f"{type(error).__name__}: {error}"[:300]
        return folder.name, [(None, folder.name, None, _badge("damaged", "bad"), words)]


def _verdict_lines(race: race_folder.Race, started: str, link: Safe) -> list[Line]:
    against = race_folder.verdicts_of(race)
    if not against:
        return [(started, link, None, _badge(str(race["status"]), "soft"), race.get("why"))]
    lines: list[Line] = []
    for name, one in against.items():
        word = badge(str(one.get("verdict"))).markup
        arms = f"{name} against {race['baseline']}"
        lines.append((started, link, arms, word, _change(one)))
    return lines


def _change(one: Mapping[str, Any]) -> object:
    """E.g. -0.50 % [-0.73, -0.27], over its sentence."""
    time = one.get("time") or {}
    if time.get("change_pct") is None or not one.get("comparable", True):
        return one.get("words")
    interval = time.get("ci95_pct")
    size = f"{time['change_pct']:+.2f} %" + (f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else "")
    return tag("div", tag("b", size), tag("div", one.get("words"), class_="soft"))


def _badge(word: str, colour: str) -> Safe:
    return tag("span", word.replace("_", " "), class_=f"badge {colour}")


def _staircase(folder: Path, out: Path, race: race_folder.Race) -> object:
    link = race_page.staircase(folder, out, race)
    return join(["; ", marked_up(link)]) if link else ""


def _race_page(folder: Path, out: Path) -> str:
    """From the index to the race's page."""
    path = folder / "race.html"
    if not path.exists():
        path = out / "races" / f"{folder.name}.html"
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, race_page.html(folder, path.parent), durable=False)
    return quote(os.path.relpath(path, out))


def sweeps(results: Path | str, runs: Sequence[tuple[str, Row]], out: Path) -> Safe:
    """The section of the sweeps in this results folder, newest first; "" without any.

    runs: (absolute folder, row) of all its runs.  A sweep whose page was never made gets one, in out/sweeps/.
    """
    lines = [_sweep_line(folder, runs, out) for folder in sweep.folders(results)]
    if not lines:
        return Safe("")
    lines.sort(key=lambda line: str(line[0] or ""), reverse=True)
    about = soft(
        "Runs over all combinations of some values, newest first.  The best is the best of those tried, no verdict."
    )
    return section("Sweeps", about, table(SWEEP_HEAD, lines, class_="races"), id="sweeps")


def _sweep_line(folder: Path, runs: Sequence[tuple[str, Row]], out: Path) -> Line:
    try:
        result = sweep_results.read(folder, runs)
        link = tag("a", folder.name, href=_sweep_page(folder, result, out))
        complete = sum(row["status"] == "complete" for row in result.rows)
        counts = f"{complete} complete" + "".join(
            f", {num} {word}" for num, word in ((len(result.lost), "lost"), (len(result.not_run), "not run")) if num
        )
        over = " × ".join(f"{len(values)} {key}" for key, values in result.axes.items())
        started = result.facts["started_at"][:16].replace("T", " ")
        return started, link, over, counts, sweep_results.best(result).partition("; ")[0]
    except Exception as error:  # whatever is wrong with one sweep, the others are shown
        return (
            None,
            folder.name,
            None,
            tag("span", "damaged", class_="badge bad"),
            f"{type(error).__name__}: {error}"[:300],
        )


def _sweep_page(folder: Path, result: sweep_results.Results, out: Path) -> str:
    """From the index to the sweep's page."""
    path = folder / sweep_page.NAME
    if not path.exists():
        path = out / "sweeps" / f"{folder.name}.html"
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, sweep_page.html(folder, path.parent, result), durable=False)
    return quote(os.path.relpath(path, out))
