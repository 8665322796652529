"""Adam with cautious weight decay: a weight decays only where the step makes it smaller anyway.

From modded-nanogpt's records 50 to 53.  For a tensor W, its mean gradient m and mean squared gradient v at step t:

1. update <- lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps), with epsilon added before v is corrected
2. W <- W - update - (lr^2 * weight_decay * W where update * W > 0)

The decay contains the learning rate twice, so it falls faster than the steps do (Chen et al. 2025, arXiv 2510.12402).
Eager, these are ten passes over all weights, moments and gradients; compiled, each tensor is read and written once.
"""

from typing import Any

import torch


class CautiousAdam(torch.optim.Optimizer):
    """The optimizer described above.  Its state has the tensors' dtype; updates are elementwise.

    With decays_still, a weight that does not move decays too (>= in step 2).  With compiled, torch.compile compiles the
    update, which is equal up to rounding: only the results for bfloat16 tensors are rounded.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decays_still: bool,
        compiled: bool = False,
    ) -> None:
        super().__init__(rows, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.decays_still = decays_still
        self._compiled = torch.compile(_move_each, dynamic=False) if compiled else None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike: dict[tuple[torch.dtype, float], list[torch.Tensor]] = {}
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self.state[tensor]
                    if not state:
                        state["step"] = torch.zeros(())
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
                    state["step"] += 1
                    alike.setdefault((tensor.dtype, state["step"].item()), []).append(tensor)
            for (_, num_steps), tensors in alike.items():
                self._move(tensors, group, num_steps)

    def _move(self, tensors: list[torch.Tensor], group: dict[str, Any], num_steps: float) -> None:
        means, squares = ([self.state[tensor][name] for tensor in tensors] for name in ("exp_avg", "exp_avg_sq"))
        grads, (beta1, beta2), lr = [tensor.grad for tensor in tensors], group["betas"], group["lr"]
        step_size = lr * (1 - beta2**num_steps) ** 0.5 / (1 - beta1**num_steps)
        decay = lr * lr * group["weight_decay"]
        if self._compiled is not None:  # numbers become tensors: a number that changes would cause a recompilation
            numbers = (beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], step_size, decay)
            factors = [torch.tensor(number) for number in numbers]
            self._compiled(tensors, grads, means, squares, factors, self.decays_still)
            return
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_mul_(updates, step_size)
        if group["weight_decay"]:
            for tensor, update in zip(tensors, updates, strict=True):
                product = update * tensor
                decays = product >= 0 if self.decays_still else product > 0
                update.addcmul_(tensor, decays, value=decay)
        torch._foreach_sub_(tensors, updates)


def _move_each(
    tensors: list[torch.Tensor],
    grads: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    factors: list[torch.Tensor],
    decays_still: bool,
) -> None:
    """The update for torch.compile.  factors are beta1, 1 - beta1, beta2, 1 - beta2, eps, step size and decay."""
    beta1, rest1, beta2, rest2, eps, step_size, decay = factors
    for tensor, grad, mean, square in zip(tensors, grads, means, squares, strict=True):
        mean.copy_(mean * beta1 + grad * rest1)
        square.copy_(square * beta2 + grad * grad * rest2)
        update = mean / (square.sqrt() + eps) * step_size
        product = update * tensor
        decays = product >= 0 if decays_still else product > 0
        tensor.sub_(update + torch.where(decays, tensor * decay, 0.0))
