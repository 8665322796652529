"""Record 9, 2024-11-06: 10.8 -> 8.2 minutes.  Value residual, embedding skip, momentum warm-up, capped logits.

Every block mixes the first block's values into its own, and the embedding into its input, by learnt scalars.
model.args: softcap (null: not capped), value_residual, embedding_skip.
B batch, T tokens, D width, V vocabulary, H heads, K head width
"""

import torch
from torch import nn

from models.base import causal_attention, constant_, split_heads
from models.ladder import r06
from models.ladder.r08 import R08


class Attention(r06.Attention):
    def __init__(self, num_heads, width):
        super().__init__(num_heads, width)
        self.value_mix = nn.Parameter(torch.tensor(0.5))  # part of the first block's values

    def forward(self, x_BTD, rotary, first_v_BHTK, mix=causal_attention):
        """first_v_BHTK: the first block's values; None in the first block.  Returns (its output, them)."""
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        first_v_BHTK = v_BHTK if first_v_BHTK is None else first_v_BHTK
        if self.value_mix is not None:
            v_BHTK = (1 - self.value_mix) * v_BHTK + self.value_mix * first_v_BHTK
        return self.attend(x_BTD, v_BHTK, rotary, mix), first_v_BHTK


class Block(r06.Block):
    Attention = Attention

    def __init__(self, num_layers, num_heads, width):
        super().__init__(num_layers, num_heads, width)
        self.stream_mix = nn.Parameter(torch.tensor([1.0, 0.0]))  # of the stream and of the embedding

    def forward(self, x_BTD, rotary, first_v_BHTK, embedded_BTD, mix=causal_attention):
        if self.stream_mix is not None:
            x_BTD = self.stream_mix[0] * x_BTD + self.stream_mix[1] * embedded_BTD
        attended_BTD, first_v_BHTK = self.attention(self.norm(x_BTD), rotary, first_v_BHTK, mix)
        x_BTD = x_BTD + attended_BTD
        return x_BTD + self.mlp(self.norm(x_BTD)), first_v_BHTK


class R09(R08):
    Block = Block

    def __init__(
        self, *, softcap: float | None = 30.0, value_residual: bool = True, embedding_skip: bool = True, **shape
    ):
        super().__init__(**shape)
        self.softcap = softcap
        for block in self.blocks:
            block.attention.value_mix = block.attention.value_mix if value_residual else None
            block.stream_mix = block.stream_mix if embedding_skip else None

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("value_mix"):
                constant_(parameter, 0.5)
            elif name.endswith("stream_mix"):
                constant_(parameter[0], 1.0)
                constant_(parameter[1], 0.0)

    def stack(self, x_BTD):
        embedded_BTD, first_v_BHTK = x_BTD, None
        for block in self.blocks:
            x_BTD, first_v_BHTK = block(x_BTD, self.rotary, first_v_BHTK, embedded_BTD)
        return self.norm(x_BTD)

    def to_logits(self, x_BTD):
        logits_BTV = self.head(x_BTD)
        if self.softcap is not None:
            logits_BTV = self.softcap * torch.tanh(logits_BTV / self.softcap)
        return logits_BTV.float()


MODEL = R09
