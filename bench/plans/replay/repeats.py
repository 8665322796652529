"""Compares a record with its repeats: its train_s with that of its replays, its loss with those of fresh seeds.

Times of another session, machine, software or protocol are not compared, nor those of runs that other programs
disturbed (compare/eligibility.py, record/validity.py). One run each gives no interval and no verdict: within BOUND_PCT,
or the session's noise floor if that is larger, the time is `reproduced`; beyond it a second replay tells a changed time
from a machine whose own runs lie as far apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.base import stats
from bench.compare import calibration, eligibility, target
from bench.plans.replay import outcomes
from bench.record.rows import Row

CONFIDENCE = 0.99  # level of the interval in which a record of the same distribution lies
BOUND_PCT = 8.0  # observed spread of runs of the same code between sessions: larger than within one
REPRODUCED, DIFFERS = "reproduced", "not reproduced"
NOT_COMPARABLE, UNDECIDED = "not comparable", "undecided"


@dataclass(frozen=True)
class Time:
    """The outcome as a word, a sentence, and numbers. None: not comparable, or the session was not calibrated."""

    word: str
    why: str
    recorded_s: float | None = None
    replayed_s: list[float] | None = None
    change_pct: float | None = None  # the replays' mean against the record
    floor_pct: float | None = None


def from_rows(recorded: Row, replayed: Sequence[Row]) -> Time:
    """Compares the time of the record's row (bench/record/rows.py) with those of its replays."""
    rows = [recorded, *replayed]
    refusals = eligibility.judge([recorded], list(replayed), ("the record", "the replay")).refusals
    for row in rows:
        if row["validity"] == "suspect":
            refusals.append(f"{row['run_id']} is suspect: {(row['machine_doubts'] or ['its own record doubts it'])[0]}")
    if refusals:
        return Time(NOT_COMPARABLE, refusals[0])
    kept = calibration.find_for_rows(rows)
    floor_pct = calibration.floor_for(kept, 1, len(replayed)) if kept else None
    recorded_s, times_s = recorded["train_s"] or 0.0, [row["train_s"] or 0.0 for row in replayed]
    changes_pct = [100 * (time_s / recorded_s - 1) for time_s in times_s]
    word, why = _judged(changes_pct, recorded_s, times_s, max(BOUND_PCT, floor_pct or 0.0))
    noise = "not measured" if floor_pct is None else f"{floor_pct:.2f} %"
    why = f"{why}; noise floor of this session: {noise}"
    return Time(word, why, recorded_s, times_s, stats.mean(changes_pct), floor_pct)


def _judged(
    changes_pct: Sequence[float], recorded_s: float, times_s: Sequence[float], bound_pct: float
) -> tuple[str, str]:
    seconds = f"{' and '.join(f'{time_s:.2f}' for time_s in times_s[:3])}{' ...' * (len(times_s) > 3)}"
    change = f"train_s {seconds} s against {recorded_s:.2f} s recorded, {stats.mean(changes_pct):+.1f} %"
    if len(times_s) > 2:
        low, high = prediction_interval(times_s, 0.95)
        change += f", 95 % of runs within {low:.2f} to {high:.2f} s"
        if low <= recorded_s <= high:
            return REPRODUCED, change
    if any(abs(change_pct) <= bound_pct for change_pct in changes_pct):
        return REPRODUCED, f"{change}, within {bound_pct:.1f} %"
    beyond = f"{change}, more than {bound_pct:.1f} %"
    if len(times_s) == 1:
        return UNDECIDED, f"{beyond}, and a second replay is needed to show whether this machine is steady"
    if max(changes_pct) - min(changes_pct) > bound_pct:
        return UNDECIDED, f"{beyond}, and the replays differ from each other by as much"
    return DIFFERS, f"{beyond}, and the replays agree with each other"


def judged_losses(
    recorded_loss: float, losses: Sequence[float], target_val_loss: float | None, p_value: float, reached: bool | None
) -> tuple[str, str, dict[str, Any]]:
    """Judges the record's loss by the last val_losses of fresh seeds. Returns (word, sentence, numbers).

    target_val_loss, p_value: the track's; reached: whether the record reached the target, None without one.
    """
    low, high = prediction_interval(losses)
    facts: dict[str, Any] = {
        "val_losses": list(losses),
        "prediction_interval": [low, high],
        "recorded_val_loss": recorded_loss,
    }
    is_within = low <= recorded_loss <= high
    sentences = [
        f"the recorded val_loss {recorded_loss:.4f} is {'within' if is_within else 'outside'} {low:.4f} to {high:.4f}, "
        f"where {CONFIDENCE:.0%} of runs lie by {len(losses)} fresh seeds (mean {stats.mean(losses):.4f})"
    ]
    word = outcomes.REPRODUCED if is_within else outcomes.DIFFERS
    if target_val_loss is not None and reached:
        test = target.loss_test(losses, target_val_loss, p_value)
        facts |= {"target_val_loss": target_val_loss, "p": test["p"]}
        is_below = f"{'' if test['below'] else 'not shown to be '}below {target_val_loss:g}"
        p = "no spread to judge by" if test["p"] is None else f"p = {test['p']:.2g}"
        sentences.append(f"their mean is {is_below} ({p})")
        word = word if test["below"] else outcomes.DIFFERS
    return word, "; ".join(sentences), facts


def prediction_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Returns where one more value of the same normal distribution lies: mean +- t(n - 1) * sd * sqrt(1 + 1/n).

    values: at least two. NIST/SEMATECH e-Handbook of Statistical Methods, section 7.2 and 1.3.5.2.
    """
    n, mean, sd = len(values), stats.mean(values), stats.sd(values)
    assert sd is not None  # there are at least two values
    half = stats.student_t_quantile(0.5 + confidence / 2, n - 1) * sd * (1 + 1 / n) ** 0.5
    return mean - half, mean + half
