"""Check a run for leaks and false losses.  ./run.sh audit RUN|RACE... [--only KIND] [--json]

The contestant, a model or an unmodified training script, runs again, untimed, on other data:
  random_tokens    train and validate on random tokens of the whole vocabulary.  A loss below their entropy means that
                   future tokens or targets leak, or that the printed loss is not its own.
  few_tokens       the same with 8 tokens of the vocabulary, which even a slow learner can learn.
  random_training  train on random tokens only, which teach nothing about the validation data.
  held_out         validate on a slice of the validation shards that no run is given.  The loss must match the claim.
  weights          evaluate the final weights of a model (checkpoint.save=true) in new processes that know no targets.
  clock            only if asked for: what a script does outside its clock, by phase and source line, on its own data.
                   The first contestant is the baseline of the others.  Exit code 1: one does more there.
Records of models already hold what the referee computed from their logits at the end of the run.
In a race, one run of each contestant is audited.  The outcome is written to audit.json beside the record;
docs/record.md explains what each audit detects, what it misses, and the arithmetic.
"""

import argparse
import json
from typing import Any

from bench.base import text_table
from bench.base.text_table import counted
from bench.base.units import MIB
from bench.cli import arguments
from bench.launch import console
from bench.launch.console import say
from bench.plans.audit import auditing, counterfactual, final_weights
from bench.record import certificates, named, off_clock
from bench.record.clock_lines import UNTIMED

KINDS = (*counterfactual.KINDS, final_weights.KIND, auditing.CLOCK)
MAX_LINES, MAX_CHARS = 8, 70
CODES = {certificates.PASSED: 0, certificates.DOUBTED: 0, certificates.FAILED: 1, certificates.NOT_POSSIBLE: 2}


def main(argv: list[str]) -> int:
    """Exit codes: 0 no audit failed, 1 an audit failed, 2 usage error, or a run cannot be audited."""
    args = _parser().parse_args(argv)
    if auditing.CLOCK in (args.only or ()):
        if len(args.only) > 1:
            raise ValueError(f"--only {auditing.CLOCK}: it cannot be combined with other audits: use two commands")
        return _clock(args)
    audits: list[Any] = []
    num_refused = 0
    with console.output(args.quiet, args.json):
        for folder in auditing.contestants(named.runs(args.runs)):
            try:
                audits.append(auditing.audit(folder, args.only or (), say, args.trust))
            except ValueError as error:
                num_refused += 1
                say("audit", str(error), always=True)
                continue
            outcome = f"{audits[-1]['outcome'].upper()}{certificates.audit_limit(audits[-1])}"
            say("audit", f"{folder.name}: {outcome}", always=True)
        if len(audits) > 1:
            say("audit", f"{counted(len(audits), 'contestant')} audited")
    if args.json:
        print(json.dumps(audits, indent=1))
    codes = [CODES[audited["outcome"]] for audited in audits] + [2] * num_refused
    return 1 if 1 in codes else max(codes, default=2)


def _clock(args: argparse.Namespace) -> int:
    """Audits every contestant, and prints what each does outside its clock beyond the first. Returns the exit code."""
    accounts: dict[str, off_clock.Account] = {}
    findings: dict[str, list[str]] = {}
    with console.output(args.quiet, args.json):
        for folder in auditing.contestants(named.runs(args.runs)):
            accounts[folder.name] = account = auditing.audit_clock(folder, say, args.trust)
            findings[folder.name] = off_clock.beyond(account, next(iter(accounts.values())))
            say(
                "clock",
                f"{folder.name}: phases by {account['by']}" + (f": {account['doubt']}" if account["doubt"] else ""),
                always=True,
            )
            heads = ("", "wall, s", "CPU, s", "CPU of others, s", "read, MiB", "line")
            lines = [usage for usage in account["lines"] if usage["phase"] in UNTIMED][:MAX_LINES]
            rows = [[usage["phase"], *_numbers(usage), ""] for usage in account["phases"]]
            rows += [
                [usage["phase"], *_numbers(usage), text_table.middle(off_clock.place_of(usage), MAX_CHARS)]
                for usage in lines
            ]
            print(text_table.render(heads, rows, [False, True, True, True, True, False]), flush=True)
            for sentence in findings[folder.name]:
                say("clock", sentence, always=True)
        if len(accounts) == 1:
            say("clock", "nothing to compare with: name a baseline's run first, or a race", always=True)
        elif not any(findings.values()):
            say("clock", f"no contestant does more outside its clock than {next(iter(accounts))}", always=True)
    if args.json:
        print(json.dumps({"accounts": accounts, "beyond": findings}, indent=1))
    return 1 if any(findings.values()) else 0


def _numbers(used: off_clock.Used) -> list[str]:
    seconds = (used["wall_s"], used["cpu_s"], used["others_cpu_s"])
    return [*(f"{s:.2f}" for s in seconds), f"{used['bytes_read'] / MIB:.1f}"]


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh audit", main=main)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, run ids, a race or RACE:ARM")
    kinds = ", ".join(KINDS)
    only = f"run only this audit; may be repeated: {kinds}"
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND", help=only)
    parser.flag("--trust", help="also run code that a record from elsewhere names: as you, in no sandbox")
    parser.forms("print a list of what was found", says_more=True)
    return parser
