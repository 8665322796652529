"""Record 49, 2025-12-14: 2.170 -> 2.146 minutes.  Keys with a part of the token before; value embeddings at zero.

In the layers with a long window the half of a key that has no position is that of the token before, whatever document
it is of: what followed a token can be found by one layer.  The record counts eleven layers from here on; the first of
our twelve has been empty since record 35.
model.args: key_offset, and those of record 31.
"""

import torch

from models.base import constant_
from models.ladder import r48
from models.ladder.r48 import R48


class Attention(r48.Attention):
    offsets_keys = False

    def positioned_keys(self, k_BHTK, rotary):
        k_BHTK = super().positioned_keys(k_BHTK, rotary)
        if not self.offsets_keys:
            return k_BHTK
        before_BHTK = torch.cat((k_BHTK[:, :, :1], k_BHTK[:, :, :-1]), dim=2)
        turned, _, turned_too, _ = k_BHTK.chunk(4, dim=-1)  # the turned ones of each half
        _, still, _, still_too = before_BHTK.chunk(4, dim=-1)
        return torch.cat((turned, still, turned_too, still_too), dim=-1)


class Block(r48.Block):
    Attention, is_first = Attention, False

    def mixed(self, x_BTD, embedded_BTD):
        if self.is_first:  # its stream is the embedding: one rounding in bfloat16 instead of two
            return (self.stream_mix[0] + self.stream_mix[1]) * x_BTD
        return super().mixed(x_BTD, embedded_BTD)


class R49(R48):
    Block = Block

    def __init__(self, *, key_offset: bool = True, **options):
        super().__init__(**options)
        self.blocks[1].is_first = True
        for index, block in enumerate(self.blocks):
            if block.attention is not None:
                block.attention.offsets_keys = key_offset and self.has_long_window(index)

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for table in self.value_embeddings or ():
            constant_(table.weight, 0.0)


MODEL = R49
