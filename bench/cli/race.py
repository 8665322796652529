"""Is B faster than A?  ./run.sh race A=<overrides> B=<overrides> [C=...] [n=5] [key=value for all arms]

    ./run.sh race A= B="optim=muon"                        the default against Muon, 5 runs each, A B B A
    ./run.sh race A.rev=HEAD~1 B.rev=HEAD n=10             two revisions of this repository
    ./run.sh race A="model=gpt2" B="model=modern data.seq_len=64" track=free looks=3,5

One session, a fresh process group a run, a discarded warm-up run an arm, the order random in blocks and planned before
the first run.  What is measured stays hidden until the race has ended.  Interrupted: ./run.sh race --resume
"""

import argparse

from bench.config import groups
from bench.paths import results_root
from bench.race import planning, request, runner, state
from bench.record import named


def main(argv):
    """Exit codes: 0 the race has ended, 1 it was interrupted or abandoned, 2 wrong use or not comparable."""
    args = _parser().parse_args(argv)
    results = results_root().absolute()
    if args.look is not None:
        return runner.look(_chosen(results, args.look), results)
    if args.abandon is not None:
        folder = _chosen(results, args.abandon)
        with state.locked(folder):
            return runner.finish(folder, results, "abandoned", "abandoned on request (--abandon)", args)
    if args.resume is not None:
        folder = _chosen(results, args.resume)
    elif args.words:
        folder = planning.begin(request.parse(args.words), results)
    else:
        raise ValueError("no arms are given: write A=... B=..., for example ./run.sh race A= B='optim=muon' n=5")
    return runner.go(folder, results, args)


def _chosen(results, word):
    """--resume, --look, --abandon: the race named, or the latest that has no end."""
    if word:
        folder = named.find([word])[0].race
        if (
            folder is None
            or not (folder / "plan.json").is_file()
            or folder.resolve().parent.parent != results.resolve()
        ):
            raise ValueError(f"{word}: is not a race of {results}: ./run.sh race A=... B=... begins one")
        return folder
    unfinished = state.unfinished(results)
    if not unfinished:
        raise ValueError("no race is unfinished: ./run.sh race A=... B=... begins one")
    return unfinished[-1]


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 ended, 1 interrupted or abandoned, 2 wrong use or not comparable",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="A=overrides, A.rev=REVISION, n=5, looks=3,5, alpha=0.05, margin=0.002 "
        "(nats of val_loss), seed=0 (the first), name=race; key=value for all arms",
    )
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RACE", help="continue this race, or the latest that has not ended"
    )
    parser.add_argument(
        "--look", nargs="?", const="", metavar="RACE", help="show the interim state; the ledger keeps the look"
    )
    parser.add_argument(
        "--abandon",
        nargs="?",
        const="",
        metavar="RACE",
        help="end it without a verdict, where it cannot be resumed; it stays in the ledger",
    )
    parser.add_argument("--config-dir", **groups.OPTION)
    parser.add_argument("--show", action="store_true", help="show every run's numbers as they come: an unplanned look")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print race.json")
    form.add_argument("--md", action="store_true", help="print race.md")
    return parser
