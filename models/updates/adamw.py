"""AdamW; with weight_decay 0 it is Adam."""

from dataclasses import dataclass
from typing import Any

from models import updates
from models.settings import Momentum, NotNegative, Positive


@dataclass(kw_only=True)
class Config(updates.Group):
    beta1: Momentum = 0.9  # decay rate of the mean gradient
    beta2: Momentum = 0.95  # decay rate of the mean squared gradient
    eps: Positive = 1e-8  # added to the denominator
    weight_decay: NotNegative = 0.0  # weight decay per step, times the learning rate

    def build(self, tensors: list[Any], lr: float, rank: int, world_size: int, device_type: str) -> Any:
        """Returns torch.optim.AdamW; every rank does the same update."""
        import torch

        row = {"params": tensors, "peak_lr": lr, "weight_decay": self.weight_decay}
        betas, fused = (self.beta1, self.beta2), device_type == "cuda"
        return torch.optim.AdamW([row], lr=lr, betas=betas, eps=self.eps, fused=fused, foreach=False)
