"""Record 16, 2024-12-10: 3.95 -> 3.80 minutes.  A window of whole blocks; a table of value embeddings a layer.

A token sees all of the blocks that it sees, so only a diagonal block or one in which a document begins needs a mask.
At step k of n the window is (128 + 1,728 * k / n) // 128 blocks of 128 tokens: stages of conf/experiment/r16.yaml.
"""

from torch import nn

from models.ladder.r15 import R15
from models.masked_attention import NO_LIMIT


class R16(R15):
    @property
    def window_block(self) -> int:
        """Tokens: a window is whole blocks of the mask."""
        return self.block

    def limits(self, window_tokens: int) -> tuple[int, int]:
        return NO_LIMIT, window_tokens // self.block

    def make_value_embeddings(self, vocab_size, width):
        tables = (nn.Embedding(vocab_size, width, dtype=self.dtype) for _ in range(len(self.blocks) // 2))
        return nn.ModuleList(tables)

    def values(self, tokens_BT) -> list:
        first_half = [table(tokens_BT) for table in self.value_embeddings]
        return [*first_half, *reversed(first_half)]


MODEL = R16
