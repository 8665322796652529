"""Record 19, 2025-01-13: 3.4 -> 3.142 minutes.  An 8-bit head while training; smaller first weights.

The cap is a sigmoid in float32: the same logits as with tanh, but for a shift that no softmax sees.  The learning rate
falls to a tenth instead of 0, and the window is 1,728 * k / n tokens at step k of n, rounded up to blocks
(conf/experiment/r19.yaml).
model.args: fp8_head (null: where the GPU has 8-bit floats, which no test here has seen; false: nowhere), and those of
record 18.
"""

import torch

from models import fp8
from models.base import constant_
from models.ladder.r02 import Linear
from models.ladder.r18 import R18


class R19(R18):
    WEIGHT_SCALE = 2.0**5
    GRAD_SCALE = 2.0**13  # times the tokens of a pass, over which the loss is a mean: 2**29 for the record's 64K

    def __init__(self, *, fp8_head: bool | None = None, **options):
        super().__init__(**options)
        self.fp8_head = fp8_head

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for module in self.blocks.modules():
            if isinstance(module, Linear) and module.weight.any():
                uniform_(module.weight, 0.5 * module.in_features**-0.5, generator)
        constant_(self.head.weight, 0.0)

    def x_scale(self, width: int) -> float:
        """Of the activations before the 8-bit head."""
        return 2.0

    def uncapped(self, x_BTD):
        """What the head's product is, before the cap."""
        in_fp8 = fp8.is_fast_on(x_BTD.device.type) if self.fp8_head is None else self.fp8_head
        if not (in_fp8 and self.training):
            return self.head(x_BTD)
        B, T, D = x_BTD.shape
        return fp8.linear(
            x_BTD, self.head.weight, fp8.Scales(self.x_scale(D), self.WEIGHT_SCALE, self.GRAD_SCALE * B * T)
        )

    def to_logits(self, x_BTD):
        return self.capped(self.uncapped(x_BTD).float())

    def capped(self, logits_BTV):
        if self.softcap is None:
            return logits_BTV
        return 2 * self.softcap * torch.sigmoid(logits_BTV * (2 / self.softcap))


@torch.no_grad()
def uniform_(parameter, std, generator):
    """Even between -sqrt(3) * std and sqrt(3) * std, drawn on the CPU."""
    bound = 3**0.5 * std
    parameter.copy_(torch.empty(parameter.shape, device="cpu").uniform_(-bound, bound, generator=generator))


MODEL = R19
