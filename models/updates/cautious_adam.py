"""Adam with cautious weight decay (models/adam_update.py)."""

from dataclasses import dataclass
from typing import Any

from models.updates import adamw


@dataclass(kw_only=True)
class Config(adamw.Config):
    """Settings; weight_decay is times the squared learning rate, where the step makes the weight smaller."""

    decays_still: bool = False  # a weight that a step does not move decays as well, as that of a token not yet seen
    compiled: bool | None = None  # by torch.compile; null: on a GPU

    def build(self, tensors: list[Any], lr: float, rank: int, world_size: int, device_type: str) -> Any:
        """Returns CautiousAdam; every rank does the same update."""
        from models.adam_update import CautiousAdam

        row = {"params": tensors, "peak_lr": lr}
        compiled = device_type == "cuda" if self.compiled is None else self.compiled
        betas = self.beta1, self.beta2
        return CautiousAdam([row], lr, betas, self.eps, self.weight_decay, self.decays_still, compiled)
