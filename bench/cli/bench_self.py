"""What this harness adds to a training step, beside its targets.  ./run.sh bench-self [--json]

Ratios are medians over variants that are interleaved in one run.  `python tests/benchmarks` measures what needs a GPU,
the tests' files or another program.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from bench.base import text_table
from bench.cli import arguments

Row = dict[str, Any]  # what, measured, ci95, sign, target


def main(argv: list[str]) -> int:
    """Exit codes: 0 no target missed, 1 one missed, 2 usage error."""
    args = _parser().parse_args(argv)
    from bench.plans import overhead  # imports torch

    print("measuring the loop ...", file=sys.stderr, flush=True)
    return show([row(*measured) for measured in overhead.measure()], args.json)


def row(
    what: str, measured: float, sign: str | None, target: float | None, ci95: tuple[float, float] | None = None
) -> Row:
    """sign: "<=" or ">=", None with target where there is no limit; ci95: (low, high), None without."""
    return {"what": what, "measured": measured, "ci95": ci95, "sign": sign, "target": target}


def show(rows: Sequence[Row], as_json: bool = False) -> int:
    """Print what was measured against its targets.  Exit code: 1 if a target is missed."""
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        cells = []
        for row in rows:
            interval = "{:.4g} to {:.4g}".format(*row["ci95"]) if row["ci95"] else ""
            target = "" if row["target"] is None else f"{row['sign']} {row['target']}"
            cells.append([row["what"], f"{row['measured']:.4g}", interval, target, verdict(row)])
        print(text_table.render(["what", "measured", "95 %", "target", ""], cells, [False, True, False, False, False]))
    return 1 if any(verdict(row) == "MISSED" for row in rows) else 0


def verdict(row: Row) -> str:
    """met, MISSED, or unclear where the interval holds the target: too busy a machine to decide.  "": no target."""
    if row["target"] is None:
        return ""
    low, high = row["ci95"] or (row["measured"], row["measured"])
    is_met = [value <= row["target"] if row["sign"] == "<=" else value >= row["target"] for value in (low, high)]
    return "met" if all(is_met) else "unclear" if any(is_met) else "MISSED"


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh bench-self", main=main)
    parser.flag("--json", help="print the measurements and their targets as JSON")
    return parser
