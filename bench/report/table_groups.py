"""Rows of runs -> rows of repeats: what they share, how many, means and standard deviations."""

from collections.abc import Iterable

from bench.record import certificates
from bench.record.rows import Row

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
