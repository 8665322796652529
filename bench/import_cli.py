"""./run.sh import FORMAT PATH... [--json]      logs of modded-nanogpt, nanochat, nanogpt or kempnerforge -> run folders

Every run of a log becomes a record under results/<track>/ with provenance "imported"; what a log does not say is unknown.
Importing again changes nothing.  --dry-run only counts.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from bench import atomic, importers, places, record, steps


def main(argv):
    """Exit codes: 0 every metric line was understood, 1 some were not, 2 wrong use."""
    args = _parser().parse_args(argv)
    files = importers.files([places.of_user(word) for word in args.path])
    summary = {"files": 0, "runs": 0, "complete": 0, "incomplete": 0, "not_a_run": 0, "unmatched_metric_lines": 0, "duplicates": 0}
    seen, unmatched, written = set(), [], 0
    for done, (path, part_of) in enumerate(files, 1):
        found, facts = importers.read(path, args.format, part_of)
        summary["files"] += 1
        summary["duplicates"] += facts["sha256"] in seen
        summary["not_a_run"] += not found
        summary["runs"] += len(found)
        summary["complete"] += sum(run["status"] == "complete" for run, _ in found)
        summary["incomplete"] += sum(run["status"] != "complete" for run, _ in found)
        summary["unmatched_metric_lines"] += len(facts["unmatched"])
        unmatched += [(path, line) for line in facts["unmatched"]]
        if not args.dry_run and facts["sha256"] not in seen:
            written += sum(write(run, rows, record.results_root()) for run, rows in found)
        seen.add(facts["sha256"])
        if sys.stderr.isatty():
            print(f"\r{done} of {len(files)} files", end="\n" if done == len(files) else "", file=sys.stderr, flush=True)
    for path, line in unmatched[:20]:
        print(f"import: {path}: not understood: {line!r}", file=sys.stderr)
    if args.json:
        print(json.dumps(summary))
    else:
        print("\n".join(f"{key.replace('_', ' '):<23} {value:>9,}" for key, value in summary.items()))
        print("nothing was written" if args.dry_run else f"{written} new run folders in {record.results_root()}; ./run.sh table shows them")
    return 1 if unmatched else 0


def write(run, rows, results):
    """One record -> results/<track>/<run_id>/; False if it is there already.  A killed import leaves no half folder."""
    folder = Path(results) / run["track"] / run["run_id"]
    if (folder / "run.json").exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        steps.write(folder, rows)
        atomic.write_json(folder / "run.json", run | {"artifacts": record.artifacts(folder)}, durable=False)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror}); free space, or name another place with SPEEDRUN_RESULTS") from None
    return True


def _parser():
    parser = argparse.ArgumentParser(prog="./run.sh import", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=importers.FORMATS)
    parser.add_argument("path", nargs="+", metavar="PATH", help="logs, or folders that are searched for them")
    parser.add_argument("--json", action="store_true", help="the counts, for programs")
    parser.add_argument("--dry-run", action="store_true", help="count, and write nothing")
    return parser
