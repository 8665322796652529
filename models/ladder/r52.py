"""Record 52, 2025-12-21: 2.075 -> 2.037 minutes.  Learnt scalars move evenly, and rest where batch or window changes.

Their Adam looks back farther, except for that of what a block takes of the embedding, which is a tensor of its own
here; for 40 steps after each change they stay as they are and their gradients are dropped.  The smear gate is Adam's
now, at a hundredth of its learning rate (conf/experiment/r52.yaml).
model.args: those of record 49.
"""

import torch
from torch import nn

from models.base import constant_
from models.ladder.r51 import R51


class R52(R51):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            if block.stream_mix is not None:
                del block.stream_mix  # torch lets no list take the place of a tensor
                block.stream_mix = nn.ParameterList([torch.tensor(1.1), torch.tensor(0.0)])

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for block in self.blocks:
            if block.stream_mix is not None:
                constant_(block.stream_mix[1], 0.0)


MODEL = R52
