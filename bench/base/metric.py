"""The metrics that a goal may name, each with its unit and the direction in which it is better.

Of METRICS, val_loss and val_bpb are computed for our own models; the others are read from what scripts and logs print.
A goal may also name a metric of its own, which a pattern finds in a script's output (goal.metric_pattern).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

DIRECTIONS = ("lower", "higher")


class Metric(NamedTuple):
    """A measure of a model's quality, not of its speed; its name is also its column of steps.csv."""

    name: str
    unit: str  # such as nats in "+0.01 nats of val_loss"; "" for none
    direction: str = "lower"  # which values are better, one of DIRECTIONS
    margin: float | None = None  # the default margin of a race, below which a change counts as none; None: no default

    @property
    def sign(self) -> int:
        """1 if lower is better, -1 if higher is: a value times this is a loss."""
        return -1 if self.direction == "higher" else 1

    def reaches(self, value: float, target: float) -> bool:
        return self.sign * value <= self.sign * target

    def best(self, values: list[float]) -> float | None:
        """Returns the best of the values, or None if there are none."""
        return None if not values else self.sign * min(self.sign * value for value in values)

    @property
    def label(self) -> str:
        """Name and unit, as the label of an axis."""
        return ", ".join(filter(None, (self.name, self.unit_in_full)))

    @property
    def unit_in_full(self) -> str:
        return "nats per token" if self.name == "val_loss" else self.unit

    @property
    def better(self) -> str:
        return "below" if self.sign > 0 else "above"


VAL_LOSS = Metric("val_loss", "nats", margin=0.002)
# The margin of val_loss, converted for tokens of 4.8 bytes, as GPT-2's of web text: 0.002 / (ln 2 * 4.8)
VAL_BPB = Metric("val_bpb", "bits per byte", margin=0.0006)
# CORE scores of one model differ by 0.0028 from one evaluation of a sample to the next: nanochat#733
CORE = Metric("core", "", "higher", margin=0.003)
ARTIFACT_BYTES = Metric("artifact_bytes", "bytes", margin=0.0)  # the compressed size of a model and its code
TRAIN_LOSS = Metric("train_loss", "nats")  # of a script that does not validate: the loss of its last step's batch
METRICS = {metric.name: metric for metric in (VAL_LOSS, VAL_BPB, CORE, ARTIFACT_BYTES, TRAIN_LOSS)}
COMPUTED = (VAL_LOSS.name, VAL_BPB.name)  # computed by this program, for its own models


def named(name: str | None = None, unit: str | None = None, direction: str | None = None) -> Metric:
    """Returns the metric of this name: one of METRICS, or one that the user defines.  None: val_loss."""
    return METRICS.get(name or VAL_LOSS.name) or Metric(str(name), unit or "", direction or DIRECTIONS[0])


def from_goal(goal: Mapping[str, Any] | None) -> Metric:
    """Returns the metric of run.json["goal"], in any version of the format."""
    facts: Mapping[str, Any] = (goal or {}).get("metric") or {}
    return named(facts.get("name"), facts.get("unit"), facts.get("direction"))


def goal_facts(metric: Metric, target: float | None, budget: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Returns the fields of run.json["goal"] for a budget and for a metric other than val_loss; {} without either."""
    spent = {"budget": dict(budget)} if budget else {}
    if metric == VAL_LOSS:
        return spent
    return spent | {
        "metric": {"name": metric.name, "unit": metric.unit, "direction": metric.direction},
        "target": target,
    }


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Returns bits per byte of text, from the sum of nats over the targets that have bytes; inf if num_bytes is 0.

    As nanochat's evaluate_bpb defines it (nanochat/loss_eval.py): special tokens have 0 bytes, and their nats are
    excluded too.
    """
    return nats / (math.log(2) * num_bytes) if num_bytes else math.inf
