"""What a track says: conf/track/NAME.yaml, typed.  The comment of a field is its meaning (meanings.py)."""

from dataclasses import dataclass, field
from typing import Annotated

from models.settings import PositiveInt, Range, one_of


@dataclass(kw_only=True)
class TrackRules:
    """How runs on the track are judged (bench/claims/rules/, bench/compare/).  No part of config_id: no run changes."""

    device: str | None = None  # what a claim must have run on, cpu or cuda; null: any
    gpu: str | None = None  # the GPU's model, as the driver names it; null: any
    num_gpus: int | None = None  # how many GPUs; null: any number
    may_be_untimed: list[str] | None = None  # what train_s may exclude; null: anything that the record names
    max_interrupted: int | None = None  # runs of a claim's races that were interrupted and raced again; null: any
    implausible_val_loss: float | None = None  # a run whose val_loss is below it is invalid; null: no such bound
    # what makes a record: least time, or fewest steps whatever their time
    judged: Annotated[str, one_of("time", "steps")] = "time"
    # a change of run time shown to be smaller than this, either way, is called equivalent
    equivalence_margin_pct: Annotated[float, Range(lambda pct: 0 < pct < 100, "between 0 and 100")] = 0.5
    # the largest alpha of a race on a track that fixes something: a plan may be stricter
    alpha: Annotated[float, Range(lambda value: 0 < value < 0.5, "between 0 and 0.5")] = 0.05
    # the widest rise of the mean val_loss that a race there calls no worse
    loss_margin_nats: Annotated[float, Range(lambda nats: nats > 0, "above 0")] = 0.002


@dataclass(kw_only=True)
class TrackConfig:
    name: str  # a file of conf/track/: its rules cannot be changed by a run, but for repeats
    about: str  # the track in a sentence
    repeats: PositiveInt  # runs that ./speedrun.sh makes and a record takes, each with a fresh seed
    # of the one-sided t test of the mean val_loss against the target
    p_value: Annotated[float, Range(lambda value: 0 < value < 1, "between 0 and 1")]
    fixed: list[str] = field(default_factory=list)  # settings that a run must leave alone to count on this track
    reference_hardware: str | None = None  # where the track's times are compared; null: anywhere
    rules: TrackRules = field(default_factory=TrackRules)  # what ./run.sh judge demands of a claim
