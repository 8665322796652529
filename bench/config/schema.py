"""Every setting as a typed dataclass: what a run is to do.

bench/config/compose.py composes the values, bench/config/resolve.py fills what was left to the machine;
bench/config/identity.py names the result.  None means off, unknown or "derive it", never 0 or -1.
The comment of a field is its meaning, what null means last: bench/config/meanings.py reads it for `run --help KEY`.

config.yaml's versions, all read by `read()`:
1  optim flat: its schedule a name, and the settings of all optimizers and schedules, None where unused
2  optim has the settings of the chosen optimizer, optim.schedule those of its schedule; exporters are not instruments
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from bench.base.metric import DIRECTIONS, VAL_LOSS, Metric, named
from bench.base.reading import yaml_file
from bench.base.reading.damage import reading_record
from bench.config.typed import AtLeast1, Name, Repository, ShardNumbers, between
from bench.config.typed import build as build
from models import optimizers
from models.settings import NotNegativeInt, Positive, PositiveInt, Range, one_of
from models.stages import Stage

metric_name = Range(lambda name: bool(re.fullmatch(r"[a-z]\w*", name)), "a name of small letters, digits and _")
GONE_RULES = ("forbidden_instruments", "num_runs")  # of track.rules in older records; num_runs is track.repeats now


@dataclass(kw_only=True)
class ModelConfig:
    arch: str  # architecture: models/ARCH.py, or a class of your own, my_model.py:MyModel
    num_layers: PositiveInt  # transformer blocks
    num_heads: PositiveInt  # attention heads of a block; 2 * num_heads must divide width
    width: PositiveInt  # features of the residual stream
    vocab_size: PositiveInt | None = None  # rows of the embedding; null: data.vocab_size, up to a multiple of 64
    residual_dtype: Annotated[str, one_of("float32", "bfloat16")] | None = None  # of the residual stream; null: float32
    # kept in bfloat16: embedding, head, matrices, vectors, or names with wildcards as in optim.groups, where the
    # optimizer's state of them is bfloat16 too; null: all parameters are float32, or what the model makes them
    bfloat16_params: list[str] | None = None
    # drop activations inside of blocks, compute them again in the backward pass: less memory, slower; null: keep them
    activation_checkpointing: bool | None = None
    args: dict[str, Any] | None = None  # further arguments of your own class


@dataclass(kw_only=True)
class DataConfig:
    source: str  # where tokens come from: bench/data/sources/, or a class of your own
    vocab_size: int | None = None  # tokens are below this number; null: the source knows
    seq_len: PositiveInt  # tokens of a sequence
    # tokens of one optimizer step, over all ranks and micro-steps: a multiple of seq_len * num_processes
    batch_tokens: PositiveInt
    # every sequence begins at a document, and what lies between them is skipped; null: the stream without gaps
    bos_aligned: bool | None = None
    # the token before each document; null: the source knows, but not of your own shards; source shards
    eos_token: Annotated[int, between(0, 65535)] | None = None
    train_glob: str | None = None  # your files to train on, a path with wildcards; sources shards and text
    val_glob: str | None = None  # your files to validate on, a path with wildcards; sources shards and text
    tokenizer: Annotated[str, one_of("bytes", "gpt2")] | None = None  # what made the tokens; sources text and shards
    train_tokens: Annotated[int, between(2, 2**28)] | None = None  # how many to make; source markov
    markov_seed: Annotated[int, between(0, 2**32 - 1)] | None = None  # of the source itself, not of the run; markov
    markov_lags: list[int] | None = None  # which earlier tokens the next one depends on, [1] or [1,3]; source markov
    repo: Repository | None = None  # dataset repository on the Hugging Face hub; source hub
    revision: str | None = None  # commit of repo; null: the hub's current one, noted by the first fetch; source hub
    # how many to fetch, 100 million tokens each, from the first on; source hub; null: those that shards names
    num_train_shards: AtLeast1 | None = None
    # which training shards and in which order, by the number in their names, [3,7,9-12]; sources hub and shards; null:
    # all of source shards, the first num_train_shards of a hub's
    shards: list[ShardNumbers] | None = None
    train_sha256: str | None = None  # what the made training file must hash to; null: anything; pysource and markov
    val_sha256: str | None = None  # what the made validation file must hash to; null: anything; pysource and markov
    args: dict[str, Any] | None = None  # settings of your own source

    @property
    def shard_numbers(self) -> list[int] | None:
        """The numbers in shards, ["3", "9-12"] -> [3, 9, 10, 11, 12]; None: not chosen.  ValueError: a number twice."""
        if self.shards is None:
            return None
        numbers: list[int] = []
        for word in self.shards:
            first, _, last = word.partition("-")
            numbers += range(int(first), int(last or first) + 1)
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(f"data.shards=[{','.join(self.shards)}]: name at least one, none twice, ranges upwards")
        return numbers


@dataclass(kw_only=True)
class GoalConfig:
    num_steps: PositiveInt  # optimizer steps, at most; schedules end there
    # tokens of a validation, the first of the val shards: a multiple of seq_len * num_processes
    val_tokens: PositiveInt
    val_every_steps: PositiveInt  # steps between validations; the clock stands still meanwhile
    val_seq_len: PositiveInt | None = None  # tokens of a sequence of validation; null: data.seq_len
    # window of every validation, of a run whose stages have windows; null: that of the step that comes next
    val_window_tokens: PositiveInt | None = None
    target_val_loss: float | None = None  # validation loss to be below, nats per token; null: no target
    # the target as nats per token above the data's known floor, data=markov only; null: no such target
    target_gap_nats: Positive | None = None
    stop_at_target: bool = False  # end the run at the first validation that reaches the target
    # what targets, budgets and comparisons are of: val_loss, val_bpb (bits per byte), core, or a name of your own that
    # metric_pattern finds in a script's lines; null: val_loss
    metric: Annotated[str, metric_name] | None = None
    metric_unit: str | None = None  # of a metric of your own; null: it has none
    metric_direction: Annotated[str, one_of(*DIRECTIONS)] | None = None  # of your own, which is better; null: lower
    # a regular expression with the group (?P<value>...), and perhaps (?P<step>...), in a script's lines; null: of a
    # metric that is known by name
    metric_pattern: str | None = None
    target: float | None = None  # value of another metric than val_loss to reach; null: no such target
    # seconds of training, by the run's clock; the best validation until then counts; null: no such budget
    time_budget_s: Positive | None = None
    token_budget: PositiveInt | None = None  # the same in tokens of training; null: no such budget
    flop_budget: Positive | None = None  # the same in FLOPs of training, by flops_per_token; null: no such budget

    @property
    def of(self) -> Metric:
        """What the goal is measured in."""
        return named(self.metric, self.metric_unit, self.metric_direction)

    @property
    def budget(self) -> dict[str, float]:
        """{time_s, tokens or flops: how much}; {} without one."""
        known = {"time_s": self.time_budget_s, "tokens": self.token_budget, "flops": self.flop_budget}
        return {unit: amount for unit, amount in known.items() if amount is not None}

    @property
    def target_value(self) -> float | None:
        """The target of that metric, but for target_gap_nats."""
        return self.target_val_loss if self.of.name == VAL_LOSS.name else self.target


@dataclass(kw_only=True)
class HardwareConfig:
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"  # what to train on; auto: every GPU, else the CPU
    num_processes: AtLeast1 | None = None  # ranks, of all nodes together; null: one per GPU, or one on a CPU and node
    # machines that the run spans; the same command is given on each; null: this one
    nodes: AtLeast1 | None = None
    # HOST:PORT where nodes meet, an address of the node that makes the record and a free port there; with nodes only
    rendezvous: str | None = None
    rendezvous_timeout_s: Positive | None = None  # how long ranks wait for each other before a run; null: 300 s
    num_threads: AtLeast1 | None = None  # CPU threads of each process; null: an equal share of the cores
    # of activations; null: bfloat16 on a GPU, float32 on a CPU
    dtype: Annotated[str, one_of("float32", "bfloat16")] | None = None
    tf32: bool | None = None  # float32 products on a GPU in TF32; null: as torch has it, which is not
    # what attention may run on: flash, efficient, cudnn or math; null: what torch chooses
    sdpa: Annotated[str, one_of("flash", "efficient", "cudnn", "math")] | None = None
    compile: bool | None = None  # torch.compile; null: on a GPU only
    # how ranks come to one update: plain, every rank all of it, gradients reduced after the backward pass; shard, each
    # its share, reduced while that runs; null: torch's DistributedDataParallel, every rank all of it
    reducer: Annotated[str, one_of("plain", "shard")] | None = None
    # most sequences of a rank at once; null: what is estimated to fit the GPU's memory, all of them on a CPU
    micro_batch_seqs: PositiveInt | None = None
    deterministic: bool = False  # torch.use_deterministic_algorithms: the same bits again, slower on a GPU
    # when Python's garbage collector runs while steps are timed; null: freeze, what exists before training is never
    # collected again
    gc: Annotated[str, one_of("freeze", "on", "off", "manual")] | None = None
    gc_every_steps: AtLeast1 | None = None  # steps between collections of generation 1; with gc=manual only
    # a collective that hangs longer fails the run; until warm-up ends 600 s at least, for ranks that compile unevenly
    collective_timeout_s: Positive = 120.0
    # a run that prints nothing, makes no step and computes nothing for so long is ended; null: it may
    stall_timeout_s: Positive | None = 600.0
    wall_timeout_s: Positive | None = None  # the launcher ends a run that lasts longer; null: no limit
    # of what the run has, all its GPUs together, or with --jobs of what the runs share; null: no costs in tables
    price_usd_per_hour: Positive | None = None

    @property
    def ranks_of_node(self) -> int:
        """How many ranks each node has; only of a resolved config."""
        assert self.num_processes is not None
        return self.num_processes // (self.nodes or 1)


@dataclass(kw_only=True)
class ScriptConfig:
    path: str | None = None  # any training script, script=train_gpt.py; null: train a model of ours
    root: str | None = None  # folder that it is started in, with all its code; null: the script's own
    rev: str | None = None  # revision of the repository of root; null: its files as they are
    module: str | None = None  # in place of a path: scripts.base_train, as python -m starts it; needs root
    command: list[str] | None = None  # in place of a path: any program, 'bash train.sh'; needs root
    torchrun: bool | None = None  # whether it gets RANK, WORLD_SIZE ...; null: yes, but for a command
    args: list[str] | None = None  # its arguments; {seed} in one of them is the run's seed; null: none
    python: str | None = None  # the interpreter that runs it; null: root's .venv, or this program's own
    env: dict[str, Any] | None = None  # variables that it gets beside the harness's; null as a value: the shell's own
    dialect: str | None = None  # how its lines read: a name, or a yaml of patterns; null: found in what it prints
    data: str | None = None  # folder in which it looks for shards; null: data/fineweb10B
    sandbox: bool | None = None  # without network, home folder and other files than its own; null: as you
    raw_data: bool | None = None  # give it nanoGPT's train.bin and val.bin there, without a header; null: shards


SCRIPT_STARTS = ("path", "module", "command")  # of these a script has one


@dataclass(kw_only=True)
class ProfileConfig:
    # end the run after the last step that the chosen instruments record; schedules are those of the whole run
    stop_after_window: bool = False


@dataclass(kw_only=True)
class LookConfig:
    # train some more steps with torch's profiler after the clock has stopped; null: on a GPU
    enabled: bool | None = None
    wait_steps: NotNegativeInt = 1  # trained before, without the profiler
    warmup_steps: NotNegativeInt = 1  # then with the profiler, which records nothing yet
    active_steps: AtLeast1 = 3  # then recorded


@dataclass(kw_only=True)
class CheckpointConfig:
    save: bool = False  # write the final weights to weights.safetensors, after the clock has stopped
    # write the whole state so often, the clock paused, and at a warning (SIGTERM, SIGUSR1, SIGUSR2), so that resume=
    # can go on from it; null: with resume= at a warning only, else never
    every_min: Positive | None = None


@dataclass(kw_only=True)
class TrackRules:
    """How runs on the track are judged (bench/claims/rules/, bench/compare/).  No part of config_id: no run changes."""

    device: str | None = None  # what a claim must have run on, cpu or cuda; null: any
    gpu: str | None = None  # the GPU's model, as the driver names it; null: any
    num_gpus: int | None = None  # how many GPUs; null: any number
    may_be_untimed: list[str] | None = None  # what train_s may exclude; null: anything that the record names
    # flags of torch.compile that a contestant may set, patterns of bench/training/compile_flags.py's names; null: any
    compile_flags: list[str] | None = None
    max_interrupted: int | None = None  # runs of a claim's races that were interrupted and raced again; null: any
    # whether a run whose clock was paused for checkpoints, or which went on from one, has a time that counts; null: no
    may_resume: bool | None = None
    implausible_val_loss: float | None = None  # a run whose val_loss is below it is invalid; null: no such bound
    # what makes a record: least time, fewest steps whatever their time, or the best value of the goal's metric
    judged: Annotated[str, one_of("time", "steps", "metric")] = "time"
    logs: str | None = None  # the dialect of its logs, as ./run.sh import names it; null: modded-nanogpt
    max_artifact_bytes: PositiveInt | None = None  # of the model and its code, as a script prints it; null: any size
    # by how much a result must be better than another (judge --against), in nats a token, at p_value; null: by no rule
    min_gain_nats: Positive | None = None
    compilations: AtLeast1 = 1  # the fewest fresh compilations of each arm in a claim's races
    # how the losses are held against the target: t, a one-sided t test of the last ones at p_value; z, modded-nanogpt's
    # rule of track 3, at the first step at which the mean of all runs is z_margin_nats / sqrt(runs) below the target
    statistic: Annotated[str, one_of("t", "z")] = "t"
    z_margin_nats: Positive = 0.004  # with statistic=z: what (target - mean) * sqrt(runs) must reach
    z_sd_nats: Positive = 0.0013  # with statistic=z: the standard deviation over runs that it assumes, not measures
    nats_per_100_steps: Positive = 0.0045  # with statistic=z: what 100 steps are worth when two results are compared
    # a change of run time shown to be smaller than this, either way, is called equivalent
    equivalence_margin_pct: Annotated[float, Range(lambda pct: 0 < pct < 100, "between 0 and 100")] = 0.5
    # the largest alpha of a race on a track that fixes something: a plan may be stricter
    alpha: Annotated[float, Range(lambda value: 0 < value < 0.5, "between 0 and 0.5")] = 0.05
    # the widest rise of the mean val_loss that a race there calls no worse; of others: bench/base/metric.py
    loss_margin_nats: Annotated[float, Range(lambda nats: nats > 0, "above 0")] = 0.002
    # what ./run.sh pr asks of a record's pull request: {a check of bench/claims/pull_request.py: the rule in words}
    pull_request: dict[str, str] = field(default_factory=dict)
    # patterns of names in a script's source: statements that have one belong to the data pipeline or the validation
    data_names: list[str] = field(default_factory=list)
    loss_buffer_nats: Positive = 0.002  # how far below the target records are kept; half of it may be spent unasked


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


@dataclass(kw_only=True)
class Config:
    name: Name | None = None  # for people, in the run's id; null: arch-optim
    # of the initial weights and of torch's random numbers
    seed: Annotated[int, Range(lambda value: 0 <= value < 2**63, "of 0 or more, below 2**63")] = 0
    script: ScriptConfig | None = None  # a training script instead of our training loop; null: ours
    model: ModelConfig | None  # what is trained; null: a script's own
    data: DataConfig  # what it is trained on, and in which portions
    optim: optimizers.Config | None  # how weights are updated; null: a script's own way
    goal: GoalConfig  # when a run ends and what it should reach
    # what changes in the course of a run, each from the end of the one before, [{until_frac:0.5,batch_tokens:512},{}]:
    # docs/own.md; null: nothing does
    stages: list[Stage] | None = None
    hardware: HardwareConfig = field(default_factory=HardwareConfig)  # where and how it runs
    track: TrackConfig  # the rules that a run keeps
    instruments: dict[str, Any] = field(default_factory=dict)  # what is measured beside the clock
    exporters: dict[str, Any] = field(default_factory=dict)  # where the finished record is sent; no part of the run
    profile: ProfileConfig = field(default_factory=ProfileConfig)  # how far a profiled run goes; no part of config_id
    look: LookConfig = field(default_factory=LookConfig)  # what is recorded after the race; no part of config_id
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # what is kept; no part of config_id
    # auto: go on with the newest run of this config and seed that ended with a checkpoint, if there is one; or the
    # run_id of one; null: begin a new run.  No part of config_id
    resume: str | None = None


@dataclass(frozen=True)
class Machine:
    """What resolve() may ask of the machine."""

    num_gpus: int
    num_cpus: int
    gpu_memory_gib: float | None = None  # of the smallest GPU; None: unknown


def to_dict(config: Any) -> dict[str, Any]:
    """A Config, or one of its groups -> a nested dict of all its settings, a copy."""
    return dataclasses.asdict(config)


def read(folder: Path | str, secrets: Iterable[tuple[list[Any], str]] = ()) -> Config:
    """config.yaml of a run folder, of any version -> Config.  Raises ValueError.

    secrets: (path, text) of what is to stand in place of a credential that config.yaml does not show.
    """
    path = Path(folder) / "config.yaml"
    with reading_record(path):
        values = upgraded(yaml_file.read(path))
        for keys, text in secrets:
            part = values
            for key in keys[:-1]:
                part = part[key]
            part[keys[-1]] = text
        return build(Config, values)


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """config.yaml's values, of any version -> as the newest version has them, in a new dict."""
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
    """A nested dict without the keys that are None; any other value as it is."""
    if not isinstance(values, dict):
        return values
    return {key: without_none(value) for key, value in values.items() if value is not None}
