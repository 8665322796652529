"""What all architectures share: loss from logits, the matrices Muon may take, causal attention, initialisation, FLOPs.

FLOPs of a training step are counted from the model's shape.  A matrix multiplication costs 2 per weight and token
forwards and 4 backwards (one for each gradient): 6 in all.  Attention multiplies scores and values: 2 * 2 * H * K per
pair of tokens forwards, twice that backwards: 12 in all.  Embedding lookups, norms, activations, softmax and the
optimizer are not counted, as is usual for MFU.

B batch, T tokens, V vocabulary, N tokens ahead, D width = H * K, H heads, K head width
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class LanguageModel(nn.Module):
    """A subclass adds blocks, num_heads, head_dim, head_weight(), logits(tokens_BT) and init_weights(generator).

    What a model with windows or documents adds, and the trainer then uses:
    set_window(window_tokens: int) -> None  how far back its long windows reach from now on, a multiple of its
        window_block; called before a step whose stage changes it and around a validation that has its own, so that what
        it sets must depend on window_tokens alone.  flops_per_token() is that of the window set last.
    set_untied(untied: bool) -> tuple[Parameter, Parameter]  whether it looks tokens up in an embedding of its own,
        which then begins as the head's matrix, or in the head's.  Returns (embedding, head): the optimizer's state is
        copied too.  Its late_parameters are the names of what is in no loss before.
    windows_are_data: bool  that another window is not another graph: the warm-up then runs the widest, not every one.
    eos_token: int | None  a class attribute, set before the model is used: the token before each document of the data;
        None where they have none.  An argument of that name of __init__, with a default, is given it too.
    """

    recomputes_blocks = False  # model.activation_checkpointing
    late_parameters: tuple[str, ...] = ()
    windows_are_data = False
    ahead_weights: torch.Tensor | None

    def __init__(self, residual_dtype: str | None = None) -> None:
        super().__init__()
        self.residual_dtype = None if residual_dtype is None else getattr(torch, residual_dtype)
        self.register_buffer("ahead_weights", None, persistent=False)

    def stream(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The residual stream in residual_dtype, from its start on; None leaves it as the embedding is: float32.

        Under autocast blocks add in bfloat16 what they compute in bfloat16, so a stream that begins so stays so.
        """
        return x_BTD if self.residual_dtype is None else x_BTD.to(self.residual_dtype)

    def through(self, block: nn.Module, *args: Any) -> Any:
        """block(*args); with recomputes_blocks what it computed is dropped, and computed again in the backward pass.

        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.  No random numbers are drawn in a block.
        """
        if self.recomputes_blocks and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def set_ahead_weights(self, weights: Sequence[float] | None) -> None:
        """While training, the loss is the sum of those of the next token, the one after it ..., each times its weight.

        None: of the next token alone, as in validation.  Other weights, but as many, are the same graph.
        """
        device = next(self.parameters()).device
        values = None if weights is None else torch.tensor(weights, dtype=torch.float32, device=device)
        if values is not None and self.ahead_weights is not None and len(values) == len(self.ahead_weights):
            self.ahead_weights.copy_(values)
        else:
            self.ahead_weights = values

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean nats per token, float32 also under bf16 autocast; while training as set_ahead_weights() says."""
        logits_BTV = self.logits(tokens_BT)
        if self.training and self.ahead_weights is not None:
            return loss_ahead(logits_BTV, targets_BT, self.ahead_weights)
        return self.loss(logits_BTV, targets_BT)

    def loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean nats per token."""
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The 2-D weights inside the blocks, in order: what Muon may take."""
        return [parameter for parameter in self.blocks.parameters() if parameter.ndim == 2]

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, masked pairs of tokens counted."""
        return flops_of_token(*self._shape(), seq_len)

    def flops_per_token_causal(self, seq_len: int) -> int:
        """Forward and backward, masked pairs of tokens not counted."""
        return flops_of_token_causal(*self._shape(), seq_len)

    def _shape(self) -> tuple[int, int, int, int]:
        num_matmul_weights = sum(matrix.numel() for matrix in (*self.hidden_matrices(), self.head_weight()))
        return num_matmul_weights, len(self.blocks), self.num_heads, self.head_dim


def loss_ahead(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Sum over n of weights_N[n] times the nats of the target n tokens on, a mean over all tokens, float32.

    At the end of a row the targets that lie beyond it count nothing.  Documents do not end it.
    """
    T, num_ahead = targets_BT.shape[1], len(weights_N)
    ahead_BTN = F.pad(targets_BT, (0, num_ahead - 1)).unfold(1, num_ahead, 1)
    nats_BTN = logits_BTV.logsumexp(-1, keepdim=True) - logits_BTV.gather(-1, ahead_BTN)
    steps_N = torch.arange(num_ahead, device=targets_BT.device)
    exists_TN = torch.arange(T, device=targets_BT.device)[:, None] + steps_N < T
    return (nats_BTN * (exists_TN * weights_N)).sum() / targets_BT.numel()


@torch.no_grad()
def normal_(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """N(0, std^2), drawn on the CPU, so that the same seed gives the same bits on every device and rank.

    CPUs with AVX2 and with AVX-512 draw the same bits; torch without either rounds some of them otherwise.
    """
    parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(std=std, generator=generator))


@torch.no_grad()
def constant_(parameter: torch.Tensor, value: float) -> None:
    parameter.fill_(value)


def split_heads(x_BTD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, T, D] -> [B, H, T, K], a view."""
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)


def merge_heads(x_BHTK: torch.Tensor) -> torch.Tensor:
    """[B, H, T, K] -> [B, T, D]."""
    B, H, T, K = x_BHTK.shape
    return x_BHTK.transpose(1, 2).reshape(B, T, H * K)


def causal_attention(q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
    """Token t attends to tokens 0..t; scores are divided by sqrt(K).

    SDPA and not FlexAttention, which has no backward pass on a CPU (torch 2.13).
    """
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)


def flops_of_token(num_matmul_weights: int, num_layers: int, num_heads: int, head_dim: int, window: int) -> int:
    """Forward and backward, every pair of tokens in a window counted, also the half that the causal mask drops.

    num_matmul_weights: weights of all matrix multiplications, the head's among them, embedding tables not.
    window: how many tokens a token attends to.  This is what torch.utils.flop_counter counts, to the digit.
    """
    return 6 * num_matmul_weights + num_layers * 12 * num_heads * head_dim * window


def flops_of_token_causal(num_matmul_weights: int, num_layers: int, num_heads: int, head_dim: int, window: int) -> int:
    """The same with half the attention term: a kernel that skips masked pairs computes about half of them.

    Exactly (window + 1) / 2 pairs a token when window is the sequence: the diagonal's half pair is dropped here.
    """
    return 6 * num_matmul_weights + num_layers * 6 * num_heads * head_dim * window
