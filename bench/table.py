"""The results table.  ./run.sh table [FOLDER...] [--sort COL[,-COL]] [--where KEY=VALUE...] [--group]

Reads run folders and nothing else; 10,000 of them in two seconds and again in half a second, so no heavy import.  A run
that failed or still runs has its row and no numbers.  Sums nothing up over steps: a row is a run, with --group a set of repeats.
"""

import argparse
import os
import sys

from bench import choosing, index, record, stats, table_text
from bench.choosing import COLUMNS
from bench.comparable import places_of_runs

GROUPED = ("val_loss", "train_s", "step_avg_ms", "tokens_per_s")
# fmt: off
GROUP_COLUMNS = (
    "track", "num_deviations", "name", "model", "optim", "world_size", "device", "config_id", "n", "num_suspect",
    "num_invalid", "num_failed", "num_aborted", "num_running",
    *(f"{name}_{what}" for name in GROUPED for what in ("mean", "sd")),
    "source_sha256", "comparability_id", "run_ids",
)
# fmt: on


def main(argv):
    args = _parser().parse_args(_joined(argv))
    if args.check is not None or args.write is not None:
        from bench import generated

        return generated.check(args.check, main) if args.write is None else generated.write(args.write, main)
    if args.leaderboard:
        from bench import leaderboard

        return leaderboard.main(args)
    try:
        conditions = [choosing.condition(words) for words in args.where]
        rows = [row for row in read_rows(args.folder) if all(choosing.holds(row, *condition) for condition in conditions)]
        columns, shown = (GROUP_COLUMNS, table_text.GROUP_SHOWN) if args.group else (COLUMNS, table_text.SHOWN)
        rows = choosing.sort(groups(rows) if args.group else rows, args.sort, columns)
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(table_text.as_json(rows, columns))
    elif args.csv:
        table_text.print_csv(rows, columns)
    elif not rows:
        print(_nothing(args))
    elif args.all_columns or args.md:
        shown = columns if args.all_columns else table_text.filled(rows, shown)
        print(table_text.render(rows, shown, "github" if args.md else "simple"))
    else:
        print(table_text.fit(rows, shown, table_text.terminal_width()))
    return 0


def read_rows(folders):
    """Words of the user, none for results/ -> one row (a dict by COLUMNS) for each run, by track, then time.

    A folder that cannot be read is named on standard error and left out.
    """
    root = record.results_root()
    paths = [record.locate(word) for word in folders] or ([root] if root.is_dir() else [])
    rows, from_here = [], {}  # parent -> the same from where the user stands
    for folder, row in index.read_rows(paths, lambda message: print(f"table: left out: {message}", file=sys.stderr)):
        parent, _, name = folder.rpartition("/")
        if parent not in from_here:
            from_here[parent] = os.path.relpath(parent or "/")
        row["folder"] = name if from_here[parent] == "." else f"{from_here[parent]}/{name}"
        rows.append(row)
    return sorted(rows, key=lambda row: (row["track"] or "", row["started_at"] or "", row["run_id"]))


def groups(rows):
    """Repeats together: same track, config (of logs: name), source and comparability_id.

    A run that did not complete may not know its comparability_id; it is counted with its siblings of the same track,
    config and source.  Means and sd (ddof 1, None for n = 1) are of complete runs that are not invalid
    nor the discarded warm-up runs of a race.
    """
    complete, incomplete = {}, {}
    for row in rows:
        family = (row["track"], row["config_id"] or row["name"], row["source_sha256"])  # a log knows no config
        if row["status"] == "complete":
            complete.setdefault((*family, row["comparability_id"]), []).append(row)
        else:
            incomplete.setdefault(family, []).append(row)
    for family, lost in incomplete.items():
        siblings = [key for key in complete if key[:3] == family]
        for row in lost:
            own = (*family, row["comparability_id"])
            complete.setdefault(own if own in siblings or not siblings else siblings[-1], []).append(row)
    return [_group(members) for members in complete.values()]


def _group(members):
    first = members[0]
    counted = [row for row in members if row["status"] == "complete" and row["validity"] != "invalid" and not row["discarded"]]
    counted = [counted[place] for place in places_of_runs(counted)]
    group = {name: first[name] for name in GROUP_COLUMNS if name in first}  # what the members share
    group |= {"n": len(counted), "run_ids": [row["run_id"] for row in members]}
    group["num_suspect"] = sum(row["validity"] == "suspect" for row in counted)
    group["num_invalid"] = sum(row["status"] == "complete" and row["validity"] == "invalid" for row in members)
    for status in ("failed", "aborted", "running"):
        group[f"num_{status}"] = sum(row["status"] == status for row in members)
    for name in GROUPED:
        values = [row[name] for row in counted if row[name] is not None]
        group[f"{name}_mean"] = stats.mean(values) if values else None
        group[f"{name}_sd"] = stats.sd(values)
    return group


def _nothing(args):
    if args.where:
        return f"no run fits --where {' '.join(args.where)}: leave it out to see all"
    where = " ".join(args.folder) or "results/"
    more = "" if args.folder else f"; ./run.sh table results/{record.PUBLISHED} shows the published ones"
    return f"no runs in {where} yet: ./speedrun.sh makes the first, ./run.sh run makes one{more}"


def _joined(argv):
    """--sort -train_s as --sort=-train_s: argparse would take -train_s for an option."""
    argv = list(argv)
    while "--sort" in argv[:-1]:
        place = argv.index("--sort")
        argv[place : place + 2] = [f"--sort={argv[place + 1]}"]
    return argv


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh table",
        description="Runs as a table, oldest first. (open): the run changed what its track fixes.",
        epilog=f"columns: {', '.join(COLUMNS)}\nwith --group: {', '.join(GROUP_COLUMNS)}\n\n"
        "exit codes: 0 fine, 1 a table is stale, 2 wrong use; what cannot be read is named on standard error and left out",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="*", metavar="FOLDER", help="run folders or folders of them; default results/")
    parser.add_argument("--sort", metavar="COL[,-COL]", help="by these columns; - in front: largest first")
    parser.add_argument(
        "--where", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="also 'KEY<VALUE' and != <= > >="
    )
    parser.add_argument("--group", action="store_true", help="repeats together, with mean and sd")
    parser.add_argument("--all-columns", action="store_true", help="every column, however wide")
    parser.add_argument("--leaderboard", action="store_true", help="by track: what stands, and how the record came down")
    files = {"nargs": "*", "metavar": "FILE"}
    parser.add_argument("--check", **files, help="exit 1 if a table in README.md, results/README.md or FILE is stale")
    parser.add_argument("--write", **files, help="write these tables again")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of objects, unrounded, all columns")
    form.add_argument("--csv", action="store_true", help="unrounded, all columns")
    form.add_argument("--md", action="store_true", help="Markdown")
    return parser
