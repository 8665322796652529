"""Record 20, 2025-01-16: 3.142 -> 2.992 minutes.  Long and short windows, merged q, k and v, scores times 0.12.

Of twelve layers the first, fifth, eighth and twelfth see the whole window, the others half of it.  Muon still takes q,
k and v as a matrix each: they are put together for the product.
model.args: attention_scale (null: 1 / sqrt(head width)), long_short, and those of record 19.
B batch, T tokens, D width, H heads, K head width
"""

import torch
import torch.nn.functional as F

from models.attention import merge_heads, split_heads
from models.ladder import r17
from models.ladder.r19 import R19
from models.masked_attention import Visible


class Attention(r17.Attention):
    def forward(self, x_BTD, rotary, value_BTD, mix):
        """value_BTD: value embeddings of the tokens, None in the inner layers."""
        weights = torch.cat((self.query.weight, self.key.weight, self.value.weight))
        q_BTD, k_BTD, v_BTD = F.linear(x_BTD, weights.type_as(x_BTD)).chunk(3, dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (split_heads(one, self.num_heads) for one in (q_BTD, k_BTD, v_BTD))
        if self.value_mix is not None and value_BTD is not None:
            v_BHTK = self.mixed_values(v_BHTK, split_heads(value_BTD, self.num_heads))
        elif self.value_mix is not None:
            v_BHTK = self.value_mix[0] * v_BHTK
        mixed_BHTK = mix(self.positioned(q_BHTK, rotary), self.positioned(k_BHTK, rotary), v_BHTK)
        return self.output(mixed_BHTK, x_BTD)

    def output(self, mixed_BHTK, x_BTD):
        """The layer's, of what its heads have mixed; x_BTD: what it was given."""
        return self.proj(merge_heads(mixed_BHTK))


class Block(r17.Block):
    Attention = Attention


class R20(R19):
    Block = Block

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_layers: int,
        num_heads: int,
        width: int,
        attention_scale: float | None = 0.12,
        long_short: bool = True,
        **ideas,
    ):
        super().__init__(vocab_size, seq_len, num_layers, num_heads, width, **ideas)
        self.attention_scale, self.long_short = attention_scale, long_short

    def has_long_window(self, index: int) -> bool:
        """Of block number index: every fourth from the outside in."""
        return not self.long_short or min(index, len(self.blocks) - 1 - index) % 4 == 0

    def windows(self) -> list[int]:
        """How far back each layer with attention sees, in tokens."""
        short = max(self.block, self.window_tokens // 2 // self.block * self.block)
        attending = (index for index, block in enumerate(self.blocks) if block.attention is not None)
        return [self.window_tokens if self.has_long_window(index) else short for index in attending]

    def mixes(self, tokens_BT) -> list:
        """Of each layer what its tokens see."""
        halved = (self.near_blocks // 2).clamp_min(1)
        long, short = (
            Visible(tokens_BT, self.eos_token, self.near_tokens, near, self.reach(), self.block, self.attention_scale)
            for near in (self.near_blocks, halved)
        )
        return [long if self.has_long_window(index) else short for index in range(len(self.blocks))]


MODEL = R20
