"""Does the claim hold?  ./run.sh judge RUN... | RACE | RACE:ARM | CLAIM_FOLDER      [--claim FOLDER] [--json]

RUN...: run folders, folders of them, or run ids, claimed together.  For a race, its candidates are judged.  Every rule
prints pass or FAIL with its evidence.  --claim FOLDER also makes a folder with everything that is needed to judge the
claim elsewhere.

./run.sh judge --track NAME LOG... judges logs of modded-nanogpt, or of the program that the track names, files or
folders, imported or not.  What a log cannot show is "not known from a log": neither pass nor FAIL.  --against RUN...
also asks the track's rule for two results.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.base import text_table
from bench.claims import claim as claims
from bench.claims import claim_folder, publication
from bench.claims.rules import rulebook
from bench.cli import arguments, publish, verify
from bench.config import groups
from bench.plans.race import state
from bench.record import ledger, named, run_folder


def main(argv: list[str]) -> int:
    """Exit codes: 0 accepted, or nothing that a log shows is against it; 1 refused, 2 usage error."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return _judged(args, Path(folder))


def _judged(args: argparse.Namespace, folder: Path) -> int:
    """folder: an empty one, for logs."""
    claimed = _claims(args.runs, args.track, folder / "runs")
    verdicts = []
    for name, claim in claimed:
        if args.track not in (None, claim.track):
            raise ValueError(f"--track {args.track}: {name} is on track {claim.track}, and was made to its rules")
        if args.against:
            (_, claim.against), *others = _claims(args.against, claim.track, folder / "against")
            if others:
                raise ValueError(f"--against {args.against[0]}: a race of several candidates; name one, RACE:B")
        if args.claim and claim.is_of_logs:
            raise ValueError(f"--claim {args.claim}: a claim needs records and their ledger; these are logs")
        checked = rulebook.check(claim, args.replayed)
        accepted = None if claim.is_of_logs else True
        if any(rule["passed"] is False for rule in checked):
            accepted = False
        about = {"claim": name, "track": claim.track, "n": len(claim.runs)}
        verdicts.append(about | {"accepted": accepted, "rules": checked})
    if args.json:
        print(json.dumps(verdicts[0] if len(verdicts) == 1 else verdicts, indent=1))
    else:
        print("\n\n".join(map(_text, verdicts)))
    if args.claim:
        if len(claimed) > 1:
            raise ValueError(f"--claim {args.claim}: a race of {len(claimed)} candidates; name one, RACE:B")
        gated = publication.Gated((lambda leaving: None) if args.json else publish.show_leaving, args.allow)
        claim_folder.write(args.claim, claimed[0][1], gated)
        if not args.json:
            print(f"{'claim':>8}  {args.claim}: say in its README.md what was changed")
    return 1 if any(verdict["accepted"] is False for verdict in verdicts) else 0


def _claims(
    names: Sequence[str], track: str | None = None, folder: Path | None = None
) -> list[tuple[str, claims.Claim]]:
    """Words of the user -> [(name, Claim)].  folder: where runs of logs are to be written; None: nowhere."""
    if len(names) == 1 and len(found := named.find(names)) == 1:
        chosen = found[0]
        if chosen.race:
            return _claims_of_race(chosen.race, chosen.arm)
        if chosen.claim:
            return [(names[0], claim_folder.read(chosen.claim))]
        if claim_folder.lacks_claim(chosen.paths[0]):
            remedy = "its README.md has a claim's table, but claim.yaml is missing: restore it"
            raise ValueError(f"{chosen.paths[0]}: {remedy}")
    return [(" ".join(names), claims.from_folders(_folders(names, folder, track), track=track))]


def _folders(names: Sequence[str], folder: Path | None, track: str | None) -> list[Path]:
    """The run folders that these words mean; where they mean files or folders without a record, of logs in them."""
    try:
        return named.runs(names)
    except ValueError:
        found = [path for word in named.find(names) for path in word.holders]
        if folder is None or next(run_folder.find_runs(path for path in found if path.is_dir()), None):
            raise
        from bench.cli import import_logs  # numpy, which a judge of records does not need
        from bench.record.importers import dialects

        form = (claims.track_rules(track).rules.logs if track else None) or "modded-nanogpt"
        for path, part_of in dialects.files_of(found):
            for run, rows in dialects.read_file(path, form, part_of)[0]:
                import_logs.write(run, rows, folder)
        if not (folders := list(run_folder.find_runs([folder]))):
            raise
        return folders


def _claims_of_race(folder: Path, arm: str | None) -> list[tuple[str, claims.Claim]]:
    """[(name, Claim)] of one arm, or without one of every arm that was raced against the baseline."""
    book = ledger.read(folder.parent.parent)
    race = state.read(folder, book=book)
    if arm is not None and arm not in race.plan["arms"]:
        raise ValueError(f"{folder.name}:{arm}: not an arm of this race; choose from {', '.join(race.plan['arms'])}")
    arms = [arm] if arm else [name for name in race.plan["arms"] if name != race.plan["baseline"]]
    return [(f"{folder.name}:{name}", claims.from_race(race, name, book)) for name in arms]


def _text(verdict: dict[str, Any]) -> str:
    what = f"{verdict['claim']} on track {verdict['track']}, {text_table.counted(verdict['n'], 'run')}"
    word = text_table.coloured({True: "accepted", False: "refused", None: "not refused"}[verdict["accepted"]])
    return verify.checked(what, verdict["rules"], "judge", f"{word}: ")


def _parser() -> arguments.Parser:
    about = {rule.__name__.replace("_", " "): str(rule.__doc__).splitlines()[0] for rule in rulebook.RULES}
    lines = "\n".join(f"  {name}: {about_rule}" for name, about_rule in about.items())
    parser = arguments.Parser("./run.sh judge", main=main, epilog=f"rules:\n{lines}\n\nA track's numbers: conf/track/.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs or logs claimed together, a race, a claim folder")
    parser.add_argument(
        "--track", metavar="NAME", choices=groups.choices("track"), help="the track of logs, which do not say it"
    )
    help_text = "require that it is better than this result by track 3's pairwise rule: at fewer steps, or a lower loss"
    parser.add_argument("--against", nargs="+", metavar="RUN", help=help_text)
    parser.add_argument("--claim", metavar="FOLDER", help="also make a claim folder: runs, races, ledger, README")
    help_text = "with --claim: include FILE although something in it looks like a credential or names this machine"
    parser.add_argument("--allow", action="append", default=[], metavar="FILE", help=help_text)
    parser.flag("--replayed", help="require that replays made on this machine reproduce each run")
    parser.flag("--json", help="an object instead of text")
    return parser
