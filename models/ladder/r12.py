"""Record 12, 2024-11-19: 7.2 -> 5.03 minutes.  Sequences of 64K tokens that hold whole documents, and FlexAttention.

A token sees the earlier tokens of its own document, at most 1,024 of them.  So a long sequence costs no more than many
short ones, and few documents are cut.  The record asked FlexAttention for the mask of every pair; here the blocks are
found as its successors find them: the same mask, sooner.
Documents are those of the run's data (LanguageModel.eos_token); without their token each sequence is one.
model.args: window (tokens, of a run whose stages have none), block (tokens of a block of the mask), and those of
record 11.
B batch, T tokens, D width
"""

import torch

from models.base import flops_of_token
from models.ladder.r10 import without_autocast
from models.ladder.r11 import R11
from models.masked_attention import BLOCK_TOKENS, NO_LIMIT, Visible


class R12(R11):
    windows_are_data = True  # they are in buffers

    def __init__(self, *, eos_token: int | None = None, window: int = 1024, block: int = BLOCK_TOKENS, **options):
        super().__init__(**options)
        self.eos_token, self.block = eos_token, block
        for name in ("near_tokens", "near_blocks"):
            self.register_buffer(name, torch.empty((), dtype=torch.int32), persistent=False)
        self.set_window(window)

    @property
    def window_block(self) -> int:
        """Tokens that a window is a multiple of: half a block, 64, as the records' schedules go."""
        return self.block // 2

    def set_window(self, window_tokens: int) -> None:
        """How far back a token sees, itself among it, from the next pass on.  ValueError: no multiple of window_block.

        Changes no graph: the compiled model takes it from a buffer.
        """
        if window_tokens < 1 or window_tokens % self.window_block:
            raise ValueError(f"window={window_tokens}: use a multiple of {self.window_block} tokens")
        self.window_tokens = window_tokens
        near_tokens, near_blocks = self.limits(window_tokens)
        self.near_tokens.fill_(near_tokens)
        self.near_blocks.fill_(near_blocks)

    def limits(self, window_tokens: int) -> tuple[int, int]:
        """(near_tokens, near_blocks) of models/masked_attention.py."""
        return window_tokens, NO_LIMIT

    def windows(self) -> list[int]:
        """How far back each layer with attention sees, in tokens."""
        return [self.window_tokens] * len(self.blocks)

    def reach(self) -> int | None:
        """Of Visible.  None where compiled, where a number would ask for a graph of its own for each window."""
        return None if torch.compiler.is_compiling() else self.window_tokens

    def visible(self, tokens_BT: torch.Tensor) -> Visible:
        """What the tokens see; called as attention."""
        return Visible(tokens_BT, self.eos_token, self.near_tokens, self.near_blocks, self.reach(), self.block)

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with without_autocast(tokens_BT):
            return self.to_logits(self.stack(self.embed(tokens_BT), self.visible(tokens_BT)))

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, of the window as it is now; where documents end earlier is not known here."""
        return self._flops([min(window, seq_len) for window in self.windows()])

    def flops_per_token_causal(self, seq_len: int) -> int:
        """The same without masked pairs: w - w * w / (2 * T) a token, since the first ones of T see less than w."""
        windows = [min(window, seq_len) for window in self.windows()]
        return self._flops([window - window**2 // (2 * seq_len) for window in windows])

    def _flops(self, windows):
        num_matmul_weights, _, num_heads, head_dim = self._shape()
        return flops_of_token(num_matmul_weights, 1, num_heads, head_dim, sum(windows))


MODEL = R12
