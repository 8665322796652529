"""What did each record gain?  ./run.sh ladder [RUNG ...] [n=3] [size=nano|short|record] [key=value for all rungs]

    ./run.sh ladder                        every rung, in the size that suits this machine
    ./run.sh ladder r04 r08 r11 n=5        these, each vs the one before it
    ./run.sh ladder --dry-run              what it would run and change, estimated time
    ./run.sh ladder --resume               after an interrupt
    ./run.sh ladder --page RACE            table and page of a finished ladder, without a run

A rung is an experiment whose source is a record of the speedrun (conf/experiment/r01.yaml ...).  The rungs are the arms
of one race (./run.sh race): one session, a warm-up each, a random order planned up front, nothing shown before the end.
The result is a staircase: time and steps to the target by rung, each vs the rung below.  docs/reference/ladder.md
"""

import argparse
import json
from pathlib import Path

from bench.base import atomic
from bench.base.paths import results_root, shown
from bench.cli import arguments
from bench.launch import console, ready
from bench.launch.console import say
from bench.plans.ladder import page, request, staircase
from bench.plans.race import planning, runner
from bench.report import table_text


def main(argv: list[str]) -> int:
    """Exit codes: 0 the ladder has ended (or --dry-run), 1 it was interrupted or abandoned, 2 usage error."""
    args = _parser().parse_intermixed_args(argv)
    results = results_root().absolute()
    with console.output(args.quiet, args.json or args.csv):
        if args.dry_run:
            planned = request.forecast(*request.parse(args.arguments))
            print(json.dumps(planned, indent=1) if args.json else request.forecast_text(planned))
            return 0
        folder = _ended(args, results)
        if folder is None:
            return 1
        stairs = staircase.from_race(folder)
        report = page.document(folder, stairs)
        atomic.write_text(folder / page.NAME, report.html())
        say("page", shown(folder / page.NAME))
        say("race", shown(folder))
    if args.csv:
        rows = page.csv_rows(stairs)
        table_text.print_csv(rows, list(rows[0]))
    else:
        print(report.json() if args.json else report.terminal())
    return 0


def check(argv: list[str]) -> None:
    """Raises ValueError for arguments that make no ladder, before they are submitted with cluster=slurm.

    Which rungs fit is not checked: the job's machine chooses the size, and composing all of them takes half a minute.
    """
    args = _parser().parse_intermixed_args(argv)
    if args.resume is not None:
        request.unfinished(results_root().absolute(), args.resume)
    request.check(args.arguments)


def _ended(args: argparse.Namespace, results: Path) -> Path | None:
    """Returns the folder of a ladder that has ended, now or before; None if it was interrupted or abandoned."""
    if args.page is not None:
        return request.ended(results, args.page)
    if args.resume is not None:
        folder = request.unfinished(results, args.resume)
    else:
        _, fitted, race_request = request.parse(args.arguments)
        for fit in fitted:
            if fit.fault:
                say("ladder", f"{fit.rung.name} is excluded, it cannot run at this size: {fit.fault}", always=True)
        folder = planning.begin(race_request, results, args.anyway)
    race = runner.go(folder, results, anyway=args.anyway, is_new=args.resume is None)
    if race["result"] is not None:
        return folder
    is_open = race["status"] == "interrupted"
    why = f"./run.sh ladder --resume {folder.name} goes on" if is_open else race["why"]
    say("ladder", f"no staircase{' yet' * is_open}: {why}", always=True)
    return None


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh ladder", main=main)
    word_help = "rungs, the lowest first; default all; n=3 (runs of each rung), size=nano, short or record, seed=0 "
    word_help += "(of the first run), alpha=0.05; key=value for all rungs"
    parser.add_argument("arguments", nargs="*", metavar="WORD", help=word_help)
    parser.flag("--dry-run", help="print what it would run and the estimated time; run nothing")
    arguments.latest(parser, "--resume", "continue this ladder, or the latest unfinished one")
    arguments.latest(parser, "--page", "table and page of this ladder, or the latest, once more")
    parser.flag("--anyway", help=ready.ANYWAY)
    parser.alone("--dry-run", "--csv", "--resume", "--page")
    parser.forms("print the staircase", csv="print it as CSV, one line per rung", says_more=True)
    return parser
