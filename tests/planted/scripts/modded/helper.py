"""Beside the script, imported by it: part of its identity."""

import os
import sys
from types import SimpleNamespace

import torch
import torch.nn as nn

if "TOY_PROFILED" not in os.environ:  # the profiler needs torch.compile
    # torch.optim and DDP import all of it, 1.5 CPU seconds, only to keep it off.
    torch._dynamo = sys.modules["torch._dynamo"] = SimpleNamespace(
        disable=lambda fn, *args, **more: fn,
        graph_break=lambda *args, **more: None,
        utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    )


class Bigrams(nn.Module):
    """Logits of the next token from the last one alone."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens, targets):
        logits = self.table(tokens)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
