"""./run.sh report RUN | RACE | FOLDER [--out PATH] [--png] [--md]      pages that open from a file, offline

Of a run or a race: report.html in its folder.  Of results/, or any folder with many runs: a site in FOLDER/site/, where
only what changed is made again.  --png has a Chromium take pictures of the charts, --md prints
Markdown for a pull request.
"""

import argparse
import os
import sys

from bench import atomic
from bench.cli import arguments
from bench.paths import of_user, results_root, shown
from bench.record import named


def main(argv):
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    folder = named.folder(args.folder) if args.folder else results_root()
    if not folder.is_dir():
        raise ValueError(f"no runs in {shown(folder)}/ yet: ./speedrun.sh makes the first, ./run.sh run makes one")
    if (folder / "run.json").exists():
        from bench.report import run_page

        return _one(folder, args, run_page, "report.html")
    if (folder / "race.json").exists():
        from bench.report import race_page

        return _one(folder, args, race_page, "race.html")
    for option in ("md", "png"):
        if getattr(args, option):
            raise ValueError(f"--{option} {folder}: it is for one run or race; name one")
    return _site(folder, of_user(args.out) if args.out else folder / "site")


def _one(folder, args, room, name):
    """A run or a race; room: the module that knows its page, its charts and its block of Markdown."""
    if args.md and (args.png or args.out):
        other = "--png" if args.png else f"--out {args.out}"
        raise ValueError(f"--md with {other}: Markdown is printed: leave {other.split()[0]} out, or --md")
    if args.md:
        print(room.block(folder), end="")
    elif args.png:
        from bench.report import png

        for path in png.write(room.charts_of(folder), of_user(args.out) if args.out else folder / "plots"):
            _say(path)
    else:
        path = of_user(args.out) if args.out else folder / name
        atomic.write_out(path, room.html(folder))
        _say(path)
    return 0


def _site(folder, out):
    from bench.report import site

    try:
        _say(site.write(folder, out, say=_progress))
    except OSError as error:
        where = error.filename or out
        raise ValueError(f"{where}: cannot be written ({error.strerror}): name another folder with --out") from None
    return 0


def _say(path):
    print(os.path.relpath(path))


def _progress(done, total):
    if sys.stderr.isatty():
        print(f"\r{done} of {total} pages", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _parser():
    parser = arguments.Parser(
        prog="./run.sh report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="folder of a run, of a race or of many runs; default results/"
    )
    parser.add_argument(
        "--out", metavar="PATH", help="file of the page (run, race), or folder of the site or the pictures"
    )
    parser.add_argument("--png", action="store_true", help="pictures of the charts instead of a page; needs a Chromium")
    parser.add_argument("--md", action="store_true", help="print Markdown for a pull request instead")
    return parser
