"""The model of track 3's portable trainer, train_gpt_simple.py, which keeps of the records what is easy to port.

It has biases, norms with weights, half of each head without positions, attention scale 0.12 and a cap without tanh.
Activations and embedding are bfloat16, everything else is float32.
model.args: activations (float32 is fast on a CPU).
B batch, T tokens, D width, V vocabulary, K head width
"""

import torch
import torch.nn.functional as F
from torch import nn

from models import modern
from models.base import LanguageModel, constant_, merge_heads, normal_, split_heads
from models.ladder.short_sequences import R02Rotary, rms_norm, without_autocast

ATTENTION_SCALE, CAP, ROTARY_BASE = 0.12, 15, 1024


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.type_as(x), self.bias.type_as(x))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD):
        return F.rms_norm(x_BTD, (x_BTD.shape[-1],), weight=self.weight.type_as(x_BTD))


class Rotary(R02Rotary):
    """Rotates the first half of the pairs, by 1 down to 1 / ROTARY_BASE radians per position; the others stay."""

    forward = modern.Rotary.forward  # in float32

    def turns(self) -> torch.Tensor:
        half_dim = self.cos_TK.shape[1]
        turn_K = torch.zeros(half_dim, dtype=torch.float64, device="cpu")
        num_turned = half_dim // 2
        turn_K[:num_turned] = (1 / ROTARY_BASE) ** torch.linspace(0, 1, num_turned, dtype=torch.float64, device="cpu")
        return turn_K


class Block(nn.Module):
    def __init__(self, num_heads, width):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.query, self.key, self.value = Linear(width, width), Linear(width, width), Linear(width, width)
        self.attention_proj = Linear(width, width)
        self.up, self.mlp_proj = Linear(width, 4 * width), Linear(4 * width, width)

    def attention(self, x_BTD, rotary):
        q_BHTK, k_BHTK, v_BHTK = (
            split_heads(part(x_BTD), self.num_heads) for part in (self.query, self.key, self.value)
        )
        q_BHTK, k_BHTK = rotary(rms_norm(q_BHTK)), rotary(rms_norm(k_BHTK))
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, scale=ATTENTION_SCALE)
        return self.attention_proj(merge_heads(mixed_BHTK))

    def forward(self, x_BTD, rotary):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        return x_BTD + self.mlp_proj(self.up(self.mlp_norm(x_BTD)).relu().square())


class Simple(LanguageModel):
    def __init__(
        self, vocab_size: int, seq_len: int, num_layers: int, num_heads: int, width: int, activations: str = "bfloat16"
    ):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.embedding = nn.Embedding(vocab_size, width, dtype=getattr(torch, activations))
        self.embedding_norm, self.final_norm = RMSNorm(width), RMSNorm(width)
        self.rotary = Rotary(self.head_dim, seq_len)
        self.blocks = nn.ModuleList(Block(num_heads, width) for _ in range(num_layers))
        self.head = Linear(width, vocab_size)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initializes every parameter from a CPU generator, and the rotary table."""
        normal_(self.embedding.weight, 1.0, generator)
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                constant_(module.weight, 1.0)
            elif isinstance(module, Linear):
                constant_(module.bias, 0.0)
                if name.endswith(("_proj", "head")):
                    constant_(module.weight, 0.0)
                else:
                    normal_(module.weight, (0.33 / module.in_features) ** 0.5, generator)
        self.rotary.fill()

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the next token's logits, [B, T] -> [B, T, V], float32, within -CAP..CAP."""
        with without_autocast(tokens_BT):
            x_BTD = self.embedding_norm(self.embedding(tokens_BT))
            for block in self.blocks:
                x_BTD = block(x_BTD, self.rotary)
            logits_BTV = self.head(self.final_norm(x_BTD)).float()
            return CAP * logits_BTV * (logits_BTV.square() + CAP**2).rsqrt()

    def head_weight(self) -> nn.Parameter:
        """Returns the head's matrix, [V, D]."""
        return self.head.weight


MODEL = Simple
