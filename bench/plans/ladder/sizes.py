"""Fits the rungs to the size at which a machine races them, derives what has to change for it, and reports that.

A rung is an experiment whose yaml begins with a comment that names its record, as far as it is known. Rungs are not
listed anywhere: a new yaml is a new rung.

    # Record 9, 8.2 minutes: value residual, embedding skip, ...         the record's time, and what was new
    # Source: records/track_1_short/...                                  what makes it a rung: a record of the speedrun
    # Expected on 8x H100: val_loss 3.2791 after 3,200 steps, 154.78 ms a step.

The sizes:

    nano     a CPU: width 128, steps of 1,024 bytes of Python source, equally many of each rung
    short    fewer than eight GPUs, of which it takes one: the records' model, data and steps of track gpt2_short
    record   eight GPUs: the records as they are, each with its own number of steps, on track gpt2_small

Batch, sequences, windows and stages are scaled in proportion, so that what a record changes remains:

    tokens of a step     by the size's tokens over the record's 524,288: three quarters of them stay three quarters
    tokens in a row      sequences, windows and blocks of a mask, by the size's over the 1,024 of records 1 to 11
    steps                stages[].until_step and frozen_steps, by the size's steps over the rung's own

A sequence is never longer than a rank's part of a step, or of a validation. If an experiment is not a record, the
size's tokens are in proportion to its own. No learning rate is changed at any size: those of a record are for 124M
weights and steps of 524,288 tokens.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import yaml

from bench.config import compose, groups, schema
from bench.config.overrides import literal
from bench.config.typed import leaves
from bench.launch import own_model, prepare

RECORD_BATCH_TOKENS, RECORD_SEQ_LEN = 524_288, 1024
IN_A_ROW = ("window_tokens", "first_window_tokens", "end_window_tokens")  # settings of a stage, besides seq_len
BLOCK = "block"  # the setting of model.args that counts tokens
NUM_GPUS_OF_RECORD = 8
SHAPE = ("num_layers", "num_heads", "width")
# settings that affect how a rung trains
HOW_IT_TRAINS = ("model.", "optim.", "goal.", "stages", "data.source", "data.seq_len", "data.batch_tokens")
START_S = 150.0  # start of a run at the record's size: compilation, data, 20 validations; estimated, not measured
GROUP = "experiment"
SOURCE = re.compile(r"\brecords/(track_\d+)")
MINUTES = re.compile(r"([\d.]+) minutes")
EXPECTED = re.compile(r"Expected[^:]*: (.*)", re.DOTALL)
VAL_LOSS = re.compile(r"val_loss (\d\.\d{4})")  # "3.28 or a little less" is not a measurement
STEPS = re.compile(r"after ([\d,]+) steps")
STEP_MS = re.compile(r"(?<!to )\b([\d.]+) ms a step")  # "147 to 155 ms a step" is not a measurement either


@dataclass(frozen=True)
class Rung:
    """An experiment, and what its record reached on 8x H100. None means that its yaml does not say."""

    name: str  # experiment=NAME
    what: str  # what was new; "" if the yaml has no head
    track: str | None = None  # modded-nanogpt's track, track_1; None: not a record of the speedrun
    minutes: float | None = None
    num_steps: int | None = None
    step_ms: float | None = None
    val_loss: float | None = None

    @property
    def arm(self) -> str:
        """The rung's name as an arm of a race, which begins with a capital letter."""
        label = re.sub(r"\W", "_", self.name, flags=re.ASCII)
        return label[0].upper() + label[1:] if label[0].isalpha() else f"E{label}"


def known_rungs() -> list[Rung]:
    """Returns every rung, the lowest first: track 1's records by their names, then those of other tracks."""
    rungs = [rung_named(name) for name in groups.choices(GROUP)]
    return sorted((rung for rung in rungs if rung.track), key=lambda rung: (rung.track, rung.name))


def rung_named(name: str) -> Rung:
    """Returns any experiment as a rung, by the comment at the head of its yaml. Raises ValueError if it is unknown."""
    if name not in groups.choices(GROUP):
        raise ValueError(f"{name}: no such experiment; the rungs are {', '.join(rung.name for rung in known_rungs())}")
    lines = itertools.takewhile(lambda line: line.startswith("#"), groups.path_of(GROUP, name).read_text().splitlines())
    head = [line.lstrip("# ").rstrip() for line in lines if not line.startswith("# @package")]
    first, text = (head or [""])[0], " ".join(head)
    source, minutes, expected = SOURCE.search(text), MINUTES.search(first), EXPECTED.search(text)
    steps, step_ms, val_loss = (part.search(expected[0] if expected else "") for part in (STEPS, STEP_MS, VAL_LOSS))
    return Rung(
        name,
        (first[minutes.end() :] if minutes else first).strip(" :.,"),
        track=source and source[1],
        minutes=minutes and float(minutes[1]),
        num_steps=steps and int(steps[1].replace(",", "")),
        step_ms=step_ms and float(step_ms[1]),
        val_loss=val_loss and float(val_loss[1]),
    )


@dataclass(frozen=True)
class Size:
    name: str
    about: str
    overrides: tuple[str, ...]  # overrides of every rung
    shape: str | None  # conf/model/size/ of every rung; None: the record's own
    batch_tokens: int | None  # instead of the record's 524,288; None: nothing is scaled
    seq_len: int | None  # instead of the record's 1,024; None: the record's own
    guess_s: float | None  # estimated time of a run with its start; None: by the record's time

    @property
    def all_overrides(self) -> list[str]:
        """The overrides, including that of the shape."""
        return [*self.overrides, *([f"model/size={self.shape}"] if self.shape else [])]


SIZES = {
    size.name: size
    for size in (
        Size(
            "nano",
            "width 128, steps of 1,024 bytes of Python source",
            # 8 sequences * 128; validated every 2 steps, 32 sequences * 128, so that the way down has points
            ("track=free", "data=pysource", "data.seq_len=128", "data.batch_tokens=1024", "goal.num_steps=60")
            + ("goal.val_every_steps=2", "goal.val_tokens=4096"),
            "nano",
            1024,
            128,
            30.0,  # measured on two busy cores, 2026-11: 20 to 40 s, 12 of them before the first step
        ),
        Size(
            "short",
            "the records' model, steps and data of track gpt2_short",
            ("track=gpt2_short", "data.batch_tokens=131072", "goal.num_steps=400")
            + ("goal.val_every_steps=20", "goal.val_tokens=2097152"),
            None,
            131_072,
            None,
            240.0,  # gpt2_short's 2 minutes on an H200 and as much for compilation: estimated, not measured
        ),
        Size("record", "the records as they are", ("track=gpt2_small", "goal.val_every_steps=125"), *(None,) * 4),
    )
}


@dataclass(frozen=True)
class Fitted:
    """A rung at a size."""

    rung: Rung
    overrides: list[str]  # the rung's own overrides: the experiment, and what was derived
    changed: list[tuple[str, str, str]] = field(default_factory=list)  # (setting, the record's value, this size's)
    fault: str | None = None  # why it cannot run at this size


def for_machine(num_gpus: int) -> Size:
    """Returns the size for a machine with that many GPUs."""
    return SIZES["nano" if not num_gpus else "short" if num_gpus < NUM_GPUS_OF_RECORD else "record"]


def named(name: str) -> Size:
    """Returns the size of that name. Raises ValueError if there is none."""
    if name not in SIZES:
        raise ValueError(f"size={name}: choose from {', '.join(SIZES)}")
    return SIZES[name]


def fitted(rungs: Iterable[Rung], size: Size, user_overrides: Sequence[str]) -> list[Fitted]:
    """Returns each rung at this size. user_overrides: settings of every rung, which win over the size's."""
    pairs = [_fitted(rung, size, user_overrides) for rung in rungs]
    faults = iter(own_model.faults_of_configs([config for _, config in pairs if config is not None]))
    return [fit if config is None else replace(fit, fault="; ".join(next(faults)) or None) for fit, config in pairs]


def _fitted(rung: Rung, size: Size, user_overrides: Sequence[str]) -> tuple[Fitted, schema.Config | None]:
    """Returns a Fitted and the config that it makes, or None if it is not valid."""
    own = [f"{GROUP}={rung.name}"]
    try:
        record = _composed(own)
        own += _derived(rung, record, size, user_overrides)
        overrides = [*size.all_overrides, *own, *user_overrides]
        config = prepare.prepare(overrides, fetch=False, say=lambda text: None, check_own=False).config
        changed = _changed(record, _composed(overrides))
    except ValueError as error:
        return Fitted(rung, own, fault=str(error)), None
    return Fitted(rung, own, changed), config


def _composed(overrides: list[str]) -> schema.Config:
    return compose.compose(overrides, prepare.this_machine())


def _derived(rung: Rung, record: schema.Config, size: Size, user_overrides: Sequence[str]) -> list[str]:
    """Returns the rung's own overrides besides the size's and the user's. record: its config as the yaml has it."""
    sized = _composed([*size.all_overrides, f"{GROUP}={rung.name}", *user_overrides])
    wanted = {} if size.batch_tokens is None else _scaled(rung, record, sized, size, user_overrides)
    if size.shape is not None:  # a rung's yaml sets the model for the record's size alone
        shape = yaml.safe_load(groups.path_of("model/size", size.shape).read_text())
        wanted |= {f"model.{key}": shape[key] for key in SHAPE}
        if sized.model and sized.model.vocab_size is not None:
            wanted["model.vocab_size"] = None  # the data has other tokens than the record's: as many, padded
    own, before = {override.partition("=")[0] for override in user_overrides}, settings_of(sized)
    return [f"{key}={literal(value)}" for key, value in wanted.items() if key not in own and before.get(key) != value]


def _scaled(
    rung: Rung, record: schema.Config, sized: schema.Config, size: Size, user_overrides: Sequence[str]
) -> dict[str, Any]:
    """Returns {setting: value} of scaled settings. record: the config as the rung's yaml has it; sized: at the size."""
    assert size.batch_tokens is not None
    batch_frac = size.batch_tokens / (RECORD_BATCH_TOKENS if rung.track else record.data.batch_tokens)
    row_frac = 1.0 if size.seq_len is None else size.seq_len / (RECORD_SEQ_LEN if rung.track else record.data.seq_len)
    num_ranks = sized.hardware.num_processes or 1
    is_own = any(override.startswith("data.batch_tokens=") for override in user_overrides)
    batch = sized.data.batch_tokens if is_own else round(record.data.batch_tokens * batch_frac)

    def row(tokens: int, batch_tokens: int) -> int:
        return min(max(1, round(tokens * row_frac)), batch_tokens // num_ranks)

    wanted: dict[str, Any] = {"data.batch_tokens": batch, "data.seq_len": row(record.data.seq_len, batch)}
    if record.goal.val_seq_len is not None:
        wanted["goal.val_seq_len"] = row(record.goal.val_seq_len, sized.goal.val_tokens)
    if record.goal.val_window_tokens is not None:
        wanted["goal.val_window_tokens"] = round(record.goal.val_window_tokens * row_frac)
    args = (record.model and record.model.args) or {}
    if BLOCK in args:
        wanted[f"model.args.{BLOCK}"] = max(1, round(args[BLOCK] * row_frac))
    stages, steps_frac = [], sized.goal.num_steps / record.goal.num_steps
    for stage in record.stages or ():
        values = {key: value for key, value in asdict(stage).items() if value is not None}
        batch_tokens = batch
        if stage.batch_tokens is not None:
            values["batch_tokens"] = batch_tokens = round(stage.batch_tokens * batch_frac)
        if stage.seq_len is not None:
            values["seq_len"] = row(stage.seq_len, batch_tokens)
        values |= {key: round(values[key] * row_frac) for key in IN_A_ROW if key in values}
        if stage.until_step is not None:
            values["until_step"] = max(1, round(stage.until_step * steps_frac))
        if stage.frozen_steps is not None:
            values["frozen_steps"] = {part: max(1, round(num * steps_frac)) for part, num in stage.frozen_steps.items()}
        stages.append(values)
    return wanted | ({"stages": stages} if stages else {})


def settings_of(config: schema.Config) -> dict[str, Any]:
    """Returns {setting: value} of a config; those set in stages are named "stages[0].window_tokens"."""
    values = dict(leaves(schema.to_dict(config)))
    for index, stage in enumerate(values.pop("stages", None) or ()):
        values |= {f"stages[{index}].{key}": value for key, value in leaves(stage) if value is not None}
    return values


def _changed(record: schema.Config, sized: schema.Config) -> list[tuple[str, str, str]]:
    """Returns [(setting, the record's value, this size's)] of changed settings that affect how a rung trains."""
    before, after = settings_of(record), settings_of(sized)
    keys = [key for key in before | after if key.startswith(HOW_IT_TRAINS)]
    changes = [(key, literal(before.get(key)), literal(after.get(key))) for key in keys]
    return [change for change in changes if change[1] != change[2]]
