"""A contestant that works on in its validations, while its own clock stands still."""

import time

from models.gpt2 import GPT2


class Mine(GPT2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.has_trained = False

    def forward(self, tokens_BT, targets_BT):
        if self.training:
            self.has_trained = True
        elif self.has_trained:
            self.has_trained = False
            time.sleep(0.3)  # as long as a few steps would take
        return super().forward(tokens_BT, targets_BT)
