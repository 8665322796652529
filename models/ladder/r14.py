"""Record 14, 2024-12-04: 4.66 -> 4.41 minutes.  Value embeddings in place of the first block's values.

Each block mixes into its values a row of a table of its own, chosen by the token.  Rotary angles are counted in the
activations' dtype: in bfloat16 they are wrong far from the start, until record 17.
B batch, T tokens, D width, L layers, K head width
"""

import torch
from torch import nn

from models.base import normal_, split_heads
from models.ladder import r02, r09
from models.ladder.r10 import without_autocast
from models.ladder.r13 import R13
from models.modern import ROTARY_BASE


class Rotary(r02.Rotary):
    """Its angles have the dtype of its table."""

    @torch.no_grad()
    def fill(self):
        seq_len, half_dim = self.cos_TK.shape
        dtype = self.cos_TK.dtype
        turn_K = ROTARY_BASE ** (-torch.arange(half_dim, dtype=torch.float64, device="cpu") / half_dim)
        angle_TK = torch.outer(torch.arange(seq_len, device="cpu").to(dtype), turn_K.to(dtype))
        self.cos_TK.copy_(angle_TK.cos())
        self.sin_TK.copy_(-angle_TK.sin())


class Attention(r09.Attention):
    def mixed_values(self, v_BHTK, embedded_BHTK):
        return (1 - self.value_mix) * v_BHTK + self.value_mix * embedded_BHTK

    def forward(self, x_BTD, rotary, value_BTD, mix):
        """value_BTD: value embeddings of the tokens."""
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        if self.value_mix is not None:
            v_BHTK = self.mixed_values(v_BHTK, split_heads(value_BTD, self.num_heads))
        return self.attend(x_BTD, v_BHTK, rotary, mix)


class Block(r09.Block):
    Attention = Attention

    def forward(self, x_BTD, rotary, value_BTD, embedded_BTD, mix):
        if self.stream_mix is not None:
            x_BTD = self.stream_mix[0] * x_BTD + self.stream_mix[1] * embedded_BTD
        if self.attention is not None:
            x_BTD = x_BTD + self.attention(self.norm(x_BTD), rotary, value_BTD, mix)
        return x_BTD + self.mlp(self.norm(x_BTD))


class R14(R13):
    Block = Block

    def __init__(self, **options):
        super().__init__(**options)
        self.rotary = self.make_rotary(len(self.rotary.cos_TK))
        mixes_values = self.blocks[0].attention.value_mix is not None
        self.value_embeddings = self.make_value_embeddings(*self.embedding.weight.shape) if mixes_values else None

    def make_rotary(self, seq_len):
        rotary = Rotary(self.head_dim, seq_len).to(self.dtype)
        rotary.fill()
        return rotary

    def make_value_embeddings(self, vocab_size, width):
        return nn.Embedding(vocab_size, len(self.blocks) * width, dtype=self.dtype)

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.named_parameters():
            if name.startswith("value_embeddings."):
                normal_(parameter, 1.0, generator)

    def values(self, tokens_BT) -> list:
        """Of each layer [B, T, D], or None."""
        return list(self.value_embeddings(tokens_BT).chunk(len(self.blocks), dim=-1))

    def mixes(self, tokens_BT) -> list:
        """Of each layer what its tokens see."""
        return [self.visible(tokens_BT)] * len(self.blocks)

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with without_autocast(tokens_BT):
            x_BTD = self.embed(tokens_BT)
            values = [None] * len(self.blocks) if self.value_embeddings is None else self.values(tokens_BT)
            return self.to_logits(self.stack(x_BTD, values, self.mixes(tokens_BT)))

    def skip_factor(self, index: int) -> torch.Tensor:
        """Of skip number index."""
        return self.skip_weights[index]

    def stack(self, x_BTD, values, mixes):
        embedded_BTD, skips = x_BTD, []
        num_encoding = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= num_encoding:
                x_BTD = x_BTD + self.skip_factor(index - num_encoding) * skips.pop()
            x_BTD = block(x_BTD, self.rotary, values[index], embedded_BTD, mixes[index])
            if index < num_encoding:
                skips.append(x_BTD)
        return self.norm(x_BTD)


MODEL = R14
