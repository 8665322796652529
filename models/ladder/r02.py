"""Record 2, 2024-06-06: 45 -> 31.4 minutes.  Rotary positions, RMSNorm, no biases, three times the learning rate.

GPT-2 without learned positions, biases and norm weights; the attention's output is scaled down by sqrt(2 * layers)
instead of its initial weights.  Weights begin as torch's layers do, the tied head as a linear layer.
B batch, T tokens, D width, V vocabulary, H heads, K head width
"""

import torch
import torch.nn.functional as F
from torch import nn

from models import modern
from models.base import LanguageModel, causal_attention, merge_heads, split_heads


@torch.no_grad()
def uniform_(parameter, generator):
    """As torch's linear layers begin: U(-1/sqrt(in), 1/sqrt(in)), drawn on the CPU."""
    bound = parameter.shape[1] ** -0.5
    parameter.copy_(torch.empty(parameter.shape, device="cpu").uniform_(-bound, bound, generator=generator))


def rms_norm(x):
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class Rotary(modern.Rotary):
    """Turns the other way round than modern's, and multiplies in the dtype that the product of both has."""

    def fill(self):
        super().fill()
        self.sin_TK.neg_()

    def forward(self, x_BHTK):
        T = x_BHTK.shape[2]
        cos_TK, sin_TK = self.cos_TK[:T], self.sin_TK[:T]
        left, right = x_BHTK.chunk(2, dim=-1)
        turned_BHTK = torch.cat((left * cos_TK - right * sin_TK, right * cos_TK + left * sin_TK), dim=-1)
        return turned_BHTK.type_as(x_BHTK)


class Linear(nn.Linear):
    """Without biases; its weights stay float32 where x is not."""

    def __init__(self, num_in, num_out):
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, num_heads, width):
        super().__init__()
        self.num_heads = num_heads
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.proj = Linear(width, width)

    def positioned(self, x_BHTK, rotary):
        """Queries or keys with their positions."""
        return rotary(x_BHTK)

    def forward(self, x_BTD, rotary):
        return self.attend(x_BTD, split_heads(self.value(x_BTD), self.num_heads), rotary)

    def attend(self, x_BTD, v_BHTK, rotary, mix=causal_attention):
        """mix: who sees whom, q, k and v to [B, H, T, K]."""
        q_BHTK = self.positioned(split_heads(self.query(x_BTD), self.num_heads), rotary)
        k_BHTK = self.positioned(split_heads(self.key(x_BTD), self.num_heads), rotary)
        return self.proj(merge_heads(mix(q_BHTK, k_BHTK, v_BHTK)))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.proj = Linear(4 * width, width)

    def forward(self, x_BTD):
        return self.proj(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    Attention, MLP, norm = Attention, MLP, staticmethod(rms_norm)

    def __init__(self, num_layers, num_heads, width):
        super().__init__()
        self.attention = self.Attention(num_heads, width)
        self.mlp = self.MLP(width)
        self.attention_scale = (2 * num_layers) ** -0.5

    def forward(self, x_BTD, rotary):
        x_BTD = x_BTD + self.attention_scale * self.attention(self.norm(x_BTD), rotary)
        return x_BTD + self.mlp(self.norm(x_BTD))


class R02(LanguageModel):
    """logits() is embed(), stack() and to_logits(): a later record replaces one of them."""

    Block, norm = Block, staticmethod(rms_norm)

    def __init__(self, vocab_size: int, seq_len: int, num_layers: int, num_heads: int, width: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.rotary = Rotary(self.head_dim, seq_len)
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(self.Block(num_layers, num_heads, width) for _ in range(num_layers))
        self.head = Linear(width, vocab_size)
        self.head.weight = self.embedding.weight

    def init_weights(self, generator: torch.Generator) -> None:
        """Every parameter anew, from a CPU generator, and the rotary table."""
        for module in self.modules():
            if isinstance(module, Linear):
                uniform_(module.weight, generator)
        self.rotary.fill()

    def embed(self, tokens_BT):
        return self.embedding(tokens_BT)

    def stack(self, x_BTD):
        """All blocks, and the last norm."""
        for block in self.blocks:
            x_BTD = block(x_BTD, self.rotary)
        return self.norm(x_BTD)

    def to_logits(self, x_BTD):
        return self.head(x_BTD).float()

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, V], of the next token, float32."""
        return self.to_logits(self.stack(self.embed(tokens_BT)))

    def head_weight(self) -> nn.Parameter:
        """[V, D]."""
        return self.head.weight


MODEL = R02
