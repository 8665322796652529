"""Does a record agree with itself?  ./run.sh verify RUN... [--json]

RUN is a run folder, a folder of them, or a run id or a part of one.  Every rule prints pass or FAIL with its evidence.
"""

import json
import sys

from bench.base import text_table
from bench.cli import arguments, rule_lines
from bench.record import named, verification


def main(argv):
    """Exit codes: 0 all passed, 1 a rule failed, 2 no record there."""
    args = _parser().parse_args(argv)
    reports, num_unreadable = [], 0
    for word in args.run:
        try:
            for folder in named.runs([word]):
                reports.append(verification.report(folder))
                if not args.json:
                    result = reports[-1]["rules"]
                    print(text_table.printable(reports[-1]["run_id"]), rule_lines.text(result), sep="\n")
                    print(f"{'verify':>8}  {rule_lines.count(result)}")
        except ValueError as error:
            num_unreadable += 1
            print(f"verify: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(reports, indent=1))
    return 2 if num_unreadable else 0 if all(one["passed"] for one in reports) else 1


def _parser():
    rules = verification.RULES + verification.RULES_OF_A_COMPLETE_RUN
    shown = "\n".join(f"  {rule.__name__.replace('_', ' ')}: {rule.__doc__}" for rule in rules)
    parser = arguments.Parser("./run.sh verify", main=main, epilog=f"rules:\n{shown}")
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folder, folder of runs, run id or part of one")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of text")
    return parser
