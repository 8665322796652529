"""Run what the lab's queue holds on this machine.  ./run.sh agent [--once] [--usd-per-hour X]

Takes one entry of ./run.sh submit at a time, leases as many free GPUs as it needs, of those that CUDA_VISIBLE_DEVICES
shows, and runs it to its end; users take turns.  Start one agent for each command that is to run at a time.  Ctrl-C
returns the entry to the queue: later a race is resumed, and a run with resume=auto continues from its checkpoint.

An agent runs commands as the user who started it, and anybody who can write into results/queue/ can submit them.
"""

import math

from bench.base.paths import results_root
from bench.cli import arguments
from bench.cli.main import QUEUED
from bench.launch.console import say
from bench.machine.signals import Interrupted
from bench.plans.agent import Agent


def main(argv: list[str]) -> int:
    """Exit codes: 0 fine, with --once that of the command; 1 interrupted or given back, 2 usage error."""
    args = _parser().parse_args(argv)
    if args.usd_per_hour is not None and not 0 <= args.usd_per_hour < math.inf:
        raise ValueError(f"--usd-per-hour {args.usd_per_hour}: use a number of 0 or more")
    try:
        return Agent(results_root().absolute(), args.usd_per_hour, QUEUED).go(args.once)
    except Interrupted as error:
        say("queue", f"interrupted ({error})", always=True)
        return 1


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh agent", main=main)
    parser.flag("--once", help="run one entry, or none where none can be begun now, and end")
    help_text = "price of a GPU of this machine, or of the machine for what needs none: for budgets and cost_usd"
    parser.add_argument("--usd-per-hour", type=float, metavar="X", help=help_text)
    return parser
