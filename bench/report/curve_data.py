"""steps.csv -> the curves of a run, thinned to what a chart can show: losses and step time by step, time and tokens."""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.base.units import s_from_ms
from bench.record import step_files

COLUMNS = (
    "step", "flags", "tokens", "train_loss", "val_loss", "step_ms", "train_time_ms", "train_time_at_val_ms",
)  # fmt: skip
DIGITS = {"train_s": 5, "train_loss": 5, "step_ms": 4, "val_loss": 6}


def of_run(folder: Path | str, max_points: int = 500) -> dict:
    """A run folder -> of_columns(); a run without steps has empty curves."""
    return of_columns(step_files.read_columns(folder, COLUMNS), max_points)


def of_rows(rows: Sequence[Mapping], max_points: int = 500) -> dict:
    """Rows of steps, as record/step_files.read() has them -> of_columns()."""
    return of_columns({name: [row.get(name) for row in rows] for name in COLUMNS}, max_points)


def of_columns(columns: Mapping[str, Sequence], max_points: int) -> dict:
    """{"every": k, "train": {step, train_s, tokens, train_loss, step_ms}, "val": {step, train_s, tokens, val_loss}}.

    Lists of one length each.  With more than max_points steps a point of train is the mean of k steps, at the last of
    them, and of the validations each j-th from the end is kept.  train_s is the time so far: the printed one of a log,
    else the sum of step_ms; None where a log prints the time of some steps only.  Steps with a flag are in no step_ms.
    None is unknown.
    """
    steps, train_s = columns["step"], train_s_of(columns)
    loss_and_ms = zip(columns["train_loss"], columns["step_ms"], strict=True)
    trained = [number for number, (loss, ms) in enumerate(loss_and_ms) if loss is not None or ms is not None]
    validated = [number for number, loss in enumerate(columns["val_loss"]) if loss is not None]
    every = max(1, -(-len(trained) // max_points))
    plain_ms = [None if flag else ms for flag, ms in zip(columns["flags"], columns["step_ms"], strict=True)]
    ends = [trained[min(start + every, len(trained)) - 1] for start in range(0, len(trained), every)]
    kept = validated[:: -max(1, -(-len(validated) // max_points))][::-1]
    means = {"train_loss": columns["train_loss"], "step_ms": plain_ms}
    train = {name: _means([values[number] for number in trained], every) for name, values in means.items()}
    val = {"val_loss": [columns["val_loss"][number] for number in kept]}
    at_val_s = list(train_s)
    for number in kept:
        if columns["train_time_at_val_ms"][number] is not None:
            at_val_s[number] = s_from_ms(columns["train_time_at_val_ms"][number])
    return {
        "every": every,
        "train": _shared(steps, train_s, columns["tokens"], ends) | _rounded(train),
        "val": _shared(steps, at_val_s, columns["tokens"], kept) | _rounded(val),
    }


def train_s_of(columns: Mapping[str, Sequence]) -> list[float | None]:
    """Columns of COLUMNS -> seconds of training up to the end of each step; all None where a step's time is missing."""
    if columns["train_time_ms"].count(None) < len(columns["step"]):
        return _printed_s(columns["train_time_ms"])
    steps, step_ms = columns["step"], columns["step_ms"]
    if any("untimed" in (flags or "") for flags in set(columns["flags"])):
        is_untimed = ["untimed" in (flags or "") for flags in columns["flags"]]
        step_ms = [0.0 if untimed else ms for untimed, ms in zip(is_untimed, step_ms, strict=True)]
    is_whole = all(map(operator.le, steps[1:], map((1).__add__, steps)))
    if None in step_ms:
        is_whole &= all(ms is not None or loss is None for ms, loss in zip(step_ms, columns["train_loss"]))
        step_ms = [ms or 0.0 for ms in step_ms]
    if not is_whole or not any(step_ms):  # the former: a log that prints some steps only
        return [None] * len(steps)
    return [s_from_ms(ms) for ms in itertools.accumulate(step_ms)]


def _printed_s(train_time_ms):
    """Of a log that prints the time so far; what its clock took back after warm-up steps counts for nothing."""
    least_s, result = math.inf, []
    for ms in reversed(train_time_ms):
        least_s = least_s if ms is None else min(least_s, s_from_ms(ms))
        result.append(None if ms is None else least_s)
    return result[::-1]


def _means(values, every):
    """The mean of each so many values, without those that are None."""
    parts = [values[start : start + every] for start in range(0, len(values), every)]
    if every == 1:
        return values
    if None in values:
        parts = [[value for value in part if value is not None] for part in parts]
    return [sum(part) / len(part) if part else None for part in parts]


def _shared(steps, train_s, tokens, numbers):
    shared = {"step": [steps[number] for number in numbers], "tokens": [tokens[number] for number in numbers]}
    return shared | _rounded({"train_s": [train_s[number] for number in numbers]})


def _rounded(columns):
    return {
        name: None if values.count(None) == len(values) else _short(values, DIGITS[name])
        for name, values in columns.items()
    }


def packed(curves: dict) -> dict:
    """Of of_columns(), smaller: even steps as {"from", "by", "num", "last"}, tokens as the number of each step."""
    return curves | {part: _packed(curves[part]) for part in ("train", "val")}


def _packed(part):
    steps, tokens = part["step"], part["tokens"]
    if None in tokens:
        tokens = None
    elif steps and steps[-1] and not tokens[-1] % steps[-1]:
        a_step = tokens[-1] // steps[-1]
        tokens = a_step if tokens == [step * a_step for step in steps] else tokens
    if len(steps) > 3:
        start, by, num = steps[0], steps[1] - steps[0], len(steps)
        if steps[:-1] == list(range(start, start + by * (num - 1), by)):
            steps = {"from": start, "by": by, "num": num, "last": steps[-1]}
    return part | {"step": steps, "tokens": tokens}


def _short(values, digits):
    """None and what is not finite -> None."""
    form = f"%.{digits}g"
    return [None if value is None or value - value != 0 else float(form % value) for value in values]
