"""For test_explain_planted.py: GPT-2 slowed by a function below (model.args.cause); of several ranks, the last."""

import gc
import os
import threading
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench.data.loader import Loader
from models.gpt2 import GPT2

TEXT = "all that a tokenizer has to read " * 20_000
KEPT = []  # what a collection has to look through
MATRIX, MATRICES = torch.ones(512, 512), torch.randn(32, 160, 160)
next_batch = Loader.next
torch._dynamo.config.recompile_limit = 100  # beyond it a function is no longer compiled
doubled = torch.compile(lambda numbers: sum(numbers * 2 + power for power in range(20)), dynamic=False, backend="eager")


class Slowed(GPT2):
    def __init__(self, *args, cause, **kwargs):
        super().__init__(*args, **kwargs)
        slow, self.slow, self.num_steps = globals().get(cause), None, 0
        if int(os.environ.get("RANK", 0)) + 1 < int(os.environ.get("WORLD_SIZE", 1)):
            return
        if slow is decomposes:
            register_optimizer_step_pre_hook(slow)
        elif slow in (tokenizes, reads_disk):
            Loader.next = lambda loader: (slow(), next_batch(loader))[1]
        else:
            self.slow = slow

    def logits(self, tokens_BT):
        if self.training and self.slow is not None:
            self.num_steps += 1
            self.slow(self.num_steps)
        return super().logits(tokens_BT)


def sleeps(number):
    time.sleep(0.15)


def collects(number):
    if number > 11 and not KEPT:  # in the look: a run freezes what was there before
        KEPT.extend([index] for index in range(200_000))
    gc.collect()


def multiplies(number):
    for _ in range(30):
        torch.mm(MATRIX, MATRIX)


def waits(number):
    done = threading.Event()
    threading.Timer(0.05, done.set).start()
    done.wait()


def compiles_once(number):
    doubled(torch.ones(8))


def recompiles(number):
    doubled(torch.ones(8 + number))


def decomposes(optimizer, *_):
    torch.linalg.svd(MATRICES)


def tokenizes():
    for _ in range(5):
        set(TEXT.split())


def reads_disk():
    with open(Path(__file__).with_name("shard.bin"), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()
