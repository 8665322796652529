"""Record 33, 2025-09-15: 2.625 -> 2.565 minutes.  The last layer sees 20 blocks in the last validation.

A window beyond the schedule's last one, 13 blocks, is the last layer's alone (stages[].end_window_tokens: 2560).  The
record also reads and indexes shards in a thread: here every loader does.
model.args: those of record 31.
"""

from models.ladder.r32 import R32


class R33(R32):
    def reaches_far(self, index: int) -> bool:
        """Whether block number index sees more than the schedule's last window where there is more."""
        return index == len(self.blocks) - 1

    def window_of(self, index: int) -> int:
        last = self.yarn_window(self.window_tokens)
        if not self.has_long_window(index):
            return self.short_window(last)
        return self.window_tokens if self.reaches_far(index) else last

    def mixes(self, tokens_BT) -> list:
        far = self.near_tokens
        long = far.clamp_max(self.yarn_blocks[-1] * self.block + 1)
        seen = {near: self.seen(tokens_BT, near) for near in (far, long, self.short_window(long - 1) + 1)}
        far, long, short = seen.values()
        is_long = (self.has_long_window(index) for index in range(len(self.blocks)))
        return [
            (far if self.reaches_far(index) else long) if is_long_one else short
            for index, is_long_one in enumerate(is_long)
        ]


MODEL = R33
