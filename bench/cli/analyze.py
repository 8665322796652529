"""Where does the time of a trace go?  ./run.sh analyze PATH... [--json] [--html PAGE] [--png FOLDER] [--md [FILE]]

PATH is a run folder, a Kineto trace (.json, .json.gz) of any program, or a folder with the traces of all ranks.
Several files count as the ranks of one job.  Several folders, and the windows of a run, are analyzed separately: --json
prints {PATH: answer}, and --html puts them below each other.  A run folder also gets the analysis.json and summary.md
of its first window; with several windows, such as the cycles of a profiler's schedule, each is written to
RUN/windows/NAME.  torch is not needed.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.analysis.trace import categories, load
from bench.analysis.trace import text as trace_text
from bench.api import traces
from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.cli import arguments
from bench.config import windows as config_windows

Answers = dict[str, dict[str, Any]]  # {title: analysis}


def main(argv: list[str]) -> int:
    """Exit codes: 0 analysed, 2 usage error, no trace, or nothing in any of them that took time."""
    if argv[:1] == ["diff"]:
        raise ValueError("analyze diff: to see what changed from A to B, use ./run.sh explain A B")
    args = _parser().parse_args(argv)
    rules = categories.load_rules(user_path(args.rules)) if args.rules else categories.RULES
    prints_text = not (args.json or args.html or args.png or args.md is not None)
    reports: Answers = {}
    for job, paths in traces.jobs(args.path):
        by_window = traces.analyses(paths, rules, args.include_last_step)
        for title, report in traces.titled(job, by_window).items():
            reports[title] = report
            if prints_text:
                print(trace_text.document(report, title).terminal())
        if (paths[0] / "run.json").is_file():
            _keep_in_run(paths[0], by_window)
    if args.json:
        print(json.dumps(reports if len(reports) > 1 else next(iter(reports.values())), indent=1))
    markdown = "\n".join(trace_text.document(report, title).markdown() + "\n" for title, report in reports.items())
    written = []
    if args.md:
        if (path := user_path(args.md)).is_file() and load.is_trace(path):
            raise ValueError(f"--md {args.md}: is a trace, and would be replaced: give --md last, or --md FILE.md")
        atomic.write_out(path, markdown)
        written.append(user_path(args.md))
    elif args.md == "":
        print(markdown, end="")
    if args.html or args.png:
        from bench.report import png, trace_page

        page = trace_page.document(reports)
        if args.html:
            atomic.write_out(user_path(args.html), page.html())
            written.append(user_path(args.html))
        if args.png:
            written += png.write(page.charts, user_path(args.png), page.drawings)
    for path in written:
        print(f"analyze: wrote {shown(path)}", file=sys.stderr)
    ranks = (rank for report in reports.values() for rank in report["ranks"].values())
    return 2 if all(map(trace_text.is_empty, ranks)) else 0


def _keep_in_run(run: Path, by_window: Mapping[str | None, dict[str, Any]]) -> None:
    """Writes the first window's analysis into the run's folder and, if there are several, each into windows/NAME."""
    _keep(run, run.name, next(iter(by_window.values())))
    for name, report in by_window.items() if len(by_window) > 1 else ():
        if name and config_windows.NAME.fullmatch(name):  # a trace's name may be anything
            _keep(run, f"{run.name}, window {name}", report, "windows", name)


def _keep(run: Path, title: str, report: dict[str, Any], *names: str) -> None:
    """Writes an analysis beside a run's record, for its report, or into the folder of these names in it."""
    try:
        folder = atomic.inner_folder(run, *names)
        atomic.write_json(folder / "analysis.json", report)
        summary = folder / "summary.md"
        if not summary.exists() or plain_file.text(summary).startswith("# Trace analysis"):
            atomic.write_text(summary, trace_text.document(report, title).markdown() + "\n")
        print(f"analyze: wrote {shown(folder / 'analysis.json')}", file=sys.stderr)
    except (OSError, Damaged) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"analyze: not all was written: {why}", file=sys.stderr)


def trace_parser(verb: str, main: arguments.Main) -> arguments.Parser:
    """Returns a parser with the options that analyze and explain share."""
    parser = arguments.Parser(f"./run.sh {verb}", main=main)
    parser.add_argument("path", nargs="+", metavar="RUN|TRACE")
    parser.flag("--json", help="print JSON, for programs")
    rules_help = "yaml list of {category, pattern}: your own kernels' categories, tried first"
    parser.add_argument("--rules", metavar="FILE", help=rules_help)
    last_help = "count the last ProfilerStep too: its kernels may be cut off"
    parser.flag("--include-last-step", help=last_help)
    return parser


def _parser() -> arguments.Parser:
    parser = trace_parser("analyze", main)
    parser.add_argument("--html", metavar="PAGE", help="write a page that opens offline")
    parser.add_argument("--png", metavar="FOLDER", help="write a picture of each drawing; needs a Chromium")
    parser.add_argument(
        "--md", metavar="FILE", nargs="?", const="", help="write Markdown to FILE; without FILE, print it"
    )
    return parser
