"""A schedule that is constant after the warm-up, then falls linearly to final_lr_frac in a cooldown.

The cooldown has round(cooldown_frac * num_steps) steps.  It ends with the run, or tail_frac before that.
The first of C cooldown steps still gets 1, the last one final + (1 - final) / C.  If rounding makes warm-up and
cooldown overlap by a step, the smaller fraction of the two is used.
"""

from dataclasses import dataclass

from models import schedules
from models.settings import Frac


@dataclass(kw_only=True)
class Config(schedules.Config):
    cooldown_frac: Frac  # fraction of num_steps at the end in which the learning rate falls linearly
    final_lr_frac: Frac  # final learning rate, as a fraction of the peak
    tail_frac: Frac | None = None  # fraction of num_steps at final_lr_frac after the cooldown; null: none

    def __post_init__(self) -> None:
        if self.warmup_frac + self.cooldown_frac + (self.tail_frac or 0) > 1:
            tail = "" if self.tail_frac is None else f" and tail_frac={self.tail_frac}"
            raise ValueError(
                f"warmup_frac={self.warmup_frac}: with cooldown_frac={self.cooldown_frac}{tail} it is more than the "
                "whole run: make one smaller"
            )

    def lr_frac(self, step: int, num_steps: int) -> float:
        fall = self.fall(step, num_steps)
        return min(super().lr_frac(step, num_steps), self.final_lr_frac + (1 - self.final_lr_frac) * fall)

    def fall(self, step: int, num_steps: int) -> float:
        """Returns the remaining part of the cooldown: 1 before it, 0 at its end."""
        num_cooldown_steps = round(self.cooldown_frac * num_steps)
        num_left = num_steps - round((self.tail_frac or 0) * num_steps) - step
        return 1.0 if num_left >= num_cooldown_steps else max(0, num_left) / num_cooldown_steps
