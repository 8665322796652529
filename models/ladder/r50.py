"""Record 50, 2025-12-18: 2.146 -> 2.128 minutes.  Cautious weight decay of what Adam moves (conf/experiment/r50.yaml).

The model is record 49's.
"""

from models.ladder.r49 import R49


class R50(R49):
    pass


MODEL = R50
