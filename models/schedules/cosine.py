"""A schedule that falls after the warm-up along half a cosine, from 1 to final_lr_frac."""

import math
from dataclasses import dataclass

from models import schedules
from models.settings import Frac


@dataclass(kw_only=True)
class Config(schedules.Config):
    final_lr_frac: Frac  # final learning rate, as a fraction of the peak

    def lr_frac(self, step: int, num_steps: int) -> float:
        rise = super().lr_frac(step, num_steps)
        num_warmup_steps = round(self.warmup_frac * num_steps)
        if step < num_warmup_steps:
            return rise
        progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
        return self.final_lr_frac + (1 - self.final_lr_frac) * 0.5 * (1 + math.cos(math.pi * progress))
