"""At which size a machine races the rungs, and what of a rung has to change for it: derived, and said.

    nano     a CPU: width 128, steps of 1,024 bytes of Python source, equally many of each rung
    short    fewer than eight GPUs, of which it takes one: the records' model, data and steps of track gpt2_short
    record   eight GPUs: the records as they are, each with its own number of steps, on track gpt2_small

Batch, sequences, windows and stages are in proportion: bench/plans/ladder/scaling.py.
No learning rate is changed at any size: those of a record are for 124M weights and steps of 524,288 tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import yaml

from bench.config import compose, groups, schema
from bench.launch import own_model, prepare
from bench.plans.ladder import scaling
from bench.plans.ladder.rungs import GROUP, Rung

NUM_GPUS_OF_RECORD = 8
SHAPE = ("num_layers", "num_heads", "width")
# of what a size changes
SAID = ("model.", "optim.", "goal.", "stages", "data.source", "data.seq_len", "data.batch_tokens")


@dataclass(frozen=True)
class Size:
    name: str
    about: str
    overrides: tuple[str, ...]  # of every rung
    shape: str | None  # conf/model/size/ of every rung; None: the record's own
    batch_tokens: int | None  # in place of the record's 524,288; None: nothing is scaled
    seq_len: int | None  # in place of the record's 1,024; None: the record's own
    guess_s: float | None  # a run with its start, where no run of the config is known; None: by the record's own time

    @property
    def words(self) -> list[str]:
        """overrides, the shape among them."""
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
            30.0,  # on two cores that others used too, 2026-11: 20 to 40 s, 12 of them before the first step
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
START_S = 150.0  # of a run of the record's size: compilation, data, 20 validations; estimated, not measured


@dataclass(frozen=True)
class Fitted:
    """A rung at a size."""

    rung: Rung
    overrides: list[str]  # of the rung alone: the experiment, and what had to be derived
    changed: list[tuple[str, str, str]] = field(default_factory=list)  # (setting, the record's value, this size's)
    fault: str | None = None  # why it cannot run at this size


def of_machine(num_gpus: int) -> Size:
    """The size for a machine with so many GPUs."""
    return SIZES["nano" if not num_gpus else "short" if num_gpus < NUM_GPUS_OF_RECORD else "record"]


def named(name: str) -> Size:
    """ValueError: there is no such size."""
    if name not in SIZES:
        raise ValueError(f"size={name}: choose from {', '.join(SIZES)}")
    return SIZES[name]


def fitted(rungs: Iterable[Rung], size: Size, given: Sequence[str]) -> list[Fitted]:
    """Each rung at this size.  given: the user's overrides of every rung, which win over the size's."""
    result = [_fitted(rung, size, given) for rung in rungs]
    faults = own_model.faults_of_configs([config for _, config in result if config is not None])
    answers = iter(faults)
    return [one if config is None else _with_fault(one, "; ".join(next(answers)) or None) for one, config in result]


def _with_fault(one, fault):
    return Fitted(one.rung, one.overrides, one.changed, fault)


def _fitted(rung, size, given):
    """-> Fitted, and the config that it makes; None for one that cannot be."""
    own = [f"{GROUP}={rung.name}"]
    try:
        record = _composed(own)
        own += _derived(rung, record, size, given)
        words = [*size.words, *own, *given]
        config = prepare.prepare(words, fetch=False, say=lambda text: None, check_own=False).config
        changed = _changed(record, _composed(words))
    except ValueError as error:
        return Fitted(rung, own, fault=str(error)), None
    return Fitted(rung, own, changed), config


def _derived(rung, record, size, given):
    """Overrides of the rung alone that it needs beside the size's."""
    sized = _composed([*size.words, f"{GROUP}={rung.name}", *given])
    keys, result = {word.partition("=")[0] for word in given}, {}
    if size.batch_tokens is not None:
        result = scaling.changes(record, sized, size.batch_tokens, size.seq_len, rung.track is not None, keys)
    result |= _shape(sized, size, keys)
    return [f"{key}={scaling.word(value)}" for key, value in result.items()]


def _composed(words):
    return compose.compose(words, prepare.this_machine())


def _shape(config: schema.Config, size: Size, given: set[str]) -> dict[str, int | None]:
    """Of the model what a rung needs beside the size's overrides: its yaml sets it for the record's size alone."""
    if size.shape is None:
        return {}
    shape, model = yaml.safe_load(groups.path_of("model/size", size.shape).read_text()), config.model
    result = {key: shape[key] for key in SHAPE if getattr(model, key) != shape[key]}
    if model.vocab_size is not None:
        result["vocab_size"] = None  # of other tokens than the record's: as many as the data has, padded
    return {f"model.{key}": value for key, value in result.items() if f"model.{key}" not in given}


def _changed(before, after):
    """[(setting, the record's value, this size's)] of what says how a rung trains."""
    values = [scaling.said(config) for config in (before, after)]
    keys = [key for key in values[0] | values[1] if key.startswith(SAID)]
    pairs = [(key, *(scaling.word(one.get(key)) for one in values)) for key in keys]
    return [(key, old, new) for key, old, new in pairs if old != new]
