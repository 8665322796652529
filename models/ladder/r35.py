"""Record 35, 2025-09-21: 2.547 -> 2.527 minutes.  The first layer is gone; 40 more steps at the last learning rate.

Of the first layer only its number is left, and the last layer takes no skip.  In the last validation every long window
is 20 blocks.
model.args: those of record 31.
"""

from models.ladder.r34 import R34


class R35(R34):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[0].attention = self.blocks[0].stream_mix = None
        self.skip_weights.data = self.skip_weights.data[: len(self.blocks) // 2 - 1]

    def reaches_far(self, index: int) -> bool:
        return True

    def entered(self, index: int, x_BTD, outputs):
        """The stream as block number index takes it; outputs: of the blocks before it, None of the first."""
        half, last = len(self.blocks) // 2, len(self.blocks) - 1
        if not half <= index < last:
            return x_BTD
        return x_BTD + self.skip_factor(index - half) * outputs[last - index]

    def left(self, outputs):
        """The stream after the last block."""
        return outputs[-1]

    def stack(self, x_BTD, values, mixes):
        """All blocks but the first, and the last norm."""
        embedded_BTD, outputs = x_BTD, [None]
        for index, block in list(enumerate(self.blocks))[1:]:
            x_BTD = self.entered(index, x_BTD, outputs)
            x_BTD = block(x_BTD, self.rotary, values[index], embedded_BTD, mixes[index])
            outputs.append(x_BTD)
        return self.norm(self.left(outputs))


MODEL = R35
