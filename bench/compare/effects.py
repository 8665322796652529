"""Estimates how much B differs from A, with uncertainty, from the rows of their runs (bench/record/rows.py).

The sample consists of runs; steps are never pooled.  Interleaved runs are compared within blocks
(bench/compare/design.py), others by Welch's t test of the logarithms.  Pairs are [A, B].
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from bench.base import stats
from bench.base.stats import ALPHA
from bench.compare import clocks, eligibility, target
from bench.compare.clocks import Arms
from bench.compare.design import Design, Fit, fit, geometric_means
from bench.record import configs
from bench.record.rows import Row, metric_of

DISAGREE, NOT_COUNTED, ONE_SIDED = "clocks-disagree", "lower-loss-not-counted", "one-sided-exclusions"  # flags
BASELINE_ALPHA = 0.01  # level of the test that A differs from itself
MAX_ONE_SIDED = 1  # most failed, interrupted or excluded runs of an arm beyond those of another
EXTRA_ALPHA = 0.01  # level of the test that B spends more time outside its own clock than A
# differences between means of the same code on one node within a day, and between sessions, in public logs of
# modded-nanogpt: the halves of 86 groups of repeats in order of time, and 11 pairs of sessions
DRIFT_PCT, SESSION_DRIFT_PCT = 0.2, 1.8
MIN_FLOOR_PCT = 0.1  # minimum noise floor: two runs of the same code in one session differ by about 0.08 %
# {measure: (column of a row, the key of its pair of means)}
SECONDARY: dict[str, tuple[Literal["energy_j", "peak_mem_gib", "compile_s"], str]] = {
    "energy": ("energy_j", "mean_j"),
    "memory": ("peak_mem_gib", "mean_gib"),
    "compile": ("compile_s", "mean_s"),
}


class Change(TypedDict):
    """The change from A to B."""

    change_pct: float | None  # change of the geometric mean
    ci95_pct: list[float] | None  # [low, high]; None also if a sequential plan has too few rounds
    p: float | None  # two-sided
    n: list[int]
    cv_pct: list[float | None]
    mde_pct: float | None  # the minimum detectable effect, at a power of 80 %


class Secondary(Change, total=False):
    """The change in energy, memory or compile time, and one of the pairs of means."""

    mean_j: list[float | None]
    mean_gib: list[float | None]
    mean_s: list[float | None]
    p_holm: float | None  # p adjusted among the three measures


class Time(Change):
    outside: clocks.Outside | None  # None if the records lack the launcher's clock
    mean_s: list[float | None]  # geometric means, adjusted as the change is if runs are compared within blocks
    ci90_pct: list[float] | None
    p_equivalent: float | None  # two one-sided tests that the change lies inside the margin
    p_holm: float | None  # p adjusted among several candidates; None if there is only one
    p_equivalent_holm: float | None  # p_equivalent adjusted likewise
    floor_pct: float  # the machine's noise floor: what it can resolve
    margin_pct: float  # equivalence margin, fixed in advance: what matters in practice
    alpha: float
    rounds: int | None  # number of rounds compared within blocks; None for Welch's test
    clipped: int  # outlying runs whose residuals were clipped
    unclipped_pct: float | None  # the change without clipping; None for Welch's test, which clips nothing
    p_flips: float | None  # p of the sign-flip test over rounds, a second opinion; None if it cannot be below alpha
    log_e: float | None  # log e-value against no difference, also for plans without interim analyses
    baseline: Change | None  # A's runs in even rounds vs those in odd ones; None if there are too few rounds
    drift_pct: float | None  # widens ci95_pct on either side if the arms were not interleaved, else None


class Loss(TypedDict):
    """The goal's metric at the end, one value per seed; change, ci95, mean, sd, target and margin are in its unit."""

    metric: NotRequired[list[str]]  # [name, unit, direction]; val_loss if missing

    p_holm: NotRequired[float | None]  # p adjusted among several candidates; missing if there is only one
    p_equivalent_holm: NotRequired[float | None]  # p_equivalent adjusted likewise

    mde: NotRequired[float | None]  # the minimum detectable effect, at a power of 80 %; missing in earlier versions

    change: float | None
    ci95: list[float] | None
    p: float | None
    n: list[int]
    mean: list[float | None]
    sd: list[float | None]
    target: float | None
    target_p_value: float  # threshold of p_target
    p_target: list[float | None]
    below_target: list[bool | None]
    margin: float
    margin_source: NotRequired[str]  # where the margin comes from, as a phrase
    p_not_worse: float | None
    identical: bool | None  # whether all trajectories are bit-identical; None if unknown
    verdict: str  # whether B is shown to be no worse: waived, not_worse, worse, inconclusive or unknown
    p_equivalent: float | None  # two one-sided tests that the change lies inside the margin
    flattered: NotRequired[int | None]  # which arm lacks values, as of flattered(); missing in earlier versions
    reasons: list[str]  # why the losses are not compared
    remarks: list[str]  # differences between the arms that may change losses


def time(
    arms: Arms,
    floor_pct: float,
    margin_pct: float,
    alpha: float,
    design: Design | None = None,
    drift_pct: float | None = None,
) -> Time:
    """Compares the run times of two arms, by blocks or, if design is None, by Welch's test.

    drift_pct: the change that machine drift alone may cause, if the arms were not interleaved.
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
    """Compares A's runs in even rounds with those in odd ones by the same method: an A/A test within the race."""
    assert design is not None
    in_time = sorted(rows, key=lambda row: design.slots[eligibility.identity(row)])
    halves = [in_time[0::2], in_time[1::2]]
    slots = {eligibility.identity(row): slot for slot, row in enumerate(in_time)}
    halves_design = Design(slots, (), is_sequential=False)
    return change([eligibility.times_s(half) for half in halves], alpha, _keys(halves, halves_design), halves_design)[0]


def rests_on_clipping(time: Time) -> bool:
    """Returns whether the change reverses its sign without clipping: one slow run in ten may be the code's fault."""
    return is_reversed(time, time.get("unclipped_pct"))


def is_reversed(time: Time, change_pct: float | None) -> bool:
    """Returns whether this change has the other sign than that of time."""
    return change_pct is not None and change_pct * (time["change_pct"] or 0.0) < 0


def differs_from_itself(time: Time) -> bool:
    """Returns whether A's runs show that something other than the code changes times from round to round."""
    baseline = time.get("baseline")  # missing from an older race.json
    return baseline is not None and baseline["p"] is not None and baseline["p"] < BASELINE_ALPHA


def _keys(arms: Arms, design: Design | None) -> list[list[str]]:
    return [[eligibility.identity(row) for row in rows] if design else [""] * len(rows) for rows in arms]


def spends_more_outside(time: Time) -> bool:
    """Returns whether B spends more time outside its own clock than A, by more than the noise floor of A's time."""
    by_launcher = time.get("outside")
    if by_launcher is None or by_launcher.get("extra_p") is None:  # missing from an older race.json
        return False
    floor_s = time["floor_pct"] / 100 * (time["mean_s"][0] or 0.0)
    return (by_launcher["extra_p"] or 0.0) < EXTRA_ALPHA and (by_launcher["extra_s"] or 0.0) > floor_s


def joint_p(time: Time, key: Literal["p", "p_equivalent"]) -> float | None:
    """Returns the larger p of the two clocks, because a verdict needs both.

    This is an intersection-union test (Berger 1982): its size is that of either test, without adjustment.
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
    """Compares two lists of positive numbers: (Change of the geometric means, fit of their logarithms or None).

    keys: identities of the values' runs, needed with a design.  floor_pct: smaller differences are ignored.
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
    """Compares energy, memory and compile time, which get no verdict.  Returns {measure: Secondary}."""
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


def log_left(time: Mapping[str, Any], on: str | None) -> float:
    """Returns the log of the share of alpha that a race leaves to later ones of its arms, by its Time.

    on: the question of the later race.  An e-value of times is no evidence on losses or steps, which are left half.
    """
    log_e = None if on in ("loss", "steps_to_target") else time.get("log_e")
    return min(0.0, math.log(0.5) if log_e is None else log_e)


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
    alpha: float = ALPHA,
    run_again: Sequence[int] = (0, 0),
) -> Loss:
    """Compares the final losses of all started runs; repeats of one seed or one trajectory count as one loss.

    target_val_loss: None without a target.  force: compare also on different validation data.  answer: only its
    loss_refusals apply, not those about times.  losses_ids: for each arm those of its rows, as target.independent()
    takes them.  design: used only if the plan is sequential; otherwise Welch's test decides.  alpha: of the MDE.
    run_again: as flattered() takes it.
    """
    complete = [row for rows in arms for row in rows if eligibility.is_complete(row)]
    metric = metric_of(complete)
    counts = {row["val_tokens"] for row in complete} - {None}
    data = {json.dumps(setting.get("val_data")) for setting in eligibility.settings_of(complete)} - {"null"}
    refused = ["validation data differ"] * (len(data) > 1)
    refused += ["numbers of validation tokens differ"] * (len(counts) > 1)
    if len(metrics := {_metric_id(row) for row in complete}) > 1:
        names_differ = len({names[0] for names in metrics}) > 1
        shown = sorted({names[0] if names_differ else " ".join(names) for names in metrics})
        refused.append(f"the goals are of different metrics ({', '.join(shown)})")
    refused += ["the budgets differ"] * (len({row.get("budget") for row in complete}) > 1)
    refused += eligibility.unequal_luck(arms[0], arms[1], names)
    unjudged = refused or (answer.loss_refusals and not force)
    groups = [target.independent(rows, ids) if force or not refused else [] for rows, ids in zip(arms, losses_ids)]
    values = [[metric.sign * score for score in target.mean_losses(group)] for group in groups]  # lower is better
    if design is not None and not design.is_sequential:
        design = None
    keys = [[eligibility.identity(runs[0]) if design else "" for runs in group] for group in groups]
    fitted = fit(values, keys, design, ALPHA)
    test = fitted.test if fitted else None
    edges = fitted.interval() if fitted else None
    p_margin = stats.non_inferiority_p(test, margin_nats) if test else None
    has_value = [sum(eligibility.is_complete(row) and row["score"] is not None for row in rows) for rows in arms]
    folded = [sum(len({row["seed"] for row in runs}) - 1 for runs in of_arm) for of_arm in groups]  # see _one_run()
    left = [num - less for num, less in zip(has_value, folded, strict=True)]
    favoured = flattered(list(map(len, arms)), left, run_again)
    judged = [
        target.loss_test([metric.sign * loss for loss in group], target_val_loss, p_value, metric) for group in values
    ]
    return {
        "metric": [metric.name, metric.unit, metric.direction],
        "change": metric.sign * test.difference if test else None,
        "ci95": sorted(metric.sign * edge for edge in edges) if edges and math.isfinite(edges[1]) else None,
        "p": test.p if test else None,
        "mde": fitted.smallest_difference(alpha) if fitted else None,
        "n": [loss_test["n"] for loss_test in judged],
        "mean": [loss_test["mean"] for loss_test in judged],
        "sd": [loss_test["sd"] for loss_test in judged],
        "target": target_val_loss,
        "target_p_value": p_value,
        "p_target": [loss_test["p"] for loss_test in judged],
        "below_target": [loss_test["below"] and number != favoured for number, loss_test in enumerate(judged)],
        "margin": margin_nats,
        "p_not_worse": p_margin,
        "identical": identical,
        "verdict": "unknown" if unjudged else _loss_verdict(edges, p_margin, identical, favoured == 1),
        "flattered": favoured,
        "p_equivalent": fitted.p_equivalent(-margin_nats, margin_nats) if fitted else None,
        "reasons": refused,
        "remarks": [] if unjudged else [*answer.loss_remarks, *_one_run(groups, names)],
    }


def _metric_id(row: Row) -> tuple[str, ...]:
    """Returns what must be equal for two metrics to be one: name, direction, the pattern of a script's lines."""
    metric, config = metric_of([row]), row.get("config") or ()
    pattern = configs.group(config, "goal").get("goal.metric_pattern")
    lines = configs.group(config, "script").items()  # of one's own
    own = [text for key, text in lines if key.startswith("script.lines.") and f"(?P<{metric.name}>" in str(text)]
    return metric.name, metric.direction, *(f"by {text!r}" for text in ([pattern] if pattern else own))


def _one_run(groups_of_arms: Sequence[Sequence[Sequence[Row]]], names: Sequence[str]) -> Iterator[str]:
    """Yields sentences about runs that count as one although their seeds differ: their losses are bit-identical."""
    for name, groups in zip(names, groups_of_arms, strict=True):
        for runs in groups:
            if len({row["seed"] for row in runs}) > 1:
                same = f"{len(runs)} runs of {name} have bit-identical training losses"
                yield f"{same}: they count as one loss, whatever their seeds"


def flattered(started: Sequence[int], left: Sequence[int], run_again: Sequence[int] = (0, 0)) -> int | None:
    """Returns the number of the arm that lacks more of its started runs, perhaps the bad ones; None if neither does.

    left: how many runs of each arm are compared.  If that are two of an arm, one run more counts, else MAX_ONE_SIDED
    do not.  run_again: how many more were interrupted and run again; they count for an arm that lacks a run too.
    """
    lacking = [num - compared for num, compared in zip(started, left, strict=True)]
    arm = lacking.index(max(lacking))
    num_more = lacking[arm] - lacking[1 - arm]
    most = MAX_ONE_SIDED if min(left) > 2 else 0
    return arm if num_more > most or (num_more and num_more + run_again[arm] - run_again[1 - arm] > most) else None


def _loss_verdict(
    edges: tuple[float, float] | None, p_not_worse: float | None, identical: bool | None, is_flattered: bool
) -> str:
    if identical:
        return "waived"  # the trajectories are bit-identical: there is nothing to test
    if edges is None or p_not_worse is None:
        return "unknown"
    if p_not_worse < ALPHA:
        return "inconclusive" if is_flattered else "not_worse"
    return "worse" if edges[0] > 0 else "inconclusive"
