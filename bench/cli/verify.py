"""Is a record internally consistent?  ./run.sh verify RUN... [--json]

RUN is a run folder, a folder of them, or a run id or a part of one.  Every rule prints pass or FAIL with its evidence.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.base import escape, text_table
from bench.base.text_table import counted
from bench.cli import arguments
from bench.record import named, verification

Rules = Sequence[Mapping[str, Any]]  # {"rule", "passed", "evidence"}; None: not applicable, or ("known" False) unknown

MARKS = {True: "pass", None: "-", False: "FAIL"}


def main(argv: list[str]) -> int:
    """Exit codes: 0 all passed, 1 a rule failed, 2 no record there."""
    args = _parser().parse_args(argv)
    reports, num_unreadable = [], 0
    for name in args.run:
        try:
            for folder in named.runs([name]):
                reports.append(report := verification.report(folder))
                if not args.json:
                    print(checked(report["run_id"], report["rules"], "verify"))
        except ValueError as error:
            num_unreadable += 1
            print(f"verify: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(reports, indent=1))
    return 2 if num_unreadable else 0 if all(report["passed"] for report in reports) else 1


def checked(subject: str, rules: Rules, mark: str, verdict: str = "") -> str:
    """Returns the verdict, what was checked and how many rules passed; then each rule, failed ones first."""
    num_failed = sum(rule["passed"] is False for rule in rules)
    num_open = sum(rule["passed"] is None for rule in rules)
    num_unknown = sum(not rule.get("known", True) for rule in rules)
    if num_failed:
        count = f"{num_failed} of {counted(len(rules), 'rule')} failed"
    elif num_open:
        count = f"{counted(len(rules) - num_open, 'rule')} passed, {num_open - num_unknown} not applicable"
    else:
        count = f"all {counted(len(rules), 'rule')} passed"
    if num_unknown and (num_failed or num_open):
        count += f", {num_unknown} not known from a log"
    head = mark, f"{verdict}{escape.line(subject)}: {count}"
    ordered = sorted(rules, key=lambda rule: rule["passed"] is not False)
    marks = (MARKS[rule["passed"]] if rule.get("known", True) else "?" for rule in ordered)
    return text_table.marked(
        [head, *((mark, f"{rule['rule']}: {rule['evidence']}") for mark, rule in zip(marks, ordered))]
    )


def _parser() -> arguments.Parser:
    rules = verification.RULES + verification.RULES_OF_A_COMPLETE_RUN
    shown = "\n".join(f"  {rule.__name__.replace('_', ' ')}: {rule.__doc__}" for rule in rules)
    parser = arguments.Parser("./run.sh verify", main=main, epilog=f"rules:\n{shown}")
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folder, folder of runs, run id or part of one")
    parser.flag("--json", help="a list of objects instead of text")
    return parser
