"""Record 32, 2025-09-11: 2.656 -> 2.625 minutes.  Skips through a sigmoid; head, gates and turns in bfloat16.

A skip is multiplied by the sigmoid of its weight, at first -1.5.  Muon's work is shared out in whole stacks of
matrices, Adam's epsilon is larger.  The record's Adam keeps bfloat16 state of its float32 scalars too, and adds epsilon
before its bias correction: ours float32, and after it, which differs for the smallest gradients of the first steps.
model.args: those of record 31.
"""

import torch

from models.base import constant_
from models.ladder import r31
from models.ladder.r31 import R31


class Rotary(r31.Yarn):
    """In its table's dtype."""

    def forward(self, x_BHTK):
        T = x_BHTK.shape[2]
        cos_TK, sin_TK = self.cos_TK[:T], self.sin_TK[:T]
        left, right = x_BHTK.chunk(2, dim=-1)
        return torch.cat((left * cos_TK + right * sin_TK, right * cos_TK - left * sin_TK), dim=-1)


class R32(R31):
    def __init__(self, **options):
        super().__init__(**options)
        for name, parameter in self.named_parameters():
            if name.endswith(("gate.weight", "head.weight")):
                parameter.data = parameter.data.to(self.dtype)

    def make_rotary(self, seq_len):
        return Rotary(self.head_dim, seq_len).to(self.dtype)

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        constant_(self.skip_weights, -1.5)

    def skip_factor(self, index: int) -> torch.Tensor:
        return torch.sigmoid(self.skip_weights[index])


MODEL = R32
