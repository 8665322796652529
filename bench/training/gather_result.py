"""What all ranks measured -> the run's rows of steps.csv, steps_by_rank.csv and .result.tmp, by rank 0 after training.

The result is the worker's half of run.json: the launcher merges and removes it.
"""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.machine import environment
from bench.record import run_folder, step_files
from bench.training.instruments.base import PHASES

PHASE_COLUMNS = tuple(f"{phase}_ms" for phase in PHASES)  # of the instrument regions, before all others
Row = dict[str, Any]  # of steps.csv, by column


@dataclass
class RankResult:
    """What one rank measured."""

    train_s: float  # of its clock
    validation_s: float
    num_validations: int
    rows: list[Row]  # of StepLog, one for each step from 1
    columns: dict[str, dict[str, dict[int, float | None]]]  # {instrument: {column: {row: value}}}
    flags: dict[str, dict[int, str]]  # {instrument: {row: word}}
    summaries: dict[str, dict[str, Any]]  # {instrument: summary}
    doubts: dict[str, list[str]]  # {instrument: [sentence]}
    loader_wait_ms: float
    peak_mem_gib: dict[str, float]  # {kind: GiB}, the warm-up excluded
    foreign_cpu_cores: float | None  # of all its node, the same on every rank there; None: not known
    warnings: list[dict[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)  # not yet written
    node: int = 0
    t_offset_ns: int = 0  # what makes its t_ns those of node 0's clock
    code: dict[str, Any] = field(default_factory=dict)  # imported.facts()
    compile_flags: dict[str, Any] = field(default_factory=dict)  # compile_flags.changed(), without the harness's own


def write(
    folder: Path, own_rows: list[Row], everyone: list[RankResult], known: dict[str, Any], begins_look: bool
) -> None:
    """steps.csv, steps_by_rank.csv, the other ranks' events and .result.tmp.

    own_rows: rank 0's of steps.csv; everyone: each rank's RankResult; known: what run.json says of the run beside that,
    {"stopped_at", "model", "measured", "instrument_summaries", "referee"}; begins_look: whether look.py comes next.
    """
    step_files.write(folder, rows(own_rows, everyone), step_files.RUN_COLUMNS)
    if len(everyone) > 1:
        step_files.write_by_rank(folder, _by_rank(everyone))
    events = []  # of the other ranks, by node 0's clock, those of another node say which; rank 0's are written already
    for rank in everyone:
        node = {"node": rank.node} if rank.node else {}
        events += [event | {"t_ns": event["t_ns"] + rank.t_offset_ns} | node for event in rank.events]
    for event in sorted(events, key=lambda event: event["t_ns"]):
        step_files.append_event(folder, event)
    first = everyone[0]
    by_node = [rank.foreign_cpu_cores for rank in everyone if rank.foreign_cpu_cores is not None]
    measured_by_all = known | {
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
            **known["measured"],
        },
        "torch_facts": environment.torch_facts(),
        "doubts": [
            {"rank": num, "instrument": name, "doubt": doubt}
            for num, rank in enumerate(everyone)
            for name, doubts in rank.doubts.items()
            for doubt in doubts
        ],
        "warnings": [{"rank": num, **warning} for num, rank in enumerate(everyone) for warning in rank.warnings],
    }
    if begins_look:  # until add_look(): whatever ends the ranks from here on ends no run
        measured_by_all["look"] = {"status": "begun", "began_s": time.monotonic()}
    atomic.write_json(folder / run_folder.RESULT, measured_by_all)


def add_look(folder: Path, facts: dict[str, Any], warnings: list[list[dict[str, str]]]) -> None:
    """facts: of the look (look.py), warnings: of each rank -> into what write() left, unless the disk is full."""
    measured = atomic.read_json(folder / run_folder.RESULT)
    measured["look"] |= facts
    measured["warnings"] += [{"rank": num, **warning} for num, raised in enumerate(warnings) for warning in raised]
    with contextlib.suppress(OSError):
        atomic.write_json(folder / run_folder.RESULT, measured)


def rows(own_rows: list[Row], everyone: list[RankResult]) -> list[Row]:
    """Rank 0's rows of steps.csv -> the run's: losses are means over ranks, milliseconds and columns maxima."""
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
            # Of a flagged step rank 0's: metrics takes them off the whole, and where ranks waited for one that wrote a
            # trace, the maxima of neighbouring steps are more than the time that passed.
            row["step_ms"] = max(rank.rows[step - 1]["step_ms"] for rank in everyone)
        for name in names:
            values = [columns[name].get(step) for columns in all_columns if name in columns]
            row[name] = max((value for value in values if value is not None), default=None)
        merged.append(row)
    return merged


def _by_rank(everyone: list[RankResult]) -> dict[str, list[dict[int, float]]]:
    """{"step_ms", and where the regions are known "own_ms": [{row: milliseconds} of each rank]}.

    Ranks wait for each other within a step, so that their step_ms are alike; what a rank does before it can wait, its
    data and forward, is its own and shows who was late.
    """
    by_column = {"step_ms": [{row["step"]: row["step_ms"] for row in rank.rows} for rank in everyone]}
    regions = [rank.columns.get("regions", {}) for rank in everyone]
    if all(columns.get("data_ms") and columns.get("forward_ms") for columns in regions):
        by_column["own_ms"] = [
            {row: (columns["data_ms"].get(row) or 0.0) + (ms or 0.0) for row, ms in columns["forward_ms"].items()}
            for columns in regions
        ]
    return by_column
