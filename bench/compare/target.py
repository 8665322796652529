"""The limits that a track sets, and whether repeated runs reach its target.

Only this module compares losses with a target, by the statistic that the track's rules name:
t  runs of a fixed number of steps pass if their mean val_loss is below the target (one-sided t test, p below p_value)
z  runs pass at the first step at which (target - mean of all runs) * sqrt(runs) >= 0.004 nats: first_passing().  This
   assumes a standard deviation of 0.0013 nats between runs and p < 0.001, so a single run suffices.  modded-nanogpt,
   records/track_3_optimization/README.md, rules 3 and 5
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from bench.base import stats
from bench.base.metric import VAL_LOSS, Metric, named
from bench.compare import eligibility
from bench.config import groups
from bench.config.schema import TrackConfig, TrackRules
from bench.record.rows import Row, metric_of

MARGIN_PCT = TrackRules.equivalence_margin_pct  # default of tracks, and of plans that predate the margin
LIMITS = ("alpha", "equivalence_margin_pct")  # upper limits in track.rules; a plan's values may be smaller
ROUNDING_NATS = 1e-9  # tolerance of margins against float rounding; losses are printed with four digits or more
OF_LOGS = "gpt2_small"  # the track that has the rules of the harness whose logs are imported


class LossTest(TypedDict):
    """One-sided t test of independent runs' losses; t, p and below are None without a target or with one loss."""

    n: int
    mean: float | None
    sd: float | None
    t: float | None
    p: float | None
    below: bool | None  # whether the mean is shown to be better than the target, in the direction of the metric


class Decision(LossTest):
    passed: bool | None  # None if there is nothing to decide
    words: str  # the decision as a sentence
    step: int | None  # the first step that passes by the z rule; None if none does, and for the t test


Curve = Mapping[int, float]  # {step: value of the goal's metric} at a run's validations


def p_value_of(track: str | None) -> float:
    """Returns the p value that conf/track/ requires on this track."""
    p_value: float = track_settings(track)["p_value"]
    return p_value


def rules_of(track: str | None) -> TrackRules:
    """Returns the track's rules from conf/track/, with defaults for what they leave out."""
    return TrackRules(**(track_settings(track).get("rules") or {}))


def margin_of(track: str | None, metric: Metric) -> tuple[float, str]:
    """Returns (margin, source): by how much the metric, in its unit, may be worse and still count as no worse."""
    if metric != VAL_LOSS:
        return metric.margin or 0.0, f"the default for {metric.name}" if metric.margin else "no other is set"
    is_named = "loss_margin_nats" in (track_settings(track).get("rules") or {})
    why = f"set by track {track}" if is_named else "the default; the track sets no loss_margin_nats"
    return rules_of(track).loss_margin_nats, why


def planned_margin(plan: Mapping[str, Any], metric: Metric) -> float | None:
    """Returns a plan's margin in the unit of the goal's metric, or None if the plan has none.

    Older plans have loss_margin_nats, whose default applies to val_loss only.
    """
    if "margin" in plan:
        margin: float = plan["margin"]
        return margin
    nats: float | None = plan.get("loss_margin_nats")
    return None if metric != VAL_LOSS and nats == TrackRules.loss_margin_nats else nats


def laxer_than_track(track: str | None, settings: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Returns [(setting, value, track's limit)] of a plan's settings that are laxer than its track allows.

    settings: a plan or its settings; those that are missing are not checked.  A track that fixes nothing has no limits.
    """
    rules, metric = rules_of(track), named(*(settings.get("metric") or ())[:3])
    allowed = {key: getattr(rules, key) for key in (*LIMITS, "loss_margin_nats")}
    allowed["margin"], _ = margin_of(track, metric)
    limits = [(key, settings[key], limit) for key, limit in allowed.items() if settings.get(key) is not None]
    return [limit for limit in limits if limit[1] > limit[2]] if track_settings(track).get("fixed") else []


@functools.cache
def track_settings(track: str | None) -> dict[str, Any]:
    """Returns the track's settings in conf/track/; for unknown tracks and None (logs), those of OF_LOGS."""
    name = track if track in groups.choices("track") else OF_LOGS
    settings: dict[str, Any] = groups.values_of("track", name)["track"]
    return settings


def loss_test(
    losses: Sequence[float], target_val_loss: float | None, p_value: float, metric: Metric = VAL_LOSS
) -> LossTest:
    """Tests the losses, or values of another metric, of independent runs against a target (None: no target)."""
    t = p = None
    if target_val_loss is not None:
        t, p = stats.one_sample_t_less([metric.sign * loss for loss in losses], metric.sign * target_val_loss)
    below = None if p is None else p < p_value
    mean = stats.mean(losses) if losses else None
    return {"n": len(losses), "mean": mean, "sd": stats.sd(losses), "t": t, "p": p, "below": below}


class StepMean(NamedTuple):
    """The mean validation loss of several runs at one step."""

    step: int
    n: int  # number of runs
    mean: float  # nats per token

    def margin_nats(self, target_val_loss: float) -> float:
        """Returns (target - mean) * sqrt(n), the left side of the z rule."""
        return (target_val_loss - self.mean) * math.sqrt(self.n)


def step_means(curves: Sequence[Curve]) -> list[StepMean]:
    """Returns the means of the curves at the steps that all of them have, in order."""
    steps: list[set[int]] = [set(curve) for curve in curves]
    common = sorted(set.intersection(*steps)) if steps else []
    return [StepMean(step, len(curves), stats.mean([curve[step] for curve in curves])) for step in common]


def first_passing(curves: Sequence[Curve], target_val_loss: float, z_margin_nats: float) -> StepMean | None:
    """Returns the first step at which the runs together are below the target by the z rule, or None.

    curves: {step: val_loss in nats per token} of every run.  Only steps at which all runs were validated are judged; a
    run may have ended before its schedule did, or continued after the step that counts.  target_val_loss and
    z_margin_nats: 3.28 and 0.004 on track 3 (conf/track/steps.yaml).
    """
    return next((at for at in step_means(curves) if is_enough(at.margin_nats(target_val_loss), z_margin_nats)), None)


def is_enough(margin_nats: float, z_margin_nats: float) -> bool:
    """Returns whether the margin of the z rule is met, with a tolerance for float rounding."""
    return margin_nats >= z_margin_nats - ROUNDING_NATS


def pairwise_margin_nats(new: StepMean, old: StepMean, nats_per_100_steps: float) -> float:
    """Returns the left side of modded-nanogpt's rule for two results of track 3: new beats old from 0.004 on.

    It is (loss saved + value of the steps saved) / sqrt(1/n_new + 1/n_old), each result at the step that it claims.
    """
    saved_nats = old.mean - new.mean + (old.step - new.step) / 100 * nats_per_100_steps
    return saved_nats / math.sqrt(1 / new.n + 1 / old.n)


def _has_loss(row: Row) -> bool:
    return row["score"] is not None and eligibility.is_complete(row)


def z_p(margin_nats: float, z_sd_nats: float) -> float:
    """Returns the one-sided p of a margin of the z rule."""
    return statistics.NormalDist().cdf(-margin_nats / z_sd_nats)


def independent(
    rows: Sequence[Row], losses_ids: Sequence[str | None] | None = None, is_counted: Callable[[Row], bool] = _has_loss
) -> list[list[Row]]:
    """Groups the counted runs (complete ones with a loss) that share a seed or a trajectory and so count as one.

    losses_ids: step_files.losses_id() of each row, None if unknown.  A run of unknown seed and trajectory is a group.
    """
    groups: list[tuple[set[tuple[str, Any]], list[Row]]] = []  # (keys of its runs, their rows)
    for row, losses_id in zip(rows, losses_ids or [None] * len(rows), strict=True):
        if not is_counted(row):
            continue
        keys = {key for key in (("seed", row.get("seed")), ("losses", losses_id)) if key[1] is not None}
        mine, *others = [group for group in groups if group[0] & keys] or [(set[tuple[str, Any]](), list[Row]())]
        groups += [] if mine[1] else [mine]
        for shared, members in [*others, (keys, [row])]:
            mine[0].update(shared)
            mine[1].extend(members)
        groups = [group for group in groups if not any(group is other for other in others)]
    return [members for _, members in groups]


def mean_losses(groups: Sequence[Sequence[Row]]) -> list[float]:
    """Returns the mean score of each group that independent() returned."""
    return [stats.mean([row["score"] for row in group if row["score"] is not None]) for group in groups]


def decide_by(
    track: TrackConfig,
    rows: Sequence[Row],
    curves: Callable[[], Sequence[Curve]],
    losses_ids: Sequence[str | None] | None = None,
) -> Decision:
    """Decides by the track's statistic whether runs of one config reach their target.

    curves: reads the validations of each run, which the t test does not need.
    """
    if track.rules.statistic == "t":
        return decide(rows, track.p_value, losses_ids)
    return decide_z(rows, curves(), track.rules, losses_ids)


def decide_z(
    rows: Sequence[Row], curves: Sequence[Curve], rules: TrackRules, losses_ids: Sequence[str | None] | None = None
) -> Decision:
    """Decides by the z rule whether runs of one config, with their curves, reach their target at some step.

    A run of ours must be complete.  A log may end early; only steps that all runs reached are judged.
    """
    by_row = {id(row): curve for row, curve in zip(rows, curves, strict=True)}
    groups = independent(rows, losses_ids, lambda row: bool(by_row[id(row)]))
    mean_curves = [{at.step: at.mean for at in step_means([by_row[id(row)] for row in group])} for group in groups]
    target_val_loss, means = rows[0]["target"], step_means(mean_curves)
    if fault := _z_fault(rows, curves, mean_curves, target_val_loss):
        nothing: LossTest = {"n": len(groups), "mean": None, "sd": None, "t": None, "p": None, "below": None}
        return {**nothing, "passed": None if target_val_loss is None else False, "words": fault, "step": None}
    assert target_val_loss is not None
    passing = first_passing(mean_curves, target_val_loss, rules.z_margin_nats)
    at = passing or max(means, key=lambda mean: mean.margin_nats(target_val_loss))
    margin_nats, losses = at.margin_nats(target_val_loss), [curve[at.step] for curve in mean_curves]
    sd = stats.sd(losses)
    sd_text = f"sd {sd:.4f}, assumed {rules.z_sd_nats:g}" if sd is not None else f"assumed sd {rules.z_sd_nats:g}"
    p = z_p(margin_nats, rules.z_sd_nats)
    first = f"step {at.step} is the first" if passing else f"step {at.step} comes closest, and none is"
    copies = f"{len(rows)} runs count as {len(groups)} by their seeds and losses; " * (len(rows) > len(groups))
    sentence = (
        f"{copies}{first} at which the mean of all runs is below {target_val_loss:g} by the z rule: mean val_loss "
        f"{at.mean:.5f} ({sd_text}, n={at.n}), ({target_val_loss:g} - mean) * sqrt(n) = {margin_nats:.5f}, "
        f"needed {rules.z_margin_nats:g}"
    )
    tested: LossTest = {"n": at.n, "mean": at.mean, "sd": sd, "t": None, "p": p, "below": passing is not None}
    return {**tested, "passed": passing is not None, "words": sentence, "step": passing and passing.step}


def _z_fault(
    rows: Sequence[Row], curves: Sequence[Curve], mean_curves: Sequence[Curve], target_val_loss: float | None
) -> str | None:
    """Returns why the z rule cannot be applied to these runs, or None if it can."""
    if target_val_loss is None:
        return "no target to reach: the losses above are the result"
    own = [row for row in rows if row["provenance"] != "imported"]
    if num_failed := sum(not eligibility.is_complete(row) for row in own):
        return f"{num_failed} of {len(rows)} runs did not complete or are invalid"
    if num_empty := sum(not curve for curve in curves):
        return f"{num_empty} of {len(rows)} runs have no validation"
    end = min(max(curve, default=0) for curve in curves)
    steps = [{step for step in curve if step <= end} for curve in curves]
    if uneven := sorted({step for seen in steps for step in seen if not all(step in other for other in steps)}):
        lacking = sum(uneven[0] not in seen for seen in steps)
        return (
            f"{lacking} of {len(rows)} runs lack the validation at step {uneven[0]} that others have: a mean is of all "
            "runs, so all must be validated at the same steps"
        )
    return None if step_means(mean_curves) else "the runs have no validated step in common"


def decide(rows: Sequence[Row], p_value: float, losses_ids: Sequence[str | None] | None = None) -> Decision:
    """Decides by the t test whether runs of one config reach their target.

    losses_ids: as independent() takes them; the runs of a group give one loss, their mean.
    """
    target_val_loss, groups = rows[0]["target"], independent(rows, losses_ids)
    tested = loss_test(mean_losses(groups), target_val_loss, p_value, metric_of(rows))
    num_suspect = sum(row["validity"] == "suspect" for row in rows)
    doubt = f"; {num_suspect} of {len(rows)} runs are suspect: trust their losses, not their times"
    passed, sentence = _decided(rows, tested, target_val_loss, p_value)
    num_losses = sum(map(len, groups))
    if target_val_loss is not None and num_losses > len(groups):
        sentence = f"{num_losses} runs count as {len(groups)} by their seeds and losses; {sentence}"
    sentence += doubt if num_suspect and tested["n"] > 1 else ""
    return {**tested, "passed": passed, "words": sentence, "step": None}


def _decided(
    rows: Sequence[Row], tested: LossTest, target_val_loss: float | None, p_value: float
) -> tuple[bool | None, str]:
    """Returns (passed, sentence).  If runs stop at their target, each of them must have reached it."""
    if num_failed := sum(not eligibility.is_complete(row) for row in rows):
        return False, f"{num_failed} of {len(rows)} runs did not complete or are invalid"
    if any(row["stop_at_target"] for row in rows):
        steps = [row["num_steps"] for row in rows if row["target_reached"]]
        at = f", after {', '.join(map(str, steps))} steps" if steps else ""
        return len(steps) == len(rows), f"{len(steps)} of {len(rows)} runs reached the target{at}"
    if target_val_loss is None:
        return None, "no target to reach: the losses above are the result"
    if tested["n"] < 2:
        return (None if len(rows) < 2 else False), "one run has no spread and gives no verdict"
    metric = metric_of(rows)
    if tested["p"] is None:
        same = f"all {tested['n']} values of {metric.name} are {tested['mean']:.6g}"
        return False, f"{same}, as in copies or after coarse rounding: without a spread their mean cannot be tested"
    return tested["below"], (
        f"mean {metric.name} {tested['mean']:.4f} (sd {tested['sd']:.4f}, n={tested['n']}) is "
        f"{'' if tested['below'] else 'not shown to be '}{metric.better} the target {target_val_loss:.6g}: "
        f"p={tested['p']:.2g}, needed p<{p_value}"
    )
