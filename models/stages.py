"""What changes in the course of a run: batch, sequences, attention window, loss, momenta, which parts are updated.

A run without stages is one stage.  models/base.py says what a model needs for stages.  Does not import torch.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, cast

from models.settings import Frac, Momentum, NotNegativeInt, Positive, PositiveInt, one_of


@dataclass(kw_only=True)
class Stage:
    """Consecutive steps of a run, a row of `stages`.  A setting that is null is as without stages."""

    until_frac: Frac | None = None  # where the stage ends, as a fraction of goal.num_steps; null in the last stage
    until_step: PositiveInt | None = None  # where the stage ends, as a number of steps
    batch_tokens: PositiveInt | None = None  # tokens per step; null: data.batch_tokens
    seq_len: PositiveInt | None = None  # tokens per sequence; null: data.seq_len
    # sequences per rank and micro-step, at most; null: as many tokens as in hardware.micro_batch_seqs of data.seq_len
    micro_batch_seqs: PositiveInt | None = None
    window_tokens: PositiveInt | None = None  # how far back the model's long windows reach; null: the model's own
    # the window at the stage's first step, from where it grows to window_tokens at its end, both before rounding to
    # whole blocks of the model, of which a window has at least one; null: it does not grow
    first_window_tokens: NotNegativeInt | None = None
    window_rounding: Annotated[str, one_of("down", "up")] | None = None  # how a growing window is rounded; null: down
    # window of the validation after the run's last step, in the last stage alone; null: what windows have grown to
    end_window_tokens: PositiveInt | None = None
    lr_frac: Positive | None = None  # multiplies every learning rate; null: 1
    # multiplies the loss whose gradients are taken, not the one that is reported: gives momentum and Adam's moments
    # the scale of a sum over a growing batch, in place of a mean; null: 1
    loss_scale: Positive | None = None
    # momentum, or beta1, of parts of the optimizer: groups of optim=groups, adamw and muon of optim=muon
    momenta: dict[str, Momentum] | None = None
    # parts that are updated only every N steps, with the sum of their gradients; null: all in every step
    update_every_steps: dict[str, PositiveInt] | None = None
    # parts that are not updated in this many first steps of the stage, and whose gradients are dropped; null: none
    frozen_steps: dict[str, PositiveInt] | None = None
    # weights in the loss of the next token, the one after it ...; null: only the next, as in validation
    ahead_weights: list[float] | None = None
    end_ahead_weights: list[float] | None = None  # their values at the stage's end, reached linearly; null: constant
    # from this stage on the embedding is separate from the head's matrix, and begins as its copy; null: as the model
    untied: bool | None = None

    def is_due(self, part: str, step: int) -> bool:
        """Whether a step, counted from 0, updates that part of the optimizer."""
        return (step + 1) % (self.update_every_steps or {}).get(part, 1) == 0

    def apply(self, optimizer: Any) -> None:
        """Puts lr_frac and momenta into param_groups, after optim.set_step(); a group without tensors is not a part."""
        if self.lr_frac is not None:
            for group in optimizer.param_groups:
                group["lr"] *= self.lr_frac
        momenta = self.momenta or {}
        for name, part in (optimizer.parts if momenta else {}).items():
            momentum = momenta.get(name)
            for group in part.param_groups if momentum is not None else ():
                if "momentum" in group:
                    group["momentum"] = momentum
                elif "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    raise ValueError(f"stages: momenta.{name}={momentum}: its update rule has no momentum: remove it")


@dataclass(frozen=True)
class Portion:
    """Steps of the same shape: in a compiled model, all of them use the same graph."""

    first_step: int  # from 0
    num_steps: int
    stage: Stage
    window_tokens: int | None  # None: the model's default

    @property
    def shape(self) -> tuple[Any, ...]:
        """The key, besides the window, of portions that need only one warm-up."""
        stage, num_ahead = self.stage, len(self.stage.ahead_weights or (1,))
        return stage.batch_tokens, stage.seq_len, stage.micro_batch_seqs, num_ahead, bool(stage.untied)


class Timeline:
    """The stages of a run of num_steps steps; each has batch_tokens, seq_len and micro_batch_seqs.

    Windows are multiples of window_block, and grow by it.  Raises ValueError if a window that does not grow is not a
    multiple, or if the stages do not cover the run in order.
    """

    def __init__(self, stages: Sequence[Stage], num_steps: int, window_block: int = 1):
        self.num_steps, self.window_block = num_steps, window_block
        self.ends = ends_of(stages, num_steps)
        self._stages = list(stages)
        for index, stage in enumerate(stages):
            if stage.first_window_tokens is None:
                check_window(f"stages[{index}].window_tokens", stage.window_tokens, window_block)
            check_window(f"stages[{index}].end_window_tokens", stage.end_window_tokens, window_block)

    @cached_property
    def portions(self) -> list[Portion]:
        """The portions of the run, in order and without gaps."""
        portions = []
        for stage, start, end in zip(self._stages, [0, *self.ends[:-1]], self.ends, strict=True):
            windows = [self._window(stage, done, end - start) for done in range(end - start)]
            first_step = start
            for window_tokens, steps in itertools.groupby(windows):
                portions.append(Portion(first_step, len(list(steps)), stage, window_tokens))
                first_step += portions[-1].num_steps
        return portions

    def distinct(self, every_window: bool = True) -> list[Portion]:
        """Returns the first portion of each shape and window; without every_window, each shape's first and widest."""
        first: dict[tuple[Any, ...], Portion] = {}
        widest: dict[tuple[Any, ...], int] = {}
        for portion in self.portions:
            first.setdefault((portion.shape, portion.window_tokens if every_window else None), portion)
            widest[portion.shape] = max(widest.get(portion.shape, 0), portion.window_tokens or 0)
        for portion in self.portions if not every_window else ():
            if portion.window_tokens == widest[portion.shape] != first[portion.shape, None].window_tokens:
                first.setdefault((portion.shape, portion.window_tokens), portion)
        return sorted(first.values(), key=lambda portion: portion.first_step)

    @cached_property
    def _starts(self) -> list[int]:
        return [portion.first_step for portion in self.portions]

    def at(self, step: int) -> Portion:
        """Returns the portion of a step, counted from 0; for num_steps it is the last one."""
        return self.portions[bisect.bisect_right(self._starts, step) - 1]

    def window_after(self, steps_done: int) -> int | None:
        """Returns the next step's window; at the end of the run end_window_tokens, or what the window has grown to."""
        if steps_done >= self.num_steps:
            return self._stages[-1].end_window_tokens or self._window(self._stages[-1], 1, 1)
        return self.at(steps_done).window_tokens

    def ahead_weights(self, step: int) -> list[float] | None:
        """Returns a step's weights, as LanguageModel.set_ahead_weights() takes them."""
        stage, steps_done, num_steps = self._place(step)
        first, last = stage.ahead_weights, stage.end_ahead_weights
        if first is None or last is None:
            return first
        return [start + (end - start) * steps_done / num_steps for start, end in zip(first, last, strict=True)]

    def is_frozen(self, part: str, step: int) -> bool:
        """Whether a step does not update that part of the optimizer and drops its gradients."""
        stage, steps_done, _ = self._place(step)
        return steps_done < (stage.frozen_steps or {}).get(part, 0)

    def _place(self, step: int) -> tuple[Stage, int, int]:
        """Returns (a step's stage, how many of the stage's steps are done before it, how many the stage has)."""
        index = min(bisect.bisect_right(self.ends, step), len(self.ends) - 1)
        start = self.ends[index - 1] if index else 0
        return self._stages[index], step - start, self.ends[index] - start

    def _window(self, stage: Stage, steps_done: int, num_steps: int) -> int | None:
        """Returns the window after steps_done of a stage's num_steps: linear, rounded to blocks, at least one block."""
        first, last = stage.first_window_tokens, stage.window_tokens
        if first is None or last is None:
            return last
        num_blocks = (first + (last - first) * steps_done / num_steps) / self.window_block
        return max(1, math.ceil(num_blocks) if stage.window_rounding == "up" else int(num_blocks)) * self.window_block


def check_window(where: str, window_tokens: int | None, window_block: int) -> None:
    """Raises ValueError if a window is not a multiple of the model's window_block."""
    if window_tokens is not None and window_tokens % window_block:
        near = max(1, round(window_tokens / window_block)) * window_block
        raise ValueError(f"{where}={window_tokens}: use a multiple of the model's window_block={window_block}: {near}")


def ends_of(stages: Sequence[Stage], num_steps: int) -> list[int]:
    """Returns how many steps are done at the end of each stage.  Raises ValueError if a stage has no end or no step,
    or if the last one has an end."""
    ends, before = [], 0
    for index, stage in enumerate(stages):
        where, is_last = f"stages[{index}]", index == len(stages) - 1
        given = [name for name in ("until_frac", "until_step") if getattr(stage, name) is not None]
        if len(given) != (0 if is_last else 1):
            has = " and ".join(f"{name}={getattr(stage, name)}" for name in given) or "no end"
            rule = "every stage has one of until_frac and until_step, but the last ends with the run and has none"
            raise ValueError(f"{where} has {has}: {rule}")
        if is_last:
            end = num_steps
        elif stage.until_step is not None:
            end = stage.until_step
        else:
            assert stage.until_frac is not None  # one of the two is given
            end = round(stage.until_frac * num_steps)
        if not before < end <= num_steps or (end == num_steps and not is_last):
            problem = f"it would go from step {before} to {end} of {num_steps}"
            raise ValueError(f"{where}: {problem}: give each stage a step, by other ends or more goal.num_steps")
        ends.append(end)
        before = end
    return ends


def num_tokens(stages: Sequence[Stage], num_steps: int, steps_done: int) -> int:
    """Returns the tokens of the first steps_done of num_steps steps.  Every stage must have batch_tokens."""
    ends = ends_of(stages, num_steps)
    spans = zip([0, *ends[:-1]], ends, stages, strict=True)
    return sum(max(0, min(steps_done, end) - start) * cast(int, stage.batch_tokens) for start, end, stage in spans)
