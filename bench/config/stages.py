"""Derives totals from the stages of a resolved run: tokens, micro-steps, the longest sequence.

bench/config/resolve.py fills and checks stages. models/stages.py defines a stage and what it means for the optimizer
and the window.
"""

import dataclasses

from bench.config import schema, typed
from models import stages
from models.stages import Stage

# {setting of a stage: the setting of a run that it replaces, for which a track may have a rule}
INSTEAD_OF = {
    "batch_tokens": "data.batch_tokens",
    "seq_len": "data.seq_len",
    "window_tokens": "model",
    "first_window_tokens": "model",
    "end_window_tokens": "model",
    "window_rounding": "model",
    "lr_frac": "optim",
    "loss_scale": "optim",
    "momenta": "optim",
    "update_every_steps": "optim",
    "frozen_steps": "optim",
    "ahead_weights": "model",
    "end_ahead_weights": "model",
    "untied": "model",
}


def stages_of(config: schema.Config) -> list[Stage]:
    """Returns the stages of a resolved config, each with its batch; without any, one stage that is the whole run."""
    data, seqs = config.data, config.hardware.micro_batch_seqs
    return config.stages or [Stage(batch_tokens=data.batch_tokens, seq_len=data.seq_len, micro_batch_seqs=seqs)]


def num_micro_steps(config: schema.Config, stage: Stage) -> int:
    """Returns the number of micro-steps of each rank in one optimizer step of a stage, given a resolved config."""
    num_processes, seqs = config.hardware.num_processes, stage.micro_batch_seqs
    assert stage.batch_tokens and stage.seq_len and num_processes and seqs  # resolve() has filled them
    return stage.batch_tokens // (stage.seq_len * num_processes * seqs)


def num_tokens(config: schema.Config, steps_done: int | None = None) -> int:
    """Returns the number of tokens in the first steps_done steps of a resolved config; None: in all goal.num_steps."""
    num_steps = config.goal.num_steps
    return stages.num_tokens(stages_of(config), num_steps, num_steps if steps_done is None else steps_done)


def mean_batch_tokens(config: schema.Config) -> int | float:
    """Returns the mean tokens per step over goal.num_steps of a resolved config, an int if it is whole."""
    mean = num_tokens(config) / config.goal.num_steps
    return int(mean) if mean.is_integer() else mean


def longest_seq_len(config: schema.Config) -> int:
    """Returns the most tokens that the model sees at once in training and validation, of a resolved config."""
    return max(val_seq_len(config), *(stage.seq_len or 0 for stage in stages_of(config)))


def val_seq_len(config: schema.Config) -> int:
    """Returns the tokens per sequence in validations."""
    return config.goal.val_seq_len or config.data.seq_len


def changed(config: schema.Config) -> dict[str, str]:
    """Returns {setting of a run: the first stage that replaces it}, as in "data.seq_len": "stages[0].seq_len=64"."""
    changes: dict[str, str] = {}
    for index, stage in enumerate(config.stages or ()):
        for field in dataclasses.fields(stage):
            key, value = INSTEAD_OF.get(field.name), getattr(stage, field.name)
            if key is not None and value is not None and (key.count(".") == 0 or value != typed.get(config, key)):
                changes.setdefault(key, f"stages[{index}].{field.name}={value}")
    return changes
