"""The rows of a results folder as the site's table takes them: a value a column, short ids, groups of repeats.

A run whose record cannot be read has a row as well, with what is wrong with it.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import certificates, configs, index, run_folder
from bench.record.rows import COLUMNS as OF_A_ROW
from bench.record.rows import Row
from bench.report import table_groups

# fmt: off
COLUMNS = (  # what a user can choose, in this order; site.js says which are shown first
    "val_loss", "train_s", "step_avg_ms", "tokens_per_s", "name", "track", "device", "started_at", "run_id", "status",
    "validity", "why", "certificate", "config_id", "seed", "model", "size", "num_params", "optim", "data", "num_shards",
    "epochs", "world_size", "mfu", "peak_mem_gib", "energy_j", "mean_power_w", "throttled_frac", "num_steps",
    "step_ms_p50", "step_ms_p95", "compile_s", "wall_s", "target_reached", "num_deviations", "dtype", "torch",
    "sweep_id", "race_id", "arm", "commit", "source", "provenance", "session_id", "comparability_id",
)
NUM_HEADLINE = 4  # of them, which the settings that differ follow
# fmt: on
OF_THE_SITE = ("short", "group", "counts", "page")  # of each row, in no column of their own
UNREAD = dict.fromkeys(OF_A_ROW)
RUN_ID = re.compile(r"(\d{8})T(\d{6})Z-(.*?)(-s\d+|-r\d+)(-\d+)?")


@dataclass
class Results:
    """A results folder, read."""

    folder: Path
    runs: list[tuple[str, Row]]  # by track, then time; a copy of a run is not in it
    damaged: dict[str, str]  # folder of a run that cannot be read: why
    num_copies: int

    @property
    def num_runs(self) -> int:
        """With the damaged."""
        return len(self.runs) + len(self.damaged)


def read(folder: Path | str) -> Results:
    """ValueError where there is no run."""
    folders = {f"{parent}/{name}" for parent, name, _ in run_folder.walk(os.path.abspath(folder))}
    if not folders:
        remedy = "./speedrun.sh makes some; ./run.sh report results/published shows the published"
        raise ValueError(f"{folder}: there is no run in it yet: {remedy}")
    result = index.read_rows([folder], on_error=lambda message: None)
    folders -= {path for path, _ in result}
    faults = {path: index.fault_of(path) for path in sorted(folders)}
    damaged = {path: _without(path, why) for path, why in faults.items() if why}
    result.sort(key=lambda one: (one[1]["track"] or "", one[1]["started_at"] or "", one[1]["run_id"]))
    by_id: dict[str, tuple[str, Row]] = {}
    for path, row in result:
        by_id.setdefault(row["run_id"], (path, row))
    return Results(Path(folder), list(by_id.values()), damaged, len(result) - len(by_id))


def _without(path: str, why: str) -> str:
    """A message without the folder that it begins with."""
    return why.removeprefix(path).lstrip("/: ")


def columns(results: Results, faults: Mapping[str, str]) -> dict[str, list[Any]]:
    """{column: a value for each run}, COLUMNS, the settings in which the runs differ, and OF_THE_SITE.

    faults: {run_id: why it has no page}.
    """
    rows: list[Any] = [row for _, row in results.runs]
    for row, (path, _) in zip(rows, results.runs):
        row["certificate"] = certificates.outcome(path)
    varied = [name for name in configs.varied(rows) if name not in COLUMNS]
    configs.add(rows, varied)
    group_of: dict[str, int] = {}
    counts: set[str] = set()
    for number, members in enumerate(table_groups.members_of(rows)):
        group_of |= {row["run_id"]: number for row in members}
        counts |= {row["run_id"] for row in table_groups.counted(members)}
    shown = [_shown(row, faults.get(row["run_id"])) | {name: _plain(row[name]) for name in varied} for row in rows]
    for row in shown:
        run_id = row["run_id"]
        row |= {"group": group_of[run_id], "counts": run_id in counts, "page": run_id not in faults}
    shown += [_unread(path, why) for path, why in results.damaged.items()]
    for row, short in zip(shown, short_ids([row["run_id"] for row in shown]), strict=True):
        row["short"] = short
    names = (*COLUMNS[:NUM_HEADLINE], *varied, *COLUMNS[NUM_HEADLINE:], *OF_THE_SITE)
    return {name: [row.get(name) for row in shown] for name in names}


def _plain(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _shown(row: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
    shown = {name: row.get(name) for name in COLUMNS}
    shown |= {"why": row["failure"], "source": row["source_sha256"] and row["source_sha256"][:8]}
    if fault:
        shown |= {"status": "damaged", "why": fault}
    elif row["discarded"] and row["status"] == "complete":
        shown["status"] = "warm-up"  # of a race's arm: in the ledger, in no mean
    if row["status"] != "complete":
        shown["validity"] = None  # a run that did not complete has no number to be valid
    return shown


def _unread(path: str, why: str) -> dict[str, Any]:
    parent, name = os.path.split(path)
    facts = {"run_id": name, "name": name, "track": os.path.basename(parent), "status": "damaged", "why": why}
    return UNREAD | facts | {"source": None, "group": -1, "counts": False, "page": False}


def short_ids(run_ids: Iterable[str]) -> list[str]:
    """Time of day, config_id and seed of each; with the date, or whole, where two would be alike."""
    run_ids = list(run_ids)
    forms = [_forms(run_id) for run_id in run_ids]
    shorts = [form[0] for form in forms]
    for number in (1, 2):
        alike: dict[str, list[int]] = {}
        for index_, short in enumerate(shorts):
            alike.setdefault(short, []).append(index_)
        for indices in alike.values():
            if len(indices) > 1:
                for index_ in indices:
                    shorts[index_] = forms[index_][number]
    return shorts


def _forms(run_id: str) -> tuple[str, str, str]:
    match = RUN_ID.fullmatch(run_id)
    if not match:
        return run_id, run_id, run_id
    date, time, name, seed, copy = match.groups()
    rest = f"{name.rpartition('-')[2]}{seed}{copy or ''}"
    is_unknown = date == "00000000"  # of a log that does not say when it began
    return (rest, run_id, run_id) if is_unknown else (f"{time}-{rest}", f"{date}-{time}-{rest}", run_id)
