"""./run.sh export RUN|FOLDER... --to csv|parquet|mllog|modded-nanogpt [--steps] [--out PATH]      records for other programs

csv, parquet: a line a run, or with --steps a line a step.  mllog: MLPerf's ":::MLLOG {json}" lines of each run.  modded-nanogpt:
a log in the format of its records, code first.  Without --out everything but parquet goes to the terminal.
"""

import argparse
import os
import sys

from bench import atomic
from bench.exporters import mllog, modded_nanogpt_log, tables
from bench.paths import of_user
from bench.record import named, run_folder, step_files

FORMATS = ("csv", "parquet", "mllog", "modded-nanogpt")


def main(argv):
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    folders = named.runs(args.run)
    out = args.out and of_user(args.out)
    if args.to == "parquet":
        if out is None:
            raise ValueError("--to parquet: it is no text: say where with --out FILE.parquet")
        tables.write_parquet(tables.rows_of(folders, args.steps), out)
    elif args.to == "csv":
        _put(tables.as_csv(tables.rows_of(folders, args.steps)), out)
    elif args.to == "mllog":
        _put(
            "".join(
                line + "\n"
                for folder in folders
                for line in mllog.lines(
                    run_folder.read(folder), step_files.read(folder), step_files.read_events(folder)
                )
            ),
            out,
        )
    else:
        if len(folders) != 1:
            raise ValueError(f"--to modded-nanogpt: it is the log of one run, and these are {len(folders)}")
        _put(modded_nanogpt_log.text(folders[0]), out)
    return 0


# ---- MLPerf


# ---- modded-nanogpt


def _put(text, out):
    if out is None:
        sys.stdout.write(text)
        return
    try:
        atomic.write_text(out, text)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None
    print(os.path.relpath(out))


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders, run ids, or folders of runs")
    parser.add_argument("--to", choices=FORMATS, required=True)
    parser.add_argument("--steps", action="store_true", help="csv, parquet: a line a step instead of a run")
    parser.add_argument("--out", metavar="PATH")
    return parser
