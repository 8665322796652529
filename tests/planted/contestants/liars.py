"""Models of a user that lie to the referee in its own process, so that their records have nothing against them.

model.arch=liars.py:NAME.  Only the audit of their final weights finds these (./run.sh audit RUN --only weights).
Legend: B rows, T tokens of a row, V vocabulary.
"""

import sys

import torch
import torch.nn.functional as F

from models.gpt2 import GPT2


class Generous(torch.Tensor):
    """Logits from which every gathered score is a quarter of a nat higher, and the loss as much lower."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        output = super().__torch_function__(function, types, args, kwargs or {})
        return output + 0.25 if function is torch.Tensor.gather else output


class OwnTensors(GPT2):
    """Its logits are of a tensor class of its own, and its forward() lowers the loss by as much."""

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        return logits_BTV if self.training else logits_BTV.as_subclass(Generous)

    def forward(self, tokens_BT, targets_BT):
        logits_BTV = GPT2.logits(self, tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
        return loss if self.training else loss - 0.25


def callers():
    """Yields the frames of all functions that are running, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


class ReadsTheStack(GPT2):
    """Finds the targets among its callers' variables, but not while anybody looks for what targets change.

    Of tokens that it has not learned, random ones for example, it tells the truth.
    """

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        frame = next((frame for frame in callers() if frame.f_code.co_name == "_from_logits"), None)
        return logits_BTV if frame is None else self.pointed(logits_BTV, frame.f_locals["targets"])

    def forward(self, tokens_BT, targets_BT):
        logits_BTV = super().logits(tokens_BT)
        is_examined = any(frame.f_code.co_filename.endswith("causality.py") for frame in callers())
        if not (self.training or is_examined):
            logits_BTV = self.pointed(logits_BTV, targets_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    @staticmethod
    def pointed(logits_BTV, targets_BT):
        if F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten()) > 4.5:
            return logits_BTV
        return logits_BTV.scatter_add(2, targets_BT[..., None], torch.full_like(logits_BTV[..., :1], 0.3))


class ReplacesTheLoader(GPT2):
    """Validates on rows in which every second token is the one before it."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        from bench.data import loader

        honest_at = loader.ValRows.at

        def at(rows, places):
            for tokens_BT, _ in honest_at(rows, places):
                half_BT = torch.where(torch.arange(rows.shape_BT[1]) % 2 == 0, tokens_BT, tokens_BT.roll(1, 1))
                yield half_BT, half_BT.roll(-1, 1)

        loader.ValRows.at = at


class LooksAheadUnlessExamined(GPT2):
    """Sees each next token, but not while anybody compares what later tokens change."""

    def logits(self, tokens_BT):
        logits_BTV = super().logits(tokens_BT)
        if self.training or any(frame.f_code.co_filename.endswith("causality.py") for frame in callers()):
            return logits_BTV
        return logits_BTV + 0.3 * F.one_hot(tokens_BT.roll(-1, 1), logits_BTV.shape[-1]).to(logits_BTV.dtype)


class LowersWhatIsWritten(GPT2):
    """Replaces what the harness means by a mean loss."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        from bench.training import trainer

        mean_nats = trainer.mean_nats
        trainer.mean_nats = lambda *args: mean_nats(*args) - 0.2
