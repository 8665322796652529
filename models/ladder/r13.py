"""Record 13, 2024-11-24: 5.03 -> 4.66 minutes.  The window grows with the run, from 64 to 1,792 tokens.

At step k of n it is 64 + 1,728 * k / n, rounded down to a multiple of 64, and validation has that of its step: stages
of conf/experiment/r13.yaml.
model.args: window (by default the last one), and those of record 12.
"""

from models.ladder.r12 import R12


class R13(R12):
    def __init__(self, *, window: int = 1792, **options):
        super().__init__(window=window, **options)


MODEL = R13
