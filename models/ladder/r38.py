"""Record 38, 2025-09-29: 2.483 -> 2.476 minutes.  Polar Express in place of Newton-Schulz.

The model is record 37's, the optimizer models/normuon_update.py without evening and decay (conf/experiment/r38.yaml).
"""

from models.ladder.r37 import R37


class R38(R37):
    pass


MODEL = R38
