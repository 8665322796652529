"""NorMuon: Muon whose update is evened out over a matrix's rows, with Polar Express and cautious weight decay.

Of modded-nanogpt's records 38 (Polar Express), 41 and 42 (NorMuon) and 43 (cautious weight decay).  After steps 1 and 2
of models/muon_update.py, for a matrix W of R rows and C columns:

3. update <- polar_express(update), in bfloat16
4. mean_square <- beta2 * mean_square + (1 - beta2) * mean over columns of update^2, a number for each row; of a wide
   matrix over rows, a number for each column (Li et al. 2025, arXiv 2510.05491, who do so by rows always)
5. update <- update / sqrt(mean_square), then scaled back to the norm that it had after step 3
6. W <- W - lr * sqrt(max(1, R / C)) * (update + lr * weight_decay * W where update * W >= 0, else update)

The sixth is record 43's, its learning rate twice in the decay: a weight decays only where the step makes it smaller
anyway (Chen et al. 2025, arXiv 2510.12402).  Not cautious, W <- W * (1 - lr * weight_decay) comes first, as in Muon.
Records 42 to 47 keep q, k, v and the projection in one wide matrix, so that step 4 goes by the columns of each: that is
evened="columns".
"""

import torch

from models import muon_update

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


def polar_coefficients():
    """POLAR_EXPRESS for newton_schulz(), whose x has a norm of 1: the margin is in the first polynomial."""
    (a, b, c), *others = POLAR_EXPRESS
    return ((a / MARGIN, b / MARGIN**3, c / MARGIN**5), *others)


class NorMuon(muon_update.Muon):
    """See above.  beta2: None leaves steps 4 and 5 out.  muon: Muon's own.  state_dict(): of this rank's share only.

    evened: "rows" or "columns" have a number each in step 4; None: the longer side's, of a square matrix rows.
    """

    def __init__(self, matrices, beta2, cautious, evened=None, **muon):
        super().__init__(matrices, **muon)
        self.beta2, self.cautious, self.evened = beta2, cautious, evened

    def _update(self, matrix, group):
        update = super()._update(matrix, group)
        return update if self.beta2 is None else self._evened(matrix, update)

    def _batch(self, matrices, group):
        updates = super()._batch(matrices, group)
        if self.beta2 is None:
            return updates
        return [self._evened(matrix, update) for matrix, update in zip(matrices, updates, strict=True)]

    def _evened(self, matrix, update):
        state = self.state[matrix]
        by_rows = matrix.shape[0] >= matrix.shape[1] if self.evened is None else self.evened == "rows"
        mean = update.float().square().mean(dim=1 if by_rows else 0, keepdim=True)
        mean_square = state.setdefault("mean_square", torch.zeros_like(mean))
        mean_square.lerp_(mean, 1 - self.beta2)
        evened = update * mean_square.clamp_min(MEAN_SQUARE_FLOOR).rsqrt()
        return (evened * (update.norm() / evened.norm().clamp_min(MEAN_SQUARE_FLOOR))).to(update.dtype)

    def _move(self, matrix, update, group):
        if not self.cautious:
            return super()._move(matrix, update, group)
        shrinks = (update * matrix) >= 0
        step = update + group["lr"] * group["weight_decay"] * shrinks * matrix
        matrix.add_(step.to(matrix.dtype), alpha=-group["lr"] * self.scale(*matrix.shape))
