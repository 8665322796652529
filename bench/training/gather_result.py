"""What all ranks measured -> the run's rows of steps.csv, steps_by_rank.csv and .result.tmp, by rank 0 after training.

The result is the worker's half of run.json: the launcher merges and removes it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from bench.base import atomic
from bench.machine import environment
from bench.record import run_folder, step_files


@dataclass
class RankResult:
    """What one rank measured."""

    train_s: float  # of its clock
    validation_s: float
    num_validations: int
    rows: list  # of StepLog, a dict for each step from 1
    columns: dict  # {instrument: {column: {row: value}}}
    flags: dict  # {instrument: {row: word}}
    summaries: dict  # {instrument: summary}
    doubts: dict  # {instrument: [sentence]}
    loader_wait_ms: float
    peak_mem_gib: dict  # {kind: GiB}, the warm-up excluded
    foreign_cpu_cores: float | None  # of all its node, the same on every rank there; None: not known
    warnings: list = field(default_factory=list)
    events: list = field(default_factory=list)  # not yet written
    node: int = 0
    t_offset_ns: int = 0  # what makes its t_ns those of node 0's clock
    code: dict = field(default_factory=dict)  # imported.facts()


def write(
    folder: Path,
    own_rows: list[dict],
    facts: dict,
    times: dict,
    everyone: list[RankResult],
    summaries: dict,
    stopped_at: int | None = None,
    referee: dict | None = None,
) -> None:
    """steps.csv, steps_by_rank.csv, the other ranks' events and .result.tmp.

    own_rows: rank 0's of steps.csv; facts: {"model", "measured"}, known before the first step; times: seconds of what
    came before it; everyone: each rank's RankResult; summaries: {instrument: the summary of all ranks together};
    stopped_at: the step after which profile.stop_after_window ended the run, None where it did not; referee: what the
    ranks found out about what they trained, for run.json["referee"].
    """
    step_files.write(folder, rows(own_rows, everyone), step_files.RUN_COLUMNS)
    if len(everyone) > 1:
        step_files.write_by_rank(folder, _by_rank(everyone))
    for event in sorted(_events(everyone), key=lambda event: event["t_ns"]):
        step_files.append_event(folder, event)  # of the other ranks; rank 0's are written already
    first = everyone[0]
    result = {
        "stopped_at": stopped_at,
        "model": facts["model"],
        "measured": {
            "train_s_by_rank": [rank.train_s for rank in everyone],
            "validation_s": first.validation_s,
            "num_validations": first.num_validations,
            **times,
            "peak_mem_gib_by_rank": {
                kind: [rank.peak_mem_gib[kind] for rank in everyone] for kind in first.peak_mem_gib
            },
            "loader_wait_ms": max(rank.loader_wait_ms for rank in everyone),
            "foreign_cpu_cores": _of_busiest_node(everyone),
            **facts["measured"],
        },
        "torch_facts": environment.torch_facts(),
        "instrument_summaries": summaries,
        "referee": referee or {},
        "doubts": [
            {"rank": num, "instrument": name, "doubt": doubt}
            for num, rank in enumerate(everyone)
            for name, doubts in rank.doubts.items()
            for doubt in doubts
        ],
        "warnings": [{"rank": num, **warning} for num, rank in enumerate(everyone) for warning in rank.warnings],
    }
    atomic.write_json(folder / run_folder.RESULT, result)


def _events(everyone):
    """Of all ranks, by node 0's clock; those of another node say which."""
    for rank in everyone:
        of_node = {"node": rank.node} if rank.node else {}
        for event in rank.events:
            yield event | {"t_ns": event["t_ns"] + rank.t_offset_ns} | of_node


def _of_busiest_node(everyone):
    known = [rank.foreign_cpu_cores for rank in everyone if rank.foreign_cpu_cores is not None]
    return max(known, default=None)


def rows(own_rows: list[dict], everyone: list[RankResult]) -> list[dict]:
    """Rank 0's rows of steps.csv -> the run's: losses are means over ranks, milliseconds and columns maxima."""
    columns_of_ranks = [of_one for rank in everyone for of_one in rank.columns.values()]
    columns = sorted({name for of_one in columns_of_ranks for name in of_one}, key=_column_order)
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
        for column in columns:
            values = [of_one[column].get(step) for of_one in columns_of_ranks if column in of_one]
            row[column] = max((value for value in values if value is not None), default=None)
        merged.append(row)
    return merged


def _by_rank(everyone):
    """{"step_ms", and where the regions are known "own_ms": [{row: milliseconds} of each rank]}.

    Ranks wait for each other within a step, so that their step_ms are alike; what a rank does before it can wait, its
    data and forward, is its own and shows who was late.
    """
    by_column = {"step_ms": [{row["step"]: row["step_ms"] for row in rank.rows} for rank in everyone]}
    regions = [rank.columns.get("regions", {}) for rank in everyone]
    if all(one.get("data_ms") and one.get("forward_ms") for one in regions):
        by_column["own_ms"] = [
            {row: one["data_ms"].get(row, 0.0) + ms for row, ms in one["forward_ms"].items()} for one in regions
        ]
    return by_column


def _column_order(name):
    order = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
    return (order.index(name) if name in order else len(order), name)
