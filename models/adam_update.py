"""Adam whose weight decay is cautious: a weight decays only where the step makes it smaller anyway.

Of modded-nanogpt's records 50 to 53.  For a tensor W, its mean gradient m and mean squared gradient v at step t:

1. update <- lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps), epsilon before the correction of v
2. W <- W - update - (lr^2 * weight_decay * W where update * W > 0)

The learning rate twice in the decay, which so falls faster than the steps do (Chen et al. 2025, arXiv 2510.12402).
"""

from typing import Any

import torch


class CautiousAdam(torch.optim.Optimizer):
    """See above; state in the tensors' dtype.  decays_still: a weight that does not move decays too, >= in step 2."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decays_still: bool,
    ) -> None:
        super().__init__(rows, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.decays_still = decays_still

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike: dict[tuple[torch.dtype, float], list[torch.Tensor]] = {}
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self._state_of(tensor)
                    state["step"] += 1
                    alike.setdefault((tensor.dtype, state["step"].item()), []).append(tensor)
            for (_, num_steps), tensors in alike.items():
                self._move(tensors, group, num_steps)

    def _state_of(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[tensor]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        return state

    def _move(self, tensors: list[torch.Tensor], group: dict[str, Any], num_steps: float) -> None:
        means, squares = ([self.state[tensor][name] for tensor in tensors] for name in ("exp_avg", "exp_avg_sq"))
        grads, (beta1, beta2), lr = [tensor.grad for tensor in tensors], group["betas"], group["lr"]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_mul_(updates, lr * (1 - beta2**num_steps) ** 0.5 / (1 - beta1**num_steps))
        if group["weight_decay"]:
            for tensor, update in zip(tensors, updates, strict=True):
                product = update * tensor
                decays = product >= 0 if self.decays_still else product > 0
                update.addcmul_(tensor, decays, value=lr * lr * group["weight_decay"])
        torch._foreach_sub_(tensors, updates)
