"""Rows of runs -> rows of repeats with means and standard deviations; each against one of them (--baseline).

The changes are those of ./run.sh compare (bench/compare/verdict.py): the run is the unit, Welch's t on logarithms.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from bench.base import text_table
from bench.compare import verdict
from bench.record import certificates
from bench.record.rows import Row
from bench.report import table_columns
from bench.report.table_columns import Columns

GROUPED = (
    *("val_loss", "train_s", "step_avg_ms", "tokens_per_s", "mfu", "peak_mem_gib", "energy_j", "mean_power_w"),
    *("throttled_frac", "gap_nats", "num_steps"),
)
# fmt: off
GROUP_COLUMNS = (
    "track", "num_deviations", "name", "model", "size", "num_params", "optim", "world_size", "num_shards", "epochs",
    "device", "config_id", "n", "num_suspect", "num_invalid", "num_failed", "num_aborted", "num_stopped", "num_running",
    *(f"{name}_{what}" for name in GROUPED for what in ("mean", "sd")),
    "certificate", "source_sha256", "comparability_id", "run_ids",
)
CHANGE_COLUMNS = ("train_s_change_pct", "train_s_ci95_pct", "val_loss_change_nats", "val_loss_ci95_nats")
NAMES = ("run_id", "config_id", "name")  # by which a baseline may be called, part of the first two


def groups(rows: Iterable[Row]) -> list[dict]:
    """members_of() the rows, each as a row: what they share, n, means and sd (ddof 1, None for n = 1) of counted().

    A group also has "config", that of its first run, and "members", its rows.
    """
    return [_group(members) for members in members_of(rows)]


def members_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Repeats together: same track, config (of logs: name), source and comparability_id.

    A run that did not complete may not know its comparability_id; it is counted with its siblings of the same track,
    config and source.
    """
    complete, incomplete = {}, {}
    for row in rows:
        family = (row["track"], row["config_id"] or row["name"], row["source_sha256"])  # a log knows no config
        if row["status"] == "complete":
            complete.setdefault((*family, row["comparability_id"]), []).append(row)
        else:
            incomplete.setdefault(family, []).append(row)
    of_family = {}
    for key in complete:
        of_family.setdefault(key[:3], []).append(key)
    for family, lost in incomplete.items():
        siblings = of_family.get(family, [])
        for row in lost:
            own = (*family, row["comparability_id"])
            complete.setdefault(own if own in siblings or not siblings else siblings[-1], []).append(row)
    return list(complete.values())


def counted(members: Iterable[Row]) -> list[Row]:
    """Those whose numbers a group's means are of: complete, not invalid, no discarded warm-up run, each log once."""
    from bench.compare.eligibility import index_of_runs

    kept = [
        row
        for row in members
        if row["status"] == "complete" and row["validity"] != "invalid" and not row["discarded"]
    ]
    return [kept[index] for index in index_of_runs(kept)]


def _group(members):
    from bench.base import stats

    first = next((row for row in members if row["status"] == "complete"), members[0])
    complete = [row for row in members if row["status"] == "complete"]
    used = counted(members)
    group = {name: first[name] for name in GROUP_COLUMNS if name in first}  # what the members share
    group |= {"config": first["config"], "members": members}
    group |= {"n": len(used), "run_ids": [row["run_id"] for row in members]}
    group["num_suspect"] = sum(row["validity"] == "suspect" for row in used)
    group["num_invalid"] = sum(row["validity"] == "invalid" for row in complete)
    for status in ("failed", "aborted", "stopped", "running"):
        group[f"num_{status}"] = sum(row["status"] == status for row in members)
    group["certificate"] = certificates.of_several(row.get("certificate") for row in complete)
    for name in GROUPED:
        values = [row[name] for row in used if row[name] is not None]
        group[f"{name}_mean"] = stats.mean(values) if values else None
        group[f"{name}_sd"] = stats.sd(values)
    return group


def find_baseline(rows: Sequence[Mapping], words: Sequence[str], columns: Columns) -> Mapping:
    """The row that a user means: part of its run id or config_id, its name, or conditions such as optim.lr=0.001.

    ValueError where it is none or several.
    """
    result, option = rows, f"--baseline {' '.join(words)}"
    for word in words:
        if table_columns.CONDITION.fullmatch(word):
            one = table_columns.condition(word)
            (key,) = columns.named([one.key], option)
            result = table_columns.chosen(result, [one._replace(key=key)])
        else:
            result = [row for row in result if word in _ids(row)] or [row for row in result if _is_part(word, row)]
    if len(result) != 1:
        what = f"{len(result)} of {text_table.counted(len(rows), 'row')}" if result else "no row"
        raise ValueError(
            f"{option}: it names {what}: give part of a run id, a config_id, or KEY=VALUE ... that one row has"
        )
    return result[0]


def _ids(row):
    return [row[name] for name in NAMES if row.get(name)] + list(row.get("run_ids") or ())


def _is_part(word, row):
    return any(word in one for one in _ids(row))


def add_changes(rows: Sequence[MutableMapping], baseline: Mapping) -> list[str]:
    """Gives each row COLUMNS, None for the baseline itself and where times or losses may not be compared.

    Returns why not, a sentence each.
    """
    others = {number: row for number, row in enumerate(rows) if row is not baseline}
    mine = _members(baseline)
    against = {number: verdict.of_rows(mine, _members(row)) for number, row in others.items()}
    reasons = {}
    for number, row in enumerate(rows):
        row |= _changes(against[number]) if number in against else dict.fromkeys(CHANGE_COLUMNS)
        if number in against and not against[number]["comparable"]:
            why = against[number]["reasons"][0]
            reasons[why] = reasons.get(why, 0) + 1
    return [f"{text_table.counted(num, 'row')} without a change of time: {why}" for why, num in reasons.items()]


def _members(row):
    return row.get("members") or [row]


def _changes(result):
    time, loss = result["time"], result["val_loss"]
    values = time["change_pct"], time["ci95_pct"], loss["change_nats"], loss["ci95_nats"]
    return dict(zip(CHANGE_COLUMNS, values, strict=True))
