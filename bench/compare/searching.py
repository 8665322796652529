"""When a search promotes, drops and keeps a candidate: the rules of its races, and the error budget that they share.

    stop: Stop = {"sd": 0.003, "effect": 0.005, "level": None}       a race: level None; a confirmation has one
    outcome(stop, [[0.004, 0.006, ...]], num_rounds)                 PROMISING, KEEP, DROP, or None: go on

A gain is what the candidate is better by in one round (a run of each arm, back to back), on log time or in the unit of
the metric.  A candidate passes two stages, each on seeds of its own.

The race is Wald's sequential test of the effect that the search looks for against none, with the calibrated noise.  It
is a screen: it decides what is worth a confirmation, at any error rate, and spends nothing.

The confirmation keeps a candidate where its e-value reaches 1 / level.  The e-value is a product over the rounds of
2 / (1 + exp(-2 tilt gain)), with tilt = effect / (2 sd^2): where the candidate is no better, a gain is as likely to be
x as -x, so each factor has mean 1 at most given the rounds before (a test of symmetry: de la Pena 1999; Ramdas, Ruf,
Larsson and Koolen 2022), and the product reaches 1 / level with probability level at most, however often one looks
(Ville 1939).  Neither the noise of the candidate nor its shape is assumed: a factor is at most 2, so no lucky run keeps
anything.  sd decides how many rounds are needed, never how often a keep is wrong.

Which run of a round comes first is drawn in blocks of four rounds (bench/plans/race/plan.py), not for each round.  So
on a machine that drifts within a round, the sign of the drift in the third and fourth round follows from the first two,
and the mean of a factor given the rounds before can exceed 1.  The blocks cancel the drift in return: by simulation a
candidate that is no better is confirmed less often than with a coin for each round (0.2 % against 1.7 % at a level of
2.5 %, where half the drift is about 0.85 and the noise 1 in units of 1 / (2 tilt)).

The levels are those of LORD++ (Ramdas, Yang, Wainwright and Jordan, "Online control of the false discovery rate with
decaying memory", NeurIPS 2017): alpha is there to begin with and is earned again with each keep but the first, and what
is there is spent on the confirmations that follow by gamma_j = 1 / (j (j + 1)), which add up to 1.  So the levels of
all confirmations never add up to more than alpha for each keep so far, and to alpha before the first: in a search in
which nothing is better alpha is the chance that anything at all is kept, and of what is kept at most the share alpha
is false (E[false keeps] <= alpha E[keeps or 1]), for searches of any length.  Only confirmations count as tests,
because their seeds are fresh: given all that was seen before, each is valid by itself, whatever chose the candidate.
e-LOND (Xu and Ramdas, AISTATS 2024), which allows any dependence and earns less, takes a quarter more runs for a keep.
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
UNDECIDED = "undecided"
PROMOTE_LOG_ODDS = 0.5  # of the effect against none, at which a race ends in a confirmation
DROP_LOG_ODDS = -1.8  # at which it ends; a candidate that has the effect is dropped with a chance of exp(-1.8) at most
GIVE_UP_LOG_ODDS = -3.0  # at which a confirmation ends: what is known by then speaks for the candidate
SPARE = 4.0  # times the expected rounds are planned


class Stop(TypedDict):
    """The stopping rule of a race of a search, in its plan (sequential.stop)."""

    sd: float  # of one run, as gains are measured
    effect: float  # that the search looks for, as gains are measured
    level: float | None  # of the confirmation; None: a race that only screens


def level(alpha: float, kept: Sequence[bool]) -> float:
    """The level of the next confirmation, after those that ended in a keep or not."""
    j = len(kept) + 1
    keeps = [number for number, is_keep in enumerate(kept, 1) if is_keep]
    return alpha * math.fsum(_gamma(j - earned_at) for earned_at in (0, *keeps[1:]))


def _gamma(j: int) -> float:
    return 1 / (j * (j + 1))


def log_odds(stop: Stop, gains: Iterable[float]) -> float:
    """Log likelihood ratio of the effect against none: gains are normal with a variance of 2 sd^2."""
    effect, variance = stop["effect"], 2 * stop["sd"] ** 2
    return math.fsum((gain - effect / 2) * effect / variance for gain in gains)


def log_e(stop: Stop, gains: Iterable[float]) -> float:
    """Log e-value against "no better"."""
    tilt = stop["effect"] / (2 * stop["sd"] ** 2)
    return math.fsum(math.log(2) - _softplus(-2 * tilt * gain) for gain in gains)


def _softplus(x: float) -> float:
    """log(1 + exp(x))."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def outcome(stop: Stop, by_clock: Sequence[Sequence[float]]) -> Outcome | None:
    """What the rounds so far say; None: nothing yet.

    by_clock: the gains of all rounds by each clock that times them; the clock that speaks least for the candidate
    decides, which is valid for whoever is no better by one of them.
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
    """The number of rounds that a race or a confirmation of a candidate with the effect takes on average.

    What is needed over the rate at which the evidence grows: the mean of a round's log e-value, or of its log odds.
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
    """The number of rounds before which no confirmation ends in a keep."""
    return 1 if stop["level"] is None else math.ceil(-math.log(stop["level"]) / math.log(2))


def most_rounds(stop: Stop) -> int:
    """The rounds of a plan: enough for all but a few of the candidates that have the effect."""
    return max(least_rounds(stop) + 2, math.ceil(SPARE * expected_rounds(stop)))


def gains(pairs: Sequence[tuple[Row, Row]], on: str, metric: Metric) -> list[list[float]]:
    """Rows of the champion's and the candidate's run of each round -> their gains by each clock; on: the question.

    Of time by the run's own clock and, where the records know of it, by the launcher's, less the validations that both
    runs had; [] where a run has no time by the latter.  Of loss there is one clock.
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
    """What the rounds of a race of a search say so far."""

    outcome: Outcome | None
    why: str | None  # a sentence, where the numbers did not decide
    gain: float | None  # the mean by the clock that speaks least for the candidate
    gains: list[list[float]]
    log_odds: float | None
    log_e: float | None
    num_rounds: int  # in which both runs count


def judge(stop: Stop, on: str, champion: Sequence[Path], candidate: Sequence[Path]) -> Finding:
    """Folders of the runs of the champion and the candidate, round by round -> Finding.

    A run of the candidate that failed or is not valid drops it.  A round whose champion's run has no time is not
    counted.
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
            what = row["failure"] or f"it is {row['validity']}"
            return {**finding, "outcome": DROP, "why": f"run {row['run_id']} does not count: {what}"}
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
    """A sentence where two seeds gave the same losses throughout: one lucky draw, repeated, is one run."""
    seeds: dict[str, int | None] = {}
    for folder, row in zip(folders, rows, strict=True):
        losses_id = step_files.losses_id_of(folder)
        if losses_id is not None and seeds.setdefault(losses_id, row["seed"]) != row["seed"]:
            return f"seeds {seeds[losses_id]} and {row['seed']} gave bit-identical losses: it ignores its seed"
    return None
