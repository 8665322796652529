"""A contestant that works on in its validations, while its own clock stands still: once it has trained for a while, so
that what is asked of it before the first step shows nothing."""

import time

from models.gpt2 import GPT2


class Mine(GPT2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_calls, self.has_trained = 0, False

    def forward(self, tokens_BT, targets_BT):
        if self.training:
            self.num_calls += 1
            self.has_trained = self.num_calls > 12
        elif self.has_trained:
            self.has_trained = False
            time.sleep(1.0)  # as long as some steps would take
        return super().forward(tokens_BT, targets_BT)
