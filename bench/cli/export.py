"""Write records for other programs.  ./run.sh export RUN|FOLDER... --to FORM [--steps] [--out PATH|URL]

csv and parquet have a row per run, or with --steps per step.  mllog is MLPerf's ":::MLLOG {json}" lines.
modded-nanogpt is a log of one run in the format of its records; importing it gives the same numbers.
Without --out everything except parquet is printed.  postgres fills the tables runs and, with --steps, steps of the
database at URL (postgresql://HOST/DATABASE, as for psql), and replaces the rows of these runs.
./run.sh dashboard sends records to TensorBoard, Weights & Biases and MLflow.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.base.text_table import some
from bench.cli import arguments
from bench.record import named
from bench.record.exporters import formats, postgres

POSTGRES = "postgres"
OUT = {"parquet": "FILE.parquet", POSTGRES: "postgresql://HOST/DATABASE"}  # {form that needs --out: what it names}
FORMS = ("csv", "parquet", "mllog", "modded-nanogpt", POSTGRES)


def main(argv: list[str]) -> int:
    """Exit codes: 0 written, 2 usage error."""
    args = _parser().parse_args(argv)
    if args.to in OUT and not args.out:
        raise ValueError(f"--to {args.to}: it cannot be printed: add --out {OUT[args.to]}")
    if args.to == POSTGRES:
        return _to_postgres(args)
    folders = named.runs(args.run)
    out = args.out and user_path(args.out)
    if args.steps and args.to not in ("csv", "parquet"):
        raise ValueError(f"--steps with --to {args.to}: it is for csv, parquet and postgres: omit it")
    if args.to == "parquet":
        formats.write_parquet(formats.rows_of(folders, args.steps), out)
        print(shown(out))
    elif out is None:
        sys.stdout.write(_text(args.to, folders, args.steps))
    else:
        atomic.write_out(out, _text(args.to, folders, args.steps))
        print(shown(out))
    return 0


def _text(form: str, folders: Sequence[Path], with_steps: bool) -> str:
    if form == "csv":
        return formats.as_csv(formats.rows_of(folders, with_steps))
    if form == "mllog":
        return "".join(formats.export_each(folders, formats.mllog))
    if len(folders) != 1:
        raise ValueError(f"--to modded-nanogpt: a log holds one run, and {len(folders)} are named: name one")
    return formats.export_each(folders, formats.modded_nanogpt_log)[0]


def _to_postgres(args: argparse.Namespace) -> int:
    folders = named.runs(args.run)
    steps = formats.rows_of(folders, with_steps=True) if args.steps else None
    exported, left_out = postgres.export(args.out, named.store_of(args.run), steps)
    print(exported)
    if left_out:
        named.report_excluded("export", f"{some(left_out)}: PostgreSQL has no columns with such names")
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh export", main=main)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders, run ids, races, or folders of runs")
    parser.add_argument("--to", required=True, metavar="FORM", choices=FORMS, help=", ".join(FORMS))
    parser.flag("--steps", help="csv, parquet: one line per step instead of per run; postgres: the table steps as well")
    parser.add_argument("--out", metavar="PATH", help="the file to write, or for postgres the URL of the database")
    return parser
