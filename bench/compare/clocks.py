"""The change from A to B by the launcher's clock, which runs outside the training processes."""

import math
from collections.abc import Sequence
from typing import TypedDict, cast

from bench.base import stats
from bench.compare import eligibility
from bench.compare.design import Design, fit, geometric_means
from bench.record.rows import Row

Arms = Sequence[Sequence[Row]]  # rows of A's runs, then of B's
BESIDE_ALPHA, BESIDE_FRAC = 0.01, 0.1  # of the test that B spends more beside the clock; of A's training time (assumed)
MORE_BESIDE = "more-beside-the-clock"  # flag of a Comparison where B spends more beside the clock
MAX_VALIDATION_RATIO = 1.25  # most by which the ratios B / A of validation and step times may differ (assumed)


class Outside(TypedDict):
    """The change by the launcher's clock.  If unknown is set, all else is None.

    A run's time is that from its first edge to its last, validations included, less the shortest validation time among
    all runs.  Only what one arm spends outside its own clock beyond the other then differs from train_s.
    """

    unknown: str | None  # why there is no such change; None if there is one
    mean_s: list[float] | None
    change_pct: float | None
    ci95_pct: list[float] | None
    p: float | None  # two-sided
    p_same_sign: float | None  # one-sided, in the direction of the change by the runs' own clocks
    p_equivalent: float | None
    extra_s: float | None  # time that a run of B spends outside its own clock beyond one of A, at B's pace
    extra_ci95_s: list[float] | None
    extra_p: float | None  # one-sided, for extra_s > 0


NOTHING_OUTSIDE = cast(Outside, dict.fromkeys(Outside.__annotations__))


def outside(
    arms: Arms,
    sign: int,
    edges: tuple[float, float],
    keys: Sequence[Sequence[str]],
    design: Design | None,
    alpha: float,
) -> Outside | None:
    """Compares the arms by the launcher's clock; returns None if an arm lacks it.

    sign: that of the change by the runs' own clocks.  edges: the equivalence margin for log times.
    """
    if not all(map(has_outside_clock, arms)):
        return None
    rows = [row for rows in arms for row in rows]
    if why := [row["outside_unknown"] for row in rows if row.get("outside_unknown")]:
        return {**NOTHING_OUTSIDE, "unknown": why[0]}
    whole_s = [[row["outside_s"] for row in rows if row.get("outside_s") is not None] for rows in arms]
    if sum(map(len, whole_s)) < len(rows):
        return {**NOTHING_OUTSIDE, "unknown": "some of the runs have no time by the launcher's clock"}
    common_s = min(row["outside_validations_s"] or 0.0 for row in rows)
    values = [[seconds - common_s for seconds in group if seconds is not None] for group in whole_s]
    if min(min(group) for group in values) <= 0:
        return {**NOTHING_OUTSIDE, "unknown": "the launcher's clock shows no time besides validations"}
    fitted = fit([[math.log(value) for value in group] for group in values], keys, design, alpha)
    assert fitted is not None
    test, extra = fitted.test, _extra(arms)
    same_sign = sign * test.difference > 0
    return {
        "unknown": None,
        "mean_s": [mean for mean in geometric_means(values, fitted) if mean is not None],
        "change_pct": 100 * math.expm1(test.difference),
        "ci95_pct": fitted.interval_pct(),
        "p": test.p,
        "p_same_sign": None if test.p is None else test.p / 2 if same_sign else 1 - test.p / 2,
        "p_equivalent": fitted.p_equivalent(*edges),
        "extra_s": extra.difference,
        "extra_ci95_s": list(extra_s) if (extra_s := stats.interval(extra)) else None,
        "extra_p": None if extra.p is None else extra.p / 2 if extra.difference > 0 else 1 - extra.p / 2,
    }


def without_times(by_launcher: Outside | None) -> Outside | None:
    """Returns only what an arm spends outside its own clock, where the times are not comparable."""
    if by_launcher is None:
        return None
    extra = {name: by_launcher[name] for name in ("extra_s", "extra_ci95_s", "extra_p")}
    return cast(Outside, NOTHING_OUTSIDE | extra | {"unknown": by_launcher["unknown"] or "times are not comparable"})


def _extra(arms: Arms) -> stats.Welch:
    """Tests how many seconds more B spends outside its own clock than A: hidden training lowers B's loss.

    A larger model may slow B's validations as much as its steps or its validation at step 0.  A cheat could stretch
    either by sleeping, so one ratio may exceed the other by at most 25 %.  Minima are used, as noise only adds time.
    Within a budget the time may also grow with the number of validations, as far as there are more steps too;
    eligibility.py limits it.
    """
    off_clock_s = [[(row["outside_s"] or 0.0) - (row["train_s"] or 0.0) for row in rows] for rows in arms]
    shortest_s = [min(row.get("outside_validation_at_start_s") or 0.0 for row in rows) for rows in arms]
    has_steps = all(row.get("num_steps") for rows in arms for row in rows)  # within a budget all train as long
    a_s, b_s = (
        stats.mean([(row["train_s"] or 0.0) / ((has_steps and row["num_steps"]) or 1) for row in rows]) for rows in arms
    )
    steps_ratio, start_ratio = b_s / a_s, shortest_s[1] / shortest_s[0] if min(shortest_s) > 0 else 1.0
    pace = max(1.0, min(max(steps_ratio, start_ratio), MAX_VALIDATION_RATIO * min(steps_ratio, start_ratio)))
    a_num, b_num = (stats.mean([row.get("num_scores") or 1 for row in rows]) for rows in arms)
    pace *= max(1.0, min(b_num / a_num, 1.0 / steps_ratio))  # within a budget: of more steps, more validations
    return stats.welch([pace * seconds for seconds in off_clock_s[0]], off_clock_s[1])


def spends_more_beside(arms: Arms) -> bool:
    """Returns whether a run of B spends more time before its clock starts and after it stops than one of A.

    Compilation is left out.  The rest may be training that no clock sees, if it is a tenth of A's training time.
    """
    beside_s = [
        [
            row["wall_s"] - row["outside_s"] - (row["compile_s"] or 0.0)
            for row in rows
            if row["wall_s"] and row["outside_s"]
        ]
        for rows in arms
    ]
    if min(map(len, beside_s)) < 2:
        return False
    extra = stats.welch(*beside_s)
    p = 1.0 if extra.p is None else extra.p / 2  # one-sided
    return p < BESIDE_ALPHA and extra.difference > BESIDE_FRAC * stats.mean(eligibility.times_s(arms[0]))


def has_outside_clock(rows: Sequence[Row]) -> bool:
    """Returns whether any run's record has the launcher's clock; older code and other harnesses have none."""
    return any(row.get("outside_s") is not None or row.get("outside_unknown") for row in rows)
