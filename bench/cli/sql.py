"""Query results with SQL.  ./run.sh sql "SELECT ..." [RUN ...] [--json | --csv | --md]      ./run.sh sql --schema

    ./run.sh sql "SELECT optim.lr, avg(val_loss) AS loss, count(*) AS n FROM runs GROUP BY 1 ORDER BY loss"
    ./run.sh sql "SELECT run_id, max(step_ms) FROM steps WHERE step > 10 GROUP BY 1" sweep-1a2b

The tables are runs (a row per run, and every setting is a column by its dotted name), metrics (run_id, metric, value),
steps, and columns.  The dialect is SQLite's, and a query cannot change anything.  RUN is a run folder, a folder of
them, a run id or a part of one, a race or a sweep; the default is all of results/.
"""

from bench.api import queries
from bench.cli import arguments

SCHEMA = "SELECT * FROM columns"


def main(argv: list[str]) -> int:
    """Exit codes: 0 printed, 2 usage error."""
    args = _parser().parse_args(argv)
    if not args.words and not args.schema:
        raise ValueError('give a query in quotes, "SELECT run_id, val_loss FROM runs", or --schema for the columns')
    query, *names = [SCHEMA, *args.words] if args.schema else args.words
    table = queries.sql(query, *names)
    if args.csv:
        table.print_csv()
    else:
        print(table.to_json() if args.json else table.to_markdown() if args.md else table)
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh sql", main=main)
    parser.add_argument(
        "words", nargs="*", metavar="QUERY | RUN", help="one SELECT in quotes, then the runs; default results/"
    )
    parser.flag("--schema", help="print the tables with their columns and types")
    parser.forms("print a list of objects, not rounded", "print Markdown", "print CSV, not rounded")
    return parser
