"""Optimizers: each file has the settings of one and builds it.  Importing them does not import torch."""

from dataclasses import dataclass
from typing import Any

from models import schedules
from models.settings import Positive


@dataclass(kw_only=True)
class Config:
    """Settings of every optimizer; models/optimizers/NAME.py extends them."""

    PACKAGE = __name__
    name: str  # optimizer: models/optimizers/NAME.py
    lr: Positive  # learning rate at the schedule's peak
    grad_clip_norm: Positive | None = None  # the norm of all gradients together is clipped to this; null: no clipping
    schedule: schedules.Config  # how the learning rate changes over a run

    def build(self, model: Any, rank: int, world_size: int, device_type: str) -> Any:
        """Returns an optimizer for a models.base.LanguageModel; each of its param_groups has lr, and may have peak_lr.

        It has step(), zero_grad(), param_groups, state_dict() and load_state_dict() like torch's optimizers.
        """
        raise NotImplementedError

    def optimizer(self, model: Any, rank: int, world_size: int, device_type: str) -> Any:
        """Returns what build() returns, with lr as the peak_lr of every group that has none."""
        optimizer = self.build(model, rank, world_size, device_type)
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
        return optimizer

    def part_names(self) -> tuple[str, ...]:
        """Returns the names of the optimizer's .parts, which stages may name; () if it has none."""
        return ()

    def set_step(self, optimizer: Any, step: int, num_steps: int) -> None:
        """Sets what changes with the step, here the learning rate, in the optimizer's param_groups.

        step is from 0 to num_steps - 1.
        """
        lr_frac = self.schedule.lr_frac(step, num_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_frac
