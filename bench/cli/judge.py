"""Does the claim hold?  ./run.sh judge RUN... | RACE | RACE:ARM | CLAIM_FOLDER      [--claim FOLDER] [--json]

RUN...: run folders, folders of them, run, sweep or config ids, and races, claimed together.  A race stands for
its candidates; beside other races or runs it needs a single one, or RACE:ARM.  Every rule prints pass or FAIL
with its evidence.  --claim FOLDER also makes a folder with everything that is needed to judge the claim elsewhere.

./run.sh judge --track NAME LOG... judges logs of modded-nanogpt, or of the program that the track names, files or
folders, imported or not.  What a log cannot show is "not known from a log": neither pass nor FAIL.  --against RUN...
also asks the track's rule for two results.
"""

import argparse
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from bench.api import judging
from bench.base import text_table
from bench.claims import claim_folder, publication
from bench.claims.rules import rulebook
from bench.cli import arguments, publish, verify
from bench.config import groups


def main(argv: list[str]) -> int:
    """Exit codes: 0 accepted, or nothing that a log shows is against it; 1 refused, 2 usage error."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return _judged(args, Path(folder))


def _judged(args: argparse.Namespace, folder: Path) -> int:
    """Judges and prints the claims. folder: an empty folder for logs. Returns the exit code."""
    judged = judging.judgements(args.runs, args.track, args.against or (), args.replayed, folder)
    claim, _ = judging.only(judged, f"--claim {args.claim}") if args.claim else judged[0]
    if args.claim and claim.is_of_logs:
        raise ValueError(f"--claim {args.claim}: a claim needs records and their ledger; these are logs")
    verdicts = [facts for _, facts in judged]
    if args.json:
        print(json.dumps(verdicts[0] if len(verdicts) == 1 else verdicts, indent=1))
    else:
        print("\n\n".join(map(_text, verdicts)))
    if args.claim:
        gated = publication.Gated((lambda leaving: None) if args.json else publish.show_leaving, args.allow)
        claim_folder.write(args.claim, claim, gated)
        if not args.json:
            print(f"{'claim':>8}  {args.claim}: {_next(verdicts[0], args.claim)}")
    return 1 if any(verdict["accepted"] is False for verdict in verdicts) else 0


def _next(verdict: dict[str, Any], folder: str) -> str:
    """Returns what to do with a claim's folder."""
    failed = [rule["rule"] for rule in verdict["rules"] if rule["passed"] is False]
    if not failed:
        return f"say in its README.md what was changed and by whom, then: ./run.sh publish {shlex.quote(folder)}"
    return f"made, although the claim is refused ({', '.join(failed)}): mend that, and claim it in a new folder"


def _text(verdict: dict[str, Any]) -> str:
    subject = f"{verdict['claim']} on track {verdict['track']}, {text_table.counted(verdict['n'], 'run')}"
    label = text_table.coloured({True: "accepted", False: "refused", None: "not refused"}[verdict["accepted"]])
    return verify.checked(subject, verdict["rules"], "judge", f"{label}: ")


def _parser() -> arguments.Parser:
    about = {rule.__name__.replace("_", " "): str(rule.__doc__).splitlines()[0] for rule in rulebook.RULES}
    lines = "\n".join(f"  {name}: {about_rule}" for name, about_rule in about.items())
    parser = arguments.Parser("./run.sh judge", main=main, epilog=f"rules:\n{lines}\n\nA track's numbers: conf/track/.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs or logs claimed together, a race, a claim folder")
    tracks = groups.choices("track")
    parser.add_argument("--track", metavar="NAME", choices=tracks, help="the track of logs, which do not name it")
    help_text = "require that it is better than this result by track 3's pairwise rule: at fewer steps, or a lower loss"
    parser.add_argument("--against", nargs="+", metavar="RUN", help=help_text)
    parser.add_argument("--claim", metavar="FOLDER", help="also make a claim folder: runs, races, ledger, README")
    help_text = "with --claim: include FILE although something in it looks like a credential or names this machine"
    parser.add_argument("--allow", action="append", default=[], metavar="FILE", help=help_text)
    parser.flag("--replayed", help="require that replays made on this machine reproduce each run")
    parser.flag("--json", help="an object instead of text")
    return parser
