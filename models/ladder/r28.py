"""Record 28, 2025-08-23: 2.817 (record 27) -> 2.812 minutes.  A gate on each head, of 12 numbers of the stream.

What a head gives is multiplied by the sigmoid of a linear layer, at first a half: a head can say nothing.  Muon takes
the gates too.  Record 27 stores the MLP's first matrix transposed, so that Muon no longer doubles its step, and
multiplies a matrix by its own transpose in a Triton kernel of its own: that is omitted, it computes the same.  The
head's logits are no longer divided.
model.args: those of record 21.
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.base import constant_, merge_heads
from models.ladder import r02, r05, r20
from models.ladder.r19 import R19
from models.ladder.r26 import R26

GATE_INPUTS = 12  # the first ones of the layer's input


class Transposed(r02.Linear):
    """Its weight is [in, out]."""

    def __init__(self, num_in, num_out):
        super().__init__(num_in, num_out)
        self.weight = nn.Parameter(self.weight.detach().T.clone())

    def forward(self, x):
        return F.linear(x, self.weight.T.to(x.dtype))


class Attention(r20.Attention):
    def __init__(self, num_heads, width):
        super().__init__(num_heads, width)
        self.gate = r02.Linear(GATE_INPUTS, num_heads)

    def output(self, mixed_BHTK, x_BTD):
        gate_BHT1 = torch.sigmoid(self.gate(x_BTD[..., :GATE_INPUTS])).transpose(1, 2)[..., None]
        return self.projected(merge_heads(mixed_BHTK * gate_BHT1))


class MLP(r05.MLP):
    def __init__(self, width):
        super().__init__(width)
        self.up = Transposed(width, 4 * width)


class Block(r20.Block):
    Attention, MLP = Attention, MLP


class R28(R26):
    Block = Block
    WEIGHT_SCALE = 2.0**9
    to_logits = R19.to_logits

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.named_parameters():
            if name.endswith("gate.weight"):
                constant_(parameter, 0.0)


MODEL = R28
