"""Record 46, 2025-11-29: 2.248 -> 2.203 minutes.  The batch grows in three stages, and the learning rate with it.

131,072, 262,144 and 393,216 tokens a step, learning rates times 1, 1.51 and 1.93 (conf/experiment/r46.yaml).  The model
is record 45's.  The record sums its loss over a rank's tokens, so that a larger batch has larger gradients, which weigh
more in momenta until the smaller ones are forgotten: ours are means.
"""

from models.ladder.r45 import R45


class R46(R45):
    pass


MODEL = R46
