"""Record 42, 2025-10-27: 2.358 -> 2.345 (record 41) -> 2.313 minutes.  NorMuon, its statistics put right.

Record 41 evened out Muon's updates over a matrix in which queries, keys, values and projection are interleaved, as they
lie in memory; record 42 takes each on its own, over its columns, and doubles the step of the MLP's first matrix.  The
last 40 steps have a window of 13 blocks (conf/experiment/r42.yaml).  The model is record 40's.
"""

from models.ladder.r40 import R40


class R42(R40):
    pass


MODEL = R42
