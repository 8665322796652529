"""Run the lab's queue on this machine.  ./run.sh agent [--once] [--usd-per-hour X]

Takes one command at a time from the queue that ./run.sh submit fills, leases the free GPUs that it needs, among those
in CUDA_VISIBLE_DEVICES, and runs it to its end.  Users take turns.  To run several commands at once, start several
agents.  Ctrl-C returns the command to the queue: a race is later resumed, and a run with resume=auto continues from its
checkpoint.

An agent runs commands as the user who started it, and anybody who can write to results/queue/ can submit them.
"""

from bench.base.paths import results_root
from bench.cli import arguments
from bench.cli.main import QUEUED
from bench.launch.console import say
from bench.machine.signals import Interrupted
from bench.plans.agent import Agent
from models.settings import NotNegative


def main(argv: list[str]) -> int:
    """Exit codes: 0 fine, with --once that of the command; 1 interrupted or given back, 2 usage error."""
    args = _parser().parse_args(argv)
    try:
        return Agent(results_root().absolute(), args.usd_per_hour, QUEUED).go(args.once)
    except Interrupted as error:
        say("queue", f"interrupted ({error})", always=True)
        return 1


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh agent", main=main)
    parser.flag("--once", help="run one command, if one can start now, and exit")
    help_text = "price of a GPU here, or of the whole machine for a run without one; for budgets and cost_usd"
    parser.number("--usd-per-hour", NotNegative, metavar="X", help=help_text)
    return parser
