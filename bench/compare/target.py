"""What a track asks: its p, its margin of equivalence; and whether repeats reach its target.

Losses are held against a target only here, by the statistic that the track's rules name:
t  a fixed number of steps is won when the mean val_loss is below the target, one-sided t test, p below p_value
z  won at the first step at which the mean of all runs is so far below it that (target - mean) * sqrt(runs) >= 0.004
   nats: first_passing().  It assumes a standard deviation of 0.0013 nats over runs and p < 0.001, so that one run is
   enough.  modded-nanogpt, records/track_3_optimization/README.md, rules 3 and 5
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import yaml

from bench.base import stats
from bench.compare import eligibility
from bench.config import groups
from bench.config.schema import TrackRules
from bench.record.rows import Row

MARGIN_PCT = TrackRules.equivalence_margin_pct  # of a track that names none, and of plans from before there was one
LIMITS = ("alpha", "loss_margin_nats", "equivalence_margin_pct")  # of track.rules: a plan may ask less, never more
ROUNDING_NATS = 1e-9  # losses are printed with four digits or more: a margin met but for the last bit of a float is met
OF_LOGS = "gpt2_small"  # the track with the rules of the harness whose logs are imported


class LossTest(TypedDict):
    """One-sided t test of the losses of independent runs; None where nothing can be tested: no target, or one loss."""

    n: int
    mean: float | None
    sd: float | None
    t: float | None
    p: float | None
    below: bool | None  # the mean is shown to be below the target


class Decision(LossTest):
    passed: bool | None  # None: nothing to decide
    words: str


def p_value_of(track: str | None) -> float:
    """The p that conf/track/ asks for on this track."""
    p_value: float = track_settings(track)["p_value"]
    return p_value


def rules_of(track: str | None) -> TrackRules:
    """track.rules of conf/track/, with the defaults of what they do not name."""
    return TrackRules(**(track_settings(track).get("rules") or {}))


def laxer_than_track(track: str | None, settings: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """What a plan asks beyond its track's rules -> [(setting, its value, the track's)].

    settings: a plan, or the settings of one: of LIMITS those that it names.  A track that fixes nothing has no limits.
    """
    rules = rules_of(track)
    limits = [(key, settings[key], getattr(rules, key)) for key in LIMITS if key in settings]
    return [limit for limit in limits if limit[1] > limit[2]] if track_settings(track).get("fixed") else []


@functools.cache
def track_settings(track: str | None) -> dict[str, Any]:
    """conf/track/ of this track; for one that it does not have (a log's, None) that of OF_LOGS."""
    name = track if track in groups.choices("track") else OF_LOGS
    settings: dict[str, Any] = yaml.safe_load(groups.path_of("track", name).read_text())["track"]
    return settings


def loss_test(losses: Sequence[float], target_val_loss: float | None, p_value: float) -> LossTest:
    """Losses of independent runs against a target; None: there is none."""
    t, p = (None, None) if target_val_loss is None else stats.one_sample_t_less(losses, target_val_loss)
    below = None if p is None else p < p_value
    mean = stats.mean(losses) if losses else None
    return {"n": len(losses), "mean": mean, "sd": stats.sd(losses), "t": t, "p": p, "below": below}


class StepMean(NamedTuple):
    """The validations of several runs at one step."""

    step: int
    n: int  # runs
    mean: float  # nats

    def margin_nats(self, target_val_loss: float) -> float:
        """(target - mean) * sqrt(n): the left side of the z rule."""
        return (target_val_loss - self.mean) * math.sqrt(self.n)


def step_means(curves: Sequence[Mapping[int, float]]) -> list[StepMean]:
    """{step: val_loss} of each run -> the means at the steps at which every run was validated, in their order."""
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return [StepMean(step, len(curves), stats.mean([curve[step] for curve in curves])) for step in common]


def first_passing(
    curves: Sequence[Mapping[int, float]], target_val_loss: float, z_margin_nats: float
) -> StepMean | None:
    """The first step at which the runs, taken together, are below the target by the z rule; None: there is none.

    curves: {step: val_loss in nats a token} of each run, one or more, all of them, each as long as it ran: only steps
    at which every run was validated are judged.  A run may have ended before its schedule did, and runs may go on
    after the step that counts.  target_val_loss and z_margin_nats: 3.28 and 0.004 on track 3 (conf/track/steps.yaml).
    """
    enough = z_margin_nats - ROUNDING_NATS
    return next((at for at in step_means(curves) if at.margin_nats(target_val_loss) >= enough), None)


def pairwise_margin_nats(new: StepMean, old: StepMean, nats_per_100_steps: float) -> float:
    """The left side of modded-nanogpt's rule for two results of track 3: at least 0.004, and new is better than old.

    (loss that was saved + what the saved steps are worth) / sqrt(1/n + 1/n), each result at the step that it claims.
    """
    saved_nats = old.mean - new.mean + (old.step - new.step) / 100 * nats_per_100_steps
    return saved_nats / math.sqrt(1 / new.n + 1 / old.n)


def independent(rows: Sequence[Row], losses_ids: Sequence[str | None] | None = None) -> list[list[Row]]:
    """Complete runs with a loss, in groups that count as one: of one seed, or of one trajectory whatever their seeds.

    losses_ids: of each row step_files.losses_id(), None: unknown.  A run of unknown seed and trajectory is on its own.
    """
    groups: list[tuple[set[tuple[str, Any]], list[Row]]] = []  # (what its runs are known by, its rows)
    for row, losses_id in zip(rows, losses_ids or [None] * len(rows), strict=True):
        if row["val_loss"] is None or not eligibility.is_complete(row):
            continue
        keys = {key for key in (("seed", row.get("seed")), ("losses", losses_id)) if key[1] is not None}
        mine, *others = [group for group in groups if group[0] & keys] or [(set[tuple[str, Any]](), list[Row]())]
        groups += [] if mine[1] else [mine]
        for known, members in [*others, (keys, [row])]:
            mine[0].update(known)
            mine[1].extend(members)
        groups = [group for group in groups if not any(group is other for other in others)]
    return [members for _, members in groups]


def mean_losses(groups: Sequence[Sequence[Row]]) -> list[float]:
    """The mean val_loss of each group of independent()."""
    return [stats.mean([row["val_loss"] for row in group if row["val_loss"] is not None]) for group in groups]


def decide(rows: Sequence[Row], p_value: float, losses_ids: Sequence[str | None] | None = None) -> Decision:
    """Rows of runs of one config: do they reach their target?

    losses_ids: as independent() takes them; runs that are one give one loss.
    """
    target_val_loss, groups = rows[0]["target_val_loss"], independent(rows, losses_ids)
    tested = loss_test(mean_losses(groups), target_val_loss, p_value)
    num_suspect = sum(row["validity"] == "suspect" for row in rows)
    doubt = f"; {num_suspect} of {len(rows)} runs are suspect: trust their losses, not their times"
    passed, sentence = _decided(rows, tested, target_val_loss, p_value)
    num_losses = sum(map(len, groups))
    if target_val_loss is not None and num_losses > len(groups):
        sentence = f"{num_losses} runs count as {len(groups)} by their seeds and losses; {sentence}"
    return {**tested, "passed": passed, "words": sentence + (doubt if num_suspect and tested["n"] > 1 else "")}


def _decided(
    rows: Sequence[Row], tested: LossTest, target_val_loss: float | None, p_value: float
) -> tuple[bool | None, str]:
    """(passed, words).  Runs that stop at their target are won one by one: each reached it in its steps or did not."""
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
    if tested["p"] is None:
        same = f"all {tested['n']} val_losses are {tested['mean']:.6g}, as in copies or after coarse rounding"
        return False, f"{same}: without a spread their mean cannot be tested"
    return tested["below"], (
        f"mean val_loss {tested['mean']:.4f} (sd {tested['sd']:.4f}, n={tested['n']}) is "
        f"{'below' if tested['below'] else 'not shown to be below'} the target {target_val_loss:.6g}: "
        f"p={tested['p']:.2g}, needed p<{p_value}"
    )
