"""Muon for the matrices inside the blocks, AdamW for everything else, in one optimizer.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix's gradient by a matrix
with the same singular vectors whose singular values are all near 1.  Each step equals torch.optim.Muon's (torch 2.13)
with adjust_lr_fn="original".  For a matrix W of R rows and C columns:

1. momentum <- momentum + (1 - mu) * (gradient - momentum)
2. update <- gradient + mu * (momentum - gradient), which is Nesterov's look-ahead
3. update <- newton_schulz(update), in bfloat16
4. W <- W * (1 - muon_lr * muon_weight_decay)
5. W <- W - muon_lr * sqrt(max(1, R / C)) * update

The square root in step 5 is Jordan's: it compensates for a tall matrix spreading its step over more outputs.  So
muon_lr is about the spectral norm of a step on a square matrix of any size, whereas AdamW's lr is about the size of a
step of a single weight.

The work is divided among the ranks: each keeps the momentum of its share of the matrices and does steps 1 to 3 for
them; then all ranks gather all updates and do steps 4 and 5 alike.  The division does not change a bit of the updates,
so the weights are the same for every number of ranks, as long as the gradients are.
Step 3 is done for one matrix at a time, because the rounding of a stack may depend on its members.  With batched, a
rank stacks matrices of the same shape, or its transpose, and updates their momenta together: 6 launches per iteration
and shape instead of 6 per matrix, equal up to the rounding of bfloat16 for any number of ranks.

NorMuon is modded-nanogpt's later variant.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

Triple = tuple[float, float, float]  # a, b and c of a x + b x^3 + c x^5
Coefficients = Triple | tuple[Triple, ...]  # the same for all iterations, or one triple for each
Group = dict[str, Any]  # an element of torch.optim's param_groups
Stacked = Callable[..., torch.Tensor]  # newton_schulz_stacked(), compiled or not
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0: small singular values grow fast, none ends far from 1
SCALES = {  # factors of a step, by the matrix's rows and columns
    "spectral": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "rms": lambda rows, columns: math.sqrt(max(rows, columns)),
}
NORM_FLOOR = 1e-7  # a gradient of zeros gives an update of zeros
# Amsel et al. 2025, arXiv 2505.16932: each iteration has the polynomial that is best for the previous one's output,
# here for 5 iterations and singular values below 1 / 1.02, as in record 38.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02  # divides the first iteration's x, so that rounding does not push a singular value above 1
MEAN_SQUARE_FLOOR = 1e-10


def newton_schulz(
    update: torch.Tensor,
    ns_steps: int,
    products: torch.dtype | None = None,
    coefficients: Coefficients = NS_COEFFICIENTS,
) -> torch.Tensor:
    """Returns a bfloat16 matrix with update's singular vectors and singular values of about 0.7 to 1.2.

    Each of ns_steps iterations applies a x + b x^3 + c x^5 to every singular value, by matrix products only.
    products is the dtype in which they are computed, by default float32 on a CPU and bfloat16 elsewhere; each product
    is then rounded to bfloat16.  bfloat16 numbers multiply exactly in float32, and both dtypes accumulate in float32:
    only the order of the additions differs.  That moves the update by at most 0.5 % (5 iterations), while bfloat16
    itself moves it by 1 to 2 %; on a CPU without bfloat16 instructions, float32 products are 10 to 60 times faster
    (measured: AVX2, 128 x 512).
    """
    products = products or _products_on(update.device)
    tall = _is_tall(update)
    X = update.to(torch.bfloat16)
    X = X.T if tall else X  # gives the smaller Gram matrix
    X = (X / X.norm().clamp(min=NORM_FLOOR)).to(products)  # Frobenius norm 1: no singular value above 1
    for a, b, c in _each(coefficients, ns_steps):
        gram = _rounded(X @ X.T)
        poly = _rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        X = _rounded(torch.addmm(X, poly, X, beta=a))
    return (X.T if tall else X).to(torch.bfloat16)


def newton_schulz_stacked(
    updates_NRC: torch.Tensor, ns_steps: int, products: torch.dtype, coefficients: Coefficients = NS_COEFFICIENTS
) -> torch.Tensor:
    """Returns newton_schulz() of N matrices with R <= C: [N, R, C] -> the same shape, bfloat16."""
    X = updates_NRC.to(torch.bfloat16)
    X = (X / X.norm(dim=(1, 2), keepdim=True).clamp(min=NORM_FLOOR)).to(products)
    for a, b, c in _each(coefficients, ns_steps):
        gram = _rounded(X @ X.mT)
        poly = _rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        X = _rounded(torch.baddbmm(X, poly, X, beta=a))
    return X.to(torch.bfloat16)


def _each(coefficients: Coefficients, ns_steps: int) -> Sequence[Triple]:
    """Returns a triple of coefficients for each iteration."""
    per_step = coefficients if isinstance(coefficients[0], tuple) else (coefficients,) * ns_steps
    triples = cast("Sequence[Triple]", per_step)  # quoted: dynamo (torch 2.13) breaks its graph at a type's subscript
    assert len(triples) == ns_steps, (len(triples), ns_steps)
    return triples


def _products_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _alike(matrices: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the indices of matrices of the same shape and dtype together, in order of the first of each kind."""
    by_kind: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_kind.setdefault((matrix.shape, matrix.dtype), []).append(index)
    return list(by_kind.values())


def _is_tall(matrix: torch.Tensor) -> bool:
    return bool(matrix.shape[0] > matrix.shape[1])


def _rounded(product: torch.Tensor) -> torch.Tensor:
    return product.to(torch.bfloat16).to(product.dtype)


def share_out(matrices: Sequence[torch.Tensor], world_size: int) -> list[list[int]]:
    """Returns the indices of each rank's matrices: the costliest first, each to the rank with the least work so far.

    The cost is the multiplications of a Newton-Schulz iteration on an n x m matrix, n <= m: n*n*m + n*n*n + n*n*m.
    """
    costs = [min(matrix.shape) ** 2 * (2 * max(matrix.shape) + min(matrix.shape)) for matrix in matrices]
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(range(len(matrices)), key=lambda index: (-costs[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters, with its work divided among the ranks.  All ranks must call step() together.

    With accumulate="sum", step 1 is momentum <- mu * momentum + gradient and step 2 update <- gradient + mu * momentum,
    as in the records of 2024: the same direction as long as mu is constant.  With scale="rms", step 5 has
    sqrt(max(R, C)).  A rank needs only the gradients of its share, self.shares[rank].
    state_dict() has the momentum of this rank's share only, for the same rank of the same world size.
    """

    def __init__(
        self,
        matrices: list[torch.Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        ns_steps: int,
        rank: int = 0,
        world_size: int = 1,
        products: torch.dtype | None = None,
        accumulate: str = "mean",
        scale: str = "spectral",
        coefficients: Coefficients = NS_COEFFICIENTS,
        batched: str | None = None,
    ) -> None:
        assert all(matrix.ndim == 2 for matrix in matrices), [tuple(matrix.shape) for matrix in matrices]
        assert 0 <= rank < world_size, (rank, world_size)
        settings = {"lr": lr, "peak_lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps}
        super().__init__(matrices, settings)
        self.rank, self.world_size, self.products = rank, world_size, products
        self.accumulate, self.scale, self.coefficients = accumulate, SCALES[scale], coefficients
        self.shares = share_out(matrices, world_size)  # indices into matrices
        self.order = [index for share in self.shares for index in share]
        self._stacked: Stacked | None = newton_schulz_stacked if batched == "eager" else None
        if batched == "compiled":
            self._stacked = torch.compile(newton_schulz_stacked, dynamic=False)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        matrices = group["params"]
        mine = [matrices[index] for index in self.shares[self.rank]]
        assert all(matrix.grad is not None for matrix in mine), "a hidden matrix has no gradient"
        updates = self._updates(mine, group) if mine else []
        if self.world_size > 1:
            updates = self._gather(updates, matrices)
        ordered = [matrices[index] for index in self.order]
        for indices in _alike(ordered):
            self._move([ordered[index] for index in indices], [updates[index] for index in indices], group)

    def _move(self, matrices: list[torch.Tensor], updates: Sequence[torch.Tensor], group: Group) -> None:
        """Does steps 4 and 5 for matrices of one shape and dtype, on every rank."""
        if decay := group["lr"] * group["weight_decay"]:
            for matrix in matrices:
                matrix.mul_(1 - decay)
        self._add(matrices, updates, group)

    def _add(self, matrices: list[torch.Tensor], updates: Sequence[torch.Tensor], group: Group) -> None:
        """Does step 5, in one launch for float32; a CPU's foreach kernels round bfloat16 differently."""
        alpha = -group["lr"] * self.scale(*matrices[0].shape)
        if matrices[0].dtype != torch.float32:
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.add_(update, alpha=alpha)
            return
        torch._foreach_add_(matrices, torch.stack(list(updates)).float().unbind(), alpha=alpha)

    def _momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix.grad)
        return state["momentum"]

    def _ahead(self, matrices: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
        """Does steps 1 and 2: updates the momenta, and returns the updates before they are orthogonalised."""
        grads, momenta = [matrix.grad for matrix in matrices], [self._momentum(matrix) for matrix in matrices]
        mu = group["momentum"]
        if self.accumulate == "mean":
            torch._foreach_lerp_(momenta, grads, 1 - mu)
            return torch._foreach_lerp(grads, momenta, mu)
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, grads)
        return torch._foreach_add(grads, momenta, alpha=mu)

    def _updates(self, matrices: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
        """Does steps 1 to 3; if batched, step 3 together for matrices of the same shape or its transpose."""
        ahead = self._ahead(matrices, group)
        if self._stacked is None:
            return [newton_schulz(update, group["ns_steps"], self.products, self.coefficients) for update in ahead]
        products = self.products or _products_on(matrices[0].device)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        updates = list(ahead)
        for index, update in enumerate(ahead):
            by_shape.setdefault(tuple(sorted(update.shape)), []).append(index)
        for indices in by_shape.values():
            wide = [ahead[index].mT if _is_tall(ahead[index]) else ahead[index] for index in indices]
            stacked = self._stacked(torch.stack(wide), group["ns_steps"], products, self.coefficients)
            for index, update in zip(indices, stacked, strict=True):
                updates[index] = update.mT if _is_tall(ahead[index]) else update
        return updates

    def _gather(self, updates: list[torch.Tensor], matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns all ranks' updates, share after share; it is one collective over padded shares."""
        sizes = [[matrices[index].numel() for index in share] for share in self.shares]
        shape = (self.world_size, max(sum(share_sizes) for share_sizes in sizes))
        shares = torch.zeros(shape, dtype=torch.bfloat16, device=matrices[0].device)
        mine = torch.zeros_like(shares[0])
        for slot, update in zip(_split(mine, sizes[self.rank]), updates, strict=True):
            slot.copy_(update.flatten())
        # into one tensor, without the copies that a list would need, and as bytes, which every backend gathers
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
        gather(shares.view(torch.uint8).flatten(), mine.view(torch.uint8).flatten())
        flat = [slot for share, share_sizes in zip(shares, sizes) for slot in _split(share, share_sizes)]
        return [slot.view_as(matrices[index]) for index, slot in zip(self.order, flat, strict=True)]


def _split(flat: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Splits the first sum(sizes) elements of flat into pieces of these sizes."""
    return flat[: sum(sizes)].split(sizes)


def polar_coefficients() -> tuple[Triple, ...]:
    """Returns POLAR_EXPRESS for newton_schulz(), whose x has a norm of 1: the first polynomial includes MARGIN."""
    (a, b, c), *others = POLAR_EXPRESS
    return ((a / MARGIN, b / MARGIN**3, c / MARGIN**5), *others)


class NorMuon(Muon):
    """Muon whose update is normalised by rows of the matrix, with Polar Express and cautious weight decay.

    From modded-nanogpt's records 38 (Polar Express), 41 and 42 (NorMuon) and 43 (cautious weight decay).  After Muon's
    steps 1 and 2, for a matrix W of R rows and C columns:

    3. update <- polar_express(update), in bfloat16
    4. mean_square <- beta2 * mean_square + (1 - beta2) * mean over columns of update^2, a number for each row; for a
       wide matrix mean over rows, a number for each column (Li et al. 2025, arXiv 2510.05491, always use rows)
    5. update <- update / sqrt(mean_square), then scaled back to the norm that it had after step 3
    6. W <- W - lr * sqrt(max(1, R / C)) * (update + lr * weight_decay * W where update * W >= 0, else update)

    Step 6 is record 43's, with the learning rate twice in the decay: a weight decays only where the step makes it
    smaller anyway (Chen et al. 2025, arXiv 2510.12402).  If not cautious, W <- W * (1 - lr * weight_decay) comes first,
    as in Muon.  Records 42 to 47 keep q, k, v and the projection in one wide matrix, so that their step 4 goes by the
    columns of each, which is evened="columns".

    If beta2 is None, steps 4 and 5 are omitted.  evened says whether step 4 has a number for each of the "rows" or
    "columns"; None takes the longer side, and rows if the matrix is square.  The other arguments are Muon's.
    """

    def __init__(
        self, matrices: list[torch.Tensor], beta2: float | None, cautious: bool, evened: str | None = None, **muon: Any
    ) -> None:
        super().__init__(matrices, **muon)
        self.beta2, self.cautious, self.evened = beta2, cautious, evened

    def _updates(self, matrices: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
        updates = super()._updates(matrices, group)
        if self.beta2 is None:
            return updates
        for indices in _alike(matrices) if self._stacked else [[index] for index in range(len(matrices))]:
            few = [updates[index] for index in indices]
            stacked = torch.stack(few) if self._stacked else few[0][None]  # with its strides, and so the same bits
            for index, update in zip(indices, self._evened([matrices[index] for index in indices], stacked)):
                updates[index] = update
        return updates

    def _evened(self, matrices: list[torch.Tensor], updates_NRC: torch.Tensor) -> torch.Tensor:
        """Does steps 4 and 5 for matrices of one shape."""
        assert self.beta2 is not None
        _, R, C = updates_NRC.shape
        by_rows = R >= C if self.evened is None else self.evened == "rows"
        mean = updates_NRC.float().square().mean(dim=2 if by_rows else 1, keepdim=True)
        kept = [self.state[matrix].setdefault("mean_square", torch.zeros_like(mean[0])) for matrix in matrices]
        mean_square = torch.stack(kept).lerp_(mean, 1 - self.beta2)
        torch._foreach_copy_(kept, mean_square.unbind())
        evened = updates_NRC * mean_square.clamp_min(MEAN_SQUARE_FLOOR).rsqrt()
        before, after = (x_NRC.norm(dim=(1, 2), keepdim=True) for x_NRC in (updates_NRC, evened))
        return (evened * (before / after.clamp_min(MEAN_SQUARE_FLOOR))).to(updates_NRC.dtype)

    def _move(self, matrices: list[torch.Tensor], updates: Sequence[torch.Tensor], group: Group) -> None:
        if not self.cautious:
            return super()._move(matrices, updates, group)
        weights_NRC, updates_NRC = torch.stack(matrices), torch.stack(list(updates))
        shrinks = (updates_NRC * weights_NRC) >= 0
        steps_NRC = updates_NRC + group["lr"] * group["weight_decay"] * shrinks * weights_NRC
        self._add(matrices, steps_NRC.to(weights_NRC.dtype).unbind(), group)
