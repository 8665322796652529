"""What all architectures share: loss from logits, the matrices Muon may take, FLOPs, initialisation.

B batch, T tokens, V vocabulary
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import flops


class LanguageModel(nn.Module):
    """A subclass adds blocks, num_heads, head_dim, head_weight(), logits(tokens_BT) and init_weights(generator).

    What a model with windows or documents adds, and the trainer then uses:
    set_window(window_tokens: int) -> None  how far back its long windows reach from now on, a multiple of its
        window_block; called before a step whose stage changes it and around a validation that has its own, so that what
        it sets must depend on window_tokens alone.  flops_per_token() is that of the window set last.
    eos_token: int | None  a class attribute, set before the model is used: the token before each document of the data;
        None where they have none.  An argument of that name of __init__, with a default, is given it too.
    """

    recomputes_blocks = False  # model.activation_checkpointing

    def __init__(self, residual_dtype: str | None = None):
        super().__init__()
        self.residual_dtype = None if residual_dtype is None else getattr(torch, residual_dtype)

    def stream(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The residual stream in residual_dtype, from its start on; None leaves it as the embedding is: float32.

        Under autocast blocks add in bfloat16 what they compute in bfloat16, so a stream that begins so stays so.
        """
        return x_BTD if self.residual_dtype is None else x_BTD.to(self.residual_dtype)

    def through(self, block: nn.Module, *args):
        """block(*args); with recomputes_blocks what it computed is dropped, and computed again in the backward pass.

        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.  No random numbers are drawn in a block.
        """
        if self.recomputes_blocks and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean nats per token, float32 also under bf16 autocast."""
        return F.cross_entropy(self.logits(tokens_BT).flatten(0, 1), targets_BT.flatten())

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The 2-D weights inside the blocks, in order: what Muon may take."""
        return [parameter for parameter in self.blocks.parameters() if parameter.ndim == 2]

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, masked pairs of tokens counted."""
        return flops.flops_per_token(*self._shape(), seq_len)

    def flops_per_token_causal(self, seq_len: int) -> int:
        """Forward and backward, masked pairs of tokens not counted."""
        return flops.flops_per_token_causal(*self._shape(), seq_len)

    def _shape(self):
        num_matmul_weights = sum(matrix.numel() for matrix in (*self.hidden_matrices(), self.head_weight()))
        return num_matmul_weights, len(self.blocks), self.num_heads, self.head_dim


@torch.no_grad()
def normal_(parameter, std, generator):
    """N(0, std^2), drawn on the CPU, so that the same seed gives the same bits on every device and rank."""
    parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(std=std, generator=generator))


@torch.no_grad()
def constant_(parameter, value):
    parameter.fill_(value)
