"""The results table.  ./run.sh table [FOLDER...] [--sort COL[,-COL]] [--where KEY=VALUE...] [--group]

Reads run folders only; 10,000 of them in two seconds and again in half a second, so no heavy import.  A run that failed
or still runs has its row and no numbers.  A row is a run, with --group a set of repeats.
"""

import sys

from bench import paths
from bench.cli import arguments
from bench.paths import PUBLISHED
from bench.record import listing
from bench.report import table_filters, table_groups, table_text
from bench.report.table_filters import COLUMNS


def main(argv):
    args = _parser().parse_args(_joined(argv))
    if args.check is not None or args.write is not None:
        from bench.report import markdown_blocks

        if args.write is None:
            return markdown_blocks.check(args.check, main)
        return markdown_blocks.write(args.write, main)
    if args.leaderboard:
        for option in ("where", "group", "sort", "all_columns", "json", "csv"):
            if getattr(args, option):
                words = option.replace("_", "-")
                raise ValueError(f"--{words} with --leaderboard: it has no effect there: give one of the two")
        from bench.claims import leaderboard_text

        print(leaderboard_text.text(args.folder, "github" if args.md else "simple", listing.report))
        return 0
    try:
        conditions = [table_filters.condition(words) for words in args.where]
        rows = listing.read_rows(args.folder)
        rows = [row for row in rows if all(table_filters.holds(row, *condition) for condition in conditions)]
        columns, shown = COLUMNS, table_text.SHOWN
        if args.group:
            rows, columns, shown = table_groups.groups(rows), table_groups.GROUP_COLUMNS, table_text.GROUP_SHOWN
        rows = table_filters.sort(rows, args.sort, columns)
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(table_text.as_json(rows, columns))
    elif args.csv:
        table_text.print_csv(rows, columns)
    elif not rows:
        print(_nothing(args))
    elif args.all_columns or args.md:
        shown = columns if args.all_columns else table_text.filled(rows, shown)
        print(table_text.render(rows, shown, "github" if args.md else "wide"))
    else:
        print(table_text.fit(rows, shown, table_filters.asked_for(args.sort, conditions, columns)))
    return 0


def _nothing(args):
    if args.where:
        return f"no run matches --where {' '.join(args.where)}: omit it to see all"
    where = " ".join(args.folder) or f"{paths.shown(paths.results_root())}/"
    more = "" if args.folder else f"; ./run.sh table results/{PUBLISHED} shows the published ones"
    return f"no runs in {where} yet: ./speedrun.sh makes the first, ./run.sh run makes one{more}"


def _joined(argv):
    """--sort -train_s as --sort=-train_s: argparse would take -train_s for an option."""
    argv = list(argv)
    while "--sort" in argv[:-1]:
        index = argv.index("--sort")
        argv[index : index + 2] = [f"--sort={argv[index + 1]}"]
    return argv


def _parser():
    parser = arguments.Parser(
        "./run.sh table",
        description="Runs as a table, oldest first. (open): the run changed what its track fixes.",
        epilog=f"columns: {', '.join(COLUMNS)}\nwith --group: {', '.join(table_groups.GROUP_COLUMNS)}\n\n"
        "exit codes: 0 fine, 1 a table is stale, 2 wrong use; unreadable runs are skipped and named on stderr",
    )
    parser.add_argument("folder", nargs="*", metavar="FOLDER", help="run folders or folders of them; default results/")
    parser.add_argument("--sort", metavar="COL[,-COL]", help="sort by these columns; - before a column: largest first")
    parser.add_argument(
        "--where",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="only these runs; also 'KEY<VALUE' and != <= > >=",
    )
    parser.add_argument("--group", action="store_true", help="repeats together, with mean and sd")
    parser.add_argument("--all-columns", action="store_true", help="every column, however wide")
    parser.add_argument(
        "--leaderboard", action="store_true", help="by track: the best runs, and the history of the record"
    )
    files = {"nargs": "*", "metavar": "FILE"}
    parser.add_argument("--check", **files, help="exit 1 if a table in README.md, results/README.md or FILE is stale")
    parser.add_argument("--write", **files, help="write these tables again")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of objects, unrounded, all columns")
    form.add_argument("--csv", action="store_true", help="unrounded, all columns")
    form.add_argument("--md", action="store_true", help="Markdown")
    return parser
