"""What kind of comparison two arms give: time or steps to a target, ms per step, loss.  No verdict depends on it.

Rows in (bench/record/rows.py), a word and a sentence out.
"""

from collections.abc import Sequence

from bench.base import stats
from bench.record.rows import Row

LOSS_AT_STEPS, LOSS_AT_TIME = "loss_at_equal_steps", "loss_at_equal_time"
KINDS = ("time_to_target", "steps_to_target", "ms_per_step", LOSS_AT_STEPS, LOSS_AT_TIME)


def of(
    arms: Sequence[Sequence[Row]],
    names: Sequence[str],
    target: float | None,
    judged: str,
    has_times: bool,
    has_losses: bool,
    margin_pct: float,
) -> tuple[str | None, str]:
    """Rows of the runs of both arms that have a time -> (one of KINDS or None, the sentence).

    target: val_loss, None without a common one; judged: the track's, time or steps; has_times, has_losses: whether
    these are compared; margin_pct: mean times that differ by less are equal.
    """
    steps = [_known(rows, "num_steps") for rows in arms]
    is_equal = len(set().union(*steps)) < 2 and len(_known([*arms[0], *arms[1]], "batch_tokens")) < 2
    if has_times:
        missing = [name for name, rows in zip(names, arms, strict=True) if not _reaches(rows, target)]
        if not missing:
            stops = all(row["stop_at_target"] for rows in arms for row in rows)
            reached = f"the target {target:g}, which {'every run reaches' if stops else 'both reach on average'}"
            return _to_target(steps, reached, judged, is_equal)
        miss = f"{' and '.join(missing)} {'misses' if len(missing) == 1 else 'miss'}"
        why = "they have no common target" if target is None else f"the mean of {miss} {target:g}"
        return "ms_per_step", f"ms per step at {_at(steps)}; not time to a target: {why}"
    if not has_losses:
        return None, "nothing: neither times nor losses"
    if is_equal:
        return LOSS_AT_STEPS, f"loss at {_at(steps)}; not times"
    if _takes_as_long(arms, margin_pct):
        return LOSS_AT_TIME, f"loss at equal time, after {_each(steps)} steps; not times"
    return None, f"losses after {_each(steps)} steps, which are neither equal steps nor equal time"


def _to_target(steps, reached, judged, is_equal):
    if judged == "steps":
        return "steps_to_target", f"steps to {reached}: {_each(steps)}; this track does not judge time"
    also = f", at {_at(steps)}: so also ms per step"
    if not is_equal:
        also = f", in {_each(steps)} steps{' of other batches' * (steps[0] == steps[1])}: not ms per step"
    return "time_to_target", f"time to {reached}{also}"


def _reaches(rows, target):
    """By the mean, as bench/compare/eligibility.py asks; of runs that stop at the target, each."""
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    if target is None or not losses:
        return False
    if all(row["stop_at_target"] for row in rows):
        return all(row["target_reached"] for row in rows)
    return stats.mean(losses) <= target


def _takes_as_long(arms, margin_pct):
    settings = {row["comparability_id"] for rows in arms for row in rows}
    if not all(arms) or len(settings) != 1 or None in settings:
        return False
    a_s, b_s = (stats.mean([row["train_s"] for row in rows]) for rows in arms)
    return abs(b_s / a_s - 1) < margin_pct / 100


def _at(steps):
    known = set().union(*steps)
    return f"equal steps ({known.pop():,})" if known else "equal steps"


def _each(steps):
    return " and ".join(", ".join(f"{number:,}" for number in sorted(of_arm)) or "unknown" for of_arm in steps)


def _known(rows, column):
    return {row[column] for row in rows} - {None}
