"""Record 53, 2025-12-22: 2.037 -> 1.988 minutes.  Several tokens ahead; embedding and head part at two thirds.

The loss is of the next three tokens in the first third of the run, of two in the second, and what the farthest weighs
falls to nothing on the way (stages[].ahead_weights of conf/experiment/r53.yaml).  At two thirds the embedding becomes a
matrix of its own, which begins as the head's, with its state of Adam (stages[].untied).  The first q, k and v are twice
as large.
model.args: those of record 49.
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.ladder.r19 import uniform_
from models.ladder.r52 import R52


class R53(R52):
    late_parameters = ("embedding.weight",)

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = nn.Embedding(*self.head.weight.shape, dtype=self.head.weight.dtype)
        self.untied = False

    @torch.no_grad()
    def set_untied(self, untied: bool) -> tuple[nn.Parameter, nn.Parameter]:
        """Whether tokens are looked up in the embedding, which begins as the head is, or in the head."""
        if untied and not self.untied:
            self.embedding.weight.copy_(self.head.weight)
        self.untied = untied
        return self.embedding.weight, self.head.weight

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for block in self.blocks:
            if block.attention is not None:
                for layer in (block.attention.query, block.attention.key, block.attention.value):
                    uniform_(layer.weight, layer.in_features**-0.5, generator)

    def looked_up(self, tokens_BT):
        return self.embedding(tokens_BT) if self.untied else F.embedding(tokens_BT, self.head.weight)


MODEL = R53
