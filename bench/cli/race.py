"""Is B faster than A?  ./run.sh race A=<overrides> B=<overrides> [C=...] [n=5] [key=value for all arms]

    ./run.sh race A= B="optim=muon"                        the default against Muon, 5 runs each, A B B A
    ./run.sh race A.rev=HEAD~1 B.rev=HEAD n=10             two revisions of this repository
    ./run.sh race A="model=gpt2" B="model=modern seq_len=64" track=free looks=3,5

One session, a fresh process group a run, a discarded warm-up run an arm, the order random in blocks and planned before the
first run.  What is measured stays hidden until the race is over.  Interrupted: ./run.sh race --resume
"""

import argparse
from pathlib import Path

from bench.paths import results_root
from bench.race import planning as race_plan
from bench.race import request as race_request
from bench.race import runner
from bench.race import state as race_state


def main(argv):
    """Exit codes: 0 the race is over, 1 it was interrupted or abandoned, 2 wrong use or not comparable."""
    args = _parser().parse_args(argv)
    results = results_root().absolute()
    if args.look is not None:
        return runner.look(_chosen(results, args.look), results)
    if args.abandon is not None:
        folder = _chosen(results, args.abandon)
        with race_state.locked(folder):
            return runner.finish(folder, results, "abandoned", "it was given up by whoever raced it", args)
    if args.resume is not None:
        folder = _chosen(results, args.resume)
    elif args.words:
        folder = race_plan.begin(race_request.parse(args.words), results)
    else:
        raise ValueError("what shall be raced? A=... B=..., for example: ./run.sh race A= B='optim=muon' n=5")
    return runner.go(folder, results, args)


def _chosen(results, word):
    """--resume and --look: the race named, or the latest that has no end."""
    if word:
        folder = race_state.folder_of(results, Path(word).name)
        if not (folder / "plan.json").exists():
            raise ValueError(f"{word}: there is no such race in {results / race_state.FOLDER}")
        return folder
    found = race_state.unfinished(results)
    if not found:
        raise ValueError("no race is unfinished: ./run.sh race A=... B=... begins one")
    return found[-1]


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 over, 1 interrupted or abandoned, 2 wrong use or not comparable",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="A=overrides, A.rev=REVISION, n=5, looks=3,5, alpha=0.05, margin=0.002 "
        "(nats of val_loss), seed=0 (the first), name=race; key=value for all arms",
    )
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RACE", help="go on with this race, or with the latest that has no end"
    )
    parser.add_argument(
        "--look", nargs="?", const="", metavar="RACE", help="show the interim state; that is written into the ledger"
    )
    parser.add_argument(
        "--abandon",
        nargs="?",
        const="",
        metavar="RACE",
        help="give it up without a verdict: one that cannot be resumed, say; it stays in the ledger",
    )
    parser.add_argument(
        "--show", action="store_true", help="show every run's numbers as they come; written into the ledger as a look"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print race.json")
    form.add_argument("--md", action="store_true", help="print race.md")
    return parser
