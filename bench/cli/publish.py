"""Publish runs of this machine, to be committed to git.  ./run.sh publish RUN... | RACE | CLAIM_FOLDER   [--name NAME]

RUN...: run folders, folders of them, or run ids; a run of a race includes the whole race.  They are copied into a new
folder of results/published/, which git tracks, without logs, traces and memory snapshots; git ignores the rest of
results/.  Every file is listed with the reason why it is included, and searched for credentials and for this machine's
names; if one is found, nothing is published.  --dry-run only lists and searches.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.api import judging
from bench.base import escape
from bench.base.paths import project_folder
from bench.base.reading import plain_file
from bench.base.text_table import counted
from bench.claims import claim as claims
from bench.claims import claim_folder, publication
from bench.cli import arguments, table
from bench.launch.console import say
from bench.record import named, run_folder
from bench.report import markdown_blocks


def main(argv: list[str]) -> int:
    """Exit codes: 0 published, 2 usage error, and nothing was written."""
    args = _parser().parse_args(argv)
    claim = named.find(args.runs)[0].claim if len(args.runs) == 1 else None
    content = claim_folder.content(claim) if claim else publication.content_of(args.runs)
    gated = publication.Gated(show_leaving, args.allow, args.dry_run)
    folder = publication.publish(content, args.name, table.main, gated)
    if args.dry_run:
        say("publish", "no credential or private name was found; nothing was written (--dry-run)")
        return 0
    shown = os.path.relpath(folder, project_folder())
    num_runs = len(list(run_folder.find_runs([folder])))
    say("publish", f"{shown}: {counted(num_runs, 'run')}, {counted(len(content.race_ids), 'race')}, ledger, README.md")
    for sentence in _refusals(args.runs):
        say("claim", sentence)
    # the leaderboard and other blocks made from results/published
    markdown_blocks.write((), table.main, only_changes=True)
    then = "git add results && git commit"
    if publication.UNWRITTEN in plain_file.text_or_empty(folder / "README.md"):
        # the leaderboard has a column with who it is by
        then = f"say in {shown}/README.md what was changed or found and by whom, then: ./run.sh table --write && {then}"
    say("next", then)
    if claim:
        say("", f"{args.runs[0]} is not needed any more: rm -r {shlex.quote(args.runs[0])}")
    return 0


def _refusals(names: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each claim that these names make, on a track that keeps records, and that is refused."""
    with contextlib.suppress(ValueError):  # what makes no claim is published too
        if len(matches := named.find(names)) == 1 and (matches[0].race or matches[0].claim):
            for claim, facts in judging.judgements(names, None, (), False, Path()):
                failed = [rule for rule in facts["rules"] if rule["passed"] is False]
                if failed and claims.has_target(claim.track):
                    rules = f"{counted(len(failed), 'rule')} failed, first: {failed[0]['rule']}"
                    yield escape.line(f"published, but ./run.sh judge refuses {facts['claim']} as a claim: {rules}")


def show_leaving(leaving: Sequence[publication.Leaving]) -> None:
    """Prints the files that leave this machine, one per line."""
    for line in publication.listing(leaving):
        say("file", escape.line(line))


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh publish", main=main)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs published together, a race, or a claim's folder")
    parser.add_argument("--name", help="name of the new folder; default: that of the race, the claim or the first run")
    parser.flag("--dry-run", help="list and search the files that would be published; write nothing")
    help_text = "include FILE, as listed, although something in it looks like a credential or names this machine"
    parser.add_argument("--allow", action="append", default=[], metavar="FILE", help=help_text)
    return parser
