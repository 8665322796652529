"""GPT-2: LayerNorm and linear layers with biases, tanh GELU, learned positions, tied head, no dropout.

From Radford et al. 2019, with the initialisation of github.com/karpathy/nanoGPT model.py; the exact GELU, which that
uses, is "model.args={gelu: none}".
B batch, T tokens, D width, V vocabulary, H heads, K head width
"""

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from models.base import LanguageModel, causal_attention, constant_, merge_heads, normal_, split_heads

INIT_STD = 0.02  # of all weights except the residual projections


class Attention(nn.Module):
    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (split_heads(part_BTD, self.num_heads) for part_BTD in (q_BTD, k_BTD, v_BTD))
        return self.proj(merge_heads(causal_attention(q_BHTK, k_BHTK, v_BHTK)))


class MLP(nn.Module):
    def __init__(self, width: int, gelu: str = "tanh") -> None:
        super().__init__()
        self.gelu = gelu
        self.up = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.proj(F.gelu(self.up(x_BTD), approximate=self.gelu))


class Block(nn.Module):
    def __init__(self, num_heads: int, width: int, gelu: str = "tanh") -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(num_heads, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, gelu)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT2(LanguageModel):
    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_layers: int,
        num_heads: int,
        width: int,
        residual_dtype: str | None = None,
        gelu: str = "tanh",  # F.gelu's approximate, tanh or none
    ) -> None:
        super().__init__(residual_dtype)
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.token_embedding = nn.Embedding(vocab_size, width)  # its matrix is also the head's
        self.position_embedding = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(num_heads, width, gelu) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width)

    def init_weights(self, generator: Generator) -> None:
        """Initializes every parameter from a CPU generator."""
        residual_std = INIT_STD / (2 * len(self.blocks)) ** 0.5  # 2 additions a block keep the stream's variance
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                normal_(module.weight, residual_std if name.endswith(".proj") else INIT_STD, generator)
            if isinstance(module, nn.LayerNorm):
                constant_(module.weight, 1.0)
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                constant_(module.bias, 0.0)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Returns the next token's logits, [B, T] -> [B, T, V], float32."""
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding.weight[: tokens_BT.shape[1]]
        x_BTD = self.stream(x_BTD)
        for block in self.blocks:
            x_BTD = self.through(block, x_BTD)
        return F.linear(self.final_norm(x_BTD), self.head_weight()).float()

    def head_weight(self) -> nn.Parameter:
        """Returns the head's matrix, [V, D]."""
        return self.token_embedding.weight


MODEL = GPT2
