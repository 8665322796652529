"""Is B faster than A?  ./run.sh compare A B      A, B: run folders, globs, run ids, RACE:ARM, logs; or one race

Prints the verdict first, then whether the runs are comparable and what differs, the numbers, and with --why where the
time went.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.api import comparing
from bench.base import atomic
from bench.base.metric import VAL_LOSS
from bench.base.paths import shown, user_path
from bench.cli import arguments
from bench.compare import questions, wording
from bench.compare.effects import NOT_COUNTED, ONE_SIDED
from bench.compare.verdict import Comparison
from bench.report import verdicts

Condition = tuple[str, float | None]  # of --fail-on: (slower, loss or a verdict, its per cent)

FAILURES = ("slower", "loss", "faster", "better", "worse", "equivalent", "inconclusive")


def main(argv: list[str]) -> int:
    """Exit codes: 0 compared, 1 a --fail-on condition holds, 2 usage error or not comparable."""
    args = _parser().parse_args(argv)
    fail_on = conditions(args.fail_on)
    for option, value in (("--margin", args.margin), ("--target", args.target)):
        comparing.check_nats(option, value)
    options: dict[str, Any] = {"on": args.on, "margin_nats": args.margin, "target_val_loss": args.target}
    compared = comparing.compare(*args.runs, **options, force=args.force)
    if args.json:
        print(compared.to_json())
    elif args.html:
        path = user_path(args.html)
        page = compared.document(path.parent, verdicts.Options(patch=True, why=True)).html()
        atomic.write_out(path, page, "--html")
        print(shown(path))
    elif args.csv:
        print(verdicts.as_csv([*compared.against.items()]), end="")
    else:
        document = compared.document(None, verdicts.Options(args.diff, args.why))
        print(document.markdown() if args.md else document.terminal())
    return max(exit_code(facts, fail_on, args.fail_if == "shown") for facts in compared.against.values())


def exit_code(compared: Comparison, fail_on: Sequence[Condition] = (), shown: bool = False) -> int:
    """Returns 0, 1 if a condition of --fail-on holds, or 2 if not comparable or a condition needs a missing verdict.

    There is no verdict with one run a side, nor on times of arms that were not interleaved.
    """
    if compared["verdict"] == "not_comparable" or (compared["on"] != "loss" and not compared["comparable"]):
        return 2
    is_about_loss = compared["on"] == "loss" and not any(kind == "slower" for kind, _ in fail_on)
    if fail_on and not is_about_loss and compared["time"]["p"] is None:
        print("compare: --fail-on needs a verdict, and these runs give none: give at least two a side", file=sys.stderr)
        return 2
    if fail_on and not is_about_loss and compared["time"]["drift_pct"] is not None:
        needs = "compare: --fail-on needs a firm verdict, and these arms were not interleaved"
        print(f"{needs}, so only the machine may have changed: ./run.sh race measures them", file=sys.stderr)
        return 2
    is_of_loss = is_about_loss or any(kind == "loss" for kind, _ in fail_on)
    if fail_on and is_of_loss and compared["val_loss"]["verdict"] == "unknown":
        refused = compared["reasons"][:1] if not compared["comparable"] else []
        why = "; ".join(compared["val_loss"]["reasons"] or refused) or "their losses have no spread, or are missing"
        print(f"compare: --fail-on needs a verdict on the loss, and these runs give none: {why}", file=sys.stderr)
        return 2
    code = 0
    for kind, limit_pct in fail_on:
        fails, why = _finding(compared, kind, limit_pct, shown)
        print(f"--fail-on {kind} {'fails' if fails else 'passes'}: {why}", file=sys.stderr)
        code |= fails
    return code


def _finding(compared: Comparison, kind: str, limit_pct: float | None, shown: bool) -> tuple[bool, str]:
    """Returns whether the condition fails, and why. shown: only what is shown fails; else also what is not excluded."""
    b, time, loss = compared["arms"][1], compared["time"], compared["val_loss"]
    if kind not in ("slower", "loss"):
        return compared["verdict"] == kind, wording.standalone_verdict(compared)
    verdict, both = "", ""
    if kind == "loss":
        metric = wording.metric_of(loss)
        way = "rise" if metric.sign > 0 else "fall"
        verdict, edges = loss["verdict"], wording.interval(loss["ci95"], 5, f" {metric.unit}".rstrip())
        is_open = verdict not in ("waived", "not_worse") or NOT_COUNTED in compared["flags"]
        is_shown = verdict == "worse"
        margin = "" if is_shown else f" by {loss['margin']:g} {metric.unit}".rstrip()
        extra = f" ({wording.extra_sentence(compared)})" if NOT_COUNTED in compared["flags"] else ""
        condition = f"a {way} of {b}'s {metric.name}{margin}{extra}"
    else:
        limit_pct = time["margin_pct"] if limit_pct is None else limit_pct
        times: list[Mapping[str, Any]] = [time]
        if ONE_SIDED in compared["flags"]:
            times.append(compared["time_all"] or {"ci95_pct": None})
        verdict, (low, high) = compared["answers"]["time"]["verdict"], _widest(times)
        outside = time["outside"]
        both = " by both clocks" if outside and not outside["unknown"] else ""
        both += ", also with the excluded runs" * (len(times) > 1 and compared["time_all"] is not None)
        edges = wording.interval([low, high], 2, " %")
        is_open = high > limit_pct or "not-at-a-planned-look" in compared["flags"]
        is_shown = verdict == "slower" and low > limit_pct
        condition = f"a slowdown of {b} by more than {limit_pct:g} %"
    end = f"95 % interval{both} {edges or 'none'}, verdict {verdict.replace('_', ' ')}"
    state = "shown" if is_shown else "excluded" if not is_open else "not shown" if shown else "not excluded"
    return is_shown if shown else is_open, f"{condition} is {state} ({end})"


def _widest(times: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns the interval of the change that contains those of all times by both clocks."""
    clocks = [clock for time in times for clock in (time, time.get("outside")) if clock]
    intervals_pct = [clock["ci95_pct"] or [-math.inf, math.inf] for clock in clocks]
    lows, highs = zip(*intervals_pct, strict=True)
    return min(lows), max(highs)


def conditions(options: Sequence[str]) -> list[Condition]:
    """Returns the conditions of --fail-on options, each with one or several. Raises ValueError for an unknown one."""
    return [_condition(text) for option in options for text in option.split(",")]


def _condition(text: str) -> Condition:
    """Returns (kind, per cent or None) of slower:0.5%, slower, loss or another verdict."""
    kind, colon, limit = text.partition(":")
    try:
        pct = float(limit.removesuffix("%")) if colon else None
    except ValueError:
        pct = -1.0
    if kind not in FAILURES or not 0 <= (pct or 0.0) < math.inf or (colon and kind != "slower"):
        raise ValueError(f"--fail-on {text}: use slower:0.5%, or one of {', '.join(FAILURES)}")
    if colon and not limit.endswith("%"):  # 0.01 may mean 0.01 % or 1 %
        raise ValueError(f"--fail-on {text}: write the limit in per cent, {text}%")
    return kind, pct


def _parser() -> arguments.Parser:
    parser = arguments.Parser(
        "./run.sh compare",
        main=main,
        description="Is B faster than A?  The change is of B against A; negative is faster.",
        epilog="A and B: a run folder or a folder of them, a quoted glob, (part of) the id of runs, RACE:ARM, logs.\n"
        "Several runs as one: A1,A2,A3 or A1 A2 A3 vs B1 B2 B3.  A single RACE compares all its arms with\n"
        "the first, a single RACE:ARM only that arm.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="A B", help="the baseline first; for several candidates, p is Holm-corrected"
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="slower:0.5%",
        help="exit code 1 unless the 95 %% interval rules out that B is slower by more than this (default: the "
        "equivalence margin); loss: by more than --margin; any other verdict: if it is the verdict",
    )
    parser.add_argument(
        "--on",
        choices=questions.QUESTIONS,
        help="the question that the verdict answers; default: that of the race's plan, or time",
    )
    parser.add_argument(
        "--fail-if",
        choices=("possible", "shown"),
        help="possible (default): --fail-on fails unless the change is excluded; shown: only if it is shown",
    )
    parser.needs("--fail-if", "--fail-on")
    parser.flag("--force", help="show numbers even if not comparable, but no verdict")
    parser.add_argument("--target", type=float, metavar="VALUE", help="of the goal's metric; default: the runs' own")
    parser.add_argument(
        "--margin",
        type=float,
        metavar="NATS",
        help="how much worse the goal's metric may be and count as no worse, in its unit; default: the plan's, or "
        f"{VAL_LOSS.margin:g} nats of val_loss",
    )
    parser.flag("--why", help="also show where the time went: regions, stalls, telemetry, traces")
    parser.flag("--diff", help="the full source diff, if the code differs")
    form = parser.forms(
        "everything, not rounded; a list for several candidates",
        "Markdown, to paste into a pull request",
        "the numbers as CSV, one line per metric",
    )
    form.add_argument("--html", metavar="PATH", help="write a self-contained page with the verdict and the curves")
    return parser
