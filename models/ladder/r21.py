"""Record 21, 2025-01-26: 2.992 -> 2.933 minutes.  Three quarters of the tokens a step, other scales of the 8-bit head.

A step is 8 sequences of 48K tokens, and validation has sequences of 256K (conf/experiment/r21.yaml).
model.args: those of record 20.
"""

from models.ladder.r20 import R20


class R21(R20):
    WEIGHT_SCALE = 2.0**9
    GRAD_SCALE = 2.0**19 / 49152  # times the tokens of a pass: 2**19 for the record's 48K


MODEL = R21
