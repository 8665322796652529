"""Record 37, 2025-09-27: 2.495 (record 36, Muon's work shared out otherwise) -> 2.483 minutes.  Bfloat16 cross entropy.

Logits stay in bfloat16 while training, and so does each token's loss; only their mean is float32.
model.args: those of record 31.
"""

import torch
import torch.nn.functional as F

from models.ladder.r35 import R35


class R37(R35):
    def to_logits(self, x_BTD):
        logits_BTV = self.capped(self.uncapped(x_BTD))
        return logits_BTV if self.training else logits_BTV.float()

    def loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean nats per token, float32."""
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").float().mean()


MODEL = R37
