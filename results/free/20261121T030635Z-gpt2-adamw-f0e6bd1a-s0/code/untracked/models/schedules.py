"""Learning rate schedules: the fraction of the peak learning rate for each step.  Numbers in, a number out.

step counts from 0 to num_steps - 1.  Every schedule begins with a linear warm-up over round(warmup_frac * num_steps)
steps: step k of W gets (k + 1) / W, so that no step is wasted on a learning rate of 0.  For the same reason what falls
reaches final_lr_frac at num_steps, the step after the last.  cooldown_frac and final_lr_frac are ignored where a
schedule has no use for them (the config refuses them there).
"""

import math


def constant(step, num_steps, warmup_frac, cooldown_frac=None, final_lr_frac=None):
    """1 after the warm-up."""
    return _warmup(step, num_steps, warmup_frac)


def cosine(step, num_steps, warmup_frac, cooldown_frac=None, final_lr_frac=None):
    """Half a cosine from 1, right after the warm-up, to final_lr_frac."""
    num_warmup_steps = round(warmup_frac * num_steps)
    if step < num_warmup_steps:
        return _warmup(step, num_steps, warmup_frac)
    progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    return final_lr_frac + (1 - final_lr_frac) * 0.5 * (1 + math.cos(math.pi * progress))


def trapezoid(step, num_steps, warmup_frac, cooldown_frac, final_lr_frac):
    """1 after the warm-up, then linear to final_lr_frac over the last round(cooldown_frac * num_steps) steps.

    The first of C cooldown steps still gets 1, the last one final + (1 - final) / C.  Where rounding makes warm-up
    and cooldown overlap by a step, the smaller of the two counts.
    """
    num_cooldown_steps = round(cooldown_frac * num_steps)
    num_left = num_steps - step
    fall = 1.0 if num_left >= num_cooldown_steps else num_left / num_cooldown_steps
    return min(_warmup(step, num_steps, warmup_frac), final_lr_frac + (1 - final_lr_frac) * fall)


def _warmup(step, num_steps, warmup_frac):
    assert 0 <= step < num_steps, (step, num_steps)
    num_warmup_steps = round(warmup_frac * num_steps)
    return (step + 1) / num_warmup_steps if step < num_warmup_steps else 1.0
