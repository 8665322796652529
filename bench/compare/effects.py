"""How much B differs from A: rows of runs in (bench/record/rows.py), numbers with their uncertainty out.

The run is the unit, never steps pooled as if they were runs.  Interleaved runs are compared within blocks
(bench/compare/design.py), others by Welch's t on the logarithms.  Pairs are those of A and of B.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired, TypedDict, cast

from bench.base import stats
from bench.base.stats import ALPHA
from bench.compare import eligibility, target
from bench.compare.design import Design, Fit, fit
from bench.config.schema import TrackRules
from bench.record.rows import Row

DISAGREE, NOT_COUNTED = "clocks-disagree", "lower-loss-not-counted"  # flags
EXTRA_ALPHA = 0.01  # of the test that B spends more outside its own clock than A
MAX_VALIDATION_RATIO = 1.25  # of B's validation at step 0 to A's, beyond that of their steps (assumed)
# by which means of the same code differ on one node within a day, and between sessions: public logs of modded-nanogpt,
# the halves of 86 groups of repeats in order of time, and 11 pairs of sessions
DRIFT_PCT, SESSION_DRIFT_PCT = 0.2, 1.8
MIN_FLOOR_PCT = 0.1  # no machine is calibrated finer: two runs of the same code in one session differ by about 0.08 %
LOSS_MARGIN_NATS = TrackRules.loss_margin_nats  # a rise of the mean val_loss that still passes as "no worse"
# {measure: (column of a row, the key of its pair of means)}
SECONDARY: dict[str, tuple[Literal["energy_j", "peak_mem_gib", "compile_s"], str]] = {
    "energy": ("energy_j", "mean_j"),
    "memory": ("peak_mem_gib", "mean_gib"),
    "compile": ("compile_s", "mean_s"),
}


Arms = Sequence[Sequence[Row]]  # rows of A's runs, then of B's


class Change(TypedDict):
    """The change from A to B."""

    change_pct: float | None  # of the geometric means
    ci95_pct: list[float] | None  # low, high; None of a sequential plan, which has too few rounds for one
    p: float | None  # two-sided
    n: list[int]
    cv_pct: list[float | None]
    mde_pct: float | None  # the change that gets a verdict with a power of 80 %


class Secondary(Change, total=False):
    """The change in energy, memory or compile time, with the pair of means."""

    mean_j: list[float | None]
    mean_gib: list[float | None]
    mean_s: list[float | None]
    p_holm: float | None  # p adjusted among the three


class Outside(TypedDict):
    """The same change by the launcher's clock.  All None where unknown is not.

    Of each run the time from its first edge to its last, validations included, less the validation time that every run
    of both arms had: only what an arm spends outside its own clock beyond the other then differs from train_s.
    """

    unknown: str | None  # why there is none
    mean_s: list[float] | None
    change_pct: float | None
    ci95_pct: list[float] | None
    p: float | None  # two-sided
    p_same_sign: float | None  # one-sided, in the direction of the runs' own clocks, which have claimed it before
    p_equivalent: float | None
    extra_s: float | None  # what a run of B spends outside its own clock beyond one of A, at B's pace
    extra_ci95_s: list[float] | None
    extra_p: float | None  # one-sided, that it spends more


class Time(Change):
    outside: Outside | None  # None: records without the launcher's clock, which are compared by their own
    mean_s: list[float | None]  # geometric; where runs are compared within blocks, adjusted as the change is
    ci90_pct: list[float] | None
    p_equivalent: float | None  # two one-sided tests that the change lies inside the margin
    p_holm: float | None  # p adjusted among several candidates, as the next; None: there is one
    p_equivalent_holm: float | None
    floor_pct: float  # of the machine's noise: what it lets us see
    margin_pct: float  # of equivalence, fixed before: what matters in practice; never the noise
    alpha: float
    rounds: int | None  # that were compared within blocks; None: Welch's test, without blocks
    clipped: int  # outlying runs whose residuals were clipped
    p_flips: float | None  # of the sign-flip test over rounds, a second opinion; None: it cannot be below alpha
    log_e: float | None  # log e-value against no difference, also of plans that do not look early
    drift_pct: float | None  # by which ci95_pct is wider to either side, for arms that were not interleaved


class Loss(TypedDict):
    """Final val_loss in nats a token, one value a seed."""

    p_holm: NotRequired[float | None]  # p adjusted among several candidates, as the next; missing: there is one
    p_equivalent_holm: NotRequired[float | None]

    change_nats: float | None
    ci95_nats: list[float] | None
    p: float | None
    n: list[int]
    mean: list[float | None]
    sd: list[float | None]
    target: float | None
    target_p_value: float  # that p_target must be below
    p_target: list[float | None]
    below_target: list[bool | None]
    margin_nats: float
    p_not_worse: float | None
    identical: bool | None  # all trajectories, bit for bit; None: unknown
    verdict: str  # waived, not_worse, worse, inconclusive, unknown: whether B is shown to be no worse
    p_equivalent: float | None  # two one-sided tests that the change lies inside the margin
    reasons: list[str]  # why the losses are not compared
    remarks: list[str]  # what differs between the arms that may change losses


NOTHING_OUTSIDE = cast(Outside, dict.fromkeys(Outside.__annotations__))  # where the launcher's clock says nothing


def time(
    arms: Arms,
    floor_pct: float,
    margin_pct: float,
    alpha: float,
    design: Design | None = None,
    drift_pct: float | None = None,
) -> Time:
    """Run times of two arms; floor and margin are kept beside the numbers for bench/compare/verdict.py.

    design: None for Welch's test.  drift_pct: of arms that were not interleaved, what the machine alone may do to them.
    """
    keys = _keys(arms, design)
    numbers, fitted = change([eligibility.times_s(rows) for rows in arms], alpha, keys, design, floor_pct)
    sign = -1 if fitted and fitted.test.difference < 0 else 1
    edges = math.log1p(-margin_pct / 100), math.log1p(margin_pct / 100)
    if drift_pct is not None and (interval := numbers["ci95_pct"]) is not None:
        numbers["ci95_pct"] = [interval[0] - drift_pct, interval[1] + drift_pct]
    return {
        **numbers,
        "outside": outside(arms, sign, edges, keys, design, alpha),
        "mean_s": _means([eligibility.times_s(rows) for rows in arms], fitted),
        "ci90_pct": _pct_interval(fitted, 0.90),
        "p_equivalent": fitted.p_equivalent(*edges) if fitted else None,
        "p_holm": None,
        "p_equivalent_holm": None,
        "floor_pct": floor_pct,
        "margin_pct": margin_pct,
        "alpha": alpha,
        "rounds": fitted.num_rounds if fitted else None,
        "clipped": fitted.num_clipped if fitted else 0,
        "p_flips": fitted.p_flips if fitted else None,
        "log_e": fitted.log_e if fitted else None,
        "drift_pct": drift_pct,
    }


def _keys(arms: Arms, design: Design | None) -> list[list[str]]:
    return [[eligibility.identity(row) for row in rows] if design else [""] * len(rows) for rows in arms]


def _means(values: Sequence[Sequence[float]], fitted: Fit | None) -> list[float | None]:
    """Geometric means, whose ratio is the change; of one arm alone its own."""
    if fitted is None:
        return [math.exp(stats.mean(map(math.log, of_arm))) if of_arm else None for of_arm in values]
    half = fitted.test.difference / 2
    return [math.exp(fitted.middle - half), math.exp(fitted.middle + half)]


def outside(
    arms: Arms,
    sign: int,
    edges: tuple[float, float],
    keys: Sequence[Sequence[str]],
    design: Design | None,
    alpha: float,
) -> Outside | None:
    """sign: of the change by the runs' own clocks; edges: of equivalence, of the logarithm; the others as of time()."""
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
        "mean_s": [mean for mean in _means(values, fitted) if mean is not None],
        "change_pct": 100 * math.expm1(test.difference),
        "ci95_pct": _pct_interval(fitted, 0.95),
        "p": test.p,
        "p_same_sign": None if test.p is None else test.p / 2 if same_sign else 1 - test.p / 2,
        "p_equivalent": fitted.p_equivalent(*edges),
        "extra_s": extra.difference,
        "extra_ci95_s": _pair(stats.interval(extra)),
        "extra_p": None if extra.p is None else extra.p / 2 if extra.difference > 0 else 1 - extra.p / 2,
    }


def _extra(arms: Arms) -> stats.Welch:
    """What B spends outside its own clock beyond A, in seconds: hidden training lowers its loss at equal steps.

    B's validations may take as much longer than A's as its steps or its validation at step 0 do (a larger model).  A
    cheat may stretch either, by sleeping, so each may exceed the other by a quarter at most.  Of validations the
    shortest of each arm, because noise only adds.
    """
    off_clock_s = [[(row["outside_s"] or 0.0) - (row["train_s"] or 0.0) for row in rows] for rows in arms]
    shortest_s = [min(row.get("outside_validation_at_start_s") or 0.0 for row in rows) for rows in arms]
    a_s, b_s = (stats.mean(eligibility.times_s(rows)) for rows in arms)
    of_steps, of_start = b_s / a_s, shortest_s[1] / shortest_s[0] if min(shortest_s) > 0 else 1.0
    pace = max(1.0, min(max(of_steps, of_start), MAX_VALIDATION_RATIO * min(of_steps, of_start)))
    return stats.welch([pace * seconds for seconds in off_clock_s[0]], off_clock_s[1])


def spends_more_outside(time: Time) -> bool:
    """Whether B is shown to spend more time outside its own clock than A: beyond the noise floor of A's time."""
    by_launcher = time.get("outside")
    if by_launcher is None or by_launcher.get("extra_p") is None:  # an older race.json does not say it
        return False
    floor_s = time["floor_pct"] / 100 * (time["mean_s"][0] or 0.0)
    return (by_launcher["extra_p"] or 0.0) < EXTRA_ALPHA and (by_launcher["extra_s"] or 0.0) > floor_s


def has_outside_clock(rows: Sequence[Row]) -> bool:
    """Whether the records of these runs know of a launcher's clock: older code, and other harnesses, have none."""
    return any(row.get("outside_s") is not None or row.get("outside_unknown") for row in rows)


def joint_p(time: Time, key: Literal["p", "p_equivalent"]) -> float | None:
    """By both clocks: the larger, because a verdict is one of both.

    An intersection-union test (Berger 1982): its size is that of either test, with nothing to adjust.
    """
    by_launcher, own_p = time.get("outside"), time[key]
    if by_launcher is None or own_p is None:
        return own_p
    p = by_launcher["p_same_sign"] if key == "p" else by_launcher["p_equivalent"]
    return 1.0 if p is None else max(own_p, p)


def change(
    values: Sequence[Sequence[float]],
    alpha: float,
    keys: Sequence[Sequence[str]] = (),
    design: Design | None = None,
    floor_pct: float = 0.0,
) -> tuple[Change, Fit | None]:
    """Two lists of positive numbers -> (Change of the geometric means, the fit of their logarithms or None).

    keys: identities of the values' runs, for a design.  floor_pct: below which no difference counts.
    """
    logs = [[math.log(value) for value in group] for group in values]
    fitted = fit(logs, keys, design, alpha)
    numbers: Change = {
        "change_pct": 100 * math.expm1(fitted.test.difference) if fitted else None,
        "ci95_pct": _pct_interval(fitted, 0.95),
        "p": fitted.test.p if fitted else None,
        "n": [len(group) for group in values],
        "cv_pct": [stats.cv_pct(group) if group else None for group in values],
        "mde_pct": _mde_pct(fitted, alpha, floor_pct),
    }
    return numbers, fitted


def _mde_pct(fitted: Fit | None, alpha: float, floor_pct: float) -> float | None:
    """The change that is beyond the floor, with p < alpha, in 80 of 100 races."""
    if fitted is None or (detectable := fitted.smallest_difference(alpha)) is None:
        return None
    beyond_floor = math.log1p(floor_pct / 100) + fitted.spare(stats.WANTED_POWER)
    return 100 * math.expm1(max(detectable, beyond_floor if floor_pct else 0.0))


def _pct_interval(fitted: Fit | None, confidence: float) -> list[float] | None:
    edges = fitted.interval(confidence) if fitted else None
    return [100 * math.expm1(edge) for edge in edges] if edges and math.isfinite(edges[1]) else None


def _pair(edges: tuple[float, float] | None) -> list[float] | None:
    return list(edges) if edges and math.isfinite(edges[1]) else None


def secondary(arms: Arms, alpha: float, design: Design | None = None) -> dict[str, Secondary]:
    """Energy, memory, compile time -> {name: Change}; they get no verdict."""
    changes: dict[str, Any] = {}
    for name, (column, mean_name) in SECONDARY.items():
        measured = [[row for row in rows if (row[column] or 0) > 0] for rows in arms]
        values = [[value for row in rows if (value := row[column]) is not None] for rows in measured]
        numbers, fitted = change(values, alpha, _keys(measured, design), design)
        changes[name] = {**numbers, mean_name: _means(values, fitted)}
    for numbers, p_holm in zip(
        changes.values(), stats.holm([numbers["p"] for numbers in changes.values()]), strict=True
    ):
        numbers["p_holm"] = p_holm
    return changes


# ---- loss


def val_loss(
    arms: Arms,
    target_val_loss: float | None,
    p_value: float,
    margin_nats: float,
    identical: bool | None,
    force: bool,
    answer: eligibility.Answer,
    names: Sequence[str] = ("A", "B"),
    losses_ids: Sequence[Sequence[str | None] | None] = (None, None),
    design: Design | None = None,
) -> Loss:
    """arms: rows of all started runs.  target_val_loss None: there is none; force: also of different validation data.
    answer: what is only a matter of time (session, machine, instruments) is none of losses.
    losses_ids: for each arm those of its rows, as target.independent() takes them.  design: only of a plan that looks
    after every round, whose p must hold at every look; all others are judged by Welch's t.

    Repeats of one seed or of one trajectory are not independent losses and count as one.
    """
    complete = [row for rows in arms for row in rows if eligibility.is_complete(row)]
    counts = {row["val_tokens"] for row in complete} - {None}
    data = {json.dumps(setting.get("val_data")) for setting in eligibility.settings_of(complete)} - {"null"}
    refused = ["validation data differ"] * (len(data) > 1)
    refused += ["numbers of validation tokens differ"] * (len(counts) > 1)
    unjudged = refused or answer.loss_refusals
    groups = [target.independent(rows, ids) if force or not refused else [] for rows, ids in zip(arms, losses_ids)]
    values = [target.mean_losses(of_arm) for of_arm in groups]
    if design is not None and not design.is_sequential:
        design = None
    keys = [[eligibility.identity(runs[0]) if design else "" for runs in group] for group in groups]
    fitted = fit(values, keys, design, ALPHA)
    test = fitted.test if fitted else None
    edges = fitted.interval() if fitted else None
    p_margin = stats.non_inferiority_p(test, margin_nats) if test else None
    judged = [target.loss_test(group, target_val_loss, p_value) for group in values]
    return {
        "change_nats": test.difference if test else None,
        "ci95_nats": _pair(edges),
        "p": test.p if test else None,
        "n": [loss_test["n"] for loss_test in judged],
        "mean": [loss_test["mean"] for loss_test in judged],
        "sd": [loss_test["sd"] for loss_test in judged],
        "target": target_val_loss,
        "target_p_value": p_value,
        "p_target": [loss_test["p"] for loss_test in judged],
        "below_target": [loss_test["below"] for loss_test in judged],
        "margin_nats": margin_nats,
        "p_not_worse": p_margin,
        "identical": identical,
        "verdict": "unknown" if unjudged else _loss_verdict(edges, p_margin, identical),
        "p_equivalent": fitted.p_equivalent(-margin_nats, margin_nats) if fitted else None,
        "reasons": refused,
        "remarks": [] if unjudged else [*answer.loss_remarks, *_one_run(groups, names)],
    }


def _one_run(groups_of_arms: Sequence[Sequence[Sequence[Row]]], names: Sequence[str]) -> Iterator[str]:
    """Sentences about runs that count as one although their seeds differ: they have the same losses throughout."""
    for name, groups in zip(names, groups_of_arms, strict=True):
        for runs in groups:
            if len({row["seed"] for row in runs}) > 1:
                same = f"{len(runs)} runs of {name} have bit-identical training losses"
                yield f"{same}: they count as one loss, whatever their seeds"


def _loss_verdict(edges: tuple[float, float] | None, p_not_worse: float | None, identical: bool | None) -> str:
    if identical:
        return "waived"  # the same trajectories, bit for bit: there is nothing to test
    if edges is None or p_not_worse is None:
        return "unknown"
    if p_not_worse < ALPHA:
        return "not_worse"
    return "worse" if edges[0] > 0 else "inconclusive"
