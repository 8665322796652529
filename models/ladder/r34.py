"""Record 34, 2025-09-18: 2.565 -> 2.547 minutes.  Smear: a token's embedding takes on some of the one before it.

How much is a gate of 12 numbers of its own embedding, through a sigmoid, times one learnt scalar, at first 0.
model.args: those of record 31.
B batch, T tokens, D width
"""

import torch
from torch import nn

from models.base import constant_
from models.ladder import r02
from models.ladder.r28 import GATE_INPUTS
from models.ladder.r33 import R33


class R34(R33):
    def __init__(self, **options):
        super().__init__(**options)
        self.smear_gate = r02.Linear(GATE_INPUTS, 1).to(self.dtype)
        self.smear_weight = nn.Parameter(torch.tensor(0.0))

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        constant_(self.smear_weight, 0.0)

    def looked_up(self, tokens_BT):
        """[B, T, D], of each token its row of the table."""
        return self.embedding(tokens_BT)

    def embed(self, tokens_BT):
        x_BTD = self.looked_up(tokens_BT)
        gate_BT1 = self.smear_weight * torch.sigmoid(self.smear_gate(x_BTD[:, 1:, :GATE_INPUTS]))
        return self.norm(torch.cat((x_BTD[:, :1], x_BTD[:, 1:] + gate_BT1 * x_BTD[:, :-1]), dim=1))


MODEL = R34
