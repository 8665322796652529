"""Does a contestant know what it must not?  ./run.sh audit RUN|RACE... [--only KIND] [--json]

RUN is made again, untimed, on data about which something is known: a model of ours or a training script, unmodified.
  random_tokens    random tokens to train and validate on: nobody has less than ln V, unless future tokens or targets
                   leak, it trains on the validation, or what it prints is not its loss
  random_training  random tokens to train on: the validation is not learnt from them
  held_out         a slice of the validation data that it was never given: its loss there is the one that it claims
Of our own models the record already holds what the referee computed from their logits at the end of the run.
A race is audited by one run of each contestant.  audit.json beside the record says how it ended; docs/HONESTY.md says
what each audit shows, what it does not, and the arithmetic.
"""

import json

from bench.audit import auditing, counterfactual
from bench.cli import arguments
from bench.launch import console
from bench.launch.console import say
from bench.record import audits, named, run_folder
from bench.terminal.text_table import counted

CODES = {audits.PASSED: 0, audits.DOUBTED: 0, audits.FAILED: 1, audits.NOT_POSSIBLE: 2}


def main(argv):
    """Exit codes: 0 none failed, 1 one failed, 2 wrong use, or one cannot be audited."""
    args = _parser().parse_args(argv)
    found, num_refused = [], 0
    with console.output(args.quiet, args.json):
        for folder in auditing.contestants(named.runs(args.runs)):
            _show_own(folder)
            try:
                found.append(auditing.audit(folder, args.only or counterfactual.KINDS, say))
            except ValueError as error:
                num_refused += 1
                say("audit", str(error), always=True)
                continue
            say("audit", f"{folder.name}: {found[-1]['outcome'].upper()}", always=True)
        if len(found) > 1:
            say("audit", f"{counted(len(found), 'contestant')} audited")
    if args.json:
        print(json.dumps(found, indent=1))
    codes = [CODES[one["outcome"]] for one in found] + [2] * num_refused
    return 1 if 1 in codes else max(codes, default=2)


def _show_own(folder):
    """What the referee computed by itself as the run ended."""
    loss = (run_folder.read(folder).get("referee") or {}).get("loss")
    if not loss:
        return
    if loss.get("not_checked"):
        say("referee", f"the loss was not checked: {loss['not_checked']}")
        return
    parts = [(f"step {one['step']}", one) for one in loss["checked"]]
    parts += [("random tokens", loss["random_tokens"]), ("held-out slice", loss["held_out"])]
    for name, one in parts:
        words = one.get("not_checked") or (
            f"{one['claimed_nats']} nats by forward(), {one['from_logits_nats']} from logits, "
            f"of {one['num_tokens']} tokens"
        )
        say("referee", f"{name}: {words}")


def _parser():
    parser = arguments.Parser("./run.sh audit", main=main)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, run ids, a race or RACE:ARM")
    kinds = ", ".join(counterfactual.KINDS)
    parser.add_argument("--only", action="append", choices=counterfactual.KINDS, metavar="KIND", help=f"of {kinds}")
    console.add_options(parser, "a list of what was found")
    return parser
