"""Record 17, 2024-12-17: 3.80 -> 3.57 minutes.  Value embeddings in the outer layers only, one attention less.

Three tables, for the first three of twelve layers and in the same order for the last three; the eighth layer has no
attention.  Half of a head's pairs are turned, by 1 to 1/1024 radians a position, the others not at all.
"""

from torch import nn

from models.base import split_heads
from models.ladder import r15, simple
from models.ladder.r16 import R16


class Attention(r15.Attention):
    def forward(self, x_BTD, rotary, value_BTD, mix):
        """value_BTD: value embeddings of the tokens, None in the inner layers."""
        if value_BTD is not None:
            return super().forward(x_BTD, rotary, value_BTD, mix)
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        return self.attend(x_BTD, v_BHTK if self.value_mix is None else self.value_mix[0] * v_BHTK, rotary, mix)


class Block(r15.Block):
    Attention = Attention


class R17(R16):
    Block = Block

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[len(self.blocks) * 7 // 12].attention = None

    def make_rotary(self, seq_len):
        return simple.Rotary(self.head_dim, seq_len).to(self.dtype)

    def make_value_embeddings(self, vocab_size, width):
        num_tables = max(1, len(self.blocks) // 4)
        return nn.ModuleList(nn.Embedding(vocab_size, width, dtype=self.dtype) for _ in range(num_tables))

    def values(self, tokens_BT) -> list:
        outer = [table(tokens_BT) for table in self.value_embeddings]
        return [*outer, *[None] * (len(self.blocks) - 2 * len(outer)), *outer]

    def windows(self) -> list[int]:
        return super().windows()[1:]


MODEL = R17
