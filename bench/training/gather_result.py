"""Writes, on rank 0 after training, what all ranks measured: steps.csv, steps_by_rank.csv and .result.tmp.

.result.tmp is the worker's half of run.json, which the launcher merges and removes.
"""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.record import run_folder, step_files
from bench.training.instruments.base import PHASES

PHASE_COLUMNS = tuple(f"{phase}_ms" for phase in PHASES)  # the instrument regions' columns, before all others
Row = dict[str, Any]  # a row of steps.csv: {column: value}


@dataclass
class RankResult:
    """What a rank measured."""

    train_s: float  # by its own clock
    validation_s: float
    num_validations: int
    rows: list[Row]  # StepLog's rows, one for each step from 1
    columns: dict[str, dict[str, dict[int, float | None]]]  # {instrument: {column: {row: value}}}
    flags: dict[str, dict[int, str]]  # {instrument: {row: flag}}
    summaries: dict[str, dict[str, Any]]  # {instrument: summary}
    doubts: dict[str, list[str]]  # {instrument: [sentence]}
    loader_wait_ms: float
    peak_mem_gib: dict[str, float]  # {kind: GiB}, the warm-up excluded
    foreign_cpu_cores: float | None  # cores used by others on its node, the same for all its ranks; None if unknown
    warnings: list[dict[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)  # events that have not been written yet
    node: int = 0
    t_offset_ns: int = 0  # added to this rank's t_ns, it gives node 0's clock
    code: dict[str, Any] = field(default_factory=dict)  # imported.facts()
    compile_flags: dict[str, Any] = field(default_factory=dict)  # compile_flags.changed(), except the harness's flags


def write(
    folder: Path, own_rows: list[Row], everyone: list[RankResult], facts: dict[str, Any], begins_look: bool
) -> None:
    """Writes steps.csv, steps_by_rank.csv, the other ranks' events and .result.tmp.

    own_rows are rank 0's rows of steps.csv, everyone has each rank's RankResult, facts the other fields of run.json:
    {"stopped_at", "model", "measured", "torch_facts", "instrument_summaries", "referee"}.  begins_look: a look follows.
    """
    step_files.write(folder, rows(own_rows, everyone), step_files.RUN_COLUMNS)
    if len(everyone) > 1 or any("is_of_all" in row for row in everyone[0].rows):
        step_files.write_by_rank(folder, _by_rank(everyone))
    events = []  # the other ranks' (rank 0's are written already), by node 0's clock, with the node unless it is 0
    for rank in everyone:
        node = {"node": rank.node} if rank.node else {}
        events += [event | {"t_ns": event["t_ns"] + rank.t_offset_ns} | node for event in rank.events]
    for event in sorted(events, key=lambda event: event["t_ns"]):
        step_files.append_event(folder, event)
    first = everyone[0]
    by_node = [rank.foreign_cpu_cores for rank in everyone if rank.foreign_cpu_cores is not None]
    measured_by_all = facts | {
        "measured": {
            "train_s_by_rank": [rank.train_s for rank in everyone],
            "validation_s": first.validation_s,
            "num_validations": first.num_validations,
            "peak_mem_gib_by_rank": {
                kind: [rank.peak_mem_gib[kind] for rank in everyone] for kind in first.peak_mem_gib
            },
            "loader_wait_ms": max(rank.loader_wait_ms for rank in everyone),
            "foreign_cpu_cores": max(by_node, default=None),
            "compile_flags": {name: value for rank in everyone for name, value in rank.compile_flags.items()},
            **facts["measured"],
        },
        "doubts": [
            {"rank": num, "instrument": name, "doubt": doubt}
            for num, rank in enumerate(everyone)
            for name, doubts in rank.doubts.items()
            for doubt in doubts
        ],
        "warnings": [{"rank": num, **warning} for num, rank in enumerate(everyone) for warning in rank.warnings],
    }
    if begins_look:  # until add_look() replaces it: from here on, a rank that ends does not fail the run
        measured_by_all["look"] = {"status": "begun", "began_s": time.monotonic()}
    atomic.write_json(folder / run_folder.RESULT, measured_by_all)


def add_look(folder: Path, facts: dict[str, Any], warnings: list[list[dict[str, str]]]) -> None:
    """Adds the facts of the look (look.py) and every rank's warnings to .result.tmp, unless the disk is full."""
    measured = atomic.read_json(folder / run_folder.RESULT)
    measured["look"] |= facts
    measured["warnings"] += [{"rank": num, **warning} for num, raised in enumerate(warnings) for warning in raised]
    with contextlib.suppress(OSError):
        atomic.write_json(folder / run_folder.RESULT, measured)


def rows(own_rows: list[Row], everyone: list[RankResult]) -> list[Row]:
    """Makes the run's rows of rank 0's: losses become means over ranks, milliseconds and columns maxima."""
    all_columns = [columns for rank in everyone for columns in rank.columns.values()]
    others = {name for columns in all_columns for name in columns}.difference(PHASE_COLUMNS)
    names = [name for name in PHASE_COLUMNS if any(name in columns for columns in all_columns)] + sorted(others)
    flags = [flag for rank in everyone for flag in rank.flags.values()]
    merged = []
    for row in own_rows:
        step = row["step"]
        flagged = ";".join(sorted({flag[step] for flag in flags if step in flag}))
        row = row | {"flags": flagged}
        if step:
            row["train_loss"] = sum(rank.rows[step - 1]["train_loss"] for rank in everyone) / len(everyone)
        if step and not flagged:
            # A flagged step keeps rank 0's: metrics subtracts them from the total, and when ranks waited for one that
            # wrote a trace, the maxima of neighbouring steps add up to more than the time that passed.
            row["step_ms"] = max(rank.rows[step - 1]["step_ms"] for rank in everyone)
        for name in names:
            values = [columns[name].get(step) for columns in all_columns if name in columns]
            row[name] = max((value for value in values if value is not None), default=None)
        merged.append(row)
    return merged


def _by_rank(everyone: list[RankResult]) -> dict[str, list[dict[int, float]]]:
    """Returns {"step_ms": [each rank's {row: milliseconds}]}, and "own_ms" alike if the regions are known.

    Ranks wait for each other within a step, so their step_ms are alike; own_ms is what a rank does before it can wait,
    its data and forward, and shows which rank was late.  Of steps before the number of ranks changed neither is known.
    """
    own_rows = [[row for row in rank.rows if "is_of_all" not in row] for rank in everyone]
    by_column = {"step_ms": [{row["step"]: row["step_ms"] for row in rank_rows} for rank_rows in own_rows]}
    regions = [rank.columns.get("regions", {}) for rank in everyone]
    if all(columns.get("data_ms") and columns.get("forward_ms") for columns in regions):
        by_column["own_ms"] = [
            {row: (columns["data_ms"].get(row) or 0.0) + (ms or 0.0) for row, ms in columns["forward_ms"].items()}
            for columns in regions
        ]
    return by_column
