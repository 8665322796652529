"""Why does a step take so long?  ./run.sh explain RUN|TRACE... [--json] [--html FILE] [--perfetto DIR]

Shows one step as a waterfall: roofline time, then overhead by cause, in parts that add up exactly to the measured step;
with several ranks, who delays whom; and the largest possible savings.  For two runs, two folders of traces,
two traces of the same rank, a race of two arms, or two arms of a race (RACE:A RACE:B), it divides the difference of
their steps among the same parts; for an arm, it takes the first run that has a trace.

Several trace files count as the ranks of one job.  Several folders, and the windows of a run, are explained one by one;
--json then prints {TITLE: account}.  A run without a trace is explained from its record, with fewer parts.
"""

from bench.analysis.trace import categories
from bench.api import traces
from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.cli import analyze, arguments


def main(argv: list[str]) -> int:
    """Exit codes: 0 explained, 2 usage error, or nothing to explain."""
    args = _parser().parse_args(argv)
    rules = categories.load_rules(user_path(args.rules)) if args.rules else categories.RULES
    account = traces.explain(
        *args.path,
        rules=rules,
        include_last_step=args.include_last_step,
        passport=args.passport,
        annotated=args.perfetto,
        captured=args.capture,
    )
    if args.html:
        path = user_path(args.html)
        atomic.write_out(path, account.to_html(), "--html")
        print(f"wrote {shown(path)}")
    else:
        print(account.to_json() if args.json else account)
    return 0


def _parser() -> arguments.Parser:
    parser = analyze.trace_parser("explain", main)
    parser.add_argument("--html", metavar="FILE", help="write a page instead")
    help_ = "write the traces again with the account as tracks, for ui.perfetto.dev"
    parser.add_argument("--perfetto", metavar="DIR", help=help_)
    help_ = "measured limits to use instead of those kept for the run's machine"
    parser.add_argument("--passport", metavar="FILE", help=help_)
    help_ = "a trace of the capture of its CUDA graphs, which names their kernels; repeat it for several"
    parser.add_argument("--capture", metavar="PATH", action="append", default=[], help=help_)
    return parser
