"""Declares every setting of a run as a field of a typed dataclass.

bench/config/compose.py composes the values, bench/config/resolve.py derives what was left to the machine, and
bench/config/identity.py names the config. None means off, unknown or "derive it", never 0 or -1. A field's comment is
its meaning, and says last what null means; bench/config/meanings.py shows it for `run --help KEY`.

Versions of config.yaml, all of which `read()` reads:
1  optim is flat: its schedule is a name, and the settings of all optimizers and schedules are there, None if unused
2  optim has the settings of the chosen optimizer, optim.schedule those of its schedule; exporters are not instruments
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from bench.base.metric import DIRECTIONS, VAL_LOSS, Metric, named
from bench.base.reading import yaml_file
from bench.base.reading.damage import reading_record
from bench.config import typed
from bench.config.typed import AtLeast1, Name, Repository, ShardNumbers, between
from bench.config.typed import build as build
from models import optimizers
from models.settings import NotNegativeInt, Positive, PositiveInt, Range, one_of
from models.stages import Stage

is_command = Range(bool, "of a program and its arguments, as 'bash train.sh'")
is_folder_below = Range(  # no absolute path, none with .. in it, and not the folder itself
    lambda text: bool((path := PurePosixPath(text)).name) and not path.is_absolute() and ".." not in path.parts,
    "a folder below the script's own, e.g. data/fineweb10B",
)
metric_name = Range(lambda name: bool(re.fullmatch(r"[a-z]\w*", name)), "a name of small letters, digits and _")
are_lags = Range(
    lambda lags: 0 < len(lags) <= 8 and all(lag in range(1, 1025) and lags.count(lag) == 1 for lag in lags),
    "of 1 to 8 different distances of 1 to 1024, such as [1] or [1,3]",
)
GONE_RULES = ("forbidden_instruments", "num_runs")  # rules that only older records have; num_runs is track.repeats now


@dataclass(kw_only=True)
class ModelConfig:
    arch: str  # architecture: models/ARCH.py, or a class of your own, my_model.py:MyModel
    num_layers: PositiveInt  # transformer blocks
    num_heads: PositiveInt  # attention heads of a block; 2 * num_heads must divide width
    width: PositiveInt  # features of the residual stream
    vocab_size: PositiveInt | None = None  # rows of the embedding; null: data.vocab_size, up to a multiple of 64
    residual_dtype: Annotated[str, one_of("float32", "bfloat16")] | None = None  # of the residual stream; null: float32
    # parameters kept in bfloat16: embedding, head, matrices, vectors, or names with wildcards, as in optim.groups; the
    # optimizer's state of these is bfloat16 too; null: all are float32, or what the model makes them
    bfloat16_params: list[str] | None = None
    # recompute the activations inside blocks in the backward pass: less memory, but slower; null: keep them
    activation_checkpointing: bool | None = None
    args: dict[str, Any] | None = None  # further arguments of your own class


@dataclass(kw_only=True)
class DataConfig:
    source: str  # where tokens come from: bench/data/sources/, or a class of your own
    vocab_size: int | None = None  # all tokens are below this number; null: as the source says
    seq_len: PositiveInt  # tokens per sequence
    # tokens of one optimizer step, over all ranks and micro-steps: a multiple of seq_len * num_processes
    batch_tokens: PositiveInt
    # begin every sequence at a document, and skip the tokens in between; null: use the stream without gaps
    bos_aligned: bool | None = None
    # the token before each document, for data=shards; null: as the source says, and unknown for shards
    eos_token: Annotated[int, between(0, 65535)] | None = None
    train_glob: str | None = None  # your files to train on, a path with wildcards, for data=shards and text
    val_glob: str | None = None  # your files to validate on, a path with wildcards, for data=shards and text
    tokenizer: Annotated[str, one_of("bytes", "gpt2")] | None = None  # the tokenizer of your text or shards
    train_tokens: Annotated[int, between(2, 2**28)] | None = None  # how many tokens to make, for data=markov
    markov_seed: Annotated[int, between(0, 2**32 - 1)] | None = None  # seed of data=markov, not of the run
    markov_lags: Annotated[list[int], are_lags] | None = None  # which earlier tokens the next depends on in data=markov
    repo: Repository | None = None  # dataset repository on the Hugging Face hub
    revision: str | None = None  # commit of repo; null: the one that was current at the first fetch
    # how many shards to fetch, of 100 million tokens each, from the first on; null: those in data.shards
    num_train_shards: AtLeast1 | None = None
    # which training shards to use and in which order, by the numbers in their names, [3,7,9-12]; null:
    # all of your own shards, the first num_train_shards of a downloaded dataset
    shards: list[ShardNumbers] | None = None
    train_sha256: str | None = None  # required sha256 of the training file, for data=pysource and markov; null: any
    val_sha256: str | None = None  # required sha256 of the validation file, for data=pysource and markov; null: any
    args: dict[str, Any] | None = None  # settings of your own source

    @property
    def shard_numbers(self) -> list[int] | None:
        """The numbers in shards, ["3", "9-12"] -> [3, 9, 10, 11, 12], or None. Raises ValueError if one is repeated."""
        if self.shards is None:
            return None
        numbers: list[int] = []
        for text in self.shards:
            first, _, last = text.partition("-")
            numbers += range(int(first), int(last or first) + 1)
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(f"data.shards=[{','.join(self.shards)}]: name at least one, none twice, ranges upwards")
        return numbers


@dataclass(kw_only=True)
class GoalConfig:
    num_steps: PositiveInt  # maximum number of optimizer steps; schedules end there
    # tokens per validation, from the start of the validation shards: a multiple of seq_len * num_processes
    val_tokens: PositiveInt
    val_every_steps: PositiveInt  # steps from one validation to the next; the clock is stopped during a validation
    val_seq_len: PositiveInt | None = None  # tokens per sequence in validations; null: data.seq_len
    # window of every validation, if the stages have windows; null: that of the next step
    val_window_tokens: PositiveInt | None = None
    target_val_loss: float | None = None  # the validation loss must be below this; null: no target
    # the target as a distance above the data's known floor, for data=markov; null: no such target
    target_gap_nats: Positive | None = None
    stop_at_target: bool = False  # end the run at the first validation that reaches the target
    # the metric of targets, budgets and comparisons: val_loss, val_bpb (bits per byte), core, or one of your own, which
    # metric_pattern finds in a script's lines; null: val_loss
    metric: Annotated[str, metric_name] | None = None
    metric_unit: str | None = None  # unit of your own metric; null: none
    metric_direction: Annotated[str, one_of(*DIRECTIONS)] | None = None  # which is better, lower or higher; null: lower
    # a regular expression that finds your own metric in a script's lines, with the group (?P<value>...) and perhaps
    # (?P<step>...); null: the metric is a known one
    metric_pattern: str | None = None
    target: float | None = None  # the target of goal.metric, if that is not val_loss; null: no such target
    # budget of training time, by the run's clock; the best validation within it counts; null: no such budget
    time_budget_s: Positive | None = None
    token_budget: PositiveInt | None = None  # budget of training tokens; null: no such budget
    flop_budget: Positive | None = None  # budget of training FLOPs, by flops_per_token; null: no such budget

    @property
    def of(self) -> Metric:
        """The metric of the goal."""
        return named(self.metric, self.metric_unit, self.metric_direction)

    @property
    def budget(self) -> dict[str, float]:
        """{"time_s", "tokens" or "flops": the budget}; {} without one."""
        budgets = {"time_s": self.time_budget_s, "tokens": self.token_budget, "flops": self.flop_budget}
        return {unit: amount for unit, amount in budgets.items() if amount is not None}

    @property
    def target_value(self) -> float | None:
        """The target in the goal's metric, or None; target_gap_nats is not considered."""
        return self.target_val_loss if self.of.name == VAL_LOSS.name else self.target


@dataclass(kw_only=True)
class HardwareConfig:
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"  # what to train on; auto: every GPU, else the CPU
    num_processes: AtLeast1 | None = None  # ranks, of all nodes together; null: one per GPU, or one on a CPU and node
    # machines that the run spans; the same command is given on each; null: this one
    nodes: AtLeast1 | None = None
    # HOST:PORT, an address of the node that makes the record and a free port there; only with several nodes
    rendezvous: str | None = None
    rendezvous_timeout_s: Positive | None = None  # how long ranks wait for each other before a run; null: 300 s
    num_threads: AtLeast1 | None = None  # CPU threads of each process; null: an equal share of the cores
    # precision of activations; null: bfloat16 on a GPU, float32 on a CPU
    dtype: Annotated[str, one_of("float32", "bfloat16")] | None = None
    tf32: bool | None = None  # compute float32 products on a GPU in TF32; null: torch's default, false
    # the backend of attention: flash, efficient, cudnn or math; null: torch chooses
    sdpa: Annotated[str, one_of("flash", "efficient", "cudnn", "math")] | None = None
    compile: bool | None = None  # use torch.compile; null: only on a GPU
    # how ranks share gradients and updates: plain, all-reduce after the backward pass; shard, reduce-scatter during it,
    # and each rank updates its share; null: torch's DistributedDataParallel
    reducer: Annotated[str, one_of("plain", "shard")] | None = None
    # sequences per rank and micro-step, at most; null: as many as should fit the GPU's memory, all of them on a CPU
    micro_batch_seqs: PositiveInt | None = None
    deterministic: bool = False  # use torch.use_deterministic_algorithms: reproducible bits, but slower on a GPU
    # when Python's garbage collector runs while steps are timed; null: freeze, what exists before training is never
    # collected again
    gc: Annotated[str, one_of("freeze", "on", "off", "manual")] | None = None
    gc_every_steps: AtLeast1 | None = None  # steps from one collection of generation 1 to the next; only with gc=manual
    # a collective that hangs longer fails the run; at least 600 s until warm-up ends, because ranks compile unevenly
    collective_timeout_s: Positive = 120.0
    # end a run that prints nothing, makes no step and computes nothing for this long; null: never
    stall_timeout_s: Positive | None = 600.0
    wall_timeout_s: Positive | None = None  # end a run that lasts longer; null: no limit
    # run the ranks of a model without network, home folder and other files; null: as you. script.sandbox is a script's
    sandbox: bool | None = None
    # price of all hardware that the run uses, or with --jobs that the runs share; null: no costs in tables
    price_usd_per_hour: Positive | None = None

    @property
    def ranks_of_node(self) -> int:
        """Number of ranks on each node, of a resolved config."""
        assert self.num_processes is not None
        return self.num_processes // (self.nodes or 1)


@dataclass(kw_only=True)
class ScriptConfig:
    path: str | None = None  # any training script, script=train_gpt.py; null: train a model of ours
    root: str | None = None  # the folder in which the script is started, with all its code; null: the script's own
    rev: str | None = None  # use this revision of root's repository; null: the files as they are
    module: str | None = None  # instead of a path, a module that python -m starts, scripts.base_train; needs root
    command: Annotated[list[str], is_command] | None = None  # instead of a path, any other program; needs root
    torchrun: bool | None = None  # start the script with RANK, WORLD_SIZE ... set; null: yes, except for a command
    args: list[str] | None = None  # arguments of the script; {seed} becomes the run's seed; null: none
    python: str | None = None  # the interpreter that runs the script; null: root's .venv, or this program's own
    env: dict[str, Any] | None = None  # further environment variables; null as a value takes the shell's
    dialect: str | None = None  # format of the script's lines: a name, or a yaml of patterns; null: detected
    # patterns of the script's lines, {step: ..., val: ...}, which script.dialect=YAML gives too; null: those of dialect
    lines: dict[str, Any] | None = None
    # the folder in which the script looks for shards; null: data/fineweb10B
    data: Annotated[str, is_folder_below] | None = None
    sandbox: bool | None = None  # run without network, home folder and other files; null: run as you
    raw_data: bool | None = None  # provide nanoGPT's train.bin and val.bin, without a header; null: shards


SCRIPT_STARTS = ("path", "module", "command")  # a script has exactly one of these


@dataclass(kw_only=True)
class ProfileConfig:
    # end the run after the last step that the instruments record; schedules are still those of the whole run
    stop_after_window: bool = False


@dataclass(kw_only=True)
class LookConfig:
    # train a few more steps under torch's profiler after the clock has stopped; null: only on a GPU
    enabled: bool | None = None
    wait_steps: NotNegativeInt = 1  # steps before the profiler starts
    warmup_steps: NotNegativeInt = 1  # steps of the profiler's warm-up, which are not recorded
    active_steps: AtLeast1 = 3  # steps that the profiler records


@dataclass(kw_only=True)
class CheckpointConfig:
    save: bool = False  # write the final weights to weights.safetensors, after the clock has stopped
    # minutes between checkpoints, with the clock paused; a warning (SIGTERM, SIGUSR1, SIGUSR2) makes one too, and
    # resume= continues from it; null: with resume= only on a warning, else never
    every_min: Positive | None = None


@dataclass(kw_only=True)
class TrackRules:
    """How runs on the track are judged (bench/claims/rules/, bench/compare/). Not in config_id: rules change no run."""

    device: str | None = None  # what a claim must have run on, cpu or cuda; null: any
    gpu: str | None = None  # the GPU's model, as the driver names it; null: any
    num_gpus: int | None = None  # how many GPUs; null: any number
    may_be_untimed: list[str] | None = None  # what train_s may exclude; null: anything that the record names
    # flags of torch.compile that a contestant may set, as patterns (bench/training/compile_flags.py); null: any
    compile_flags: list[str] | None = None
    max_interrupted: int | None = None  # how many interrupted runs a claim's races may have; null: any number
    # whether the time of a run counts that wrote checkpoints or was resumed from one; null: no
    may_resume: bool | None = None
    # whether resume= may go on with fewer ranks than a run began with; the time of such a run never counts; null: no
    may_shrink: bool | None = None
    implausible_val_loss: float | None = None  # a run with a lower val_loss is invalid; null: no such bound
    # what makes a record: least time, fewest steps whatever their time, or the best value of the goal's metric
    judged: Annotated[str, one_of("time", "steps", "metric")] = "time"
    logs: str | None = None  # the dialect of its logs, as ./run.sh import names it; null: modded-nanogpt
    max_artifact_bytes: PositiveInt | None = None  # maximum size of model and code, as a script prints it; null: any
    # by how much a result must be better than another, at p_value (judge --against); null: no such rule
    min_gain_nats: Positive | None = None
    compilations: AtLeast1 = 1  # minimum number of compilations of each arm in a claim's races
    # how losses are compared with the target: t, a one-sided t test of the final ones at p_value; z, modded-nanogpt's
    # rule of track 3, at the first step at which the mean of all runs is z_margin_nats / sqrt(runs) below the target
    statistic: Annotated[str, one_of("t", "z")] = "t"
    z_margin_nats: Positive = 0.004  # with statistic=z: what (target - mean) * sqrt(runs) must reach
    z_sd_nats: Positive = 0.0013  # with statistic=z: the standard deviation of runs, which is assumed
    nats_per_100_steps: Positive = 0.0045  # with statistic=z: the nats that 100 steps are worth (judge --against)
    # changes of run time that are shown to be smaller than this are equivalent
    equivalence_margin_pct: Annotated[float, Range(lambda pct: 0 < pct < 100, "between 0 and 100")] = 0.5
    # the highest significance level that a race may have, if the track has fixed settings
    alpha: Annotated[float, Range(lambda value: 0 < value < 0.5, "between 0 and 0.5")] = 0.05
    # the largest rise of the mean val_loss that still counts as not worse; for other metrics see bench/base/metric.py
    loss_margin_nats: Annotated[float, Range(lambda nats: nats > 0, "above 0")] = 0.002
    # what ./run.sh pr asks of a record's pull request: {a check of bench/claims/pull_request.py: the rule in words}
    pull_request: dict[str, str] = field(default_factory=dict)
    # patterns of names in a script's source: statements that have one belong to the data pipeline or the validation
    data_names: list[str] = field(default_factory=list)
    loss_buffer_nats: Positive = 0.002  # how far below the target records are kept; a record may use up half of it


@dataclass(kw_only=True)
class TrackConfig:
    name: str  # a file of conf/track/; of the track's settings, a run can change only repeats
    about: str  # the track in a sentence
    repeats: PositiveInt  # how many runs ./speedrun.sh makes and a record needs, each with a fresh seed
    # level of the one-sided t test of the mean val_loss against the target
    p_value: Annotated[float, Range(lambda value: 0 < value < 1, "between 0 and 1")]
    fixed: list[str] = field(default_factory=list)  # settings that a run must not change to be eligible for this track
    reference_hardware: str | None = None  # where the track's times are compared; null: anywhere
    rules: TrackRules = field(default_factory=TrackRules)  # what ./run.sh judge requires of a claim


@dataclass(kw_only=True)
class Config:
    name: Name | None = None  # a name that becomes part of the run's id; null: arch-optim
    # seed of the initial weights and of torch's random numbers
    seed: Annotated[int, Range(lambda value: 0 <= value < 2**63, "of 0 or more, below 2**63")] = 0
    script: ScriptConfig | None = None  # a training script instead of our training loop; null: ours
    model: ModelConfig | None  # what is trained; null: a script's own
    data: DataConfig  # the data to train on, and the size of batches
    optim: optimizers.Config | None  # how weights are updated; null: a script's own way
    goal: GoalConfig  # when a run ends and what it should reach
    # settings that change during a run, stage by stage, [{until_frac:0.5,batch_tokens:512},{}]:
    # docs/own.md; null: nothing changes
    stages: list[Stage] | None = None
    hardware: HardwareConfig = field(default_factory=HardwareConfig)  # where and how it runs
    track: TrackConfig  # the rules of the track
    instruments: dict[str, Any] = field(default_factory=dict)  # optional measurements
    exporters: dict[str, Any] = field(default_factory=dict)  # where the finished record is sent; not part of the run
    profile: ProfileConfig = field(default_factory=ProfileConfig)  # profiling; not part of config_id
    look: LookConfig = field(default_factory=LookConfig)  # profiling after the clock has stopped; not in config_id
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig
    )  # checkpoints, weights; not part of config_id
    # auto: continue the newest run of this config and seed that ended with a checkpoint, if there is one; or the
    # run_id of a run to continue; null: begin a new run.  Not part of config_id
    resume: str | None = None


@dataclass(frozen=True)
class Machine:
    """What resolve() knows about the machine."""

    num_gpus: int
    num_cpus: int
    gpu_memory_gib: float | None = None  # memory of the smallest GPU; None: unknown


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a Config, or one of its groups, as a new nested dict of all its settings."""
    return dataclasses.asdict(config)


def read(folder: Path | str, secrets: Iterable[tuple[list[Any], Any]] = ()) -> Config:
    """Reads config.yaml of a run folder, of any version. Raises ValueError if it is damaged.

    secrets are (path, value) pairs of what the file does not show: credentials, and settings of a later segment.
    """
    path = Path(folder) / "config.yaml"
    with reading_record(path):
        values = upgraded(yaml_file.recorded(path))
        for keys, value in secrets:
            part = values
            for key in keys[:-1]:
                part = part[key]
            part[keys[-1]] = value
        return build(Config, values)


def recorded(folder: Path | str) -> Config:
    """Returns read() of a run folder whose user's own classes need not be here, and are not loaded."""
    with typed.without_own_code():
        return read(folder)


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config.yaml of any version as the newest version has them, in a new dict."""
    optim, track = values.get("optim"), values.get("track")
    if isinstance(optim, dict) and isinstance(optim.get("schedule"), str):
        optim = without_none(optim)
        schedule = {"name": optim.pop("schedule")}
        names = ("warmup_frac", "cooldown_frac", "final_lr_frac")
        schedule |= {name: optim.pop(name) for name in names if name in optim}
        values = values | {"optim": optim | {"schedule": schedule}}
    if isinstance(track, dict) and isinstance(track.get("rules"), dict):
        rules = {name: rule for name, rule in track["rules"].items() if name not in GONE_RULES}
        values = values | {"track": track | {"rules": rules}}
    return values


def without_none(values: Any) -> Any:
    """Returns a nested dict without the keys whose value is None; any other value is returned unchanged."""
    if not isinstance(values, dict):
        return values
    return {key: without_none(value) for key, value in values.items() if value is not None}
