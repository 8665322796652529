"""AdamW as in the speedrun's first records: weight decay on matrices only, one learning rate for all parameters.

From Loshchilov and Hutter 2019; the same parameters decay as in github.com/karpathy/nanoGPT model.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from models import optimizers
from models.settings import Momentum, NotNegative, Positive


@dataclass(kw_only=True)
class Config(optimizers.Config):
    beta1: Momentum  # AdamW's decay rate of the mean gradient
    beta2: Momentum  # AdamW's decay rate of the mean squared gradient
    eps: Positive  # added to AdamW's denominator
    weight_decay: NotNegative  # AdamW's weight decay of matrices per step, times the learning rate
    # use AdamW's fused kernel on a CPU, as always on CUDA: a third of the time, but other last digits; null:
    # the loop over tensors, bit-identical to records that lack this setting
    fused: bool | None = None

    def build(self, model: Any, rank: int, world_size: int, device_type: str) -> Any:
        """Returns AdamW for the whole model.  Every rank does the same update: rank and world_size are not used."""
        return self.adamw(model.parameters(), device_type)

    def adamw(self, parameters: Iterable[Any], device_type: str) -> Any:
        """Returns AdamW with a group of matrices with weight decay and one of vectors without, each with a peak_lr.

        state_dict() refers to the live tensors: copy it to keep it.  One from before the first step resets everything.
        """
        import torch

        parameters = list(parameters)
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay, "peak_lr": self.lr},
            {"params": vectors, "weight_decay": 0.0, "peak_lr": self.lr},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (self.beta1, self.beta2)
        fused = device_type == "cuda" or bool(self.fused)
        return torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, fused=fused, foreach=False)
