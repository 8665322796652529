"""Time and steps to the same loss in a race without a target, from the curves of its runs.

The loss is the worst final value of the goal's metric among all runs, so every run has reached it.  It is symmetric in
the arms: swapping two equal arms does not change it, so a test of the times to it keeps its level.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from bench.base.metric import VAL_LOSS, Metric
from bench.compare import design, effects, eligibility
from bench.record.rows import Row, metric_of
from bench.record.step_files import Validation


class SameLoss(TypedDict):
    """Time and steps of a baseline and a candidate to the same loss.  Pairs are [baseline, candidate]."""

    val_loss: float  # the loss that all runs reached, in the unit of the goal's metric
    mean_s: list[float | None]  # geometric mean time to the loss
    mean_steps: list[float]
    change_pct: float | None  # change of the geometric mean time
    ci95_pct: list[float] | None
    p: float | None
    alpha: float  # level of this question
    more_outside: bool  # whether the candidate spends more time outside its own clock, so that it is never faster
    verdict: str  # faster, slower, equivalent, inconclusive or not_comparable


def way(
    curve: Sequence[Validation], goal: float, metric: Metric = VAL_LOSS, interpolate: bool = False
) -> tuple[float | None, float | None]:
    """Returns (steps, seconds) to the first validation that reaches goal, or (None, None) if none does.

    interpolate: return where the line from the previous validation crosses goal instead.
    """
    for number, (step, at_s, value) in enumerate(curve):
        if metric.reaches(value, goal):
            if not interpolate or not number:
                return step, at_s
            step_before, before_s, value_before = curve[number - 1]
            frac = (value_before - goal) / (value_before - value)
            seconds = None if at_s is None or before_s is None else before_s + frac * (at_s - before_s)
            return step_before + frac * (step - step_before), seconds
    return None, None


def of(curves: Mapping[str, Sequence[Validation]], metric: Metric) -> float:
    """Returns the worst final value in the curves of {run_id: validations}."""
    return metric.sign * max(metric.sign * curve[-1][2] for curve in curves.values())


def compared(
    arms: Sequence[Sequence[Row]],
    curves: Mapping[str, Sequence[Validation]],
    alpha: float,
    race: Mapping[str, Any],
    plan: Any,
) -> SameLoss:
    """Compares the times of both arms' complete runs to the worst final loss in curves.

    curves: {run_id: validations with times} of all arms.  alpha: level of this question.  race: the arms' Comparison,
    for its noise floor, margin and comparability.  plan: the plan of the race.
    """
    metric = metric_of(row for rows in arms for row in rows)
    loss = of(curves, metric)
    ways = [[way(curves[row["run_id"]], loss, metric, interpolate=True) for row in rows] for rows in arms]

    def reached(axis: Literal[0, 1]) -> list[list[float]]:
        return [[cast(float, point[axis]) for point in arm_ways] for arm_ways in ways]

    a_rows, b_rows = arms
    floor_pct, margin_pct = race["time"]["floor_pct"], race["time"]["margin_pct"]
    keys = [[eligibility.identity(row) for row in rows] for rows in arms]
    seconds = reached(1)
    numbers, fitted = effects.change(seconds, alpha, keys, design.from_rows(a_rows, b_rows, plan), floor_pct)
    change_pct, p = numbers["change_pct"], numbers["p"]
    p_equivalent = fitted.p_equivalent(math.log1p(-margin_pct / 100), math.log1p(margin_pct / 100)) if fitted else None
    verdict = "inconclusive" if race["comparable"] else "not_comparable"
    if race["comparable"] and p_equivalent is not None and p_equivalent < alpha:
        verdict = "equivalent"
    elif race["comparable"] and p is not None and change_pct is not None and p < alpha:
        verdict = ("faster" if change_pct < 0 else "slower") if abs(change_pct) > floor_pct else verdict
    more_outside = bool(race.get("more_outside"))  # where it may have trained, with its clock still
    if more_outside and verdict == "faster":
        verdict = "inconclusive"
    return {
        "val_loss": loss,
        "mean_s": design.geometric_means(seconds, fitted),
        "mean_steps": [sum(steps) / len(steps) for steps in reached(0)],
        "change_pct": change_pct,
        "ci95_pct": numbers["ci95_pct"],
        "p": p,
        "alpha": alpha,
        "verdict": verdict,
        "more_outside": more_outside,
    }
