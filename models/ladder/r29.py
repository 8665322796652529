"""Record 29, 2025-09-03: 2.812 -> 2.731 minutes.  FlashAttention 3, and a window in three steps: 3, 7 and 11 blocks.

A token sees itself and exactly `window` tokens before it, wherever blocks end; short windows are half the blocks, and
whole ones.  Here FlexAttention does it where compiled for a GPU, FlashAttention 3 being a package for Hopper alone.
The record's loader keeps the first 2,048 tokens of each document: ours keeps documents whole (docs/LADDER.md).
model.args: those of record 21.
"""

from models.ladder.r28 import R28
from models.masked_attention import NO_LIMIT, Visible


class R29(R28):
    def limits(self, window_tokens: int) -> tuple[int, int]:
        return window_tokens + 1, NO_LIMIT

    def short_window(self, window_tokens):
        """Of an int or a tensor: half the blocks, one at least."""
        halved = window_tokens // self.block // 2
        return (max(1, halved) if isinstance(halved, int) else halved.clamp_min(1)) * self.block

    def windows(self) -> list[int]:
        """How far back each layer with attention sees, in tokens, itself among them."""
        attending = (index for index, block in enumerate(self.blocks) if block.attention is not None)
        return [self.window_of(index) + 1 for index in attending]

    def window_of(self, index: int) -> int:
        """Of block number index: how many tokens before it a token sees."""
        return self.window_tokens if self.has_long_window(index) else self.short_window(self.window_tokens)

    def mixes(self, tokens_BT) -> list:
        long = self.seen(tokens_BT, self.near_tokens)
        short = self.seen(tokens_BT, self.short_window(self.near_tokens - 1) + 1)
        return [long if self.has_long_window(index) else short for index in range(len(self.blocks))]

    def seen(self, tokens_BT, near_tokens) -> Visible:
        reach = self.reach()
        reach = None if reach is None else reach + 1
        return Visible(
            tokens_BT, self.eos_token, near_tokens, self.near_blocks, reach, self.block, self.attention_scale
        )


MODEL = R29
