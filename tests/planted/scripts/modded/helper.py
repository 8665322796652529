"""A module that the script imports, and which is therefore part of its identity."""

import torch.nn as nn


class Bigrams(nn.Module):
    """Logits of the next token from the last one alone."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens, targets):
        logits = self.table(tokens)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
