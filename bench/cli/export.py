"""./run.sh export RUN|FOLDER... --to csv|parquet|mllog|modded-nanogpt [--steps] [--out PATH]    for other programs

csv, parquet: a line a run, or with --steps a line a step.  mllog: MLPerf's ":::MLLOG {json}" lines of each run.
modded-nanogpt: a log in the format of its records, of one run; it imports to the same numbers.
Without --out everything but parquet goes to the terminal.
"""

import sys

from bench.base import atomic
from bench.base.paths import of_user, shown
from bench.cli import arguments
from bench.record import named
from bench.record.exporters import formats

FORMATS = ("csv", "parquet", "mllog", "modded-nanogpt")


def main(argv):
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    folders = named.runs(args.run)
    out = args.out and of_user(args.out)
    if args.steps and args.to not in ("csv", "parquet"):
        raise ValueError(f"--steps with --to {args.to}: it is for csv and parquet: omit it")
    if args.to == "parquet":
        if out is None:
            raise ValueError("--to parquet: it is binary: name a file with --out FILE.parquet")
        formats.write_parquet(formats.rows_of(folders, args.steps), out)
    else:
        _put(_text(args.to, folders, args.steps), out)
    return 0


def _text(form, folders, of_steps):
    if form == "csv":
        return formats.as_csv(formats.rows_of(folders, of_steps))
    if form == "mllog":
        return "".join(formats.of_each(folders, formats.mllog))
    if len(folders) != 1:
        raise ValueError(f"--to modded-nanogpt: it is the log of one run, and these are {len(folders)}")
    return formats.of_each(folders, formats.modded_nanogpt_log)[0]


def _put(text, out):
    if out is None:
        sys.stdout.write(text)
    else:
        atomic.write_out(out, text)
        print(shown(out))


def _parser():
    parser = arguments.Parser("./run.sh export", main=main)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders, run ids, or folders of runs")
    parser.add_argument("--to", choices=FORMATS, required=True)
    parser.add_argument("--steps", action="store_true", help="csv, parquet: a line a step instead of a run")
    parser.add_argument("--out", metavar="PATH")
    return parser
