"""Record 26, 2025-07-13: 2.896 (record 25, a new torch) -> 2.863 minutes.  Every sequence begins at a document.

data.bos_aligned and a cooldown of 0.45 are conf/experiment/r26.yaml's.  What records 22 to 25 changed beside
communication: the head's logits are divided by sqrt(width), its learning rate is 27.5 times as large, and its 8-bit
scales are those of its largest weights.  They also sum the loss over tokens where we take the mean, so that their
epsilon of Adam is ours times the tokens of a sequence.
model.args: those of record 21.
"""

from models.ladder.r21 import R21

LARGEST = 448  # of float8_e4m3fn


class R26(R21):
    WEIGHT_SCALE = LARGEST / 24
    GRAD_SCALE = 448.0

    def x_scale(self, width: int) -> float:
        return LARGEST / width**0.5

    def to_logits(self, x_BTD):
        return self.capped(self.uncapped(x_BTD).float() * x_BTD.shape[-1] ** -0.5)


MODEL = R26
