"""Every knob as a typed dataclass: what a run is asked to do, checked and derived before anything starts.

Hydra composes these schemas (bench/compose.py); `resolve()` fills what was left to the machine and refuses what
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
    source: str = MISSING  # a name in bench.sources.SOURCES
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
    """How a claim on the track is judged (bench/rules.py).  No part of config_id: it changes nothing in a run."""

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
    raise ValueError(f"{where}={value!r} is of type {type(value).__name__}: it must be of type {getattr(hint, '__name__', hint)}")


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


def resolve(config, machine, vocab_size):
    """A copy of config with every "derive it" derived.  vocab_size is the data's.  Raises ValueError, all checks made."""
    config = build(Config, to_dict(config))
    resolve_hardware(config.hardware, machine)
    _resolve_batch(config)
    _resolve_model(config, vocab_size)
    _check_optim(config.optim)
    _check_goal(config)
    if config.name is None:
        config.name = f"{config.model.arch}-{config.optim.name}"
    elif not config.name or not all(char.isalnum() or char in "._-" for char in config.name) or config.name[0] == ".":
        _refuse("name", config.name, "it becomes part of a folder's name: use letters, digits, '-', '_' and '.'")
    if config.seed < 0:
        _refuse("seed", config.seed, "use 0 or more")
    return config


def _refuse(what, value, remedy):
    raise ValueError(f"{what}={value}: {remedy}")


def _positive(config, *names):
    for name in names:
        value = get(config, name)
        if value is not None and value <= 0:
            _refuse(name, value, "it must be above 0")


def resolve_hardware(hardware, machine):
    """In place: what was left to the machine, derived.  Raises ValueError."""
    if hardware.device not in ("auto", "cpu", "cuda"):
        _refuse("hardware.device", hardware.device, "use auto, cpu or cuda")
    if hardware.device == "auto":
        hardware.device = "cuda" if machine.num_gpus else "cpu"
    on_gpu = hardware.device == "cuda"
    if on_gpu and not machine.num_gpus:
        _refuse("hardware.device", "cuda", "this machine shows no NVIDIA GPU: use hardware=cpu or hardware=auto")
    if hardware.num_processes is None:
        hardware.num_processes = machine.num_gpus if on_gpu else 1
    if hardware.num_processes < 1:
        _refuse("hardware.num_processes", hardware.num_processes, "use 1 or more")
    if on_gpu and hardware.num_processes > machine.num_gpus:
        _refuse("hardware.num_processes", hardware.num_processes, f"this machine has {machine.num_gpus} GPU(s), one process each")
    if hardware.num_threads is None:
        hardware.num_threads = max(1, machine.num_cpus // hardware.num_processes)
    if hardware.num_threads < 1:
        _refuse("hardware.num_threads", hardware.num_threads, "use 1 or more")
    if hardware.dtype is None:
        hardware.dtype = "bfloat16" if on_gpu else "float32"
    if hardware.dtype not in ("float32", "bfloat16"):
        _refuse("hardware.dtype", hardware.dtype, "use float32 or bfloat16")
    if hardware.compile is None:
        hardware.compile = on_gpu
    for name in ("collective_timeout_s", "wall_timeout_s"):
        value = getattr(hardware, name)
        if value is not None and value <= 0:
            _refuse(f"hardware.{name}", value, "use a number of seconds above 0")
    _resolve_collector(hardware)


def _resolve_collector(hardware):
    if hardware.gc == "freeze":
        hardware.gc = None  # said or not, the default is one config with one id
    if hardware.gc not in (None, "on", "off", "manual"):
        _refuse("hardware.gc", hardware.gc, "use freeze, on, off or manual")
    if hardware.gc_every_steps is not None and hardware.gc_every_steps < 1:
        _refuse("hardware.gc_every_steps", hardware.gc_every_steps, "use 1 or more")
    _needed_or_refused("hardware.gc_every_steps", hardware.gc_every_steps, hardware.gc == "manual", f"hardware.gc={hardware.gc or 'freeze'}")


def _resolve_batch(config):
    """batch_tokens = world_size * num_micro_steps * micro_batch_seqs * seq_len, exactly."""
    data, hardware = config.data, config.hardware
    _positive(config, "data.seq_len", "data.batch_tokens", "goal.val_tokens", "hardware.micro_batch_seqs")
    step_tokens = data.seq_len * hardware.num_processes
    for name, tokens in (("data.batch_tokens", data.batch_tokens), ("goal.val_tokens", config.goal.val_tokens)):
        if tokens % step_tokens:
            near = max(1, round(tokens / step_tokens)) * step_tokens
            _refuse(name, tokens, f"it must be a multiple of seq_len * num_processes = {data.seq_len} * "
                    f"{hardware.num_processes} = {step_tokens}; try {name}={near}")
    rank_seqs = data.batch_tokens // step_tokens
    limit = min(hardware.micro_batch_seqs or rank_seqs, rank_seqs)
    hardware.micro_batch_seqs = next(seqs for seqs in range(limit, 0, -1) if rank_seqs % seqs == 0)


def num_micro_steps(config):
    """Micro-steps of each rank in one optimizer step, of a resolved config."""
    hardware = config.hardware
    return config.data.batch_tokens // (config.data.seq_len * hardware.num_processes * hardware.micro_batch_seqs)


def _resolve_model(config, vocab_size):
    model = config.model
    _positive(config, "model.num_layers", "model.num_heads", "model.width", "model.vocab_size")
    if model.width % (2 * model.num_heads):
        _refuse("model.width", model.width, f"it must be a multiple of 2 * num_heads = {2 * model.num_heads}")
    config.data.vocab_size = vocab_size
    if model.vocab_size is None:
        model.vocab_size = -(-vocab_size // 64) * 64  # e.g. 50257 -> 50304
    if model.vocab_size < vocab_size:
        _refuse("model.vocab_size", model.vocab_size, f"the data uses tokens up to {vocab_size - 1}: use {vocab_size} or more")


def _check_optim(optim):
    for name in ("lr", "eps", "grad_clip_norm", "muon_lr", "muon_ns_steps"):
        value = getattr(optim, name)
        if value is not None and value <= 0:
            _refuse(f"optim.{name}", value, "it must be above 0")
    for name in ("weight_decay", "muon_weight_decay"):
        value = getattr(optim, name)
        if value is not None and value < 0:
            _refuse(f"optim.{name}", value, "it must not be below 0")
    for name in ("beta1", "beta2", "muon_momentum"):
        value = getattr(optim, name)
        if value is not None and not 0 <= value < 1:
            _refuse(f"optim.{name}", value, "it must be in [0, 1)")
    for name in ("warmup_frac", "cooldown_frac", "final_lr_frac"):
        value = getattr(optim, name)
        if value is not None and not 0 <= value <= 1:
            _refuse(f"optim.{name}", value, "it must be in [0, 1]")
    needs = {"constant": (), "cosine": ("final_lr_frac",), "trapezoid": ("cooldown_frac", "final_lr_frac")}
    if optim.schedule in needs:
        for name in ("cooldown_frac", "final_lr_frac"):
            _needed_or_refused(f"optim.{name}", getattr(optim, name), name in needs[optim.schedule], f"optim.schedule={optim.schedule}")
    for name in ("muon_lr", "muon_momentum", "muon_weight_decay", "muon_ns_steps"):
        _needed_or_refused(f"optim.{name}", getattr(optim, name), optim.name == "muon", f"optim={optim.name}")
    if optim.warmup_frac + (optim.cooldown_frac or 0) > 1:
        _refuse("optim.warmup_frac", optim.warmup_frac, f"with cooldown_frac={optim.cooldown_frac} it is more than the whole race: make one smaller")


def _needed_or_refused(name, value, needed, by):
    if needed and value is None:
        _refuse(name, value, f"{by} needs it: give {name}=NUMBER")
    if not needed and value is not None:
        _refuse(name, value, f"it has no effect with {by}: leave it out")


def _check_goal(config):
    goal = config.goal
    _positive(config, "goal.num_steps", "goal.val_every_steps", "goal.target_gap_nats", "track.repeats")
    if goal.target_val_loss is not None and goal.target_gap_nats is not None:
        _refuse("goal.target_gap_nats", goal.target_gap_nats, f"target_val_loss={goal.target_val_loss} is set too: keep one of them")
    if goal.target_gap_nats is not None and config.data.source != "markov":
        _refuse("goal.target_gap_nats", goal.target_gap_nats, f"only data=markov has a known floor, this is data={config.data.source}")
    if goal.stop_at_target and goal.target_val_loss is None and goal.target_gap_nats is None:
        _refuse("goal.stop_at_target", True, "there is no target: set goal.target_val_loss or goal.target_gap_nats")
    if not 0 < config.track.p_value < 1:
        _refuse("track.p_value", config.track.p_value, "it must be between 0 and 1")
