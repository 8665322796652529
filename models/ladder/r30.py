"""Record 30, 2025-09-05: 2.731 -> 2.717 minutes.  No MLP in the first layer.

model.args: those of record 21.
"""

from models.ladder import r28
from models.ladder.r29 import R29


class Block(r28.Block):
    def forward(self, x_BTD, rotary, value_BTD, embedded_BTD, mix):
        if self.stream_mix is not None:
            x_BTD = self.stream_mix[0] * x_BTD + self.stream_mix[1] * embedded_BTD
        if self.attention is not None:
            x_BTD = x_BTD + self.attention(self.norm(x_BTD), rotary, value_BTD, mix)
        return x_BTD if self.mlp is None else x_BTD + self.mlp(self.norm(x_BTD))


class R30(R29):
    Block = Block

    def __init__(self, vocab_size: int, seq_len: int, num_layers: int, num_heads: int, width: int, **ideas):
        super().__init__(vocab_size, seq_len, num_layers, num_heads, width, **ideas)
        self.blocks[0].mlp = None


MODEL = R30
