"""When a search promotes, drops or keeps a candidate: the stopping rules of its races and their shared error budget.

    stop: Stop = {"sd": 0.003, "effect": 0.005, "level": None}       level: None for a race, a number to confirm
    outcome(stop, [[0.004, 0.006, ...]])                             PROMISING, KEEP, DROP, or None to continue

A gain is the improvement of the candidate over the champion in one round (a run of each arm, back to back), in log time
or in the unit of the metric.  A candidate passes two stages, a race and a confirmation, each on fresh seeds.

The race is Wald's sequential test of the effect that the search looks for against no effect, with the calibrated noise.
It only screens for candidates worth a confirmation, so its error rate is free and it spends no alpha.

The confirmation keeps a candidate when its e-value reaches 1 / level.  The e-value is a product over the rounds of
2 / (1 + exp(-2 tilt gain)), with tilt = effect / (2 sd^2).  If the candidate is no better, gains of x and -x are
equally likely, so each factor has a mean of at most 1 given the earlier rounds (a test of symmetry: de la Pena 1999;
Ramdas, Ruf, Larsson and Koolen 2022), and the product reaches 1 / level with probability at most level, however often
it is inspected (Ville 1939).  The distribution of the noise is not assumed; a factor is at most 2, so a single lucky
run keeps nothing.  sd determines how many rounds are needed, not how often a keep is wrong.

Which run of a round comes first is drawn in blocks of four rounds (bench/plans/race/plan.py), not for each round.  On a
machine that drifts within a round, the sign of the drift in the third and fourth round therefore follows from the first
two, and the mean of a factor given the earlier rounds can exceed 1.  In return the blocks cancel the drift: by
simulation, a candidate that is no better is confirmed less often than if each round were randomized independently
(0.2 % vs 1.7 % at a level of 2.5 %, where half the drift is about 0.85 and the noise 1 in units of 1 / (2 tilt)).

The levels are those of LORD++ (Ramdas, Yang, Wainwright and Jordan, "Online control of the false discovery rate with
decaying memory", NeurIPS 2017).  The budget starts at alpha, and each keep but the first adds alpha; each of these is
spent on the confirmations that follow by gamma_j = 1 / (j (j + 1)), which add up to 1.  So the levels of all
confirmations add up to at most alpha per keep, and to alpha before the first.  If nothing is better, alpha bounds the
probability that a search of any length keeps anything, and otherwise the share of false keeps:
E[false keeps] <= alpha E[keeps or 1].  Only confirmations count as tests, because their seeds are fresh: given all
earlier results, each is valid by itself, however the candidate was chosen.  e-LOND (Xu and Ramdas, AISTATS 2024), which
allows any dependence and earns less, takes a quarter more runs for a keep.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from bench.base.metric import Metric
from bench.compare import clocks, eligibility
from bench.record import run_folder, step_files
from bench.record.rows import Row, metric_of, row_of

Outcome = Literal["promising", "keep", "drop"]
PROMISING: Outcome = "promising"
KEEP: Outcome = "keep"
DROP: Outcome = "drop"
PROMOTE_LOG_ODDS = 0.5  # log odds of the effect vs none at which a race leads to a confirmation
DROP_LOG_ODDS = -1.8  # log odds at which a race drops; with the effect, the probability is at most exp(-1.8)
GIVE_UP_LOG_ODDS = -3.0  # log odds at which a confirmation drops; lower, because the race favoured the candidate
SPARE = 4.0  # planned rounds as a multiple of the expected ones


class Stop(TypedDict):
    """The stopping rule of a search's race, stored in the race's plan (sequential.stop)."""

    sd: float  # standard deviation of one run, in the unit of the gains
    effect: float  # the effect that the search looks for, in the unit of the gains
    level: float | None  # level of a confirmation; None for a race


def level(alpha: float, kept: Sequence[bool]) -> float:
    """Returns the level of the next confirmation.  kept: whether each earlier confirmation ended in a keep."""
    j = len(kept) + 1
    keeps = [number for number, is_keep in enumerate(kept, 1) if is_keep]
    return alpha * math.fsum(_gamma(j - earned_at) for earned_at in (0, *keeps[1:]))


def _gamma(j: int) -> float:
    return 1 / (j * (j + 1))


def log_odds(stop: Stop, gains: Iterable[float]) -> float:
    """Returns the log likelihood ratio of the effect vs none, for normal gains with a variance of 2 sd^2."""
    effect, variance = stop["effect"], 2 * stop["sd"] ** 2
    return math.fsum((gain - effect / 2) * effect / variance for gain in gains)


def log_e(stop: Stop, gains: Iterable[float]) -> float:
    """Returns the log e-value against the hypothesis that the candidate is no better."""
    tilt = stop["effect"] / (2 * stop["sd"] ** 2)
    return math.fsum(math.log(2) - _softplus(-2 * tilt * gain) for gain in gains)


def _softplus(x: float) -> float:
    """Returns log(1 + exp(x)) without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def outcome(stop: Stop, by_clock: Sequence[Sequence[float]]) -> Outcome | None:
    """Returns the outcome of the rounds so far, or None if the race must continue.

    by_clock: the gains of all rounds by each clock.  The clock least favourable to the candidate decides, so the error
    rate holds for a candidate that is no better by either clock.
    """
    if not by_clock or not min(map(len, by_clock)):
        return None
    odds = min(log_odds(stop, gains) for gains in by_clock)
    if stop["level"] is None:
        return PROMISING if odds >= PROMOTE_LOG_ODDS else DROP if odds <= DROP_LOG_ODDS else None
    if min(log_e(stop, gains) for gains in by_clock) >= -math.log(stop["level"]):
        return KEEP
    return DROP if odds <= GIVE_UP_LOG_ODDS else None


def expected_rounds(stop: Stop) -> float:
    """Returns the mean number of rounds that a candidate with the effect takes to pass.

    It is the required evidence divided by the mean of a round's log odds, or log e-value in a confirmation.
    """
    sd = math.sqrt(2) * stop["sd"]
    grid = [number / 10 for number in range(-50, 51)]
    weights = [math.exp(-z * z / 2) for z in grid]
    if stop["level"] is None:
        return PROMOTE_LOG_ODDS / (stop["effect"] ** 2 / (2 * sd**2)) + 1
    growth = [weight * log_e(stop, [stop["effect"] + sd * z]) for z, weight in zip(grid, weights, strict=True)]
    rate = math.fsum(growth) / math.fsum(weights)
    return max(-math.log(stop["level"]) / max(rate, 1e-9), least_rounds(stop)) + 0.5


def least_rounds(stop: Stop) -> int:
    """Returns the smallest number of rounds after which a confirmation can keep; 1 for a race."""
    return 1 if stop["level"] is None else math.ceil(-math.log(stop["level"]) / math.log(2))


def most_rounds(stop: Stop) -> int:
    """Returns the number of rounds to plan: enough for nearly all candidates that have the effect."""
    return max(least_rounds(stop) + 2, math.ceil(SPARE * expected_rounds(stop)))


def gains(pairs: Sequence[tuple[Row, Row]], on: str, metric: Metric) -> list[list[float]]:
    """Returns the gains of all rounds by each clock.  pairs: the champion's and the candidate's run; on: the question.

    Times are compared by the runs' own clocks and, if the records have it, by the launcher's, less the shorter of both
    runs' validation times; [] if a run has no time left by the latter.  Losses give one list.
    """
    if on == "loss":
        return [[metric.sign * (_score(a) - _score(b)) for a, b in pairs]]
    own = [math.log((a["train_s"] or math.nan) / (b["train_s"] or math.nan)) for a, b in pairs]
    if not all(map(clocks.has_outside_clock, zip(*pairs, strict=True))):
        return [own]
    outside = []
    for pair in pairs:
        common_s = min(row["outside_validations_s"] or 0.0 for row in pair)
        a_s, b_s = ((row["outside_s"] or 0.0) - common_s for row in pair)
        if min(a_s, b_s) <= 0:
            return []
        outside.append(math.log(a_s / b_s))
    return [own, outside]


def _score(row: Row) -> float:
    assert row["score"] is not None
    return row["score"]


class Finding(TypedDict):
    """The state of a search's race after the rounds so far."""

    outcome: Outcome | None  # None if the race must continue
    why: str | None  # a sentence, if something other than the numbers decided
    gain: float | None  # mean gain by the clock least favourable to the candidate
    gains: list[list[float]]  # as gains() returns them
    log_odds: float | None
    log_e: float | None
    num_rounds: int  # rounds in which both runs have a value


def judge(stop: Stop, on: str, champion: Sequence[Path], candidate: Sequence[Path]) -> Finding:
    """Judges the rounds so far from the run folders of the champion and the candidate.

    A candidate with a failed or invalid run is dropped.  A round whose champion's run has no value is skipped.
    """
    a_rows, b_rows = ([row_of(run_folder.read(folder)) for folder in folders] for folders in (champion, candidate))
    has_value = eligibility.is_complete if on == "loss" else eligibility.is_timed
    pairs = [(a, b) for a, b in zip(a_rows, b_rows, strict=False) if has_value(a) and has_value(b)]
    finding: Finding = {
        "outcome": None,
        "why": None,
        "gain": None,
        "gains": [],
        "log_odds": None,
        "log_e": None,
        "num_rounds": len(pairs),
    }
    for row in b_rows:
        if not has_value(row):
            reason = row["failure"] or f"it is {row['validity']}"
            return {**finding, "outcome": DROP, "why": f"run {row['run_id']} does not count: {reason}"}
    if on == "loss" and (why := _repeated(candidate, b_rows)):
        return {**finding, "outcome": DROP, "why": why}
    if not pairs:
        return finding
    by_clock = gains(pairs, on, metric_of(a_rows))
    if not by_clock:
        return {**finding, "why": "the launcher has no time of some of the runs"}
    least = min(by_clock, key=math.fsum)
    return {
        "outcome": outcome(stop, by_clock),
        "why": None,
        "gain": math.fsum(least) / len(least),
        "gains": by_clock,
        "log_odds": min(log_odds(stop, clock_gains) for clock_gains in by_clock),
        "log_e": min(log_e(stop, clock_gains) for clock_gains in by_clock),
        "num_rounds": len(pairs),
    }


def _repeated(folders: Sequence[Path], rows: Sequence[Row]) -> str | None:
    """Returns a sentence if two seeds gave bit-identical losses, which would count one lucky draw twice, else None."""
    seeds: dict[str, int | None] = {}
    for folder, row in zip(folders, rows, strict=True):
        losses_id = step_files.losses_id_of(folder)
        if losses_id is not None and seeds.setdefault(losses_id, row["seed"]) != row["seed"]:
            return f"seeds {seeds[losses_id]} and {row['seed']} gave bit-identical losses: it ignores its seed"
    return None
