"""How much B differs from A: rows of runs in (bench/record/rows.py), numbers with their uncertainty out.

The run is the unit, never steps pooled as if they were runs.  Interleaved runs are compared within blocks
(bench/compare/design.py), others by Welch's t on the logarithms.  Pairs are those of A and of B.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from bench.base import stats
from bench.base.stats import ALPHA
from bench.compare import clocks, eligibility, target
from bench.compare.clocks import Arms
from bench.compare.design import Design, Fit, fit, geometric_means
from bench.record.rows import Row, metric_of

DISAGREE, NOT_COUNTED = "clocks-disagree", "lower-loss-not-counted"  # flags
BASELINE_ALPHA = 0.01  # of the test that A differs from itself
EXTRA_ALPHA = 0.01  # of the test that B spends more outside its own clock than A
# by which means of the same code differ on one node within a day, and between sessions: public logs of modded-nanogpt,
# the halves of 86 groups of repeats in order of time, and 11 pairs of sessions
DRIFT_PCT, SESSION_DRIFT_PCT = 0.2, 1.8
MIN_FLOOR_PCT = 0.1  # no machine is calibrated finer: two runs of the same code in one session differ by about 0.08 %
# {measure: (column of a row, the key of its pair of means)}
SECONDARY: dict[str, tuple[Literal["energy_j", "peak_mem_gib", "compile_s"], str]] = {
    "energy": ("energy_j", "mean_j"),
    "memory": ("peak_mem_gib", "mean_gib"),
    "compile": ("compile_s", "mean_s"),
}


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


class Time(Change):
    outside: clocks.Outside | None  # None: records without the launcher's clock, which are compared by their own
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
    unclipped_pct: float | None  # the change without clipping; None: Welch's test, which clips nothing
    p_flips: float | None  # of the sign-flip test over rounds, a second opinion; None: it cannot be below alpha
    log_e: float | None  # log e-value against no difference, also of plans that do not look early
    baseline: Change | None  # of A's runs in even rounds against those in odd ones; None: fewer than four rounds
    drift_pct: float | None  # by which ci95_pct is wider to either side, for arms that were not interleaved


class Loss(TypedDict):
    """The goal's metric at the end, one value a seed; change, ci95, mean, sd, target and margin are in its unit."""

    metric: NotRequired[list[str]]  # its name, unit and direction; missing: val_loss

    p_holm: NotRequired[float | None]  # p adjusted among several candidates, as the next; missing: there is one
    p_equivalent_holm: NotRequired[float | None]

    change: float | None
    ci95: list[float] | None
    p: float | None
    n: list[int]
    mean: list[float | None]
    sd: list[float | None]
    target: float | None
    target_p_value: float  # that p_target must be below
    p_target: list[float | None]
    below_target: list[bool | None]
    margin: float
    margin_source: NotRequired[str]  # as words
    p_not_worse: float | None
    identical: bool | None  # all trajectories, bit for bit; None: unknown
    verdict: str  # waived, not_worse, worse, inconclusive, unknown: whether B is shown to be no worse
    p_equivalent: float | None  # two one-sided tests that the change lies inside the margin
    reasons: list[str]  # why the losses are not compared
    remarks: list[str]  # what differs between the arms that may change losses


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
        "outside": clocks.outside(arms, sign, edges, keys, design, alpha),
        "mean_s": geometric_means([eligibility.times_s(rows) for rows in arms], fitted),
        "ci90_pct": fitted.interval_pct(0.90) if fitted else None,
        "p_equivalent": fitted.p_equivalent(*edges) if fitted else None,
        "p_holm": None,
        "p_equivalent_holm": None,
        "floor_pct": floor_pct,
        "margin_pct": margin_pct,
        "alpha": alpha,
        "rounds": fitted.num_rounds if fitted else None,
        "clipped": fitted.num_clipped if fitted else 0,
        "unclipped_pct": 100 * math.expm1(fitted.unclipped) if fitted and fitted.num_rounds else None,
        "p_flips": fitted.p_flips if fitted else None,
        "log_e": fitted.log_e if fitted else None,
        "baseline": _against_itself(arms[0], design, alpha) if fitted and fitted.num_rounds else None,
        "drift_pct": drift_pct,
    }


def _against_itself(rows: Sequence[Row], design: Design | None, alpha: float) -> Change:
    """An A/A comparison within the race: the same code at other times of the same day, by the same method."""
    assert design is not None
    in_time = sorted(rows, key=lambda row: design.slots[eligibility.identity(row)])
    halves = [in_time[0::2], in_time[1::2]]
    slots = {eligibility.identity(row): slot for slot, row in enumerate(in_time)}
    halves_design = Design(slots, (), is_sequential=False)
    return change([eligibility.times_s(half) for half in halves], alpha, _keys(halves, halves_design), halves_design)[0]


def rests_on_clipping(time: Time) -> bool:
    """Whether the change has the other sign once outlying runs count in full: a slow run in ten may be the code's."""
    unclipped_pct = time.get("unclipped_pct")
    return unclipped_pct is not None and unclipped_pct * (time["change_pct"] or 0.0) < 0


def differs_from_itself(time: Time) -> bool:
    """Whether the runs of A say that something else than the code changes times from round to round."""
    baseline = time.get("baseline")  # an older race.json does not say it
    return baseline is not None and baseline["p"] is not None and baseline["p"] < BASELINE_ALPHA


def _keys(arms: Arms, design: Design | None) -> list[list[str]]:
    return [[eligibility.identity(row) for row in rows] if design else [""] * len(rows) for rows in arms]


def spends_more_outside(time: Time) -> bool:
    """Whether B is shown to spend more time outside its own clock than A: beyond the noise floor of A's time."""
    by_launcher = time.get("outside")
    if by_launcher is None or by_launcher.get("extra_p") is None:  # an older race.json does not say it
        return False
    floor_s = time["floor_pct"] / 100 * (time["mean_s"][0] or 0.0)
    return (by_launcher["extra_p"] or 0.0) < EXTRA_ALPHA and (by_launcher["extra_s"] or 0.0) > floor_s


def joint_p(time: Time, key: Literal["p", "p_equivalent"]) -> float | None:
    """The p by both clocks: the larger of the two, because a verdict needs both.

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
        "ci95_pct": fitted.interval_pct() if fitted else None,
        "p": fitted.test.p if fitted else None,
        "n": [len(group) for group in values],
        "cv_pct": [stats.cv_pct(group) if group else None for group in values],
        "mde_pct": fitted.detectable_pct(alpha, floor_pct) if fitted else None,
    }
    return numbers, fitted


def secondary(arms: Arms, alpha: float, design: Design | None = None) -> dict[str, Secondary]:
    """Energy, memory, compile time -> {name: Change}; they get no verdict."""
    changes: dict[str, Any] = {}
    for name, (column, mean_name) in SECONDARY.items():
        measured = [[row for row in rows if (row[column] or 0) > 0] for rows in arms]
        values = [[value for row in rows if (value := row[column]) is not None] for rows in measured]
        numbers, fitted = change(values, alpha, _keys(measured, design), design)
        changes[name] = {**numbers, mean_name: geometric_means(values, fitted)}
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
    metric = metric_of(complete)
    counts = {row["val_tokens"] for row in complete} - {None}
    data = {json.dumps(setting.get("val_data")) for setting in eligibility.settings_of(complete)} - {"null"}
    refused = ["validation data differ"] * (len(data) > 1)
    refused += ["numbers of validation tokens differ"] * (len(counts) > 1)
    if len(names_of_metrics := sorted({metric_of([row]).name for row in complete})) > 1:
        refused.append(f"the goals are of different metrics ({', '.join(names_of_metrics)})")
    refused += ["the budgets differ"] * (len({row.get("budget") for row in complete}) > 1)
    unjudged = refused or answer.loss_refusals
    groups = [target.independent(rows, ids) if force or not refused else [] for rows, ids in zip(arms, losses_ids)]
    values = [[metric.sign * score for score in target.mean_losses(group)] for group in groups]  # less is better
    if design is not None and not design.is_sequential:
        design = None
    keys = [[eligibility.identity(runs[0]) if design else "" for runs in group] for group in groups]
    fitted = fit(values, keys, design, ALPHA)
    test = fitted.test if fitted else None
    edges = fitted.interval() if fitted else None
    p_margin = stats.non_inferiority_p(test, margin_nats) if test else None
    judged = [
        target.loss_test([metric.sign * loss for loss in group], target_val_loss, p_value, metric) for group in values
    ]
    return {
        "metric": [metric.name, metric.unit, metric.direction],
        "change": metric.sign * test.difference if test else None,
        "ci95": sorted(metric.sign * edge for edge in edges) if edges and math.isfinite(edges[1]) else None,
        "p": test.p if test else None,
        "n": [loss_test["n"] for loss_test in judged],
        "mean": [loss_test["mean"] for loss_test in judged],
        "sd": [loss_test["sd"] for loss_test in judged],
        "target": target_val_loss,
        "target_p_value": p_value,
        "p_target": [loss_test["p"] for loss_test in judged],
        "below_target": [loss_test["below"] for loss_test in judged],
        "margin": margin_nats,
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
