"""What a goal is measured in: a metric by name, with its unit and the direction in which it is better.

METRICS are known here: val_loss and val_bpb are computed for our own models, the others are only printed, by scripts
and in logs.  A goal may name one of its own, which a pattern finds in a script's lines (goal.metric_pattern).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

DIRECTIONS = ("lower", "higher")


class Metric(NamedTuple):
    """A number of the model, not of its speed; the same name is its column of steps.csv."""

    name: str
    unit: str  # as in "+0.01 nats of val_loss"; "" for none
    direction: str = "lower"  # which values are better, one of DIRECTIONS
    margin: float | None = None  # a change that passes as none where no plan names one; None: none does

    @property
    def sign(self) -> int:
        """1 where lower is better, -1 where higher is: what makes a loss of its values."""
        return -1 if self.direction == "higher" else 1

    def reaches(self, value: float, target: float) -> bool:
        return self.sign * value <= self.sign * target

    def best(self, values: list[float]) -> float | None:
        """None of no values."""
        return None if not values else self.sign * min(self.sign * value for value in values)

    @property
    def label(self) -> str:
        """Of an axis, with its unit."""
        return ", ".join(filter(None, (self.name, self.unit_in_full)))

    @property
    def unit_in_full(self) -> str:
        return "nats per token" if self.name == "val_loss" else self.unit

    @property
    def better(self) -> str:
        return "below" if self.sign > 0 else "above"


VAL_LOSS = Metric("val_loss", "nats", margin=0.002)
# The margin is val_loss's for tokens of 4.8 bytes, as GPT-2's of web text: 0.002 / (ln 2 * 4.8)
VAL_BPB = Metric("val_bpb", "bits per byte", margin=0.0006)
# Its scores of one model differ by 0.0028 from one evaluation of a sample to the next: nanochat#733
CORE = Metric("core", "", "higher", margin=0.003)
ARTIFACT_BYTES = Metric("artifact_bytes", "bytes", margin=0.0)  # of a model and its code, compressed
METRICS = {metric.name: metric for metric in (VAL_LOSS, VAL_BPB, CORE, ARTIFACT_BYTES)}
COMPUTED = (VAL_LOSS.name, VAL_BPB.name)  # of our own models


def named(name: str | None = None, unit: str | None = None, direction: str | None = None) -> Metric:
    """One of METRICS, or of a user's own; None: val_loss."""
    return METRICS.get(name or VAL_LOSS.name) or Metric(str(name), unit or "", direction or DIRECTIONS[0])


def from_goal(goal: Mapping[str, Any] | None) -> Metric:
    """run.json["goal"] of any version -> its metric."""
    facts: Mapping[str, Any] = (goal or {}).get("metric") or {}
    return named(facts.get("name"), facts.get("unit"), facts.get("direction"))


def goal_facts(metric: Metric, target: float | None, budget: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Of run.json["goal"] what says another metric than val_loss, and a budget; {} without either."""
    spent = {"budget": dict(budget)} if budget else {}
    if metric == VAL_LOSS:
        return spent
    return spent | {
        "metric": {"name": metric.name, "unit": metric.unit, "direction": metric.direction},
        "target": target,
    }


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Sum of nats over the targets that have bytes -> bits per byte of their text; inf where none has any.

    As nanochat's evaluate_bpb defines it (nanochat/loss_eval.py): special tokens have 0 bytes, and their nats do not
    count either.
    """
    return nats / (math.log(2) * num_bytes) if num_bytes else math.inf
