"""./run.sh report RUN | RACE | FOLDER [--out PATH] [--png] [--md]      pages that open from a file, offline

Of a run or a race: report.html in its folder.  Of results/, or any folder with many runs: a site in FOLDER/site/, where only
what changed is made again.  --png writes the charts as pictures beside it, --md prints a block for a pull request.
"""

import argparse
import os
import sys

from bench import atomic
from bench.paths import of_user, results_root
from bench.record import named, run_folder


def main(argv):
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    folder = named.folder(args.folder) if args.folder else results_root()
    if (folder / "run.json").exists():
        return _run(folder, args)
    if (folder / "race.json").exists():
        return _race(folder, args)
    if args.md:
        raise ValueError(f"--md {folder}: it is for one run or race; ./run.sh table --md prints a table of many")
    if args.png:
        raise ValueError(f"--png {folder}: it is for one run or race; name one")
    from bench.report import site

    out = of_user(args.out) if args.out else folder / "site"
    try:
        index = site.write(folder, out, say=_progress)
    except OSError as error:
        raise ValueError(
            f"{error.filename or out}: cannot be written ({error.strerror}): name another place with --out"
        ) from None
    _say(index)
    return 0


def _run(folder, args):
    from bench.report import run_page

    if args.md:
        print(run_page.block(run_folder.effective(run_folder.read(folder))), end="")
        return 0
    if args.png:
        from bench.report import png

        for path in png.of_run(folder, of_user(args.out) if args.out else folder / "plots"):
            _say(path)
        return 0
    return _write(of_user(args.out) if args.out else folder / "report.html", run_page.of_run(folder))


def _race(folder, args):
    from bench.report import race_page

    if args.md:
        print(race_page.block(folder), end="")
        return 0
    if args.png:
        from bench.report import png

        for path in png.of_race(folder, of_user(args.out) if args.out else folder / "plots"):
            _say(path)
        return 0
    return _write(of_user(args.out) if args.out else folder / "race.html", race_page.of_race(folder))


def _write(path, html):
    atomic.write_out(path, html)
    _say(path)
    return 0


def _say(path):
    print(os.path.relpath(path))


def _progress(done, total):
    if sys.stderr.isatty():
        print(f"\r{done} of {total} pages", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="of a run, a race or many; without it results/")
    parser.add_argument("--out", metavar="PATH", help="the page (run, race), or the folder of the site or the pictures")
    parser.add_argument("--png", action="store_true", help="pictures instead of a page; needs matplotlib")
    parser.add_argument("--md", action="store_true", help="print Markdown for a pull request instead")
    return parser
