"""./run.sh project RUN|TRACE... --gpus 8 [--nodes 4] [--link nvlink4|nvlink4,ib400|FILE] [--json] [--md]

How long a step would take on more GPUs: work divided, collectives by NCCL's own model of the link or by tables that
nccl-tests (or ./run.sh doctor --passport) measured, beside what hides them, and the slowest of all GPUs.

A run keeps its batch (strong scaling), traces keep each GPU's work (weak).  Where no public pair of measurements is
like it, the answer says "not checked" and has no interval.  --errors shows all pairs and their errors.  Needs no torch.
"""

from bench.analysis.projection import document, links
from bench.api import projecting
from bench.api.answers import Answer
from bench.cli import arguments


def main(argv: list[str]) -> int:
    """Exit codes: 0 projected, 2 usage error, or nothing that could be projected."""
    args = _parser().parse_args(argv)
    answer: Answer
    if args.errors:
        if args.path or args.gpus is not None:
            raise ValueError("--errors: shows all pairs, and takes no run, trace or --gpus: remove the rest")
        answer = Answer(document.table_of_errors())
    else:
        if not args.path or args.gpus is None:
            raise ValueError("name a run or traces, and --gpus N: the number of GPUs to project to")
        answer = projecting.project(
            *args.path,
            gpus=args.gpus,
            nodes=args.nodes,
            link=args.link,
            scaling=args.scaling,
            usd_per_gpu_hour=args.usd_per_gpu_hour,
            include_last_step=args.include_last_step,
        )
    print(answer.to_json() if args.json else answer.to_markdown() if args.md else answer)
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh project", main=main)
    parser.add_argument("path", nargs="*", metavar="RUN|TRACE")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of all nodes together")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes that they are in (default 1)")
    help_ = (
        f"{', '.join(links.LINKS)}; two with a comma: in a node and between nodes; or a file of measured collectives"
    )
    parser.add_argument("--link", metavar="LINK|FILE", help=f"{help_} (default of GPUs: nvlink4)")
    help_ = "strong: the same batch (of a run); weak: the same work for each GPU (of traces)"
    parser.add_argument("--scaling", choices=["strong", "weak"], help=help_)
    parser.add_argument("--usd-per-gpu-hour", type=float, metavar="USD", help="for the cost to the end of the run")
    parser.flag("--include-last-step", help="count the last ProfilerStep too: its kernels may be cut off")
    parser.flag("--errors", help="the table of errors: what projections were checked on")
    parser.flag("--json", help="print JSON, for programs")
    parser.flag("--md", help="print Markdown")
    return parser
