"""Bring the results of several machines together.  ./run.sh collect PLACE... [--into DIR]

PLACE is a results folder: a path, USER@HOST:PATH (over ssh), s3://BUCKET/PATH, or another address that fsspec knows.
Only runs that pass verify are copied, with the ledger and the races that they belong to; judge, table, publish and
report then treat them as the results of one machine.  You can interrupt it at any moment and repeat it: what is already
here is not copied again.  If two runs have the same name, both are left as they are and the place is refused.
"""

import sys
from pathlib import Path

from bench.base import escape
from bench.base.paths import results_root, user_path
from bench.base.reading.place import Place
from bench.claims import collecting
from bench.cli import arguments
from bench.launch.console import say
from bench.record import verification


def main(argv: list[str]) -> int:
    """Exit codes: 0 all was collected, 1 something was refused (each is named), 2 usage error."""
    args = _parser().parse_args(argv)
    into = Path(user_path(args.into)) if args.into else results_root()
    num_refused = 0
    for place in args.places:
        try:
            collected = collecting.collect(Place(place), into, args.without)
        except ValueError as error:
            print(f"collect: {escape.line(str(error))}", file=sys.stderr)
            num_refused += 1
            continue
        say("collect", f"{place}: {collected}")
        for sentence in collected.refused:
            say("refused", escape.line(f"{place}: {sentence}"), always=True)
        num_refused += len(collected.refused)
    return 1 if num_refused else 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh collect", main=main)
    parser.add_argument("places", nargs="+", metavar="PLACE", help="results folders: paths, USER@HOST:PATH, s3://...")
    parser.add_argument("--into", metavar="DIR", help="the results folder that gets them; default: this machine's own")
    help_text = "leave these files where they are; verify accepts a record without them"
    parser.add_argument("--without", nargs="+", default=(), choices=verification.LOCAL_ROLES, help=help_text)
    return parser
