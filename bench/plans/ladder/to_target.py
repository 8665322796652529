"""One run's way to the target: its validations, and the first of them at or below it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from bench.record import step_files
from bench.record.rows import Row
from bench.report import curve_data

Validation = tuple[int, float | None, float]  # step, seconds of training so far, val_loss


class Run(TypedDict):
    """One started run of a rung; None: not reached, not complete, not known."""

    run_id: str
    steps_to_target: float | None  # whole, unless it is interpolated
    to_target_s: float | None  # of training: no warm-up, no validation
    val_loss: float | None  # at the end, nats a token
    step_ms: float | None
    is_timed: bool  # its times count: complete, and not of a disturbed machine where others are


def curve_of(folder: Path | str) -> list[Validation]:
    """A run folder -> its validations, in order."""
    columns = step_files.read_columns(folder, curve_data.COLUMNS)
    lines = zip(columns["step"], curve_data.train_s_of(columns), columns["val_loss"], strict=True)
    return [line for line in lines if line[2] is not None]


def every_steps(curve: Sequence[Validation]) -> set[int]:
    """Steps between validations, without the last one's, which may come sooner."""
    steps = [step for step, _, _ in curve]
    return {later - step for step, later in zip(steps[:-1], steps[1:-1])} or {steps[-1] - steps[0]} if steps else set()


def way(curve: Sequence[Validation], goal: float, interpolate: bool = False) -> tuple[float | None, float | None]:
    """(steps, seconds) to the first validation at or below goal; (None, None) where none is.

    interpolate: to where the line from the validation before it crosses goal.
    """
    for number, (step, at_s, val_loss) in enumerate(curve):
        if val_loss <= goal:
            if not interpolate or not number:
                return step, at_s
            step_before, before_s, loss_before = curve[number - 1]
            frac = (loss_before - goal) / (loss_before - val_loss)
            seconds = None if None in (at_s, before_s) else before_s + frac * (at_s - before_s)
            return step_before + frac * (step - step_before), seconds
    return None, None


def of_run(row: Row, curve: Sequence[Validation], goal: float | None, interpolate: bool, is_timed: bool) -> Run:
    """A run's row and validations -> Run.  goal None: there is no target; is_timed: as in Run."""
    ended = is_ended(row)
    steps, seconds = way(curve, goal, interpolate) if ended and goal is not None else (None, None)
    return {
        "run_id": row["run_id"],
        "steps_to_target": steps,
        "to_target_s": seconds,
        "val_loss": row["val_loss"] if ended else None,
        "step_ms": row["step_avg_ms"] if ended else None,
        "is_timed": is_timed,
    }


def is_ended(row: Row) -> bool:
    """Whether its losses count: it is complete, and nothing shows that it is wrong."""
    return row["status"] == "complete" and row["validity"] != "invalid"
