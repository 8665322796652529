"""An optimizer of your own: the sign of a momentum, as in Lion.  Change it, or write your own from here.

`optim=mine` (conf/optim/mine.yaml) is the class Config below; its fields are settings: optim.beta_mean=0.95.
`models` is the harness's package, which is on the path while it runs this file (docs/own.md).
"""

from dataclasses import dataclass

import torch

from models import optimizers
from models.settings import Momentum, NotNegative


class SignMomentum(torch.optim.Optimizer):
    """Moves every weight by lr a step, against the sign of a mixture of its gradient and the gradients' running mean.

    Chen et al. 2023, arxiv.org/abs/2302.06675, algorithm 2.
    """

    def __init__(self, params, lr, beta_step, beta_mean):
        super().__init__(params, {"lr": lr, "beta_step": beta_step, "beta_mean": beta_mean, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr = group["lr"]  # the schedule has set it for this step
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]  # unlike attributes of self, reset after the warm-up of a run
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                direction = torch.lerp(weight.grad, state["mean"], group["beta_step"]).sign_()
                weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                state["mean"].lerp_(weight.grad, 1 - group["beta_mean"])


@dataclass(kw_only=True)
class Config(optimizers.Config):
    """The settings besides lr, grad_clip_norm and schedule, which every optimizer has; types and ranges are checked."""

    beta_step: Momentum  # share of the running mean in the direction of a step
    beta_mean: Momentum  # decay of the running mean of gradients
    weight_decay: NotNegative  # of matrices, times the learning rate a step

    def build(self, model, rank, world_size, device_type):
        """Needed. Returns the optimizer of all parameters. Gradients are already averaged over the processes."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2]},
        ]
        return SignMomentum(groups, self.lr, self.beta_step, self.beta_mean)
