"""models/modern.py with attention only within a document and a window, which stages may change.

From github.com/KellerJordan/modded-nanogpt, records 12 (document mask) and 13 (a growing window).
"""

import torch

from models.base import flops_of_token, flops_of_token_causal
from models.masked_attention import NO_LIMIT, Visible
from models.modern import Modern


class Windowed(Modern):
    """Has window_tokens until a stage sets another window; None means seq_len, the whole sequence."""

    window_block = 16
    eos_token: int | None = None  # set by the trainer

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_layers: int,
        num_heads: int,
        width: int,
        residual_dtype: str | None = None,
        window_tokens: int | None = None,
    ) -> None:
        super().__init__(vocab_size, seq_len, num_layers, num_heads, width, residual_dtype)
        self.register_buffer("near_tokens", torch.empty((), dtype=torch.int32), persistent=False)
        self.register_buffer("near_blocks", torch.tensor(NO_LIMIT, dtype=torch.int32), persistent=False)
        self.set_window(window_tokens or seq_len)

    def set_window(self, window_tokens: int) -> None:
        """Sets the window of every layer from now on."""
        self.window_tokens = window_tokens
        self.near_tokens.fill_(window_tokens)

    def mix(self, tokens_BT: torch.Tensor) -> Visible:
        """Returns the attention within window and document."""
        reach_tokens = None if torch.compiler.is_compiling() else self.window_tokens
        return Visible(tokens_BT, self.eos_token, self.near_tokens, self.near_blocks, reach_tokens)

    def flops_per_token(self, seq_len: int) -> int:
        """Returns FLOPs of forward and backward, with every pair of tokens in a window, across documents too."""
        return flops_of_token(*self._shape(), min(self.window_tokens, seq_len))

    def flops_per_token_causal(self, seq_len: int) -> int:
        """Returns the same without the pairs that the window and causality mask; documents are not known here.

        A token sees W tokens, the first W tokens half as many: W - W * W / (2 * T) on average.
        """
        window = min(self.window_tokens, seq_len)
        return flops_of_token_causal(*self._shape(), 2 * window - window * window // seq_len)


MODEL = Windowed
