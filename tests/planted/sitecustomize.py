"""For test_events.py: with this folder first on PYTHONPATH, every run has one more instrument, which disturbs it.

In optimizer step 8 it sleeps 200 ms, in step 14 it collects many objects, in step 20 it has a function compiled anew.
It sleeps 100 ms itself as step 4 starts and as step 26 ends; its summary fails on a file of this repository.
"""

import gc
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, os.getcwd())  # the code that this process is to import: of a rank the run's copy

from bench.training.instruments import registry
from bench.training.instruments.base import Instrument

SLEEP_STEP, COLLECT_STEP, COMPILE_STEP = 8, 14, 20
OWN_START_STEP, OWN_END_STEP = 4, 26


class Planted(Instrument):
    name = "planted"

    def on_warmup_end(self):
        import torch

        def doubled(numbers):
            return numbers * 2

        self._torch, self._compiled = torch, torch.compile(doubled, backend="eager", dynamic=False)
        self._compiled(torch.ones(3))

    def on_run_start(self):
        gc.disable()
        self._many = [[] for _ in range(1_500_000)]  # not frozen: the policy has frozen already
        gc.enable()

    def on_phase(self, name):
        if name == "optimizer" and self._step == SLEEP_STEP:
            time.sleep(0.2)

    def on_step_start(self, step):
        self._step = step
        if step == OWN_START_STEP:
            time.sleep(0.1)
        if step == COLLECT_STEP:
            gc.collect()
        if step == COMPILE_STEP:
            self._compiled(self._torch.ones(4))

    def on_step_end(self, step):
        if step == OWN_END_STEP:
            time.sleep(0.1)

    def summary(self):
        return {"found": (Path(__file__).parent / "nothing").read_text()}


really = registry.load


def load(chosen, context):
    instruments, warnings = really(chosen, context)
    return [*instruments, Planted(context)], warnings


registry.load = load
