"""Every setting as a typed dataclass: what a run is asked to do.

bench/config/compose.py composes the values, bench/config/resolve.py fills what was left to the machine; `config_id()`
names the result.  None means off, unknown or "derive it", never 0 or -1.

config.yaml's versions, both read by `read()`:
  1  optim flat: its schedule a name, and the settings of all optimizers and schedules, None where unused
  2  optim has the settings of its own optimizer, optim.schedule those of its schedule; exporters are not instruments
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from bench.config.typed import build
from models import optimizers
from models.settings import Positive, PositiveInt, Range, one_of

CONFIG_ID_CHARS = 8
AtLeast1 = Annotated[int, Range(lambda value: value >= 1, "use 1 or more")]
Seconds = Annotated[float, Range(lambda value: value > 0, "use a number of seconds above 0")]
Name = Annotated[
    str,
    Range(
        lambda name: name[:1] not in ("", ".") and all(char.isalnum() or char in "._-" for char in name),
        "it becomes part of a folder's name: use letters, digits, '-', '_' and '.'",
    ),
]


@dataclass(kw_only=True)
class ModelConfig:
    arch: str  # models/ARCH.py, or a class of the user's own: bench/own_code.py
    num_layers: PositiveInt
    num_heads: PositiveInt
    width: PositiveInt  # of the residual stream
    vocab_size: PositiveInt | None = None  # rows of the embedding; None: data.vocab_size rounded up to a multiple of 64
    args: dict[str, Any] | None = None  # further arguments of the user's own class


@dataclass(kw_only=True)
class DataConfig:
    source: str  # a name in bench.data.sources.SOURCES, or a class of the user's own
    vocab_size: int | None = None  # tokens the data may use; None: the source knows
    seq_len: PositiveInt
    batch_tokens: PositiveInt  # of one optimizer step, over all ranks and micro-steps
    train_glob: str | None = None  # shards, text
    val_glob: str | None = None  # shards, text
    tokenizer: str | None = None  # text: "bytes" or "gpt2"
    train_tokens: int | None = None  # markov: how many to make
    markov_seed: int | None = None  # markov: of the source itself, never of the run
    markov_lags: list[int] | None = None  # markov: which earlier tokens the next one depends on
    repo: str | None = None  # hub: dataset repository
    revision: str | None = None  # hub: commit, so that the files cannot change underneath
    num_train_shards: int | None = None  # hub: how many to fetch
    train_sha256: str | None = None  # pysource, markov: what the made files must hash to
    val_sha256: str | None = None
    args: dict[str, Any] | None = None  # settings of the user's own source


@dataclass(kw_only=True)
class GoalConfig:
    num_steps: PositiveInt
    val_tokens: PositiveInt
    val_every_steps: PositiveInt
    target_val_loss: float | None = None  # nats per token
    target_gap_nats: Positive | None = None  # above the data's known floor
    stop_at_target: bool = False  # end the run at the first validation that reaches the target


@dataclass(kw_only=True)
class HardwareConfig:
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    num_processes: AtLeast1 | None = None  # None: one per GPU, or one on a CPU
    num_threads: AtLeast1 | None = None  # CPU threads of each process; None: an equal share of the cores
    dtype: Annotated[str, one_of("float32", "bfloat16")] | None = None  # of activations; None: bfloat16 on a GPU only
    compile: bool | None = None  # torch.compile; None: on a GPU only
    micro_batch_seqs: PositiveInt | None = None  # at most, per rank and micro-step; None: no limit
    deterministic: bool = False  # torch.use_deterministic_algorithms
    gc: Annotated[str, one_of("freeze", "on", "off", "manual")] | None = None  # Python's collector; None: freeze
    gc_every_steps: AtLeast1 | None = None  # manual: a collection of generation 1 every so many steps
    collective_timeout_s: Seconds = 120.0
    wall_timeout_s: Seconds | None = None  # the launcher ends the run after this long


@dataclass(kw_only=True)
class TrackRules:
    """How runs on the track are judged (bench/claims/rules/, bench/compare/).  No part of config_id: no run changes."""

    device: str | None = None  # cpu or cuda
    gpu: str | None = None  # its model, as the driver names it
    num_gpus: int | None = None
    num_runs: int | None = None  # a claim's fewest, each of another seed and with a time that counts
    may_be_untimed: list[str] | None = None  # what train_s may exclude; None: anything that the record names
    max_interrupted: int | None = None  # runs of a claim's races that were interrupted and raced again
    # a change of run time shown to be smaller than this, either way, is called equivalent
    equivalence_margin_pct: Annotated[float, Range(lambda pct: 0 < pct < 100, "use per cent above 0")] = 0.5


@dataclass(kw_only=True)
class TrackConfig:
    name: str
    about: str
    repeats: PositiveInt  # runs that ./speedrun.sh makes, each with a fresh seed
    # of the one-sided t test of the mean val_loss against the target
    p_value: Annotated[float, Range(lambda value: 0 < value < 1, "it must be between 0 and 1")]
    fixed: list[str] = field(default_factory=list)  # settings which a run must leave alone to count on this track
    reference_hardware: str | None = None
    rules: TrackRules = field(default_factory=TrackRules)


@dataclass(kw_only=True)
class ScriptConfig:
    path: str | None = None  # somebody's own training program, script=train_gpt.py; null: train a model of ours
    args: list[str] | None = None  # its arguments; {seed} in one of them is the run's seed; null: none
    python: str | None = None  # the interpreter that runs it; null: this program's own
    env: dict[str, Any] | None = None  # variables that it gets beside the harness's; null as a value: the shell's own
    dialect: str | None = None  # how its lines read: a name, or a yaml of patterns; null: found in what it prints
    data: str | None = None  # folder in which it looks for shards; null: data/fineweb10B
    raw_data: bool | None = None  # give it nanoGPT's train.bin and val.bin there, without a header; null: shards


@dataclass(kw_only=True)
class Config:
    name: Name | None = None  # for people; None: arch-optim
    seed: Annotated[int, Range(lambda value: value >= 0, "use 0 or more")] = 0
    script: ScriptConfig | None = None  # then model and optim are null: the script has its own
    model: ModelConfig | None
    data: DataConfig
    optim: optimizers.Config | None
    goal: GoalConfig
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    track: TrackConfig
    instruments: dict[str, Any] = field(default_factory=dict)  # name -> its settings
    exporters: dict[str, Any] = field(default_factory=dict)  # name -> its settings; they change nothing in a run


@dataclass(frozen=True)
class Machine:
    """What resolve() may ask of the machine."""

    num_gpus: int
    num_cpus: int


def to_dict(config: Any) -> dict[str, Any]:
    """A Config, or one of its groups -> a nested dict of all its settings, a copy."""
    return dataclasses.asdict(config)


def read(folder: Path | str) -> Config:
    """config.yaml of a run folder, of any version -> Config.  Raises OSError, ValueError."""
    path = Path(folder) / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds no settings")
    return build(Config, upgraded(values))


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """config.yaml's values, of any version -> as the newest version has them, in a new dict."""
    optim, track = values.get("optim"), values.get("track")
    if isinstance(optim, dict) and isinstance(optim.get("schedule"), str):
        optim = _without_none(optim)
        schedule = {"name": optim.pop("schedule")}
        names = ("warmup_frac", "cooldown_frac", "final_lr_frac")
        schedule |= {name: optim.pop(name) for name in names if name in optim}
        values = values | {"optim": optim | {"schedule": schedule}}
    if isinstance(track, dict) and isinstance(track.get("rules"), dict):
        rules = {name: rule for name, rule in track["rules"].items() if name != "forbidden_instruments"}
        values = values | {"track": track | {"rules": rules}}
    return values


def config_id(config: Config) -> str:
    """First 8 hex digits of a sha256 over all that changes a run but its seed: runs that share it are repeats.

    What is None is not hashed, and optim is hashed flat, as version 1 wrote it: a setting that a later version adds or
    moves changes no id.
    """
    values = to_dict(config)
    for name in ("name", "seed", "exporters"):
        del values[name]
    del values["track"]["rules"]  # they judge runs and change none
    if values["optim"] is None:
        return _digest(values)
    schedule = values["optim"].pop("schedule")
    assert schedule.keys() & values["optim"].keys() == {"name"}, "an optimizer and a schedule share a setting's name"
    values["optim"] = {**schedule, **values["optim"], "schedule": schedule["name"]}
    return _digest(values)


def _digest(values):
    text = json.dumps(_without_none(values), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:CONFIG_ID_CHARS]


def _without_none(values):
    if not isinstance(values, dict):
        return values
    return {key: _without_none(value) for key, value in values.items() if value is not None}


def get(config: Config | dict, dotted: str) -> Any:
    """Value of a dotted key, of a Config or of its dict."""
    for part in dotted.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def num_micro_steps(config: Config) -> int:
    """Micro-steps of each rank in one optimizer step, of a resolved config."""
    hardware = config.hardware
    return config.data.batch_tokens // (config.data.seq_len * hardware.num_processes * hardware.micro_batch_seqs)
