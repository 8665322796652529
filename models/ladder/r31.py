"""Record 31, 2025-09-10: 2.717 -> 2.656 minutes.  YaRN: turns slow down and scores grow as the window grows.

Each time the window grows from a to b tokens, a pair that turns r times within a is slowed down to a / b of its speed
where r is at most 1, less the nearer r comes to 32, and not beyond (Peng et al. 2023, arXiv 2309.00071, with alpha 1
and beta 32).  Scores are multiplied by 0.1 at first and by 1 + 0.2 ln(b / a) more each time.  The last validation has a
window of 13 blocks, which no step had (stages[].end_window_tokens).
model.args: yarn_blocks (windows of the run in order, in blocks), attention_scale (at the first of them), and those of
record 21.
"""

import math

import torch

from models.ladder import simple
from models.ladder.r30 import R30

ALPHA, BETA, SCALE_GAIN = 1, 32, 0.2


class Yarn(simple.Rotary):
    """path: the windows that the run has come through, in tokens; its first one changes nothing."""

    path: tuple[int, ...] = ()

    def turns(self) -> torch.Tensor:
        """Radians a position of each pair of a head, float64."""
        turn_K = super().turns()
        for before, after in zip(self.path, self.path[1:], strict=False):
            rounds_K = before * turn_K / (2 * math.pi)
            kept_K = ((rounds_K - ALPHA) / (BETA - ALPHA)).clamp(0, 1)
            turn_K = turn_K * (before / after + kept_K * (1 - before / after))
        return turn_K


class R31(R30):
    def __init__(self, *, attention_scale: float = 0.1, yarn_blocks: tuple[int, ...] = (3, 7, 11, 13), **options):
        super().__init__(attention_scale=attention_scale, **options)
        self.first_scale, self.yarn_blocks = attention_scale, yarn_blocks
        del self.attention_scale  # a number would ask for a graph of its own for each window
        self.register_buffer("attention_scale", torch.empty(()), persistent=False)
        self.set_window(self.window_tokens)

    def make_rotary(self, seq_len):
        return Yarn(self.head_dim, seq_len)

    def yarn_window(self, window_tokens: int) -> int:
        """The window that turns and scores are of: beyond the schedule's last one they stay as they are."""
        return min(window_tokens, self.yarn_blocks[-1] * self.block)

    def set_window(self, window_tokens: int) -> None:
        """How far back a token sees, from the next pass on, with the turns and the scale that belong to it."""
        super().set_window(window_tokens)
        if isinstance(self.rotary, Yarn):  # not yet while the rungs below are made
            last = self.yarn_window(window_tokens)
            before = [blocks * self.block for blocks in self.yarn_blocks if blocks * self.block < last]
            self.turn_by((*before, last))

    def turn_by(self, path):
        if path == self.rotary.path:
            return
        self.rotary.path = path
        self.rotary.fill(self.attention_scale.device)
        gains = (1 + SCALE_GAIN * math.log(after / before) for before, after in zip(path, path[1:], strict=False))
        self.attention_scale.fill_(self.first_scale * math.prod(gains))


MODEL = R31
