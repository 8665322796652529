"""How long would a step take on more GPUs?  ./run.sh project RUN|TRACE... --gpus 8 [--nodes 4] [--link LINK]

The work is divided among the GPUs.  Collectives take as long as NCCL's model of the link says, or the tables that
nccl-tests or ./run.sh doctor --passport measured, minus what computation hides, and all GPUs wait for the slowest.

A run keeps its batch (strong scaling); traces keep the work of each GPU (weak scaling).  If no published pair of
measurements is similar, the answer says "not checked" and has no interval.  --errors shows all pairs and their errors.
"""

from bench.analysis.projection import document, links
from bench.api import traces
from bench.api.answers import Answer
from bench.cli import arguments


def main(argv: list[str]) -> int:
    """Exit codes: 0 projected, 2 usage error, or nothing that could be projected."""
    args = _parser().parse_args(argv)
    projection: Answer
    if args.errors:
        if args.path or args.gpus is not None:
            raise ValueError("--errors: shows all pairs, and takes no run, trace or --gpus: remove the rest")
        projection = Answer(document.table_of_errors())
    else:
        if not args.path or args.gpus is None:
            raise ValueError("name a run or traces, and --gpus N: the number of GPUs to project to")
        projection = traces.project(
            *args.path,
            gpus=args.gpus,
            nodes=args.nodes,
            link=args.link,
            scaling=args.scaling,
            usd_per_gpu_hour=args.usd_per_gpu_hour,
        )
    print(projection.to_json() if args.json else projection.to_markdown() if args.md else projection)
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh project", main=main)
    parser.add_argument("path", nargs="*", metavar="RUN|TRACE", help="a run, or the traces of all its ranks")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs, of all nodes together")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes; default 1")
    help_ = f"{', '.join(links.LINKS)}; or two, within a node and between nodes; or a file of measured collectives"
    parser.add_argument("--link", metavar="LINK|FILE", help=f"{help_} (default on GPUs: nvlink4)")
    help_ = "strong: keep the batch (default for a run); weak: keep the work of each GPU (default for traces)"
    parser.add_argument("--scaling", choices=["strong", "weak"], help=help_)
    parser.add_argument("--usd-per-gpu-hour", type=float, metavar="USD", help="price, to project what the run costs")
    parser.flag("--errors", help="show what projections were checked on, with their errors")
    parser.forms("print JSON, for programs", "print Markdown")
    return parser
