"""A model of your own: GPT-2's blocks with an MLP of another width.  Change it, or write your own from here.

LanguageModel brings the loss, the FLOPs and the matrices for Muon; it needs what is marked below.  `models` is the
harness's package, which is on the path while it runs this file (docs/own.md says how to import it elsewhere).
"""

import torch.nn.functional as F
from torch import nn

from models.base import LanguageModel, constant_, normal_
from models.gpt2 import Block


class MyModel(LanguageModel):
    def __init__(self, vocab_size, seq_len, num_layers, num_heads, width, mlp_ratio=4):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads  # needed
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(num_heads, width) for _ in range(num_layers))  # needed
        for block in self.blocks:
            block.mlp.up = nn.Linear(width, mlp_ratio * width)
            block.mlp.proj = nn.Linear(mlp_ratio * width, width)
        self.norm = nn.LayerNorm(width)

    def init_weights(self, generator):
        """Needed. Draws every parameter again from a CPU generator, so that every rank has the same."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                normal_(parameter, 0.02, generator)
            else:
                constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)

    def logits(self, tokens_BT):
        """Needed. Returns the next token's logits in float32: [batch, tokens] -> [batch, tokens, vocabulary]."""
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.head_weight()).float()

    def head_weight(self):
        """Needed. Returns the head's weight [vocabulary, width]."""
        return self.tokens.weight
