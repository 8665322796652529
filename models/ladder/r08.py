"""Record 8, 2024-11-03: 12.0 -> 10.8 minutes.  A head of its own, at zero; a norm right after the embedding.

Embedding and head have learning rates of their own now, 0.3 and 0.002 (conf/experiment/r08.yaml).
"""

import torch

from models.base import constant_, normal_
from models.ladder.r02 import Linear
from models.ladder.r06 import R06


class R08(R06):
    def __init__(self, **shape):
        super().__init__(**shape)
        self.head = Linear(*reversed(self.embedding.weight.shape))

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        normal_(self.embedding.weight, 1.0, generator)
        constant_(self.head.weight, 0.0)

    def embed(self, tokens_BT):
        return self.norm(super().embed(tokens_BT))


MODEL = R08
