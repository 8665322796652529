"""The stages of a run: what was left open filled in, what cannot be refused, and what they come to.

A stage and what it means for optimizer and window: models/stages.py.
"""

import dataclasses
from collections.abc import Callable

from bench.config import schema, typed
from models import stages
from models.stages import Stage

# A setting of a stage: the setting of a run that it replaces, for which a track may have a rule.
INSTEAD_OF = {
    "batch_tokens": "data.batch_tokens",
    "seq_len": "data.seq_len",
    "window_tokens": "model",
    "first_window_tokens": "model",
    "end_window_tokens": "model",
    "window_rounding": "model",
    "lr_frac": "optim",
    "momenta": "optim",
    "update_every_steps": "optim",
    "frozen_steps": "optim",
    "ahead_weights": "model",
    "end_ahead_weights": "model",
    "untied": "model",
}
ALL_OR_NONE = ("window_tokens",)  # nothing says what a stage without it would go back to
OF_PARTS = ("momenta", "update_every_steps", "frozen_steps")
WITHOUT_REDUCER = {
    "update_every_steps": "update_every_steps keeps gradients over steps",
    "frozen_steps": "frozen_steps leaves gradients out",
    "untied": "before it the embedding has no gradient",
}


def stages_of(config: schema.Config) -> list[Stage]:
    """Of a resolved config, each with its batch; without stages the one that all of the run is."""
    data, seqs = config.data, config.hardware.micro_batch_seqs
    return config.stages or [Stage(batch_tokens=data.batch_tokens, seq_len=data.seq_len, micro_batch_seqs=seqs)]


def num_micro_steps(config: schema.Config, stage: Stage) -> int:
    """Micro-steps of each rank in one optimizer step of a stage, of a resolved config."""
    num_processes, seqs = config.hardware.num_processes, stage.micro_batch_seqs
    assert stage.batch_tokens and stage.seq_len and num_processes and seqs  # resolve() has filled them
    return stage.batch_tokens // (stage.seq_len * num_processes * seqs)


def num_tokens(config: schema.Config, steps_done: int | None = None) -> int:
    """How many the first steps train on, of a resolved config; None: all goal.num_steps."""
    num_steps = config.goal.num_steps
    return stages.num_tokens(stages_of(config), num_steps, num_steps if steps_done is None else steps_done)


def mean_batch_tokens(config: schema.Config) -> int | float:
    """Tokens of a step, of a resolved config: the mean over goal.num_steps, whole where it is."""
    mean = num_tokens(config) / config.goal.num_steps
    return int(mean) if mean.is_integer() else mean


def longest_seq_len(config: schema.Config) -> int:
    """The most tokens that the model sees at once, in training and validation, of a resolved config."""
    return max(val_seq_len(config), *(stage.seq_len or 0 for stage in stages_of(config)))


def val_seq_len(config: schema.Config) -> int:
    """Tokens of a sequence of validation."""
    return config.goal.val_seq_len or config.data.seq_len


def resolve(config: schema.Config, micro_batch_of: Callable[[int, int], int]) -> None:
    """In place.  micro_batch_of: (seq_len, sequences of a rank in a step) -> how many at once.  Raises ValueError."""
    if config.goal.val_window_tokens is not None and not (config.stages and config.stages[0].window_tokens):
        remedy = "no stage has a window: give one, stages=[{window_tokens:NUMBER}], or remove it"
        raise ValueError(f"goal.val_window_tokens={config.goal.val_window_tokens}: {remedy}")
    if not config.stages:
        config.stages = None
        return
    stages.ends_of(config.stages, config.goal.num_steps)
    for index, stage in enumerate(config.stages):
        _fill(config, stage, f"stages[{index}]", micro_batch_of)
        _check_parts(config, stage, f"stages[{index}]")
    _check_together(config.stages, config.goal.val_window_tokens)


def _fill(config: schema.Config, stage: Stage, where: str, micro_batch_of: Callable[[int, int], int]) -> None:
    stage.batch_tokens = stage.batch_tokens or config.data.batch_tokens
    stage.seq_len = stage.seq_len or config.data.seq_len
    num_processes = config.hardware.num_processes
    assert num_processes is not None  # resolved before
    row_tokens = stage.seq_len * num_processes
    if stage.batch_tokens % row_tokens:
        near = max(1, round(stage.batch_tokens / row_tokens)) * row_tokens
        product = f"its seq_len * num_processes = {stage.seq_len} * {num_processes} = {row_tokens}"
        raise ValueError(f"{where}.batch_tokens={stage.batch_tokens}: use a multiple of {product}; try {near}")
    rank_seqs = stage.batch_tokens // row_tokens
    limit = min(stage.micro_batch_seqs or micro_batch_of(stage.seq_len, rank_seqs), rank_seqs)
    stage.micro_batch_seqs = next(seqs for seqs in range(limit, 0, -1) if rank_seqs % seqs == 0)
    if stage.first_window_tokens is not None and stage.window_tokens is None:
        raise ValueError(f"{where}.first_window_tokens={stage.first_window_tokens}: give window_tokens, its end, too")
    if stage.window_rounding is not None and stage.first_window_tokens is None:
        remedy = "only a window that grows is rounded: give first_window_tokens, or remove it"
        raise ValueError(f"{where}.window_rounding={stage.window_rounding}: {remedy}")
    if stage.end_ahead_weights is not None and len(stage.end_ahead_weights) != len(stage.ahead_weights or ()):
        remedy = f"ahead_weights={stage.ahead_weights}: give as many of both"
        raise ValueError(f"{where}.end_ahead_weights={stage.end_ahead_weights}: {remedy}")
    if stage.ahead_weights is not None and not 0 < len(stage.ahead_weights) < stage.seq_len:
        remedy = f"use 1 to {stage.seq_len - 1}, the next tokens of a sequence"
        raise ValueError(f"{where}.ahead_weights={stage.ahead_weights}: {remedy}")
    if not stage.untied:
        stage.untied = None
    if stage.window_rounding == "down":
        stage.window_rounding = None  # given or not, the default is one config with one id


def _check_parts(config: schema.Config, stage: Stage, where: str) -> None:
    """Names of the optimizer's parts."""
    optim = config.optim
    assert optim is not None  # of no script
    known = optim.part_names()
    for setting in OF_PARTS:
        for name, value in (getattr(stage, setting) or {}).items():
            if name not in known:
                has = f"has the parts {', '.join(known)}" if known else "is all one part"
                raise ValueError(f"{where}.{setting}.{name}={value}: optim={optim.name} {has}")
    if stage.update_every_steps and optim.grad_clip_norm is not None:
        remedy = "update_every_steps adds up gradients over steps, and each would clip the sum: use null"
        raise ValueError(f"optim.grad_clip_norm={optim.grad_clip_norm}: {remedy}")
    for setting, words in WITHOUT_REDUCER.items():
        if getattr(stage, setting) and config.hardware.reducer is not None:
            raise ValueError(f"hardware.reducer={config.hardware.reducer}: {words}, which it does not expect: use null")


def _check_together(run_stages: list[Stage], val_window_tokens: int | None) -> None:
    """What one stage sets and another does not."""
    for setting in ALL_OR_NONE:
        given = [getattr(stage, setting) is not None for stage in run_stages]
        if any(given) and not all(given):
            raise ValueError(f"stages[{given.index(False)}].{setting}=null: another stage has it: give it in each")
    for index, stage in enumerate(run_stages):
        if stage.end_window_tokens is None:
            continue
        words = f"stages[{index}].end_window_tokens={stage.end_window_tokens}"
        if stage is not run_stages[-1]:
            raise ValueError(f"{words}: only the last stage has the run's end: move it there")
        if stage.window_tokens is None or val_window_tokens is not None:
            raise ValueError(f"{words}: give window_tokens too, and no goal.val_window_tokens")
    for index, (before, stage) in enumerate(zip(run_stages, run_stages[1:], strict=False), start=1):
        if before.untied and not stage.untied:
            raise ValueError(f"stages[{index}].untied=null: the stage before sets it: an untied embedding stays untied")
    names = {name for stage in run_stages for name in stage.momenta or ()}
    for index, stage in enumerate(run_stages):
        for name in sorted(names - set(stage.momenta or ())):
            raise ValueError(f"stages[{index}].momenta.{name} is not set: another stage sets it: give it in each")


def changed(config: schema.Config) -> dict[str, str]:
    """{setting of a run: the stage's that is in its place and differs}, "data.seq_len": "stages[0].seq_len=64"."""
    changes: dict[str, str] = {}
    for index, stage in enumerate(config.stages or ()):
        for field in dataclasses.fields(stage):
            key, value = INSTEAD_OF.get(field.name), getattr(stage, field.name)
            if key is not None and value is not None and (key.count(".") == 0 or value != typed.get(config, key)):
                changes.setdefault(key, f"stages[{index}].{field.name}={value}")
    return changes
