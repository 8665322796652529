"""The results table.  ./run.sh table [FOLDER...] [--sort KEY[,-KEY]] [--where KEY=VALUE...] [--group] [--pivot KEY KEY]

KEY is a column or any setting of config.yaml, such as optim.lr.  Reads run folders only: 10,000 of them in two seconds,
and in half a second when cached, so it imports nothing heavy.  A failed or running run has a row without numbers.  A
row is a run, with --group a set of repeats, with --pivot a value of a setting.
"""

import argparse
import functools
import sys
from typing import Any

from bench.api import tables
from bench.base import paths
from bench.base.metric import METRICS, VAL_LOSS
from bench.base.paths import PUBLISHED
from bench.cli import arguments
from bench.record import named
from bench.report import table_groups
from bench.report.table_columns import COLUMNS, Columns

OF_RUNS = ("--group", "--sort", "--columns", "--baseline")  # options that only the plain table has


def main(argv: list[str]) -> int:
    """Exit codes: 0 fine, 1 a table is stale, 2 usage error."""
    argv = list(argv)
    while "--sort" in argv[:-1]:  # argparse would read -train_s in --sort -train_s as an option
        index = argv.index("--sort")
        argv[index : index + 2] = [f"--sort={argv[index + 1]}"]
    args = _parser().parse_args(argv)
    if args.check is not None or args.write is not None:
        from bench.report import markdown_blocks

        if args.write is None:
            return markdown_blocks.check(args.check, main)
        return markdown_blocks.write(args.write, main)
    if args.leaderboard:
        from bench.claims import leaderboard_views

        report = functools.partial(named.report_excluded, "table")
        print(leaderboard_views.text(args.folder, args.md, report))
        return 0
    _pivot(args) if args.pivot else _table(args)
    return 0


def _table(args: argparse.Namespace) -> None:
    table = tables.table(
        *args.folder,
        where=args.where,
        sort=args.sort,
        columns=args.columns,
        group=args.group,
        baseline=args.baseline or (),
        sweep=args.sweep,
    )
    if args.json:
        print(table.to_json())
    elif args.csv:
        table.print_csv()
    elif not len(table):
        print(_nothing(args))
    else:
        print(table.to_markdown() if args.md else table)
        for note in table.notes:
            print(note, file=sys.stderr)


def _pivot(args: argparse.Namespace) -> None:
    option = f"--pivot {' '.join(args.pivot)}"
    if len(args.pivot) > 2:
        raise ValueError(f"{option}: give one or two keys, for the rows and the columns")
    rows, _ = tables.rows_of(args.folder, args.where, args.sweep)
    shared = {row["metric"] for row in rows}
    goal = METRICS.get(*shared) if len(shared) == 1 else None  # rows do not have the direction of a user's own metric
    columns, value = Columns(rows), args.value or ("val_loss" if goal in (None, VAL_LOSS) else "score")
    keys = columns.named(args.pivot, option)
    (value,) = columns.named([value], f"--value {value}")
    pivot = table_groups.pivot_of(rows, keys, value, goal)
    if args.json or args.csv:
        names = [*keys, f"{value}_mean", f"{value}_sd", "n", "num_lost", "num_without", "best"]
        cells = tables.Table(table_groups.rows_of_pivot(pivot), names)
        print(cells.to_json()) if args.json else cells.print_csv()
    else:
        print(table_groups.pivot_text(pivot, args.md) if rows else _nothing(args))


def _nothing(args: argparse.Namespace) -> str:
    if args.where:
        return f"no run matches --where {' '.join(args.where)}: omit it to see all"
    where = " ".join(args.folder) or f"{paths.shown(paths.results_root())}/"
    hint = f"./run.sh table results/{PUBLISHED} shows the published ones"
    hint = "./run.sh compare and import read logs of other programs" if args.folder else hint
    return f"no runs in {where} yet: make one with ./run.sh run, or start with ./speedrun.sh; {hint}"


def _parser() -> arguments.Parser:
    parser = arguments.Parser(
        "./run.sh table",
        description="Runs as a table, oldest first, with the settings in which they differ.  KEY is a column or a\n"
        "setting of the config, such as optim.lr.  (open): the run changed what its track fixes.",
        epilog=f"columns: {', '.join(COLUMNS)}\nwith --group: {', '.join(table_groups.GROUP_COLUMNS)}\n\n"
        "exit codes: 0 fine, 1 a table is stale, 2 usage error; unreadable runs are skipped and named on stderr",
    )
    parser.add_argument("folder", nargs="*", metavar="FOLDER", help="run folders or folders of them; default results/")
    parser.add_argument("--sort", metavar="KEY[,-KEY]", help="sort by these keys; -KEY sorts the largest first")
    parser.add_argument(
        "--where",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="runs that meet all conditions; also 'KEY<VALUE' and != <= > >=; KEY=A,B: either; 'model=g*': a glob",
    )
    help_ = "only these; a glob matches several"
    parser.add_argument("--columns", nargs="+", action="extend", default=[], metavar="KEY", help=help_)
    parser.flag("--group", help="group repeats, with n, mean and sd")
    parser.add_argument(
        "--baseline",
        nargs="+",
        metavar="ROW",
        help="the change of each row against this one (part of an id, KEY=VALUE), with --group its 95 %% interval",
    )
    parser.add_argument("--pivot", nargs="+", metavar="KEY", help="means by one setting, or cross-tabulated by two")
    parser.add_argument(
        "--value",
        metavar="KEY",
        help="the column that --pivot averages; default score where all share a goal of another metric, else val_loss",
    )
    parser.add_argument("--sweep", metavar="ID", help="the runs of this sweep; also part of its id")
    parser.flag("--leaderboard", help="by track: the best runs, and the history of the record")
    files: dict[str, Any] = {"nargs": "*", "metavar": "FILE"}
    parser.add_argument("--check", **files, help="exit 1 if a table in README.md, results/README.md or FILE is stale")
    parser.add_argument("--write", **files, help="update these tables")
    parser.forms("a list of objects, not rounded, all columns", "Markdown", "CSV, not rounded, all columns")
    beside = ("--where", "--json", "--csv", "--sweep", "--pivot", "--value")
    parser.alone("--leaderboard", *OF_RUNS, *beside)
    parser.alone("--pivot", *OF_RUNS)
    return parser
