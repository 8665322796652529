"""Record 15, 2024-12-08: 4.41 -> 3.95 minutes.  Value embeddings in a U: the last block has the first one's.

The two parts of a block's values have a learnt weight each.  The window also ends at a block of the mask, so that no
token looks into more than window / 128 blocks, its own among them.
"""

import torch
from torch import nn

from models.ladder import r14
from models.ladder.r14 import R14


class Attention(r14.Attention):
    def __init__(self, num_heads, width):
        super().__init__(num_heads, width)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))  # of its own values and of the embedded ones

    def mixed_values(self, v_BHTK, embedded_BHTK):
        return self.value_mix[0] * v_BHTK + self.value_mix[1] * embedded_BHTK


class Block(r14.Block):
    Attention = Attention


class R15(R14):
    Block = Block

    def limits(self, window_tokens: int) -> tuple[int, int]:
        return window_tokens, -(-window_tokens // self.block)

    def make_value_embeddings(self, vocab_size, width):
        return nn.Embedding(vocab_size, len(self.blocks) // 2 * width, dtype=self.dtype)

    def values(self, tokens_BT) -> list:
        first_half = self.value_embeddings(tokens_BT).chunk(len(self.blocks) // 2, dim=-1)
        return [*first_half, *reversed(first_half)]


MODEL = R15
