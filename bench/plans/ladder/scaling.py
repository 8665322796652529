"""Batch, sequences, windows and stages of a rung at a size: all in proportion, so that what a record changes stays.

    tokens of a step     as the size's are to the record's 524,288: what takes three quarters of them does so here
    tokens in a row      sequences, windows and the blocks of a mask, as the size's are to the 1,024 of records 1 to 11
    steps                stages[].until_step and frozen_steps, as the size's steps are to the rung's own

A sequence is never longer than a rank's part of a step, or of a validation.  Of an experiment that is not a record the
size's tokens are in proportion to its own.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from bench.config import schema
from bench.config.typed import leaves

RECORD_BATCH_TOKENS, RECORD_SEQ_LEN = 524_288, 1024
IN_A_ROW = ("window_tokens", "first_window_tokens", "end_window_tokens")  # of a stage, beside seq_len
BLOCK = "block"  # of model.args: tokens


def changes(
    own: schema.Config,
    sized: schema.Config,
    batch_tokens: int,
    seq_len: int | None,
    is_record: bool,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """{setting: value} that a rung needs beside a size's own overrides; what it does not change is not in it.

    own: the rung as its yaml has it; sized: with the size's overrides and the user's.  batch_tokens, seq_len: the
    size's, None where tokens in a row stay as they are.  given: settings that are the user's.
    """
    batch_frac = batch_tokens / (RECORD_BATCH_TOKENS if is_record else own.data.batch_tokens)
    row_frac = 1.0 if seq_len is None else seq_len / (RECORD_SEQ_LEN if is_record else own.data.seq_len)
    num_ranks = sized.hardware.num_processes or 1
    batch = sized.data.batch_tokens if "data.batch_tokens" in given else round(own.data.batch_tokens * batch_frac)

    def in_a_row(tokens, of_tokens):
        return min(max(1, round(tokens * row_frac)), of_tokens // num_ranks)

    result = {"data.batch_tokens": batch, "data.seq_len": in_a_row(own.data.seq_len, batch)}
    if own.goal.val_seq_len is not None:
        result["goal.val_seq_len"] = in_a_row(own.goal.val_seq_len, sized.goal.val_tokens)
    if own.goal.val_window_tokens is not None:
        result["goal.val_window_tokens"] = round(own.goal.val_window_tokens * row_frac)
    if BLOCK in (own.model.args or {}):
        result[f"model.args.{BLOCK}"] = max(1, round(own.model.args[BLOCK] * row_frac))
    if own.stages:
        steps_frac = sized.goal.num_steps / own.goal.num_steps
        result["stages"] = [_stage(stage, batch, batch_frac, row_frac, steps_frac, in_a_row) for stage in own.stages]
    before = said(sized)
    return {key: value for key, value in result.items() if key not in given and before.get(key) != value}


def _stage(
    stage, batch: int, batch_frac: float, row_frac: float, steps_frac: float, in_a_row: Callable[[int, int], int]
) -> dict[str, Any]:
    """What is set of it, in proportion."""
    result = {key: value for key, value in dataclasses.asdict(stage).items() if value is not None}
    if stage.batch_tokens is not None:
        result["batch_tokens"] = batch = round(stage.batch_tokens * batch_frac)
    if stage.seq_len is not None:
        result["seq_len"] = in_a_row(stage.seq_len, batch)
    for key in IN_A_ROW:
        if key in result:
            result[key] = round(result[key] * row_frac)
    if stage.until_step is not None:
        result["until_step"] = max(1, round(stage.until_step * steps_frac))
    if stage.frozen_steps is not None:
        result["frozen_steps"] = {part: max(1, round(num * steps_frac)) for part, num in stage.frozen_steps.items()}
    return result


def word(value: Any) -> str:
    """A value as Hydra's command line takes it: {first_window_tokens:8,window_tokens:224}."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(word, value)) + "]"
    return "null" if value is None else str(value)


def said(config: schema.Config) -> dict[str, Any]:
    """{setting: value} of a config, those of its stages as "stages[0].window_tokens" where they are set."""
    values = dict(leaves(schema.to_dict(config)))
    for index, stage in enumerate(values.pop("stages", None) or ()):
        values |= {f"stages[{index}].{key}": value for key, value in leaves(stage) if value is not None}
    return values
