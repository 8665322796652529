"""Muon for the matrices inside the blocks, AdamW for everything else, in one optimizer.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) takes the momentum of a matrix's gradient and replaces it
by a matrix with the same singular vectors whose singular values are all near 1.  Step by step the same as
torch.optim.Muon (torch 2.13) with adjust_lr_fn="original".  For a matrix W of R rows and C columns:

1. momentum <- momentum + (1 - mu) * (gradient - momentum)
2. update <- gradient + mu * (momentum - gradient), Nesterov's look ahead
3. update <- newton_schulz(update), in bfloat16
4. W <- W * (1 - muon_lr * muon_weight_decay)
5. W <- W - muon_lr * sqrt(max(1, R / C)) * update

The square root of the fifth line is Jordan's: it makes up for a tall matrix spreading its step over more outputs.
So muon_lr is about the spectral norm of one step on a square matrix, of any size, where AdamW's lr is about the
size of one weight's step.

The work is shared out among the ranks: each keeps the momentum of its share of the matrices and does steps 1 to 3 for
them; then all ranks gather all updates and do steps 4 and 5 alike.  The share of a matrix changes no bit of its
update, so the weights are the same for every number of ranks, as long as the gradients are.
Matrices go through step 3 one by one: a stack's rounding may depend on who shares it.  With batched a rank stacks those
of one shape, or its transpose, and its momenta move together: 6 launches an iteration for a shape in place of 6 for
a matrix, equal up to the rounding of bfloat16, for any number of ranks.

NorMuon is modded-nanogpt's later form of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

Triple = tuple[float, float, float]  # a, b and c of a x + b x^3 + c x^5
Coefficients = Triple | tuple[Triple, ...]  # of every iteration, or of each
Group = dict[str, Any]  # of torch.optim's param_groups
Stacked = Callable[..., torch.Tensor]  # newton_schulz_stacked(), compiled or not
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0: small singular values rise fast, none ends far from 1
SCALES = {  # of a step, by the matrix's rows and columns
    "spectral": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "rms": lambda rows, columns: math.sqrt(max(rows, columns)),
}
NORM_FLOOR = 1e-7  # a gradient of zeros gives an update of zeros
# Amsel et al. 2025, arXiv 2505.16932: for each iteration the polynomial that is best for what the one before leaves,
# here for 5 iterations and singular values below 1 / 1.02, as record 38 has them.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02  # the first iteration's x is divided by it, so that rounding puts no singular value above 1
MEAN_SQUARE_FLOOR = 1e-10


def newton_schulz(
    update: torch.Tensor,
    ns_steps: int,
    products: torch.dtype | None = None,
    coefficients: Coefficients = NS_COEFFICIENTS,
) -> torch.Tensor:
    """A matrix with update's singular vectors and singular values of about 0.7 to 1.2, bfloat16.

    Each of ns_steps iterations applies a x + b x^3 + c x^5 to every singular value, in matrix products only.
    products: dtype in which they are computed; each is then rounded to bfloat16.  None: float32 on a CPU, else
    bfloat16.  bfloat16 numbers multiply exactly in float32, and both dtypes add up in float32: only the order of
    adding differs.  That moves the update by at most 0.5 % (5 iterations), where bfloat16 itself moves it by 1 to 2 %;
    on a CPU without bfloat16 instructions a product is 10 to 60 times faster (measured: AVX2, 128 x 512).
    """
    products = products or _products_on(update.device)
    tall = _is_tall(update)
    X = update.to(torch.bfloat16)
    X = X.T if tall else X  # the smaller Gram matrix
    X = (X / X.norm().clamp(min=NORM_FLOOR)).to(products)  # Frobenius norm 1: no singular value above 1
    for a, b, c in _each(coefficients, ns_steps):
        gram = _rounded(X @ X.T)
        poly = _rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        X = _rounded(torch.addmm(X, poly, X, beta=a))
    return (X.T if tall else X).to(torch.bfloat16)


def newton_schulz_stacked(
    updates_NRC: torch.Tensor, ns_steps: int, products: torch.dtype, coefficients: Coefficients = NS_COEFFICIENTS
) -> torch.Tensor:
    """newton_schulz() of N matrices with no more rows than columns: [N, R, C] -> the same shape, bfloat16."""
    X = updates_NRC.to(torch.bfloat16)
    X = (X / X.norm(dim=(1, 2), keepdim=True).clamp(min=NORM_FLOOR)).to(products)
    for a, b, c in _each(coefficients, ns_steps):
        gram = _rounded(X @ X.mT)
        poly = _rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        X = _rounded(torch.baddbmm(X, poly, X, beta=a))
    return X.to(torch.bfloat16)


def _each(coefficients: Coefficients, ns_steps: int) -> Sequence[Triple]:
    """A triple for each iteration."""
    given = coefficients if isinstance(coefficients[0], tuple) else (coefficients,) * ns_steps
    triples = cast("Sequence[Triple]", given)  # quoted: dynamo (torch 2.13) breaks its graph at a type's subscript
    assert len(triples) == ns_steps, (len(triples), ns_steps)
    return triples


def _products_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _is_tall(matrix: torch.Tensor) -> bool:
    return bool(matrix.shape[0] > matrix.shape[1])


def _rounded(product: torch.Tensor) -> torch.Tensor:
    return product.to(torch.bfloat16).to(product.dtype)


def share_out(matrices: Sequence[torch.Tensor], world_size: int) -> list[list[int]]:
    """Indices of the matrices of each rank: the costliest first, always to the rank with the least to do so far.

    Cost is the multiplications of one Newton-Schulz iteration on an n x m matrix, n <= m: n*n*m + n*n*n + n*n*m.
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
    """Muon over 2-D parameters, its work shared out among the ranks.  All ranks must call step() together.

    accumulate="sum": step 1 is momentum <- mu * momentum + gradient, step 2 update <- gradient + mu * momentum, as in
    the records of 2024: the same direction while mu stays the same.  scale="rms": sqrt(max(R, C)) in step 5.
    A rank needs the gradients of its share, self.shares[rank], alone.
    state_dict() holds the momentum of this rank's share only: it fits the same rank of the same world size.
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
        self.shares = share_out(matrices, world_size)  # of indices into matrices
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
        if self._stacked is None:
            updates = [self._update(matrix, group) for matrix in mine]
        else:
            updates = self._batch(mine, group)
        if self.world_size > 1:
            updates = self._gather(updates, matrices)
        for index, update in zip(self.order, updates, strict=True):
            self._move(matrices[index], update, group)

    def _move(self, matrix: torch.Tensor, update: torch.Tensor, group: Group) -> None:
        """Steps 4 and 5, on every rank."""
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * self.scale(*matrix.shape))

    def _momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix.grad)
        return state["momentum"]

    def _update(self, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        return newton_schulz(self._ahead([matrix], group)[0], group["ns_steps"], self.products, self.coefficients)

    def _ahead(self, matrices: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
        """Steps 1 and 2: the updates before they are orthogonalised, and the momenta as they are then."""
        grads, momenta = [matrix.grad for matrix in matrices], [self._momentum(matrix) for matrix in matrices]
        mu = group["momentum"]
        if self.accumulate == "mean":
            torch._foreach_lerp_(momenta, grads, 1 - mu)
            return torch._foreach_lerp(grads, momenta, mu)
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, grads)
        return torch._foreach_add(grads, momenta, alpha=mu)

    def _batch(self, matrices: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
        """_update() of each, those of one shape or its transpose together."""
        assert self._stacked is not None  # else step() does them one by one
        if not matrices:
            return []
        products = self.products or _products_on(matrices[0].device)
        ahead = self._ahead(matrices, group)
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
        """This rank's updates -> all updates, share after share; one collective over padded shares."""
        sizes = [[matrices[index].numel() for index in share] for share in self.shares]
        shape = (self.world_size, max(sum(share_sizes) for share_sizes in sizes))
        shares = torch.zeros(shape, dtype=torch.bfloat16, device=matrices[0].device)
        mine = torch.zeros_like(shares[0])
        for slot, update in zip(_split(mine, sizes[self.rank]), updates, strict=True):
            slot.copy_(update.flatten())
        gather_into_one(shares.view(torch.uint8), mine.view(torch.uint8))  # as bytes, which every backend gathers
        flat = [slot for share, share_sizes in zip(shares, sizes) for slot in _split(share, share_sizes)]
        return [slot.view_as(matrices[index]) for index, slot in zip(self.order, flat, strict=True)]


def gather_into_one(everyone: torch.Tensor, mine: torch.Tensor) -> None:
    """mine of every rank, in turn, into the one tensor everyone: no copies of a list's parts."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 gave it another name
    gather(everyone.flatten(), mine.flatten())


def _split(flat: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """The first sum(sizes) elements of flat in pieces."""
    return flat[: sum(sizes)].split(sizes)


def polar_coefficients() -> tuple[Triple, ...]:
    """POLAR_EXPRESS for newton_schulz(), whose x has a norm of 1: the margin is in the first polynomial."""
    (a, b, c), *others = POLAR_EXPRESS
    return ((a / MARGIN, b / MARGIN**3, c / MARGIN**5), *others)


class NorMuon(Muon):
    """Muon whose update is evened out over a matrix's rows, with Polar Express and cautious weight decay.

    Of modded-nanogpt's records 38 (Polar Express), 41 and 42 (NorMuon) and 43 (cautious weight decay).  After Muon's
    steps 1 and 2, for a matrix W of R rows and C columns:

    3. update <- polar_express(update), in bfloat16
    4. mean_square <- beta2 * mean_square + (1 - beta2) * mean over columns of update^2, a number for each row; of a
       wide matrix over rows, a number for each column (Li et al. 2025, arXiv 2510.05491, who do so by rows always)
    5. update <- update / sqrt(mean_square), then scaled back to the norm that it had after step 3
    6. W <- W - lr * sqrt(max(1, R / C)) * (update + lr * weight_decay * W where update * W >= 0, else update)

    The sixth is record 43's, its learning rate twice in the decay: a weight decays only where the step makes it smaller
    anyway (Chen et al. 2025, arXiv 2510.12402).  Not cautious, W <- W * (1 - lr * weight_decay) comes first, as in
    Muon.  Records 42 to 47 keep q, k, v and the projection in one wide matrix, so that step 4 goes by the columns of
    each: that is evened="columns".

    beta2: None leaves steps 4 and 5 out.  muon: Muon's own.  state_dict(): of this rank's share only.  evened: "rows"
    or "columns" have a number each in step 4; None: the longer side's, of a square matrix rows.
    """

    def __init__(
        self, matrices: list[torch.Tensor], beta2: float | None, cautious: bool, evened: str | None = None, **muon: Any
    ) -> None:
        super().__init__(matrices, **muon)
        self.beta2, self.cautious, self.evened = beta2, cautious, evened

    def _update(self, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        update = super()._update(matrix, group)
        return update if self.beta2 is None else self._evened(matrix, update)

    def _batch(self, matrices: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
        updates = super()._batch(matrices, group)
        if self.beta2 is None:
            return updates
        return [self._evened(matrix, update) for matrix, update in zip(matrices, updates, strict=True)]

    def _evened(self, matrix: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        assert self.beta2 is not None
        state = self.state[matrix]
        by_rows = matrix.shape[0] >= matrix.shape[1] if self.evened is None else self.evened == "rows"
        mean = update.float().square().mean(dim=1 if by_rows else 0, keepdim=True)
        mean_square = state.setdefault("mean_square", torch.zeros_like(mean))
        mean_square.lerp_(mean, 1 - self.beta2)
        evened = update * mean_square.clamp_min(MEAN_SQUARE_FLOOR).rsqrt()
        return (evened * (update.norm() / evened.norm().clamp_min(MEAN_SQUARE_FLOOR))).to(update.dtype)

    def _move(self, matrix: torch.Tensor, update: torch.Tensor, group: Group) -> None:
        if not self.cautious:
            return super()._move(matrix, update, group)
        shrinks = (update * matrix) >= 0
        step = update + group["lr"] * group["weight_decay"] * shrinks * matrix
        matrix.add_(step.to(matrix.dtype), alpha=-group["lr"] * self.scale(*matrix.shape))
