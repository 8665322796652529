"""Read logs of modded-nanogpt, nanochat, nanogpt, kempnerforge or llm.c as runs.  ./run.sh import FORMAT PATH...

Every run in a log becomes a record under results/<track>/ with provenance "imported"; what a log does not state is
unknown.  Importing a log again changes nothing, and --dry-run only counts.  A line that looks like a metric line but
cannot be parsed is shown with its number, and the runs of its file are marked suspect.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.base import text_table
from bench.base.paths import results_root, user_path
from bench.cli import arguments
from bench.record.importers import dialects, records
from bench.record.shape import Record
from bench.record.step_files import StepRow

Report = dict[str, list[Any]]  # {kind of REPORTED: lines}

NUM_SHOWN = 20  # lines of each kind
COUNTS = ("files", "runs", "complete", "incomplete", "not_a_run", "unmatched_metric_lines", "duplicates")
REPORTED = ("unread", "unmatched", "repeated", "same run", "no run")


def main(argv: list[str]) -> int:
    """Exit codes: 0 every metric line was understood, 1 some were not or a file could not be read, 2 usage error."""
    if argv and argv[0] not in dialects.NAMES and user_path(argv[0]).exists():
        raise ValueError(f"{argv[0]}: its format comes first: ./run.sh import {'|'.join(dialects.NAMES)} {argv[0]}")
    args = _parser().parse_args(argv)
    files = dialects.files_of([user_path(pattern) for pattern in args.path])
    summary = dict.fromkeys(COUNTS, 0)
    report: Report = {kind: [] for kind in REPORTED}
    seen, num_written = set(), 0  # sha256 of the files so far
    file_of: dict[str, Path] = {}  # {same_run_id: the first file with that run}
    for done, (path, part_of) in enumerate(files, 1):
        arguments.count_up(done, len(files), "files")
        try:
            runs, facts = dialects.read_file(path, args.format, part_of)
        except ValueError as error:
            report["unread"].append(str(error))
            continue
        is_duplicate = facts["sha256"] in seen
        num_complete = sum(run["status"] == "complete" for run, _ in runs)
        new = (1, len(runs), num_complete, len(runs) - num_complete, not runs, len(facts["unmatched"]), is_duplicate)
        summary = {name: summary[name] + number for name, number in zip(COUNTS, new, strict=True)}
        _report(report, path, runs, facts, {} if is_duplicate else file_of)
        if not args.dry_run and not is_duplicate:
            num_written += sum(records.write(run, rows, results_root()) for run, rows in runs)
        seen.add(facts["sha256"])
    if len(report["unread"]) == len(files):
        raise ValueError(report["unread"][0])
    _print_report(report, args.format)
    if args.json:
        print(json.dumps(summary))
    else:
        counts = [(key.replace("_", " "), f"{value:,}") for key, value in summary.items()]
        print(text_table.render((), counts, [False, True]))
        written = f"{text_table.counted(num_written, 'new run folder')} in {results_root()}; ./run.sh table shows them"
        print("nothing was written" if args.dry_run else written)
    return 1 if report["unmatched"] or report["unread"] else 0


def _report(
    report: Report,
    path: Path,
    runs: Sequence[tuple[Record, list[StepRow]]],
    facts: dict[str, Any],
    file_of: dict[str, Path],
) -> None:
    report["unmatched"] += [f"{path}:{number}: not understood: {text!r}" for number, text in facts["unmatched"]]
    if facts["num_repeated"]:
        report["repeated"].append(f"{path}: {facts['num_repeated']} lines repeat lines before them; each counts once")
    if num_again := facts.get("num_validated_again"):
        message = f"{path}: {text_table.counted(num_again, 'further validation')} of a last step: only the first counts"
        report["repeated"].append(message)
    if not runs:
        report["no run"].append((path, facts["unmatched"]))
    for run, _ in runs:
        same = (run["imported"] or {})["same_run_id"]
        if same is not None and (other := file_of.setdefault(same, path)) != path:
            again = f"its run ({same}) is also in {other}"
            report["same run"].append(f"{path}: {again}: compare and table --group count it once")


def _print_report(report: Report, form: str) -> None:
    """Prints what a person must look at on stderr, the first lines of each kind."""
    for kind in REPORTED:
        for line in report[kind][:NUM_SHOWN]:
            if kind == "no run":
                path, unmatched = line
                line = f"{path}: {_why_no_run(path, unmatched, form)}"
            print(f"import: {line}", file=sys.stderr)
        if len(report[kind]) > NUM_SHOWN:
            print(f"import: and {len(report[kind]) - NUM_SHOWN:,} more like it", file=sys.stderr)


def _why_no_run(path: Path, unmatched: Sequence[Any], form: str) -> str:
    """Returns what a file without a run is instead, as far as can be seen."""
    if unmatched:
        return f"no run: {len(unmatched)} of its lines look like metric lines, and none was understood"
    data = path.read_bytes()
    if not data.strip():
        return "no run: the file is empty"
    if b"\0" in data[:4096]:
        return "no run: the file is not text"
    other = next((other for other in dialects.NAMES if other != form and dialects.read_file(path, other)[0]), None)
    if other:
        return f"no run: it has no step lines of {form}, but some of {other}: ./run.sh import {other} {path}"
    if data.partition(b"\n")[0].count(b"\t") > 1:
        return "no run: a table, not a log: import the logs of its runs, or race the commits that it names"
    return f"no run: it has no step lines of {form}"


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh import", main=main)
    parser.add_argument("format", choices=dialects.NAMES)
    parser.add_argument("path", nargs="+", metavar="PATH", help="logs, or folders to search for them")
    parser.flag("--json", help="the counts, for programs")
    parser.flag("--dry-run", help="count without writing anything")
    return parser
