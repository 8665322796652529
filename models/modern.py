"""A GPT like those of the speedrun's records of late 2024, without the parts that need a special GPU.

It has rotary positions; RMSNorm without weights, also right after the embedding; normalised queries and keys; ReLU
squared; no biases; projections into the stream and a head that start at zero; an untied head; softly capped logits.
From github.com/KellerJordan/modded-nanogpt, records 2 (rotary), 5 (ReLU squared, zero projections, QK-norm),
8 (untied zero head, norm after the embedding), 18 (softcap 15).
B batch, T tokens, D width, V vocabulary, H heads, K head width
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from models.base import LanguageModel, causal_attention, constant_, merge_heads, normal_, split_heads

EMBEDDING_STD = 0.02  # the next norm undoes the scale: it only determines how far an AdamW step of lr turns a row
NORM_EPS = 1e-6  # well below EMBEDDING_STD**2 = 4e-4; torch's default depends on the dtype
ROTARY_BASE = 10_000  # Su et al. 2021, RoFormer, section 3.2.2
LOGIT_CAP = 15.0  # logits become cap * tanh(logits / cap); Gemma 2 (2024) has 30, record 18 found 15 better

Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # attention: q, k and v to [B, H, T, K]


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def softcap(logits: torch.Tensor, cap: float = LOGIT_CAP) -> torch.Tensor:
    """Caps logits smoothly within -cap..cap; close to the identity near 0."""
    return cap * torch.tanh(logits / cap)


class Rotary(nn.Module):
    """Rotates the pair (i, i + K/2) of a head by position * ROTARY_BASE**(-2i/K): dot products see only distances."""

    def __init__(self, head_dim: int, seq_len: int) -> None:
        super().__init__()
        self.register_buffer("cos_TK", torch.empty(seq_len, head_dim // 2), persistent=False)
        self.register_buffer("sin_TK", torch.empty(seq_len, head_dim // 2), persistent=False)
        self.fill()

    def turns(self) -> torch.Tensor:
        """Returns the radians per position of each pair of a head, float64."""
        half_dim = self.cos_TK.shape[1]
        return ROTARY_BASE ** (-torch.arange(half_dim, dtype=torch.float64, device="cpu") / half_dim)

    @torch.no_grad()
    def fill(self, device: torch.device | str = "cpu") -> None:
        """Fills the table, computed in float64 on device; the CPU gives every device and rank the same table."""
        position_T = torch.arange(self.cos_TK.shape[0], dtype=torch.float64, device=device)
        turn_K = self.turns().to(device, non_blocking=True)  # a new window fills it in a step: nothing may wait there
        angle_TK = torch.outer(position_T, turn_K)
        self.cos_TK.copy_(angle_TK.cos())
        self.sin_TK.copy_(angle_TK.sin())

    def forward(self, x_BHTK: torch.Tensor) -> torch.Tensor:
        T = x_BHTK.shape[2]
        cos_TK, sin_TK = self.cos_TK[:T], self.sin_TK[:T]
        left, right = x_BHTK.float().chunk(2, dim=-1)  # bf16 angles would be off by whole turns far from the start
        turned_BHTK = torch.cat((left * cos_TK - right * sin_TK, right * cos_TK + left * sin_TK), dim=-1)
        return turned_BHTK.type_as(x_BHTK)


class Attention(nn.Module):
    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)  # separate matrices, because Muon makes each one orthogonal
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, rotary: Rotary, mix: Mix = causal_attention) -> torch.Tensor:
        """Returns the layer's output; mix is the attention of q, k and v."""
        q_BHTK = split_heads(self.query(x_BTD), self.num_heads)
        k_BHTK = split_heads(self.key(x_BTD), self.num_heads)
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        q_BHTK, k_BHTK = rotary(rms_norm(q_BHTK)), rotary(rms_norm(k_BHTK))
        return self.proj(merge_heads(mix(q_BHTK, k_BHTK, v_BHTK)))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.proj(F.relu(self.up(x_BTD)).square())


class Block(nn.Module):
    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.attention = Attention(num_heads, width)
        self.mlp = MLP(width)

    def forward(self, x_BTD: torch.Tensor, rotary: Rotary, mix: Mix = causal_attention) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(rms_norm(x_BTD), rotary, mix)
        return x_BTD + self.mlp(rms_norm(x_BTD))


class Modern(LanguageModel):
    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_layers: int,
        num_heads: int,
        width: int,
        residual_dtype: str | None = None,
    ) -> None:
        super().__init__(residual_dtype)
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.embedding = nn.Embedding(vocab_size, width)
        self.rotary = Rotary(self.head_dim, seq_len)
        self.blocks = nn.ModuleList(Block(num_heads, width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocab_size, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initializes every parameter from a CPU generator, and the rotary table."""
        normal_(self.embedding.weight, EMBEDDING_STD, generator)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name.endswith((".proj", "head")):
                constant_(module.weight, 0.0)
            elif isinstance(module, nn.Linear):
                std = (3 * module.in_features) ** -0.5  # has the variance of torch's default; 0.0208 at width 768
                normal_(module.weight, std, generator)
        self.rotary.fill()

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the next token's logits, [B, T] -> [B, T, V], float32, within -LOGIT_CAP..LOGIT_CAP."""
        x_BTD, mix = self.stream(rms_norm(self.embedding(tokens_BT))), self.mix(tokens_BT)
        for block in self.blocks:
            x_BTD = self.through(block, x_BTD, self.rotary, mix)
        return softcap(self.head(rms_norm(x_BTD)).float())

    def mix(self, tokens_BT: torch.Tensor) -> Mix:
        """Returns the attention for these tokens; here every token sees itself and all earlier ones."""
        return causal_attention

    def head_weight(self) -> nn.Parameter:
        """Returns the head's matrix, [V, D]."""
        return self.head.weight


MODEL = Modern
