"""Record 11, 2024-11-10: 7.8 -> 7.2 minutes.  U-net skips: the first half's outputs enter the second half, last first.

Learning rates are doubled, the head's fourfold (conf/experiment/r11.yaml).
"""

import torch
from torch import nn

from models.base import causal_attention, constant_
from models.ladder.r10 import R10


class R11(R10):
    def __init__(self, **options):
        super().__init__(**options)
        num_layers = len(self.blocks)
        if num_layers % 2:
            raise ValueError(f"model.num_layers={num_layers}: every skip joins two blocks: use an even number")
        self.skip_weights = nn.Parameter(torch.ones(num_layers // 2, dtype=self.dtype))

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        constant_(self.skip_weights, 1.0)

    def stack(self, x_BTD, mix=causal_attention):
        embedded_BTD, first_v_BHTK, skips = x_BTD, None, []
        num_encoding = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= num_encoding:
                x_BTD = x_BTD + self.skip_weights[index - num_encoding] * skips.pop()
            x_BTD, first_v_BHTK = block(x_BTD, self.rotary, first_v_BHTK, embedded_BTD, mix)
            if index < num_encoding:
                skips.append(x_BTD)
        return self.norm(x_BTD)


MODEL = R11
