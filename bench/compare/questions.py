"""The questions that a comparison can ask (time, loss, time or steps to a target) and their verdicts.

The verdict on times is in bench/compare/verdict.py.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from bench.base import stats
from bench.base.metric import named
from bench.compare import effects, eligibility
from bench.compare.clocks import Arms
from bench.record.rows import Row, metric_of

QUESTIONS = {  # {value of the setting "on": what is compared}
    "time": "training time",
    "loss": "loss, at equal steps",
    "time_to_target": "time to the target loss",
    "steps_to_target": "steps to the target loss",
}
FIRM = ("faster", "slower", "better", "worse", "equivalent")  # verdicts that decide
LOSS_AT_STEPS = "loss_at_equal_steps"
LOSS_AT_TIME = "loss_at_equal_time"
KINDS = ("time_to_target", "steps_to_target", "ms_per_step", LOSS_AT_STEPS, LOSS_AT_TIME)


class Steps(TypedDict):
    """The comparison of the steps to the target.  Pairs are [A, B]."""

    mean: list[float | None]  # None for an arm without a timed run
    p: float | None  # p of a two-sided Welch t test; None if no arm's number of steps varies
    alpha: float  # threshold of p, divided among interim analyses and candidates (Bonferroni)
    why: str | None  # why the numbers of steps cannot be compared; None if they can


def steps_to(arms: Arms, loss: effects.Loss, alpha: float) -> Steps:
    """Compares the steps that both arms needed to reach the target.  arms: the timed runs.

    For runs that stop at the target, the steps are counted.  For runs of a fixed length, the mean val_loss of each arm
    must be shown to be below the target.
    """
    steps_by_arm = [[row["num_steps"] or 0 for row in rows] for rows in arms]
    why, ends = None, all(row["stop_at_target"] for rows in arms for row in rows)
    if loss["target"] is None:
        why = "the arms have no common target"
    elif ends:
        missed = sum(not row["target_reached"] for rows in arms for row in rows)
        why = f"{missed} runs did not reach the target" if missed else None
    elif loss["below_target"] != [True, True]:
        metric = metric_of([*arms[0], *arms[1]])
        why = f"the mean {metric.name} of both arms is not shown to be {metric.better} the target {loss['target']:g}"
    elif any(len(set(steps)) > 1 for steps in steps_by_arm):
        why = "the runs of an arm took different numbers of steps"
    if why is None and min(map(len, steps_by_arm)) < 2:
        why = "one run has no spread"
    test = stats.welch(*steps_by_arm) if all(steps_by_arm) else None
    means = [stats.mean(steps) if steps else None for steps in steps_by_arm]
    p, is_constant = test.p if test else None, ends and None not in means and means[0] != means[1]
    if p is None and is_constant:  # in each arm: the chance of this order of the runs
        p = 2 / math.comb(sum(map(len, steps_by_arm)), len(steps_by_arm[0]))
    return {"mean": means, "p": p, "alpha": alpha, "why": why}


def steps_answer(steps: Steps | None, is_at_a_look: bool) -> str:
    """Returns the verdict on the steps to the target: fewer are better."""
    if steps is None or steps["why"] is not None or not is_at_a_look:
        return "inconclusive"
    a, b = steps["mean"]
    assert a is not None and b is not None
    if steps["p"] is None:  # all runs of an arm take the same number of steps
        return "equivalent" if a == b else "better" if b < a else "worse"
    return "inconclusive" if steps["p"] >= steps["alpha"] else "better" if b < a else "worse"


def loss_answer(loss: effects.Loss, alpha: float, is_at_a_look: bool) -> str:
    """Returns the verdict on the goal's metric: equivalent inside the margin, else better or worse if p < alpha."""
    if loss["verdict"] == "unknown" and loss["reasons"]:
        return "not_comparable"
    if loss["verdict"] == "waived":
        return "equivalent"
    if loss["verdict"] == "unknown" or loss["p"] is None or loss["change"] is None or not is_at_a_look:
        return "inconclusive"
    p, p_equivalent = loss.get("p_holm"), loss.get("p_equivalent_holm")
    p, p_equivalent = loss["p"] if p is None else p, loss["p_equivalent"] if p_equivalent is None else p_equivalent
    if p_equivalent is not None and p_equivalent < alpha:
        return "equivalent"
    if p is not None and p < alpha:
        return "better" if named(*loss.get("metric", ())).sign * loss["change"] < 0 else "worse"
    return "inconclusive"


# ---- kinds


def kind_of(
    arms: Arms,
    names: Sequence[str],
    target: float | None,
    judged: str,
    has_times: bool,
    has_losses: bool,
    margin_pct: float,
) -> tuple[str | None, str]:
    """Returns what the arms can be compared by, as one of KINDS or None, and a sentence about it.

    arms: the timed runs.  target: that of the goal's metric, None if the arms have different ones.  judged: time or
    steps, by the track.  has_times, has_losses: whether they are compared.  margin_pct: times within it are equal.
    """
    steps = [_known_in(rows, "num_steps") for rows in arms]
    is_equal = len(set[int]().union(*steps)) < 2 and len(_known_in([*arms[0], *arms[1]], "batch_tokens")) < 2
    if has_times:
        missing = [name for name, rows in zip(names, arms, strict=True) if not _reaches(rows, target)]
        if not missing:
            stops = all(row["stop_at_target"] for rows in arms for row in rows)
            reached = f"the target of {target:g}, which {'every run reaches' if stops else 'both means reach'}"
            return _to_target(steps, reached, judged, is_equal)
        miss = f"{' and '.join(missing)} {'misses' if len(missing) == 1 else 'miss'}"
        why = "the arms share no target loss"
        if target is not None:
            why = f"the mean{'s' * (len(missing) > 1)} of {miss} {target:g}"
        return "ms_per_step", f"ms per step at {_at(steps)}; not time to a target, because {why}"
    if not has_losses:
        return None, "nothing: neither times nor losses"
    if is_equal:
        return LOSS_AT_STEPS, f"loss at {_at(steps)}; not times"
    settings = {row["comparability_id"] for rows in arms for row in rows}
    a_s, b_s = (stats.mean(eligibility.times_s(rows) or [math.nan]) for rows in arms)
    if len(settings) == 1 and None not in settings and abs(b_s / a_s - 1) < margin_pct / 100:  # False for nan
        return LOSS_AT_TIME, f"loss at equal time, after {_each(steps)} steps; not times"
    return None, f"losses after {_each(steps)} steps, which are neither equal steps nor equal time"


def _to_target(steps: list[set[int]], reached: str, judged: str, is_equal: bool) -> tuple[str, str]:
    if judged == "steps":
        return "steps_to_target", f"steps to {reached}: {_each(steps)}; this track does not judge time"
    also = f", at {_at(steps)}, so also ms per step"
    if not is_equal:
        also = f", in {_each(steps)} steps{' of other batches' * (steps[0] == steps[1])}, so not ms per step"
    return "time_to_target", f"time to {reached}{also}"


def _reaches(rows: Sequence[Row], target: float | None) -> bool:
    """Returns whether the arm reaches the target, by the rule that bench/compare/eligibility.py applies."""
    scores = [row["score"] for row in rows if row["score"] is not None]
    if target is None or not scores:
        return False
    if all(row["stop_at_target"] for row in rows):
        return all(row["target_reached"] for row in rows)
    return metric_of(rows).reaches(stats.mean(scores), target)


def _at(steps: list[set[int]]) -> str:
    all_steps = set[int]().union(*steps)
    return f"equal steps ({all_steps.pop():,})" if all_steps else "equal steps"


def _each(steps: list[set[int]]) -> str:
    return " and ".join(", ".join(f"{number:,}" for number in sorted(arm_steps)) or "unknown" for arm_steps in steps)


def _known_in(rows: Sequence[Row], column: Literal["num_steps", "batch_tokens"]) -> set[Any]:
    return {row[column] for row in rows} - {None}
