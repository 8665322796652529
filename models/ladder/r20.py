"""Record 20, 2025-01-16: 3.142 -> 2.992 minutes.  Long and short windows, merged q, k and v, scores times 0.12.

Of twelve layers the first, fifth, eighth and twelfth see the whole window, the others half of it.  Muon still takes q,
k and v as a matrix each: they are put together for the product.
model.args: attention_scale (null: 1 / sqrt(head width)), long_short, and those of record 19.
B batch, T tokens, D width, H heads, K head width
"""

import torch
import torch.nn.functional as F

from models.base import merge_heads, split_heads
from models.ladder import r17
from models.ladder.r19 import R19
from models.masked_attention import Visible


class Attention(r17.Attention):
    def forward(self, x_BTD, rotary, value_BTD, mix):
        q_BTD, k_BTD, v_BTD = F.linear(x_BTD, self.merged_weights(x_BTD)).chunk(3, dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (split_heads(one, self.num_heads) for one in (q_BTD, k_BTD, v_BTD))
        v_BHTK = self.with_embedded(v_BHTK, None if value_BTD is None else split_heads(value_BTD, self.num_heads))
        mixed_BHTK = mix(self.positioned(q_BHTK, rotary), self.positioned_keys(k_BHTK, rotary), v_BHTK)
        return self.output(mixed_BHTK, x_BTD)

    def merged_weights(self, x_BTD):
        """[3 * D, D], of q, k and v, in x's dtype."""
        return torch.cat((self.query.weight, self.key.weight, self.value.weight)).type_as(x_BTD)

    def with_embedded(self, v_BHTK, embedded_BHTK):
        """Values with their value embeddings, None in the inner layers."""
        if self.value_mix is None:
            return v_BHTK
        return self.value_mix[0] * v_BHTK if embedded_BHTK is None else self.mixed_values(v_BHTK, embedded_BHTK)

    def positioned_keys(self, k_BHTK, rotary):
        return self.positioned(k_BHTK, rotary)

    def output(self, mixed_BHTK, x_BTD):
        """The layer's, of what its heads have mixed; x_BTD: what it was given."""
        return self.projected(merge_heads(mixed_BHTK))

    def projected(self, mixed_BTD):
        return self.proj(mixed_BTD)


class Block(r17.Block):
    Attention = Attention


class R20(R19):
    Block = Block

    def __init__(self, *, attention_scale: float | None = 0.12, long_short: bool = True, **options):
        super().__init__(**options)
        self.attention_scale, self.long_short = attention_scale, long_short

    def has_long_window(self, index: int) -> bool:
        """Of block number index: every fourth from the outside in."""
        return not self.long_short or min(index, len(self.blocks) - 1 - index) % 4 == 0

    def windows(self) -> list[int]:
        short = max(self.block, self.window_tokens // 2 // self.block * self.block)
        attending = (index for index, block in enumerate(self.blocks) if block.attention is not None)
        return [self.window_tokens if self.has_long_window(index) else short for index in attending]

    def mixes(self, tokens_BT) -> list:
        halved = (self.near_blocks // 2).clamp_min(1)
        long, short = (
            Visible(tokens_BT, self.eos_token, self.near_tokens, near, self.reach(), self.block, self.attention_scale)
            for near in (self.near_blocks, halved)
        )
        return [long if self.has_long_window(index) else short for index in range(len(self.blocks))]


MODEL = R20
