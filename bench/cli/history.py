"""How did the speed of this repository change?  ./run.sh history [WORD...] [--rev main] [--html PATH] [--badge PATH]

Orders the runs of results/ (or those that WORD names) by the commit that they trained, along the first parents of --rev
in the git repository of this folder.  For each configuration and machine it shows the series, the ranges of commits
that must contain a change, with 95 % intervals, and the command that finds the commit.  Nothing is run:
./run.sh race HEAD~1 HEAD, or race v1..HEAD for a whole line of commits, measures them.
"""

from pathlib import Path

from bench.base import atomic
from bench.base.paths import shown, user_path, working_folder
from bench.cli import arguments
from bench.record import named
from bench.report import history


def main(argv: list[str]) -> int:
    """Exit codes: 0 shown, 2 usage error, or no two commits have runs."""
    args = _parser().parse_args(argv)
    repo = Path(working_folder()).absolute()
    commits = history.commits_of(repo, args.rev)
    series = history.all_series(named.rows_of_names(args.names), commits, args.on)
    rev = args.rev[: history.SHORT] if len(args.rev) == 40 else args.rev
    document = history.document(series, f"{repo.name} ({rev})")
    for path, text in ((args.html, document.html), (args.badge, lambda: history.badge(series))):
        if path:
            is_badge = path is args.badge
            mark = history.BADGE_MARK if is_badge else b""
            atomic.write_out(user_path(path), text(), "--badge" if is_badge else "--html", mark=mark)
    if args.json:
        print(document.json())
    elif args.md or not (args.html or args.badge):
        print(document.markdown() if args.md else document.terminal())
    else:
        print("\n".join(shown(user_path(path)) for path in (args.html, args.badge) if path))
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh history", main=main)
    parser.add_argument("names", nargs="*", metavar="WORD", help="runs, races or folders of them; default results/")
    parser.add_argument("--rev", default="HEAD", help="follow the first parents of this revision; default HEAD")
    on_help = "the metric to follow; default %(default)s"
    parser.add_argument("--on", choices=tuple(history.MEASURES), default="step_avg_ms", help=on_help)
    parser.add_argument("--html", metavar="PATH", help="write a self-contained page instead of printing")
    parser.add_argument("--badge", metavar="PATH", help="write an SVG badge with the newest change, or steady")
    parser.forms("print the series, not rounded, and their changes", "print Markdown")
    return parser
