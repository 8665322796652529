"""models/modern.py whose tokens attend only within their document and a window, which stages may change.

From github.com/KellerJordan/modded-nanogpt, records 12 (document mask) and 13 (a window that grows).  The mask is an
explicit tensor, so that it runs everywhere and skips no work: the reference beside which a fast kernel is tested.
"""

import torch

from models import flops
from models.attention import window_mask
from models.documents import document_ids
from models.modern import Modern


class Windowed(Modern):
    """window_tokens: until a stage sets another; null: seq_len, which is all of a sequence."""

    window_block = 16
    eos_token: int | None = None  # the trainer sets it

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_layers: int,
        num_heads: int,
        width: int,
        residual_dtype: str | None = None,
        window_tokens: int | None = None,
    ):
        super().__init__(vocab_size, seq_len, num_layers, num_heads, width, residual_dtype)
        self.window_tokens = window_tokens or seq_len

    def set_window(self, window_tokens: int) -> None:
        """Of every layer, from now on."""
        self.window_tokens = window_tokens

    def mask(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """[B, 1, T, T], within window and document."""
        return window_mask(document_ids(tokens_BT, self.eos_token), self.window_tokens)

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, every pair of tokens in a window counted, across documents too."""
        return flops.flops_per_token(*self._shape(), min(self.window_tokens, seq_len))

    def flops_per_token_causal(self, seq_len: int) -> int:
        """The same without pairs that the mask drops, but for documents, which are not known.

        A token sees W of the tokens before it, the first W half as many: W - W * W / (2 * T) in the mean.
        """
        window = min(self.window_tokens, seq_len)
        return flops.flops_per_token_causal(*self._shape(), 2 * window - window * window // seq_len)


MODEL = Windowed
