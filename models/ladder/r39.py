"""Record 39, 2025-09-30: 2.476 -> 2.447 minutes.  Adam in every second step, and two thirds of the tokens a step.

The model is record 38's; Muon's momentum falls back to 0.85 in the last 50 steps (conf/experiment/r39.yaml).
"""

from models.ladder.r38 import R38


class R39(R38):
    pass


MODEL = R39
