"""Record 51, 2025-12-19: 2.128 -> 2.075 minutes.  Embedding and head are one matrix again.

It is drawn as a head, small, and learns as one; the scales of its 8-bit product are the record's of its numbers then.
model.args: those of record 49.
"""

import torch

from models.base import normal_
from models.ladder.r26 import LARGEST
from models.ladder.r49 import R49


class R51(R49):
    WEIGHT_SCALE = LARGEST / 1.5
    GRAD_SCALE = LARGEST / 0.75

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding.weight = self.head.weight

    def x_scale(self, width: int) -> float:
        return LARGEST / 100

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        normal_(self.head.weight, 0.005, generator)


MODEL = R51
