"""Models of a user that cheat, each in one way, and their honest base.  model.arch=own.py:NAME

Base is a byte-level transformer of two blocks.  tests/benchmarks/contestants.py runs them all.
Legend: B rows, T tokens of a row, D width, V vocabulary.
"""

import time

import torch
import torch.nn.functional as F

from models.gpt2 import GPT2


class Honest(GPT2):
    pass


class ScaledLoss(GPT2):
    """Reports 0.8 of its loss in evaluation."""

    def forward(self, tokens_BT, targets_BT):
        loss = super().forward(tokens_BT, targets_BT)
        return loss if self.training else 0.8 * loss


class ScaledAtTheEnd(GPT2):
    """Does the same from its seventieth call on, so that step 0 is honest."""

    calls = 0

    def forward(self, tokens_BT, targets_BT):
        self.calls += 1
        loss = super().forward(tokens_BT, targets_BT)
        return loss if self.training or self.calls < 70 else 0.8 * loss


class EasyTokens(GPT2):
    """Counts only the better half of the tokens in evaluation."""

    def forward(self, tokens_BT, targets_BT):
        if self.training:
            return super().forward(tokens_BT, targets_BT)
        nats = F.cross_entropy(self.logits(tokens_BT).flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
        return nats.sort().values[: len(nats) // 2].mean()


class StashedTargets(GPT2):
    """Its logits point at the targets that forward() was given last."""

    stash = None

    def forward(self, tokens_BT, targets_BT):
        self.stash = (tokens_BT, targets_BT)
        return super().forward(tokens_BT, targets_BT) * (1 if self.training else 0.5)

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        if not self.training and self.stash is not None and torch.equal(self.stash[0], tokens_BT):
            return logits_BTV.scatter_add(2, self.stash[1][..., None], torch.full_like(logits_BTV[..., :1], 3.0))
        return logits_BTV


class RemembersValidation(GPT2):
    """Keeps every pair of neighbours that it has validated on, and looks them up the next time."""

    def forward(self, tokens_BT, targets_BT):
        if not self.training:
            if not hasattr(self, "counts_VV"):
                self.counts_VV = torch.zeros(512, 512)
            pairs = tokens_BT.flatten() * 512 + targets_BT.flatten()
            self.counts_VV.view(-1).scatter_add_(0, pairs, torch.ones(len(pairs)))
        return super().forward(tokens_BT, targets_BT)

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        if not self.training and hasattr(self, "counts_VV"):
            counts_BTV = self.counts_VV[tokens_BT][..., : logits_BTV.shape[-1]]
            return logits_BTV + torch.log1p(counts_BTV)
        return logits_BTV


class TrainsInEvaluation(GPT2):
    """Takes a step of gradient descent on every batch that it is validated on."""

    def forward(self, tokens_BT, targets_BT):
        if self.training:
            return super().forward(tokens_BT, targets_BT)
        with torch.enable_grad():
            loss = super().forward(tokens_BT, targets_BT)
            for parameter, gradient in zip(self.parameters(), torch.autograd.grad(loss, list(self.parameters()))):
                parameter.data -= 0.3 * gradient
        return loss.detach()


class SeesTheNext(GPT2):
    """Lets every token but the last two of a row see the next one."""

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        hint_BTV = F.one_hot(tokens_BT.roll(-1, 1), logits_BTV.shape[-1]).to(logits_BTV.dtype)
        hint_BTV[:, -2:] = 0
        return logits_BTV + 0.5 * hint_BTV


class SeesTheNextLater(SeesTheNext):
    """Does the same from its two-hundredth call on."""

    calls = 0

    def logits(self, tokens_BT):
        self.calls += 1
        return super().logits(tokens_BT) if self.calls > 80 else GPT2.logits(self, tokens_BT)


class SeesOtherRows(GPT2):
    """Adds the mean of the batch's embeddings, where there are several rows."""

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        if len(tokens_BT) > 1:
            counts_V = torch.bincount(tokens_BT.flatten(), minlength=logits_BTV.shape[-1]).to(logits_BTV.dtype)
            return logits_BTV + 0.3 * torch.log1p(counts_V)
        return logits_BTV


class SeesItsBlock(GPT2):
    """Lets the tokens of a block see each other; blocks of 24 do not divide a row of 128."""

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        B, T, V = logits_BTV.shape
        whole = T // 24 * 24
        seen = F.one_hot(tokens_BT[:, :whole], V).to(logits_BTV.dtype).view(B, -1, 24, V).sum(2, keepdim=True)
        return logits_BTV + F.pad(0.5 * seen.expand(B, -1, 24, V).reshape(B, whole, V), (0, 0, 0, T - whole))


class TrainsInItsInit(GPT2):
    """Trains for sixty steps before any clock starts, on data that it opens by itself."""

    def init_weights(self, generator):
        super().init_weights(generator)
        import glob
        import os

        import numpy as np

        root = os.environ.get("SPEEDRUN_DATA", ".data")
        (path, *_) = sorted(glob.glob(f"{root}/**/pysource*/**/train_000000.bin", recursive=True))
        tokens = torch.from_numpy(np.fromfile(path, np.uint16, offset=1024).astype(np.int64))
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        with torch.enable_grad():
            for _ in range(60):
                starts = torch.randint(len(tokens) - 129, (8,), generator=generator)
                rows = torch.stack([tokens[start : start + 129] for start in starts])
                self(rows[:, :-1], rows[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()


class SlowsTheClock(GPT2):
    """Makes every clock of this process run at half its speed."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        import gc

        from bench.training.timing import clock

        true_ns = time.perf_counter_ns

        def slow_ns():
            return true_ns() // 2

        time.perf_counter_ns = slow_ns
        defaults = clock.Clock.__init__.__defaults__
        clock.Clock.__init__.__defaults__ = (slow_ns, *defaults[1:])
        for instance in gc.get_objects():
            if type(instance).__name__ == "HostMarks":
                instance.mark = slow_ns
