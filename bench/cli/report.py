"""Write results as pages that open offline.  ./run.sh report RUN|RACE|SWEEP|STUDY|FOLDER [--out PATH] [--png] [--md]

    ./run.sh report WORD WORD ...       the curves of all of them in one chart: results/curves.html
    ./run.sh report WORD --curves       the same for the arms of one race, or the runs of one folder

A run gets report.html in its folder; a race race.html, and report.html for each of its runs; a sweep sweep.html; a
study study.html; and results/, or any folder with many runs, a site in FOLDER/site/, of which only changed pages are
written again.  --png writes each chart of the page as a picture instead, to plots/ in its folder or to --out FOLDER (it
needs Chromium); --md prints Markdown for a pull request.  A WORD is anything that compare accepts: runs, races,
RACE:ARM, parts of run ids, folders of logs.
"""

import argparse
import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.base import atomic
from bench.base.paths import published_root, results_root, shown, user_path
from bench.base.reading.damage import reading_record
from bench.cli import arguments
from bench.record import ledger, line_count, named, sweep

Made = dict[str, Any]  # what --json prints

# {file in a folder: the module of its page}
PAGES = {"run.json": "run_page", sweep.STUDY: "study_page", sweep.NAME: "sweep_page", "race.json": "race_page"}
MAX_UNASKED = 500  # runs of a folder that may not be a results folder; more need --anyway


def main(argv: list[str]) -> int:
    """Exit codes: 0 written, 2 usage error."""
    args = _parser().parse_args(argv)
    files = _write(args)
    if args.json:
        print(json.dumps(files, indent=1))
    else:
        for path in files.get("pictures") or files.values():
            print(shown(path))
    return 0


def _write(args: argparse.Namespace) -> Made:
    """Returns what --json prints: {"page": path}, {"site": path} or {"pictures": [path]}; {} for printed Markdown."""
    if not args.names and not results_root().is_dir():
        raise ValueError(f"no runs in {shown(results_root())}/ yet: make one with ./run.sh run or ./speedrun.sh")
    if args.curves or len(args.names) > 1:
        return _curves(args)
    folder = named.folder(args.names[0]) if args.names else results_root()
    for file, module in PAGES.items():
        if (folder / file).exists():
            return _write_page(folder, args, importlib.import_module(f"bench.report.{module}"))
    for option in ("md", "png"):
        if getattr(args, option):
            raise ValueError(f"--{option} {folder}: it works for a single run or race: name one")
    return _site(folder, user_path(args.out) if args.out else folder / "site", args.anyway)


def _curves(args: argparse.Namespace) -> Made:
    """Writes the overlay of what the arguments name, one line per arm."""
    from bench.compare import selection
    from bench.report import curves

    if args.md:
        raise ValueError("--md with several words: it prints one run or race; use ./run.sh compare A B --md")
    names = args.names or [str(results_root())]
    arms = selection.arm_from_each(names, lambda message: named.report_excluded("report", message))
    path = user_path(args.out) if args.out else results_root() / ("plots" if args.png else "curves.html")
    if args.png:
        files = _pictures(curves.charts_of_arms(arms), path, is_own=not args.out)
    else:
        files = {"page": os.path.abspath(path)}
        atomic.write_out(path, curves.html(arms, path), may_follow=bool(args.out))
    for message in dict.fromkeys(message for arm in arms for message in arm.damaged.values()):
        named.report_excluded("report", f"the steps of a run: {message}")
    return files


def _pictures(charts: Iterable[Any], folder: Path, drawings: Iterable[Any] = (), is_own: bool = False) -> Made:
    from bench.report import png

    return {"pictures": [os.path.abspath(path) for path in png.write(charts, folder, drawings, is_own)]}


def _write_page(folder: Path, args: argparse.Namespace, module: ModuleType) -> Made:
    """Writes the page of a run, race or sweep with the module that has its Document and its Markdown."""
    if args.md:
        print(module.block(folder), end="")
        return {}
    if args.png:
        out = user_path(args.out) if args.out else atomic.inner_folder(folder, "plots")
        with reading_record(folder):
            document = module.document(folder)
        return _pictures(document.charts, out, document.drawings, not args.out)
    path = user_path(args.out) if args.out else folder / module.NAME
    if hasattr(module, "write_run_pages"):
        module.write_run_pages(folder)
    with reading_record(folder):  # damage may show only while the page is drawn
        page = module.document(folder, path.parent).html()
    atomic.write_out(path, page, may_follow=bool(args.out))
    return {"page": os.path.abspath(path)}


def _site(folder: Path, out: Path, is_wanted: bool) -> Made:
    from bench.claims import leaderboard_views
    from bench.report.site import site

    if lost := line_count.lost(folder / ledger.NAME):
        named.report_excluded("report", lost)
    results = site.read(folder)
    roots = (results_root().resolve(), published_root().resolve())  # folders of runs, published or not, and claims
    is_results = (folder / ledger.NAME).is_file() or any(map(folder.resolve().is_relative_to, roots))
    if not is_wanted and results.num_runs > MAX_UNASKED and not is_results:
        many = f"{folder} is not a results folder, and pages of {results.num_runs:,} runs would go to {out}"
        raise ValueError(f"{many}: add --anyway, or name a folder of results")
    try:
        page = site.write(
            results,
            out,
            lambda: leaderboard_views.standing(results.runs, [folder]),
            lambda done, total: arguments.count_up(done, total, "pages"),
        )
        return {"site": os.path.abspath(page)}
    except OSError as error:
        where = error.filename or out
        raise ValueError(f"{where}: cannot be written ({error.strerror}): name another folder with --out") from None


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh report", main=main)
    names_help = "a run, race, sweep, study or folder of many runs; default results/; several: curves"
    parser.add_argument("names", nargs="*", metavar="WORD", help=names_help)
    parser.flag("--curves", help="overlay the curves in one chart")
    parser.add_argument("--out", metavar="PATH", help="the page's path, or the folder of the site or the pictures")
    parser.flag("--png", help="each chart of the page as a PNG in plots/, instead of the page; needs Chromium")
    parser.forms('{"page": PATH}, {"site": PATH} or {"pictures": [PATH]}', "print Markdown for a pull request instead")
    parser.alone("--md", "--png", "--out")
    parser.flag("--anyway", help=f"pages of more than {MAX_UNASKED} runs of a folder that is not a results folder")
    return parser
