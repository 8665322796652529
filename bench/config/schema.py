"""Every knob as a typed dataclass: what a run is asked to do.

Hydra composes these schemas (bench/config/compose.py); bench/config/resolve.py fills what was left to the machine and refuses what
cannot be; `config_id()` names the result.  None means off, unknown or "derive it", never 0 or -1.
"""

import dataclasses
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Optional

MISSING = "???"  # OmegaConf's mark for a value that some yaml must give
CONFIG_ID_CHARS = 8


@dataclass
class ModelConfig:
    arch: str = MISSING  # a name in models.MODELS
    num_layers: int = MISSING
    num_heads: int = MISSING
    width: int = MISSING  # of the residual stream
    vocab_size: Optional[int] = None  # rows of the embedding; None: data.vocab_size rounded up to a multiple of 64


@dataclass
class DataConfig:
    source: str = MISSING  # a name in bench.data.sources.SOURCES
    vocab_size: Optional[int] = None  # tokens the data may use; None: the source knows
    seq_len: int = MISSING
    batch_tokens: int = MISSING  # of one optimizer step, over all ranks and micro-steps
    train_glob: Optional[str] = None  # shards, text
    val_glob: Optional[str] = None  # shards, text
    tokenizer: Optional[str] = None  # text: "bytes" or "gpt2"
    train_tokens: Optional[int] = None  # markov: how many to make
    markov_seed: Optional[int] = None  # markov: of the source itself, never of the run
    markov_lags: Optional[list[int]] = None  # markov: which earlier tokens the next one depends on
    repo: Optional[str] = None  # hub: dataset repository
    revision: Optional[str] = None  # hub: commit, so that the files cannot change underneath
    num_train_shards: Optional[int] = None  # hub: how many to fetch
    train_sha256: Optional[str] = None  # pysource, markov: what the made files must hash to
    val_sha256: Optional[str] = None


@dataclass
class OptimConfig:
    name: str = MISSING  # a name in models.OPTIMIZERS
    lr: float = MISSING  # of AdamW, at the schedule's peak
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING
    weight_decay: float = MISSING
    grad_clip_norm: Optional[float] = None
    schedule: str = MISSING  # a name in models.SCHEDULES
    warmup_frac: float = 0.0  # of num_steps
    cooldown_frac: Optional[float] = None  # of num_steps; trapezoid only
    final_lr_frac: Optional[float] = None  # of the peak; trapezoid and cosine
    muon_lr: Optional[float] = None
    muon_momentum: Optional[float] = None
    muon_weight_decay: Optional[float] = None
    muon_ns_steps: Optional[int] = None  # Newton-Schulz iterations


@dataclass
class GoalConfig:
    num_steps: int = MISSING
    val_tokens: int = MISSING
    val_every_steps: int = MISSING
    target_val_loss: Optional[float] = None  # nats per token
    target_gap_nats: Optional[float] = None  # above the data's known floor
    stop_at_target: bool = False  # end the race at the first validation that reaches the target


@dataclass
class HardwareConfig:
    device: str = "auto"  # auto, cpu, cuda
    num_processes: Optional[int] = None  # None: one per GPU, or one on a CPU
    num_threads: Optional[int] = None  # CPU threads of each process; None: an equal share of the cores
    dtype: Optional[str] = None  # of activations; None: bfloat16 on a GPU, float32 on a CPU
    compile: Optional[bool] = None  # torch.compile; None: on a GPU only
    micro_batch_seqs: Optional[int] = None  # at most, per rank and micro-step; None: no limit
    deterministic: bool = False  # torch.use_deterministic_algorithms
    gc: Optional[str] = None  # Python's garbage collector in the race: freeze, on, off, manual; None: freeze
    gc_every_steps: Optional[int] = None  # manual: a collection of generation 1 every so many steps
    collective_timeout_s: float = 120.0
    wall_timeout_s: Optional[float] = None  # the launcher ends the run after this long


@dataclass
class TrackRules:
    """How a claim on the track is judged (bench/claims/rules/).  No part of config_id: it changes nothing in a run."""

    device: Optional[str] = None  # cpu or cuda
    gpu: Optional[str] = None  # its model, as the driver names it
    num_gpus: Optional[int] = None
    num_runs: Optional[int] = None  # a claim's fewest, each of another seed and with a time that counts
    may_be_untimed: Optional[list[str]] = None  # what train_s may leave out; None: anything that is written down
    forbidden_instruments: Optional[list[str]] = None
    max_interrupted: Optional[int] = None  # runs of a claim's races that were interrupted and raced again


@dataclass
class TrackConfig:
    name: str = MISSING
    about: str = MISSING
    repeats: int = MISSING  # runs that ./speedrun.sh makes, each with a fresh seed
    p_value: float = MISSING  # of the one-sided t test of the mean val_loss against the target
    fixed: list[str] = field(default_factory=list)  # knobs which a run must leave alone to count on this track
    reference_hardware: Optional[str] = None
    rules: TrackRules = field(default_factory=TrackRules)


@dataclass
class Config:
    name: Optional[str] = None  # for people; None: arch-optim
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    goal: GoalConfig = field(default_factory=GoalConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    instruments: dict[str, Any] = field(default_factory=dict)  # name -> its settings


@dataclass(frozen=True)
class Machine:
    """What resolve() may ask of the machine."""

    num_gpus: int
    num_cpus: int


def build(cls, values, path=""):
    """Plain nested dict -> dataclass.  Raises ValueError for a key, type or missing value that cls does not have."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise ValueError(f"unknown setting {path}{key}={values[key]!r}: {cls.__name__} has {', '.join(fields)}")
    made = {}
    for name, hint in hints.items():
        where = f"{path}{name}"
        if name in values:
            value = values[name]
            nested = dataclasses.is_dataclass(hint)
            made[name] = build(hint, value or {}, where + ".") if nested else _checked(where, value, hint)
    config = cls(**made)
    for name in fields:
        if getattr(config, name) == MISSING:
            raise ValueError(f"{path}{name} is not set: give {path}{name}=VALUE or choose a track that does")
    return config


def _checked(where, value, hint):
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        origin = typing.get_origin(hint)
    kind = origin or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}={value}: it must be a finite number; null leaves it out")
    if value == MISSING or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise ValueError(
        f"{where}={value!r} is of type {type(value).__name__}: it must be of type {getattr(hint, '__name__', hint)}"
    )


def to_dict(config):
    return dataclasses.asdict(config)


def config_id(config):
    """First 8 hex digits of a sha256 over everything but name, seed and the track's rules: runs that share it are repeats.

    What is None is left out, so that a knob which later versions add, and which an old run never had, changes no id.
    """
    values = {key: value for key, value in to_dict(config).items() if key not in ("name", "seed")}
    values["track"].pop("rules")  # they judge runs and change none
    values = _without_none(values)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:CONFIG_ID_CHARS]


def _without_none(values):
    if not isinstance(values, dict):
        return values
    return {key: _without_none(value) for key, value in values.items() if value is not None}


def get(config, dotted):
    """Value of a dotted key, of a Config or of its dict."""
    for part in dotted.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def num_micro_steps(config):
    """Micro-steps of each rank in one optimizer step, of a resolved config."""
    hardware = config.hardware
    return config.data.batch_tokens // (config.data.seq_len * hardware.num_processes * hardware.micro_batch_seqs)
