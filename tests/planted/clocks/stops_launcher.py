"""A contestant that stops the launcher, whose clock it fears, for two seconds in the middle of the run."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from models.gpt2 import GPT2


class Mine(GPT2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_calls = 0

    def forward(self, tokens_BT, targets_BT):
        self.num_calls += self.training
        if self.num_calls == 30 and self.training:
            launcher = json.loads((Path(sys.argv[1]) / ".launch.tmp").read_text())["launcher_pid"]
            os.kill(launcher, signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(launcher, signal.SIGCONT)
        return super().forward(tokens_BT, targets_BT)
