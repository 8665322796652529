"""A trapezoid whose peak changes during the run, for example when the batch grows, but not the end of its fall.

From modded-nanogpt's record 46.
"""

from dataclasses import dataclass, field

from models import schedules
from models.schedules import trapezoid


@dataclass(kw_only=True)
class Config(trapezoid.Config):
    at_fracs: list[float] = field(default_factory=list)  # where the peak changes: increasing fractions of num_steps
    lr_fracs: list[float] = field(default_factory=list)  # the peak from there on, as a fraction of the first

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.at_fracs) != len(self.lr_fracs) or self.at_fracs != sorted(self.at_fracs):
            raise ValueError(f"at_fracs={self.at_fracs}: lr_fracs={self.lr_fracs}: give as many, and at_fracs in order")

    def lr_frac(self, step: int, num_steps: int) -> float:
        changes = zip(self.at_fracs, self.lr_fracs, strict=True)
        peak = ([1.0] + [frac for at, frac in changes if step >= round(at * num_steps)])[-1]
        fall = self.fall(step, num_steps)
        return min(
            peak * schedules.Config.lr_frac(self, step, num_steps), peak * fall + self.final_lr_frac * (1 - fall)
        )
