"""Learning rate schedules, which return the fraction of the peak learning rate for each step."""

from dataclasses import dataclass

from models.settings import Frac


@dataclass(kw_only=True)
class Config:
    """Settings of every schedule; models/schedules/NAME.py extends them."""

    PACKAGE = __name__
    name: str  # schedule: models/schedules/NAME.py
    warmup_frac: Frac = 0.0  # linear rise from 0 at the start, as a part of num_steps

    def lr_frac(self, step: int, num_steps: int) -> float:
        """Returns the fraction for step 0 to num_steps - 1: linear over round(warmup_frac * num_steps) steps, then 1.

        Step k of W warm-up steps gets (k + 1) / W, so that no step is wasted on a learning rate of 0.  For the same
        reason a schedule that falls reaches its end at num_steps, the step after the last.
        """
        assert 0 <= step < num_steps, (step, num_steps)
        num_warmup_steps = round(self.warmup_frac * num_steps)
        return (step + 1) / num_warmup_steps if step < num_warmup_steps else 1.0
