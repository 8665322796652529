"""Writes and reads the numbers of each step (steps.csv, steps_by_rank.csv) and the events (events.jsonl) of a run."""

import contextlib
import errno
import hashlib
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from bench.base import atomic
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Missing

CORE_COLUMNS = ("step", "flags", "tokens", "lr", "train_loss", "val_loss", "step_ms")  # every record has these
RUN_COLUMNS = (*CORE_COLUMNS, "t_ns")  # our own runs write these; columns of instruments are added when they complete
# t_ns: rank 0's time.perf_counter_ns at the beginning of the step, as in events.jsonl
INT_COLUMNS = ("step", "tokens", "t_ns", "line_t_ns", "val_line_t_ns")
OF_SCRIPTS = ("wall_ms", "train_time_ms", "train_time_at_val_ms", "train_s")  # what rows of foreign scripts have too
STEPS, BY_RANK = "steps.csv", "steps_by_rank.csv"
LOSSES = ("step", "train_loss", "val_loss")
MIN_LOSSES = 8  # this many training losses never agree by chance, even if they are printed with four digits

# {column: value}: "step" int, "flags" str, INT_COLUMNS int, the others float; None is an empty cell
StepRow = dict[str, Any]
Validation = tuple[int, float | None, float]  # step, seconds of training so far, value of a metric


class Event(TypedDict):
    """A line of events.jsonl; each kind of event has further fields."""

    event: str
    t_ns: NotRequired[int | None]
    utc: NotRequired[str | None]
    step: NotRequired[int | None]
    rank: NotRequired[int | None]


class Cause(TypedDict):
    """What held up a step; ms: None if it is known only to coincide."""

    what: str
    ms: float | None


class Stall(Event, total=False):
    """A step far longer than the usual one."""

    ms: float  # above the usual step
    step_ms: float
    usual_ms: float
    what: str  # the first cause
    causes: list[Cause]
    where: dict[str, float]  # {"forward_ms": ..., ...}: what regions took above their usual


def write(
    folder: Path | str, rows: Sequence[StepRow], columns: Sequence[str] = CORE_COLUMNS, name: str = STEPS
) -> None:
    """Writes rows as CSV, atomically.  The given columns come first, then the others in order of appearance."""
    columns = list(dict.fromkeys([*columns, *(column for row in rows for column in row)]))
    text = ",".join(columns) + "\n" + "".join(_line(row, columns) for row in rows)
    atomic.write_text(Path(folder) / name, text)


def append(folder: Path | str, rows: Sequence[StepRow], columns: Sequence[str] = RUN_COLUMNS) -> None:
    """Appends rows to steps.csv, all or none.  Raises OSError if the disk is full."""
    _append(Path(folder) / "steps.csv", "".join(_line(row, columns) for row in rows))


def _append(path: Path, text: str) -> None:
    """Appends text in one write, so that the lines of two writers never mix.  After an OSError nothing is appended."""
    data = text.encode()
    with open(path, "ab", buffering=0, opener=plain_file.open_now) as file:
        whole = file.tell()
        if file.write(data) < len(data):
            file.truncate(whole)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(row: StepRow, columns: Sequence[str]) -> str:
    return ",".join(_cell(row.get(column)) for column in columns) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else repr(value)


def read(folder: Path | str, strict: bool = False, name: str = STEPS) -> list[StepRow]:
    """Reads steps.csv into rows in order of step (see StepRow); [] without the file.

    Lines of the same step are merged (runs of 2026-11 that were killed have two).  A line that was cut by a kill is
    skipped; with strict, a cut, damaged or repeated line raises ValueError, which names the file and the line.  A byte
    that is not UTF-8 always does.
    """
    path = Path(folder) / name
    try:
        head, *lines = plain_file.text(path, plain_file.MAX_LINES_BYTES).split("\n")
    except Missing:
        return []
    columns = head.split(",")
    cut = lines.pop() if lines else ""  # what follows the last newline
    if not cut and (whole := _whole(columns, lines)):
        return [dict(zip(columns, values)) for values in zip(*whole.values())]
    rows: dict[int, StepRow] = {}
    for number, line in enumerate(lines, 2):
        try:
            row = {name: _column(name, [cell])[0] for name, cell in zip(columns, line.split(","), strict=True)}
            if row["step"] is None or (strict and row["step"] in rows):
                raise ValueError
            filled = {name: value for name, value in row.items() if value not in (None, "")}
            rows.setdefault(row["step"], row).update(filled)
        except (ValueError, KeyError):
            if strict:
                raise ValueError(f"{path}: line {number} is damaged or repeated: {line[:60]!r}") from None
    if strict and cut:
        raise ValueError(f"{path}: the last line is cut: {cut[:60]!r}")
    return [rows[step] for step in sorted(rows)]


def read_columns(folder: Path | str, names: Sequence[str]) -> dict[str, list[Any]]:
    """Reads columns of steps.csv, {name: values in order of step; None if missing}, ten times as fast as read()."""
    with contextlib.suppress(ValueError):
        head, *lines, cut = plain_file.text(Path(folder) / "steps.csv", plain_file.MAX_LINES_BYTES).split("\n")
        columns = None if cut else _whole(head.split(","), lines, names)
        if columns:
            return {name: columns.get(name) or [None] * len(lines) for name in names}
    rows = read(folder)
    return {name: [row.get(name) for row in rows] for name in names}


def losses_id(columns: Mapping[str, list[Any]]) -> str | None:
    """Returns a hash that two runs share if all their losses are bit-identical; None without losses.

    columns: those of LOSSES, from read_columns().  If there are at least MIN_LOSSES training losses, only they are
    hashed, so that an additional validation does not change the hash.
    """
    steps, train, val = (columns[name] for name in LOSSES)
    losses: list[tuple[Any, ...]] = [(step, loss) for step, loss in zip(steps, train) if loss is not None]
    if len(losses) < MIN_LOSSES:
        losses = [row for row in zip(steps, train, val) if row[1:] != (None, None)]
    return hashlib.sha256(repr(losses).encode()).hexdigest() if losses else None


def losses_id_of(folder: Path | str) -> str | None:
    """Returns losses_id() of a run folder; None also if its steps.csv is damaged."""
    try:
        return losses_id(read_columns(folder, LOSSES))
    except ValueError:
        return None


def validations(folder: Path | str, metric: str = "val_loss") -> dict[int, float]:
    """Returns {step: value} of the validations in a run folder that have this metric.  Raises ValueError as read()."""
    columns = read_columns(folder, ("step", metric))
    return {step: value for step, value in zip(columns["step"], columns[metric]) if value is not None}


def _whole(columns: list[str], lines: list[str], names: Sequence[str] | None = None) -> dict[str, list[Any]] | None:
    """Parses whole columns at once: {name: values}; names=None: all.  None unless lines are whole and steps ascend."""
    cells, width = ",\n,".join([*lines, ""]).split(","), len(columns) + 1  # a cell "\n" marks the end of each line
    if cells.pop() or len(cells) != len(lines) * width or set(cells[width - 1 :: width]) - {"\n"}:
        return None
    wanted = columns if names is None else {"step", *names}
    try:
        values = {name: _column(name, cells[at::width]) for at, name in enumerate(columns) if name in wanted}
        steps = values["step"]
        return values if None not in steps and all(map(operator.lt, steps, steps[1:])) else None
    except (ValueError, KeyError):
        return None


def _column(name: str, cells: list[str]) -> list[Any]:
    if name == "flags":
        return list(cells)
    kind = int if name in INT_COLUMNS else float
    return [kind(cell) if cell else None for cell in cells] if "" in cells else list(map(kind, cells))


def write_by_rank(folder: Path | str, columns: dict[str, list[dict[int, float]]]) -> None:
    """Writes columns name_rank0, name_rank1, ..., to microseconds, from {name: [{step: milliseconds} of each rank]}."""
    by_column = {f"{name}_rank{rank}": ms for name, ranks in columns.items() for rank, ms in enumerate(ranks)}
    steps = sorted({step for rank_ms in by_column.values() for step in rank_ms})
    rows: list[StepRow] = [
        {"step": step} | {name: round(rank_ms[step], 3) for name, rank_ms in by_column.items() if step in rank_ms}
        for step in steps
    ]
    write(folder, rows, ("step", *by_column), BY_RANK)


def read_by_rank(folder: Path | str) -> dict[str, list[dict[int, float]]]:
    """Reads steps_by_rank.csv into {name: [{step: milliseconds} of each rank]}; {} without the file."""
    by_rank: dict[str, list[dict[int, float]]] = {}
    for row in read(folder, name=BY_RANK):
        for column, rank_ms in row.items():
            name, _, rank = column.rpartition("_rank")
            if name and int(rank) == len(by_rank.setdefault(name, [])):
                by_rank[name].append({})
            if name and rank_ms is not None:
                by_rank[name][int(rank)][row["step"]] = rank_ms
    return by_rank


def append_event(folder: Path | str, event: Mapping[str, Any]) -> None:
    """Appends an event: t_ns (time.perf_counter_ns), utc, event (its name) and further fields.  May raise OSError."""
    _append(Path(folder) / "events.jsonl", _event_line(event))


def write_events(folder: Path | str, events: Iterable[Mapping[str, Any]]) -> None:
    """Replaces events.jsonl, atomically.  May raise OSError."""
    atomic.write_text(Path(folder) / "events.jsonl", "".join(map(_event_line, events)))


def _event_line(event: Mapping[str, Any]) -> str:
    return json.dumps(atomic.without_nan(event)) + "\n"


def read_events(folder: Path | str) -> list[dict[str, Any]]:
    """Reads events.jsonl, without a cut last line; [] without the file.  Raises ValueError for a damaged line."""
    path = Path(folder) / "events.jsonl"
    try:
        lines = plain_file.text(path, plain_file.MAX_LINES_BYTES).split("\n")
    except Missing:
        return []
    events = [json_file.parsed(line, f"{path}, line {number}", Event) for number, line in enumerate(lines[:-1], 1)]
    for number, event in enumerate(events, 1):
        if event["event"] == "stall":
            json_file.check_kind(event, Stall, f"{path}, line {number}")
    return events
