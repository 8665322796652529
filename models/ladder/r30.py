"""Record 30, 2025-09-05: 2.731 -> 2.717 minutes.  No MLP in the first layer.

model.args: those of record 21.
"""

from models.ladder import r28
from models.ladder.r29 import R29


class Block(r28.Block):
    def forward(self, x_BTD, rotary, value_BTD, embedded_BTD, mix):
        x_BTD = x_BTD if self.stream_mix is None else self.mixed(x_BTD, embedded_BTD)
        if self.attention is not None:
            x_BTD = x_BTD + self.attention(self.norm(x_BTD), rotary, value_BTD, mix)
        return x_BTD if self.mlp is None else x_BTD + self.mlp(self.norm(x_BTD))

    def mixed(self, x_BTD, embedded_BTD):
        return self.stream_mix[0] * x_BTD + self.stream_mix[1] * embedded_BTD


class R30(R29):
    Block = Block

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[0].mlp = None


MODEL = R30
