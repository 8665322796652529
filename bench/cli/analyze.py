"""./run.sh analyze PATH... [--json] [--html PAGE] [--png FOLDER] [--md [FILE]] [--rules FILE]

PATH: a run folder, a Kineto trace (.json, .json.gz), or a folder of ranks' traces, also from other programs.
Several files are the ranks of one job; several folders, and the windows of a run, are analyzed separately, in --json as
{PATH: answer}, in --html below each other.  For a run folder it also writes analysis.json and summary.md of the first
window into it, and of several windows, as the cycles of a schedule are, each into RUN/windows/NAME.  Does not need
torch.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.analysis.trace import categories
from bench.analysis.trace import text as trace_text
from bench.api import traces
from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.cli import arguments
from bench.config import windows as config_windows

Answers = dict[str, dict[str, Any]]  # {what was analysed: its analysis}


def main(argv: list[str]) -> int:
    """Exit codes: 0 analysed, 2 usage error or no trace."""
    if argv[:1] == ["diff"]:
        raise ValueError("analyze diff: to see what changed from A to B, use ./run.sh explain A B")
    args = _parser().parse_args(argv)
    rules = categories.load_rules(user_path(args.rules)) if args.rules else categories.RULES
    answers: Answers = {}
    for title, paths in traces.jobs(args.path):
        answers |= _answer(title, paths, rules, args)
    if args.json:
        print(json.dumps(answers if len(answers) > 1 else next(iter(answers.values())), indent=1))
    from bench.report import trace_page

    markdown = [trace_text.document(answer, title).markdown() + "\n" for title, answer in answers.items()]
    _write(args, "\n".join(markdown), lambda: trace_page.document(answers))
    return 0


def _write(args: argparse.Namespace, markdown: str, with_pictures: Callable[[], Any]) -> None:
    """What --html, --png and --md ask for.  with_pictures() -> the Document."""
    written = []
    if args.md:
        atomic.write_out(user_path(args.md), markdown)
        written.append(user_path(args.md))
    elif args.md == "":
        print(markdown, end="")
    if args.html or args.png:
        answer = with_pictures()
    if args.html:
        atomic.write_out(user_path(args.html), answer.html())
        written.append(user_path(args.html))
    if args.png:
        from bench.report import png

        written += png.write(answer.charts, user_path(args.png), answer.drawings)
    for path in written:
        print(f"analyze: wrote {shown(path)}", file=sys.stderr)


def _prints_text(args: argparse.Namespace) -> bool:
    return not (args.json or args.html or args.png or args.md is not None)


def _answer(whole: str, paths: list[Path], rules: tuple[categories.Rule, ...], args: argparse.Namespace) -> Answers:
    """Paths of one job -> {title: analysis}, one for each window."""
    by_window = traces.analyses(paths, rules, args.include_last_step)
    answers = traces.titled(whole, by_window)
    for title, answer in answers.items() if _prints_text(args) else ():
        print(trace_text.document(answer, title).terminal())
    if (paths[0] / "run.json").is_file():
        _keep(paths[0], paths[0].name, next(iter(answers.values())))
        for name, answer in by_window.items() if len(by_window) > 1 else ():
            if name and config_windows.NAME.fullmatch(name):  # a trace may say anything
                _keep(paths[0] / "windows" / name, f"{paths[0].name}, window {name}", answer)
    return answers


def _keep(folder: Path, title: str, answer: dict[str, Any]) -> None:
    """Beside the run's record, for reports."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(folder / "analysis.json", answer)
        if not (folder / "summary.md").exists() or (folder / "summary.md").read_text().startswith("# Trace analysis"):
            atomic.write_text(folder / "summary.md", trace_text.document(answer, title).markdown() + "\n")
        print(f"analyze: wrote {shown(folder / 'analysis.json')}", file=sys.stderr)
    except OSError as error:
        print(f"analyze: {folder}/analysis.json could not be written ({error.strerror})", file=sys.stderr)


def trace_parser(verb: str, main: arguments.Main) -> arguments.Parser:
    """The options that analyze and explain share."""
    made = arguments.Parser(f"./run.sh {verb}", main=main)
    made.add_argument("path", nargs="+", metavar="RUN|TRACE")
    made.flag("--json", help="print JSON, for programs")
    rules_help = "yaml list of {category, pattern}: your own kernels' categories, tried first"
    made.add_argument("--rules", metavar="FILE", help=rules_help)
    last_help = "count the last ProfilerStep too: its kernels may be cut off"
    made.flag("--include-last-step", help=last_help)
    return made


def _parser() -> arguments.Parser:
    parser = trace_parser("analyze", main)
    _forms(parser)
    return parser


def _forms(parser: arguments.Parser) -> None:
    """Forms of an answer other than text on a terminal; several at once are possible."""
    parser.add_argument("--html", metavar="PAGE", help="write a page that opens offline")
    parser.add_argument("--png", metavar="FOLDER", help="write a picture of each drawing; needs a Chromium")
    parser.add_argument("--md", metavar="FILE", nargs="?", const="", help="write Markdown, without FILE: print it")
