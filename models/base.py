"""What all architectures share: loss from logits, Muon's matrices, causal attention, initialisation, FLOPs.

FLOPs of a training step are counted from the model's shape.  A matrix multiplication costs 2 per weight and token in
the forward pass and 4 in the backward pass (2 for each gradient), 6 in all.  Attention multiplies scores and values,
which costs 2 * 2 * H * K per pair of tokens in the forward pass and twice that in the backward pass, 12 in all.
Embedding lookups, norms, activations, softmax and the optimizer are not counted, as is usual for MFU.

B batch, T tokens, V vocabulary, N tokens ahead, D width = H * K, H heads, K head width
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class LanguageModel(nn.Module):
    """A subclass adds blocks, num_heads, head_dim, head_weight() [V, D], logits(tokens_BT) [B, T, V], init_weights().

    A model with windows or documents may add the following, which the trainer then uses:
    set_window(window_tokens: int) -> None  sets how far back its long windows reach, a multiple of its window_block.
        It is called before a step whose stage changes the window, and around a validation with another one, so what it
        sets must depend on window_tokens only.  flops_per_token() is for the window that was set last.
    set_untied(untied: bool) -> tuple[Parameter, Parameter]  makes it look tokens up in a separate embedding, which
        begins as a copy of the head's matrix, or in the head's.  Returns (embedding, head), so that the optimizer's
        state can be copied too.  late_parameters names the parameters that are in no loss before that.
    windows_are_data: bool  says that another window needs no other graph: the warm-up then runs only the widest.
    eos_token: int | None  a class attribute, set before the model is used: the token before each document of the data,
        None if there is none.  An argument eos_token of __init__, with a default, receives it too.
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
        """Returns the start of the residual stream in residual_dtype; None keeps the embedding's dtype, float32.

        Under autocast blocks compute in bfloat16, so a stream that begins in bfloat16 stays bfloat16.
        """
        return x_BTD if self.residual_dtype is None else x_BTD.to(self.residual_dtype)

    def through(self, block: nn.Module, *args: Any) -> Any:
        """Returns block(*args); with recomputes_blocks its activations are recomputed in the backward pass.

        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.  No random numbers are drawn in a block.
        """
        if self.recomputes_blocks and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def set_ahead_weights(self, weights: Sequence[float] | None) -> None:
        """Makes the training loss the weighted sum of the losses of the next token, the one after it, and so on.

        None means the next token only, as in validation.  Changing the weights but not their number keeps the graph.
        """
        if weights is None:
            self.ahead_weights = None
            return
        if self.ahead_weights is None or len(weights) != len(self.ahead_weights):
            self.ahead_weights = torch.empty(len(weights), dtype=torch.float32, device=next(self.parameters()).device)
        for index, weight in enumerate(weights):  # in each step of a run: a copy from the host would wait for the GPU
            self.ahead_weights[index].fill_(weight)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Returns the mean nats of int64 targets, a float32 scalar even under bf16; see also set_ahead_weights()."""
        logits_BTV = self.logits(tokens_BT)
        if self.training and self.ahead_weights is not None:
            return loss_ahead(logits_BTV, targets_BT, self.ahead_weights)
        return self.loss(logits_BTV, targets_BT)

    def loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Returns mean nats per token."""
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Returns the 2-D weights inside the blocks, in order, which Muon may update."""
        return [parameter for parameter in self.blocks.parameters() if parameter.ndim == 2]

    def flops_per_token(self, seq_len: int) -> int:
        """Returns FLOPs of forward and backward, masked pairs of tokens included."""
        return flops_of_token(*self._shape(), seq_len)

    def flops_per_token_causal(self, seq_len: int) -> int:
        """Returns FLOPs of forward and backward, masked pairs of tokens excluded."""
        return flops_of_token_causal(*self._shape(), seq_len)

    def _shape(self) -> tuple[int, int, int, int]:
        num_matmul_weights = sum(matrix.numel() for matrix in (*self.hidden_matrices(), self.head_weight()))
        return num_matmul_weights, len(self.blocks), self.num_heads, self.head_dim


def loss_ahead(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Returns the sum over n of weights_N[n] times the nats of the target n tokens later, a mean over tokens, float32.

    Targets beyond the end of a row count as 0; the end of a document has no effect.
    """
    T, num_ahead = targets_BT.shape[1], len(weights_N)
    ahead_BTN = F.pad(targets_BT, (0, num_ahead - 1)).unfold(1, num_ahead, 1)
    nats_BTN = logits_BTV.logsumexp(-1, keepdim=True) - logits_BTV.gather(-1, ahead_BTN)
    steps_N = torch.arange(num_ahead, device=targets_BT.device)
    exists_TN = torch.arange(T, device=targets_BT.device)[:, None] + steps_N < T
    return (nats_BTN * (exists_TN * weights_N)).sum() / targets_BT.numel()


@torch.no_grad()
def normal_(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Draws from N(0, std^2) on the CPU, so that the same seed gives the same bits on every device and rank.

    CPUs with AVX2 and with AVX-512 draw the same bits; without either, torch rounds some numbers differently.
    """
    parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(std=std, generator=generator))


@torch.no_grad()
def constant_(parameter: torch.Tensor, value: float) -> None:
    parameter.fill_(value)


def split_heads(x_BTD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns a view: [B, T, D] -> [B, H, T, K]."""
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)


def merge_heads(x_BHTK: torch.Tensor) -> torch.Tensor:
    """Concatenates heads: [B, H, T, K] -> [B, T, D]."""
    B, H, T, K = x_BHTK.shape
    return x_BHTK.transpose(1, 2).reshape(B, T, H * K)


def causal_attention(q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
    """Attention of token t to tokens 0..t, with scores divided by sqrt(K).

    It is SDPA, because FlexAttention has no backward pass on a CPU (torch 2.13).
    """
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)


def flops_of_token(num_matmul_weights: int, num_layers: int, num_heads: int, head_dim: int, window: int) -> int:
    """Returns FLOPs of forward and backward, with every pair of tokens in a window, even if the causal mask drops it.

    num_matmul_weights counts the weights of all matrix multiplications, including the head's but no embedding tables.
    window is the number of tokens that a token attends to.  torch.utils.flop_counter counts exactly the same.
    """
    return 6 * num_matmul_weights + num_layers * 12 * num_heads * head_dim * window


def flops_of_token_causal(num_matmul_weights: int, num_layers: int, num_heads: int, head_dim: int, window: int) -> int:
    """Returns the same with half the attention term: a kernel that skips masked pairs computes about half of them.

    For a window of the whole sequence the exact number is (window + 1) / 2 pairs per token; this drops the diagonal's.
    """
    return 6 * num_matmul_weights + num_layers * 6 * num_heads * head_dim * window
