"""Is B better than A if both are tuned?  ./run.sh study SETTING=A,B tune=SETTING budget=2h [n=5] [key=value]

    ./run.sh study optim=adamw,mine tune=optim.lr budget=2h             your optimizer against AdamW
    ./run.sh study model=gpt2,modern tune=optim.lr budget=8trials       of each arm; or budget=500Mtokens

Every arm gets the same number of trials, each of the same tokens.  The search is logarithmic, and extends its range
while the best value lies at an edge.  The best settings of each arm then race with fresh seeds, and the race decides,
on the loss and on the time to the same loss.  A budget in time or tokens includes the race.  The page and the table
(Markdown, LaTeX, CSV) are written to a folder of results/sweeps/.  After an interrupt, repeat the command to continue.
"""

import contextlib
import json

from bench.base.paths import results_root, shown
from bench.cli import arguments
from bench.launch import console, ready
from bench.machine.signals import Interrupted, raise_interrupted
from bench.plans import study
from bench.plans.sweep.points import Points
from bench.record import sweep


def main(argv: list[str]) -> int:
    """Exit codes: 0 ended, 1 interrupted, a trial failed or no verdict, 2 usage error."""
    args = _parser().parse_intermixed_args(argv)
    results, race = results_root().absolute(), None
    if args.dry_run:
        with console.output(args.quiet, args.json):
            planned = study.planned(args.arguments, results, args.anyway)
            study.introduce(*planned, results)
        if args.json:
            print(json.dumps(planned[0], indent=1))
        return 0
    with console.output(args.quiet, args.json):
        command = ["study", *argv]
        folder, budget_s = study.begin(args.arguments, command, results, args.anyway)
        why: str | None = "it was interrupted"
        with study.locked(folder):
            try:
                with contextlib.suppress(Interrupted), raise_interrupted():  # also between its runs
                    race = study.go(folder, budget_s, Points(folder, command, args.anyway), results)
                    why = None if race["result"] else race["why"]
            except study.Failed as error:
                why = f"{error}: fix it, then"
            except ValueError as error:
                why = str(error)
                raise
            finally:
                sweep.end(folder, why)
    if race is None or race["result"] is None:
        why = f"{str(why).partition(': ./run.sh')[0]}:".replace("then:", "then")
        console.say("study", f"{why} repeat the command to continue", always=True)
        return 1
    from bench.report import study_page

    page = study_page.write(folder)
    print(page.json() if args.json else page.markdown() if args.md else f"\n{page.terminal()}")
    if not args.json:
        figure = f"./run.sh report {folder.name} --png --out DIR saves its figure"
        if any(verdict.word == "inconclusive" for verdict in page.verdicts):
            console.say(
                "next", f"./run.sh race --from-sweep {folder.name} n=N on=loss races the best of each arm again"
            )
        console.say("study", f"{shown(folder / study_page.NAME)}; for a paper: study.tex, study.csv, and {figure}")
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh study", main=main)
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="WORD",
        help="one setting with several values, the baseline first: optim=adamw,mine; tune=optim.lr, a setting that "
        "every arm has; budget=2h, 8trials (of each arm) or 500Mtokens; n=5 (runs of each in the race), alpha=0.05, "
        "seed=0 (of the trials); key=value for all arms",
    )
    parser.flag(
        "--dry-run", help="check the arms, print what would be run and, as far as earlier runs tell, how long it takes"
    )
    parser.flag("--anyway", help=ready.ANYWAY)
    parser.forms("print what the study found", "print study.md", says_more=True)
    return parser
