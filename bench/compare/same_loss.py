"""Time and steps to the same loss in a race without a target, from the curves of its runs.

The loss, a value of the metric of the runs' goal, is the worst with which any run ended, so that every run has reached
it.  It depends on all runs alike: exchanging the names of two equal arms leaves it as it is, and so a test of the
times to it keeps its level.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from bench.compare import design, effects, eligibility
from bench.record.rows import Row, metric_of


class Curve(TypedDict):
    """The validations of a run."""

    train_s: list[float]
    step: list[int]
    val_loss: list[float]  # the goal's metric, its sign turned where higher is better


class SameLoss(TypedDict):
    """Of a candidate against the baseline; pairs are of both."""

    val_loss: float  # the goal's metric
    mean_s: list[float | None]  # geometric means of the seconds to it
    mean_steps: list[float]
    change_pct: float | None  # of the seconds
    ci95_pct: list[float] | None
    p: float | None
    verdict: str  # faster, slower, equivalent, inconclusive or not_comparable


def first_at(loss: float, at: Sequence[float], losses: Sequence[float]) -> float:
    """Where the losses first are no higher than that, linear between validations; at: of each validation."""
    number = next(number for number, value in enumerate(losses) if value <= loss)
    if number == 0:
        return at[0]
    frac = (losses[number - 1] - loss) / (losses[number - 1] - losses[number])
    return at[number - 1] + frac * (at[number] - at[number - 1])


def compared(
    arms: Sequence[Sequence[Row]], curves: Mapping[str, Curve], alpha: float, of_race: Mapping[str, Any], plan: Any
) -> SameLoss:
    """Rows of the complete runs of both arms, {run_id: curve} of all arms' runs.  alpha: of this question.

    of_race: the Comparison of both, for its floor, its margin and whether times may be compared; plan: of the race.
    """
    loss = max(curve["val_loss"][-1] for curve in curves.values())
    metric = metric_of(row for rows in arms for row in rows)

    def reached(axis: Literal["train_s", "step"]) -> list[list[float]]:
        of_each = [[curves[row["run_id"]] for row in rows] for rows in arms]
        return [[first_at(loss, curve[axis], curve["val_loss"]) for curve in of_arm] for of_arm in of_each]

    a_rows, b_rows = arms
    floor_pct, margin_pct = of_race["time"]["floor_pct"], of_race["time"]["margin_pct"]
    keys = [[eligibility.identity(row) for row in rows] for rows in arms]
    seconds = reached("train_s")
    numbers, fitted = effects.change(seconds, alpha, keys, design.of_rows(a_rows, b_rows, plan), floor_pct)
    change_pct, p = numbers["change_pct"], numbers["p"]
    p_equivalent = fitted.p_equivalent(math.log1p(-margin_pct / 100), math.log1p(margin_pct / 100)) if fitted else None
    verdict = "inconclusive" if of_race["comparable"] else "not_comparable"
    if of_race["comparable"] and p_equivalent is not None and p_equivalent < alpha:
        verdict = "equivalent"
    elif of_race["comparable"] and p is not None and change_pct is not None and p < alpha:
        verdict = ("faster" if change_pct < 0 else "slower") if abs(change_pct) > floor_pct else verdict
    return {
        "val_loss": metric.sign * loss,
        "mean_s": design.geometric_means(seconds, fitted),
        "mean_steps": [sum(of_arm) / len(of_arm) for of_arm in reached("step")],
        "change_pct": change_pct,
        "ci95_pct": numbers["ci95_pct"],
        "p": p,
        "verdict": verdict,
    }
