"""The results table.  ./run.sh table [FOLDER...] [--sort KEY[,-KEY]] [--where KEY=VALUE...] [--group] [--pivot KEY KEY]

KEY is a column or any setting of config.yaml, such as optim.lr.  Reads run folders only: 10,000 of them in two seconds,
and in half a second when cached, so it imports nothing heavy.  A failed or running run has a row without numbers.  A
row is a run, with --group a set of repeats, with --pivot a value of a setting.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from bench.base import paths
from bench.base.paths import PUBLISHED
from bench.cli import arguments
from bench.record import named
from bench.report import table_columns, table_groups, table_text
from bench.report.table_columns import COLUMNS, Columns, Condition, TableRow

ALONE = {  # what has no effect beside another option
    "leaderboard": (
        *("where", "group", "sort", "reverse", "columns", "all_columns", "json", "csv", "sweep", "pivot", "value"),
        "baseline",
    ),
    "pivot": ("group", "sort", "reverse", "columns", "all_columns", "baseline"),
}


def main(argv: list[str]) -> int:
    """Exit codes: 0 fine, 1 a table is stale, 2 usage error."""
    args = _parser().parse_args(_joined(argv))
    if args.check is not None or args.write is not None:
        from bench.report import markdown_blocks

        if args.write is None:
            return markdown_blocks.check(args.check, main)
        return markdown_blocks.write(args.write, main)
    for alone, others in ALONE.items():
        for option in others if getattr(args, alone) else ():
            if getattr(args, option):
                flag = option.replace("_", "-")
                raise ValueError(f"--{flag} with --{alone}: it has no effect there: give one of the two")
    if args.leaderboard:
        from bench.claims import leaderboard_views

        report = functools.partial(named.report_excluded, "table")
        print(leaderboard_views.text(args.folder, "github" if args.md else "simple", report))
        return 0
    try:
        rows, conditions = _rows(args)
        _pivot(args, rows) if args.pivot else _table(args, rows, conditions)
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    return 0


def _rows(args: argparse.Namespace) -> tuple[list[TableRow], list[Condition]]:
    """-> (the rows of the requested runs, the conditions)."""
    rows: list[Any] = named.rows_of_words(args.folder)
    if args.sweep:
        from bench.record import sweep

        rows = sweep.chosen(rows, args.sweep)
    columns = Columns(rows)
    conditions = [columns.condition(condition) for condition in args.where]
    return table_columns.chosen(rows, conditions), conditions


def _table(args: argparse.Namespace, rows: list[TableRow], conditions: list[Condition]) -> None:
    fixed: tuple[str, ...] = table_groups.GROUP_COLUMNS if args.group else COLUMNS
    rows = [*table_groups.groups(rows)] if args.group else rows
    shown: Sequence[str] = table_text.with_metric(rows, table_text.GROUP_SHOWN if args.group else table_text.SHOWN)
    columns = Columns(rows, fixed)
    orders = columns.orders(args.sort, args.reverse)
    given = [key for names in args.columns for key in names.split(",") if key]
    chosen = columns.named(given, f"--columns {' '.join(args.columns)}")
    notes, changes = [], []
    if args.baseline:
        baseline = table_groups.find_baseline(rows, args.baseline, columns)
        notes, changes = table_groups.add_changes(rows, baseline), list(table_groups.CHANGE_COLUMNS)
        rows = [baseline, *(row for row in rows if row is not baseline)]
    rows = table_columns.sort(rows, orders) if orders or not args.reverse else rows[::-1]
    varied = [] if chosen else columns.varied()
    every = columns.all() if args.all_columns else [*fixed, *(name for name in varied if name not in fixed)]
    if args.json or args.csv:
        _print_data(args, rows, [*(chosen or every), *(name for name in changes if name not in chosen)])
        return
    if not rows:
        print(_nothing(args))
        return
    if not chosen and not args.all_columns:
        behind = shown.index("track" if args.group else "status") + 1
        every = [*shown[:behind], *varied, *shown[behind:]]
    shown = list(dict.fromkeys([*(chosen or every), *changes]))
    if args.md:
        print(table_text.render(rows, shown if args.all_columns else table_text.filled(rows, shown), "github"))
    elif args.all_columns:
        print(table_text.render(rows, shown, "wide"))
    else:  # what a user asks about is shown, of a group its mean
        keys = [key for condition in conditions for key in (condition.key, f"{condition.key}_mean") if key in rows[0]]
        requested = list(dict.fromkeys([*(key for key, _ in orders), *keys, *changes]))
        print(table_text.fit(rows, shown, chosen or requested, varied))
    num_hidden = 0 if chosen or args.all_columns or args.md else columns.num_varied - table_columns.MAX_VARIED
    if num_hidden > 0:
        notes.append(f"{num_hidden} more settings differ: --columns run_id,'optim.*' or --all-columns shows them")
    for note in notes:
        print(note, file=sys.stderr)


def _pivot(args: argparse.Namespace, rows: list[TableRow]) -> None:
    given = f"--pivot {' '.join(args.pivot)}"
    if len(args.pivot) > 2:
        raise ValueError(f"{given}: one or two keys: a table has lines and columns")
    columns, value = Columns(rows), args.value or "val_loss"
    keys = columns.named(args.pivot, given)
    (value,) = columns.named([value], f"--value {value}")
    pivot = table_groups.pivot_of(rows, keys, value)
    if args.json or args.csv:
        cells = table_groups.rows_of_pivot(pivot)
        _print_data(args, cells, [*keys, f"{value}_mean", f"{value}_sd", "n", "num_lost", "best"])
    else:
        print(table_groups.pivot_text(pivot, args.md) if rows else _nothing(args))


def _print_data(args: argparse.Namespace, rows: Sequence[TableRow], columns: Sequence[str]) -> None:
    print(table_text.as_json(rows, columns)) if args.json else table_text.print_csv(rows, columns)


def _nothing(args: argparse.Namespace) -> str:
    if args.where:
        return f"no run matches --where {' '.join(args.where)}: omit it to see all"
    where = " ".join(args.folder) or f"{paths.shown(paths.results_root())}/"
    more = "" if args.folder else f"; ./run.sh table results/{PUBLISHED} shows the published ones"
    return f"no runs in {where} yet: ./speedrun.sh makes the first, ./run.sh run makes one{more}"


def _joined(argv: list[str]) -> list[str]:
    """--sort -train_s as --sort=-train_s: argparse would take -train_s for an option."""
    argv = list(argv)
    while "--sort" in argv[:-1]:
        index = argv.index("--sort")
        argv[index : index + 2] = [f"--sort={argv[index + 1]}"]
    return argv


def _parser() -> arguments.Parser:
    parser = arguments.Parser(
        "./run.sh table",
        description="Runs as a table, oldest first, with the settings in which they differ.  KEY is a column or a\n"
        "setting of the config, such as optim.lr.  (open): the run changed what its track fixes.",
        epilog=f"columns: {', '.join(COLUMNS)}\nwith --group: {', '.join(table_groups.GROUP_COLUMNS)}\n\n"
        "exit codes: 0 fine, 1 a table is stale, 2 usage error; unreadable runs are skipped and named on stderr",
    )
    parser.add_argument("folder", nargs="*", metavar="FOLDER", help="run folders or folders of them; default results/")
    parser.add_argument("--sort", metavar="KEY[,-KEY]", help="sort by these; - before a key: largest first")
    parser.flag("--reverse", help="reverse the order; without --sort the newest first")
    parser.add_argument(
        "--where",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="runs that meet all conditions; also 'KEY<VALUE' and != <= > >=; KEY=A,B: either; 'model=g*': a glob",
    )
    parser.add_argument(
        "--columns", nargs="+", action="extend", default=[], metavar="KEY", help="only these; 'optim.*' matches several"
    )
    parser.flag("--all-columns", help="every column and every setting, however wide")
    parser.flag("--group", help="group repeats, with n, mean and sd")
    parser.add_argument(
        "--baseline",
        nargs="+",
        metavar="ROW",
        help="the change of each row against this one (part of an id, KEY=VALUE), with --group its 95 %% interval",
    )
    parser.add_argument("--pivot", nargs="+", metavar="KEY", help="means by one setting, or cross-tabulated by two")
    parser.add_argument("--value", metavar="KEY", help="the column that --pivot averages; default val_loss")
    parser.add_argument("--sweep", metavar="ID", help="the runs of this sweep; also part of its id")
    parser.flag("--leaderboard", help="by track: the best runs, and the history of the record")
    files: dict[str, Any] = {"nargs": "*", "metavar": "FILE"}
    parser.add_argument("--check", **files, help="exit 1 if a table in README.md, results/README.md or FILE is stale")
    parser.add_argument("--write", **files, help="update these tables")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of objects, not rounded, all columns")
    form.add_argument("--csv", action="store_true", help="not rounded, all columns")
    form.add_argument("--md", action="store_true", help="Markdown")
    return parser
