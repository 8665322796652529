"""Record 43, 2025-11-10: 2.313 -> 2.284 minutes.  Cautious weight decay of what Muon moves (conf/experiment/r43.yaml).

The model is record 42's.
"""

from models.ladder.r42 import R42


class R43(R42):
    pass


MODEL = R43
