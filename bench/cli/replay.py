"""Rerun a record from its own folder, and certify the outcome.  ./run.sh replay RUN|RACE|CLAIM... [--times N]

The code is the record's commit with its uncommitted changes; settings and data are the record's own.  Missing parts and
differences on this machine are reported first.  The code, which is the whole harness of that commit, is hashed and
then executed: as your user if it is known to be yours (docs/record.md), otherwise in a sandbox without network, home
folder and your files.  In neither case does it get your credentials.

The replay's losses are compared with the recorded ones, step by step:
  identical                 every loss is bit-identical; required on the same machine and software
  equal within rounding     elsewhere: within the measured effect of rounding at each step (bench/plans/replay)
  statistically reproduced  with --times: fresh seeds give such losses, and reach the track's target if the record did
  not reproduced            none of these
  undecided                 the run is not deterministic, or rounding was never measured for it (GPUs, scripts)
  impossible here           something is missing, or the record does not contain what it lists
A second outcome reports whether the time was reproduced.  certificate.json holds both, beside the record and beside the
replay in results/replays/.  A record that ./run.sh verify refuses gets no certificate.
"""

import argparse
import contextlib
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

from bench.base import text_table
from bench.base.paths import published_root, shown
from bench.base.text_table import counted
from bench.claims import claim_folder
from bench.cli import arguments
from bench.config.typed import at_least
from bench.launch import console
from bench.launch.console import say
from bench.machine import leases
from bench.machine.signals import Interrupted
from bench.plans.replay import certificate, outcomes, recorded, replaying
from bench.record import certificates, named, run_folder

COLOURED = {outcomes.IDENTICAL: "accepted", outcomes.DIFFERS: "failed", outcomes.IMPOSSIBLE: "refused"}
SHOWN_FIELDS = 8


def main(argv: list[str]) -> int:
    """Exit codes: 0 reproduced, 1 not reproduced, 2 usage error, undecided, or nothing could be run again, 75 the
    machine was busy, 128 + N interrupted by signal N."""
    args = _parser().parse_args(argv)
    certified = []
    with console.output(as_json=args.json):
        folders = _folders(args)
        try:
            for number, folder in enumerate(folders, 1):
                if len(folders) > 1:
                    say("replay", f"record {number} of {len(folders)}: {folder.name}")
                certified.append(_of(folder, args))
        except Interrupted as error:
            say("replay", f"interrupted ({error}): no certificate of {folder.name}; begin it again")
            return 128 + signal.Signals[str(error)]
        except (OSError, ValueError) as error:
            if not replaying.is_of_machine(error):
                raise
            why = f"no certificate of {folder.name} was written, because it says nothing about the record"
            problem = error.strerror if isinstance(error, OSError) else error
            raise leases.Busy(f"{problem}: {why}: run the same command again") from None
        replayed = [certificate for certificate in certified if certificate is not None]
        if len(folders) > 1 and replayed:
            numbers = Counter(certificate["outcome"] for certificate in replayed)
            counts = ", ".join(f"{number} {outcome}" for outcome, number in numbers.items())
            say("replay", f"{counted(len(replayed), 'record')}: {counts}")
        if not args.check and any(folder.absolute().is_relative_to(published_root()) for folder in folders):
            say("next", "./run.sh table --write && git add results")
    if args.json:
        print(json.dumps(replayed, indent=1))
    if args.check:
        return 0 if all(certificate is None for certificate in certified) else 2
    if any(certificate["outcome"] == outcomes.DIFFERS for certificate in replayed):
        return 1
    return 0 if any(certificate["outcome"] in certificates.HOLDS for certificate in replayed) else 2


def _folders(args: argparse.Namespace) -> list[Path]:
    if not args.all:
        folders = list[Path]()
        for given in named.find(args.runs):
            runs = named.runs([given.text])
            if given.claim:
                claimed_runs = [run.folder for run in claim_folder.read(given.claim).runs]
                if len(claimed_runs) < len(runs):
                    others = f"the {len(claimed_runs)} claimed runs of {len(runs)}: --all replays the others too"
                    say("replay", f"{given.text}: {others}")
                runs = claimed_runs
            folders += runs
        return list(dict.fromkeys(folders))
    folders = [folder for given in named.find(args.runs) for folder in run_folder.find_runs(given.holders)]
    kept = []
    for folder in folders:
        with contextlib.suppress(ValueError):
            recorded.read(folder)
            kept.append(folder)
    say("replay", f"{counted(len(kept), 'record')} of {len(folders)}: the others are imported or not complete")
    return kept


def _of(folder: Path, args: argparse.Namespace) -> certificates.Certificate | None:
    """Returns a record's certificate; with --check None, or the certificate of what is missing."""
    record = recorded.with_secrets(recorded.read(folder), args.fill)
    checks, fields = replaying.foreseen(record)
    for check in checks:
        remedy = f"; try: {check.remedy}" if check.remedy else ""
        say(check.name, f"{'MISSING: ' * (check.status == 'fail')}{check.found}{remedy}")
    for field in fields[:SHOWN_FIELDS]:
        say("differs", f"{field.name}: {field.recorded} in the record, {field.here} here")
    if len(fields) > SHOWN_FIELDS:
        say("differs", f"and {len(fields) - SHOWN_FIELDS} more")
    if not fields:
        say("machine", "nothing that the record says of its environment differs here")
    if args.check:
        missing = [check for check in checks if check.status == "fail"]
        return certificate.impossible(record, missing[0].found) if missing else None
    options = replaying.Options(args.times, args.keep_env, sys.stderr.isatty() and not args.quiet, args.trust)
    replayed = replaying.replay(record, checks, options, say)
    outcome = replayed["outcome"]
    is_coloured = outcome in COLOURED and text_table.is_terminal()
    say("replay", f"{text_table.coloured(outcome) if is_coloured else outcome.upper()}: {replayed['why']}")
    if time := replayed["time"]:
        say("time", f"{time['word']}: {time['why']}")
    say("wrote", "no certificate" if replaying.is_refused(checks) else shown(folder / certificates.FILE))
    return replayed


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh replay", main=main)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, run ids, a race, RACE:ARM or a claim")
    about = "N runs with fresh seeds instead of the record's seed, at least 2 for an interval"
    parser.number("--times", Annotated[int, at_least(2)], metavar="N", help=about)
    parser.flag("--all", help="RUN are results folders: every complete run below them")
    parser.flag("--check", help="only report what is missing here and what differs")
    parser.flag("--keep-env", help="use this shell's OMP_..., ONEDNN_..., not the record's")
    parser.flag("--trust", help="run code contained in someone else's record as you, not in a sandbox")
    help_text = "the value of a setting recorded as SECRET; repeat for each, in the order of redacted in run.json"
    parser.add_argument("--fill", action="append", default=[], metavar="VALUE", help=help_text)
    parser.flag("--quiet", "-q", help="hide what the runs print, as in a pipe")
    parser.flag("--json", help="print the certificates to standard output, everything else to standard error")
    return parser
