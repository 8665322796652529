"""./run.sh explain RUN|TRACE... [--json] [--html FILE] [--perfetto DIR] [--passport FILE] [--include-last-step]

Shows one step as a waterfall: roofline time, then overhead by cause, in parts that add up exactly to the measured step;
for several ranks who delays whom; and where the next millisecond can be saved.  For two runs, two folders of traces, or
two traces of the same rank it divides the difference of their steps among the same parts.

Several trace files are the ranks of one job; more folders, and the windows of a run, are explained one by one, in
--json as {TITLE: account}.  A run without a trace is explained from its record, more coarsely.  Needs no torch.
"""

from pathlib import Path
from typing import Any

from bench.analysis.explain import account, document, explained
from bench.analysis.trace import categories
from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.cli import analyze, arguments

Jobs = list[tuple[list[str], list[Path]]]  # (names, paths) of each


def main(argv: list[str]) -> int:
    """Exit codes: 0 explained, 2 usage error, or nothing that could be explained."""
    args = _parser().parse_args(argv)
    rules = categories.load_rules(user_path(args.rules)) if args.rules else categories.RULES
    passport = user_path(args.passport) if args.passport else None
    annotated = user_path(args.perfetto) if args.perfetto else None
    jobs = _jobs(args.path)
    if annotated and len(jobs) == 2:
        raise ValueError("--perfetto annotates the traces of one job: name one run, or the traces of one run")
    if len(jobs) == 2:
        sides = (_side(names, paths, rules, args.include_last_step, passport, jobs) for names, paths in jobs)
        (a_title, a), (b_title, b) = sides
        answer = document.from_differences({f"{a_title} -> {b_title}": account.difference(a, b)})
    else:
        answers: dict[str, dict[str, Any]] = {}
        for names, paths in jobs:
            of_job = paths, rules, args.include_last_step, passport, annotated
            answers |= explained.explain_paths(", ".join(names), *of_job)
        answer = document.from_accounts(answers)
    if args.html:
        path = user_path(args.html)
        atomic.write_out(path, answer.html(), "--html")
        print(f"wrote {shown(path)}")
    else:
        print(answer.json() if args.json else answer.terminal())
    return 0


def _jobs(names: list[str]) -> Jobs:
    """Like analyze.jobs(), but two files are A and B, unless they say that they are different ranks of one job."""
    jobs = analyze.jobs(names)
    if len(names) == 2 and len(jobs) == 1 and len(jobs[0][1]) == 2:
        files = jobs[0][1]
        if all(path.is_file() for path in files) and not explained.are_of_one_job(files):
            return [([word], [path]) for word, path in zip(names, files)]
    return jobs


def _side(
    names: list[str],
    paths: list[Path],
    rules: tuple[categories.Rule, ...],
    include_last_step: bool,
    passport: Path | None,
    jobs: Jobs,
) -> tuple[str, dict[str, Any]]:
    """The account of a side of a difference: its first window; of its record where the other side has no trace."""
    title = ", ".join(names)
    is_run = len(paths) == 1 and (paths[0] / "run.json").is_file()
    if is_run and not all(explained.has_trace(of_job) for _, of_job in jobs):
        return title, explained.explain_record(paths[0], passport)
    return next(iter(explained.explain_paths(title, paths, rules, include_last_step, passport).items()))


def _parser() -> arguments.Parser:
    parser = analyze.trace_parser("explain", main)
    parser.add_argument("--html", metavar="FILE", help="write a page instead")
    help_ = "write the traces again with the account as tracks, for ui.perfetto.dev"
    parser.add_argument("--perfetto", metavar="DIR", help=help_)
    help_ = "measured limits to use instead of those kept for the run's machine"
    parser.add_argument("--passport", metavar="FILE", help=help_)
    return parser
