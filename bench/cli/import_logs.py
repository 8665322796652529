"""./run.sh import FORMAT PATH... [--json]      logs of modded-nanogpt, nanochat, nanogpt or kempnerforge -> run folders

Every run of a log becomes a record under results/<track>/ with provenance "imported"; what a log does not say is unknown.
Importing again changes nothing.  --dry-run only counts.  A line that looks like a metric line and could not be understood is
shown with its number, and the runs of its file are marked suspect.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from bench import atomic, importers
from bench.paths import of_user, results_root
from bench.record import run_folder, step_files

MAX_LOOKED_AT = 200_000  # bytes of a file that is no log: enough to say what it is
NUM_SHOWN = 20  # lines of one kind
FOREIGN = (re.compile(rb"\bstep\W{0,3}\d", re.I), re.compile(rb"\bloss\W{0,3}\d", re.I))  # of another program's line


def main(argv):
    """Exit codes: 0 every metric line was understood, 1 some were not or a file could not be read, 2 wrong use."""
    args = _parser().parse_args(argv)
    files = importers.files([of_user(word) for word in args.path])
    summary = {
        "files": 0,
        "runs": 0,
        "complete": 0,
        "incomplete": 0,
        "not_a_run": 0,
        "unmatched_metric_lines": 0,
        "duplicates": 0,
    }
    told, seen, written = {"unread": [], "unmatched": [], "no run": [], "repeated": [], "same run": []}, set(), 0
    where = {}  # same_run_id -> the first file with that run
    for done, (path, part_of) in enumerate(files, 1):
        if sys.stderr.isatty():
            print(
                f"\r{done} of {len(files)} files", end="\n" if done == len(files) else "", file=sys.stderr, flush=True
            )
        try:
            found, facts = importers.read(path, args.format, part_of)
        except ValueError as error:
            told["unread"].append(str(error))
            continue
        _count(summary, found, facts, facts["sha256"] in seen)
        _tell(told, path, found, facts)
        if facts["sha256"] not in seen:
            _tell_of_same_runs(told, path, found, where)
        if not args.dry_run and facts["sha256"] not in seen:
            written += sum(write(run, rows, results_root()) for run, rows in found)
        seen.add(facts["sha256"])
    if len(told["unread"]) == len(files):
        raise ValueError(told["unread"][0])
    _print_told(told, args.format)
    if args.json:
        print(json.dumps(summary))
    else:
        print("\n".join(f"{key.replace('_', ' '):<23} {value:>9,}" for key, value in summary.items()))
        print(
            "nothing was written"
            if args.dry_run
            else f"{written} new run folders in {results_root()}; ./run.sh table shows them"
        )
    return 1 if told["unmatched"] or told["unread"] else 0


def _count(summary, found, facts, is_duplicate):
    summary["files"] += 1
    summary["duplicates"] += is_duplicate
    summary["not_a_run"] += not found
    summary["runs"] += len(found)
    summary["complete"] += sum(run["status"] == "complete" for run, _ in found)
    summary["incomplete"] += sum(run["status"] != "complete" for run, _ in found)
    summary["unmatched_metric_lines"] += len(facts["unmatched"])


def _tell(told, path, found, facts):
    told["unmatched"] += [f"{path}:{number}: not understood: {text!r}" for number, text in facts["unmatched"]]
    if facts["num_repeated"]:
        told["repeated"].append(f"{path}: {facts['num_repeated']} lines repeat lines before them; each counts once")
    if not found:
        told["no run"].append((path, facts["unmatched"]))


def _tell_of_same_runs(told, path, found, where):
    for run, _ in found:
        same = run["imported"]["same_run_id"]
        if same is not None and where.setdefault(same, path) != path:
            told["same run"].append(
                f"{path}: its run ({same}) is also in {where[same]}: compare and table --group count it once"
            )


def _print_told(told, form):
    """What a person must look at, on stderr; of each kind the first few."""
    no_runs = [f"{path}: {_why_no_run(path, form, unmatched)}" for path, unmatched in told["no run"][:NUM_SHOWN]]
    kinds = (told["unread"], told["unmatched"], told["repeated"], told["same run"], no_runs)
    for lines, num_lines in zip(kinds, (None, None, None, None, len(told["no run"]))):
        for line in lines[:NUM_SHOWN]:
            print(f"import: {line}", file=sys.stderr)
        if (num_lines or len(lines)) > NUM_SHOWN:
            print(f"import: and {(num_lines or len(lines)) - NUM_SHOWN:,} more like it", file=sys.stderr)


def _why_no_run(path, form, unmatched):
    """A file without a run -> what it is instead, as far as can be told."""
    if unmatched:
        return f"no run: {len(unmatched)} of its lines look like metric lines, and none was understood"
    data = path.read_bytes()
    if not data.strip():
        return "no run: the file is empty"
    if b"\0" in data[:4096]:
        return "no run: the file is no text"
    other = next((other for other in importers.FORMATS if other != form and importers.read(path, other)[0]), None)
    if other:
        return f"no run: it has no step's line of {form}, but some of {other}: ./run.sh import {other} {path}"
    lines = (line[:100] for line in re.split(rb"[\r\n]", data[:MAX_LOOKED_AT]))
    foreign = next((line for line in lines if all(word.search(line) for word in FOREIGN)), None)
    return "no run: it has no step's line" + (
        f" of {form}; another program's are in it: {foreign.decode('utf-8', 'replace')!r}" if foreign else ""
    )


def write(run, rows, results):
    """One record -> results/<track>/<run_id>/; False if it is there already.  A killed import leaves no half folder."""
    folder = Path(results) / run["track"] / run["run_id"]
    if (folder / "run.json").exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        step_files.write(folder, rows)
        atomic.write_json(folder / "run.json", run | {"artifacts": run_folder.artifacts(folder)}, durable=False)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror}); free space, or name another place with SPEEDRUN_RESULTS"
        ) from None
    return True


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh import", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("format", choices=importers.FORMATS)
    parser.add_argument("path", nargs="+", metavar="PATH", help="logs, or folders that are searched for them")
    parser.add_argument("--json", action="store_true", help="the counts, for programs")
    parser.add_argument("--dry-run", action="store_true", help="count, and write nothing")
    return parser
