"""The results table.  ./run.sh table [FOLDER...] [--sort COL[,-COL]] [--where KEY=VALUE...] [--group]

Reads run folders and nothing else; 10,000 of them in two seconds and again in half a second, so no heavy import.  A run
that failed or still runs has its row and no numbers.  Sums nothing up over steps: a row is a run, with --group a set of repeats.
"""

import argparse
import json
import operator
import os
import re
import sys

from bench import grid, index, record, stats
from bench import rows as rows_of_runs
from bench.rows import METRICS

DEFAULT_WIDTH = 100
GROUPED = ("val_loss", "train_s", "step_avg_ms", "tokens_per_s")
# fmt: off
COLUMNS = (*rows_of_runs.SHOWN, "folder")
GROUP_COLUMNS = (
    "track", "num_deviations", "name", "model", "optim", "world_size", "device", "config_id", "n", "num_suspect",
    "num_invalid", "num_failed", "num_aborted", "num_running",
    *(f"{name}_{what}" for name in GROUPED for what in ("mean", "sd")),
    "source_sha256", "comparability_id", "run_ids",
)
# What a terminal shows, without columns that are empty; from the right they give way until the rest fits.
SHOWN = ("run_id", "track", "status", "val_loss", "train_s", "step_avg_ms", "tokens_per_s", "mfu", "peak_mem_gib")
GROUP_SHOWN = (
    "config_id", "name", "track", "n", "val_loss_mean", "val_loss_sd", "train_s_mean", "train_s_sd",
    "step_avg_ms_mean", "step_avg_ms_sd", "tokens_per_s_mean", "tokens_per_s_sd",
)
DECIMALS = {
    "val_loss": 4, "gap_nats": 4, "train_s": 2, "wall_s": 2, "compile_s": 2, "step_avg_ms": 2, "step_ms_p50": 2,
    "step_ms_p95": 2, "tokens_per_s": 0, "tokens_per_s_per_gpu": 0, "mfu": 3, "mfu_causal": 3, "peak_mem_gib": 2,
    "goodput_frac": 2,
}
# fmt: on
CONDITION = re.compile(r"(\w+)(<=|>=|!=|=|<|>)(.*)", re.S)
YES_OR_NO = ("target_reached", "discarded")
NUMBERS = (*(name for name in METRICS if name != "target_reached"), "num_deviations", "seed", "world_size", "wall_s")
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def main(argv):
    args = _parser().parse_args(_joined(argv))
    if args.check is not None or args.write is not None:
        from bench import generated

        return generated.check(args.check, main) if args.write is None else generated.write(args.write, main)
    if args.leaderboard:
        from bench import leaderboard

        return leaderboard.main(args)
    try:
        conditions = [_parsed(condition) for condition in args.where]
        rows = [row for row in read_rows(args.folder) if all(_holds(row, *condition) for condition in conditions)]
        columns = GROUP_COLUMNS if args.group else COLUMNS
        rows = sort(groups(rows) if args.group else rows, args.sort, columns)
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(_json(rows, columns))
    elif args.csv:
        _print_csv(rows, columns)
    elif not rows:
        print(_nothing(args))
    elif args.all_columns or args.md:
        shown = columns if args.all_columns else _filled(rows, GROUP_SHOWN if args.group else SHOWN)
        print(_render(rows, shown, "github" if args.md else "simple"))
    else:
        print(_fit(rows, GROUP_SHOWN if args.group else SHOWN, _width()))
    return 0


def text(runs, width=DEFAULT_WIDTH):
    """Records -> the table a terminal shows."""
    return _fit([row_of(run) for run in runs], SHOWN, width)


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


def row_of(run, folder=None):
    """A record -> its row, bench/rows.py, and where it lies."""
    return rows_of_runs.row_of(run) | {"folder": folder}


def groups(rows):
    """Repeats together: same track, config, source and comparability_id.

    A run that did not complete may not know its comparability_id; it is counted with its siblings of the same track,
    config and source.  Means and sd (ddof 1, None for n = 1) are of complete runs that are not invalid,
  and not of the discarded warm-up runs of a race.
    """
    complete, incomplete = {}, {}
    for row in rows:
        family = (row["track"], row["config_id"], row["source_sha256"])
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


# ---- choosing and sorting


def _parsed(condition):
    """E.g. val_loss<4 -> ("val_loss", "<", 4.0); the empty value is None."""
    match = CONDITION.fullmatch(condition)
    if not match:
        raise ValueError(f"--where {condition}: use KEY=VALUE, or one of != < <= > >= in the place of =")
    key, sign, wanted = match.groups()
    if key not in COLUMNS:
        raise ValueError(f"--where {condition}: there is no column {key}; choose from {', '.join(COLUMNS)}")
    if wanted == "":
        return key, sign, None
    try:
        if key in NUMBERS:
            return key, sign, float(wanted)
        return key, sign, BOOLEANS[wanted.lower()] if key in YES_OR_NO else wanted
    except ValueError:
        raise ValueError(f"--where {condition}: {key} is a number, {wanted!r} is none") from None
    except KeyError:
        raise ValueError(f"--where {condition}: {key} is yes or no") from None


def _holds(row, key, sign, wanted):
    """An empty cell equals only the empty value, and is neither above nor below anything."""
    if key == "status" and wanted in ("valid", "suspect", "invalid"):  # what the terminal's status column may show
        return row["status"] == "complete" and OPERATORS[sign](row["validity"], wanted)
    if row[key] is None or wanted is None:
        return {"=": row[key] is wanted, "!=": row[key] is not wanted}.get(sign, False)
    return OPERATORS[sign](row[key], wanted)


def sort(rows, order, columns):
    """order: "val_loss,-train_s" or None; empty cells come last either way."""
    for word in reversed((order or "").split(",")):
        column = word.strip().lstrip("-+")
        if not column:
            continue
        if column not in columns and f"{column}_mean" in columns:
            column = f"{column}_mean"  # of a group
        if column not in columns:
            raise ValueError(f"--sort {order}: there is no column {column}; choose from {', '.join(columns)}")
        filled = [row for row in rows if row[column] is not None]
        filled.sort(key=lambda row: row[column], reverse=word.strip().startswith("-"))
        rows = filled + [row for row in rows if row[column] is None]
    return rows


# ---- showing


def _fit(rows, columns, width):
    """As many of the columns as fit, the most useful first."""
    columns = _filled(rows, columns)
    cells = [_column(rows, name) for name in columns]
    widths = [max([len(name), *map(len, column)]) for name, column in zip(columns, cells, strict=True)]
    num_shown = len(columns)
    while num_shown > 4 and sum(widths[:num_shown]) + 2 * (num_shown - 1) > width:  # 2 spaces between them
        num_shown -= 1
    return _render(rows, columns[:num_shown], "simple", cells[:num_shown])


def _filled(rows, columns):
    """Without the columns that are empty in every row."""
    return [name for name in columns if any(row[name] is not None for row in rows)]


def _render(rows, columns, form, cells=None):
    """cells: by column, if they were made already."""
    if not columns:
        return ""
    cells = cells or [_column(rows, name) for name in columns]
    numeric = [any(isinstance(row[name], (int, float)) for row in rows) for name in columns]
    return grid.render(columns, list(zip(*cells, strict=True)), numeric, form)


def _column(rows, name):
    """The cells of a column; what most cells hold, a float or a word, without asking further."""
    if name in ("track", "status", "n"):
        return [_cell(row, name) for row in rows]
    form = f"{{:,.{_decimals(name)}f}}".format
    return [
        form(value) if (kind := type(value := row[name])) is float else value if kind is str else _cell(row, name)
        for row in rows
    ]


def _decimals(column):
    name, _, what = column.rpartition("_") if column.endswith(("_mean", "_sd")) else (column, "", "")
    return DECIMALS.get(name, 3) + (what == "sd")


def _cell(row, column):
    value = row[column]
    if column == "track" and row["num_deviations"]:
        return f"{value} (open)"  # it changed what the track fixes: MLPerf's open division
    if column == "status":
        if row["discarded"] and value == "complete":
            return "warm-up"
        return row["validity"] if value == "complete" and row["validity"] != "valid" else value
    if column == "n":
        kinds = ("suspect", "invalid", "failed", "aborted", "running")  # the suspect are among the n, the rest beside
        return ", ".join([str(value), *(f"{row[f'num_{kind}']} {kind}" for kind in kinds if row[f"num_{kind}"])])
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:,.{_decimals(column)}f}" if isinstance(value, float) else str(value)


def _json(rows, columns):
    """A run a line: the C encoder, which knows no indents, is five times as fast."""
    lines = [json.dumps({column: row[column] for column in columns}) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]"


def _print_csv(rows, columns):
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([" ".join(value) if isinstance(value := row[name], list) else value for name in columns])


def _width():
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # a pipe, or no file at all
        return DEFAULT_WIDTH


def _nothing(args):
    if args.where:
        return f"no run fits --where {' '.join(args.where)}: leave it out to see all"
    where = " ".join(args.folder) or "results/"
    return f"no runs in {where} yet: ./speedrun.sh makes the first, ./run.sh run makes one"


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
