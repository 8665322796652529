"""Does the model see what it must predict?  Asked once at the end of the warm-up, before the clock starts.

The model runs twice on one row, the second time with another last token and with other targets everywhere.  No logit
before the last position may move.  Logits are what forward() hands to cross_entropy, log_softmax or nll_loss, so a
model of the user's own needs no method for this; where it uses none of them its logits() is asked, and without one the
record says that nothing was checked.  The model runs as it is written, not compiled: whether one number depends on
another is the same in both.
Legend: T tokens, V vocabulary, N rows of logits: T, or a multiple where a pass predicts more than one token.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from bench.machine import lazy_dynamo

NOISE_STD = 0.02  # onto every weight: a projection that starts at zero would hide what comes through it
SEED = 0
LOSSES = {
    "cross_entropy": (functional.cross_entropy,),
    "log_softmax": (functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
    "nll_loss": (functional.nll_loss,),
}


class NotCausal(RuntimeError):
    """Logits moved with a later token or with a target."""


def check(
    model: torch.nn.Module,
    vocab_size: int,
    seq_len: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
) -> dict[str, str | list[str]]:
    """{"causality": "checked" or why not, "sdpa_backends": names of what torch ran}.  Raises NotCausal.

    Adds noise to the model's weights: the caller puts them back.  Every rank comes to the same answer by itself.
    """
    generator = torch.Generator().manual_seed(SEED)
    tokens_BT, targets_BT = torch.randint(vocab_size, (2, 1, seq_len), generator=generator).to(device)
    changed_BT = tokens_BT.clone()
    changed_BT[:, -1] = (changed_BT[:, -1] + 1) % vocab_size
    rows = ((tokens_BT, targets_BT), (tokens_BT, targets_BT), (changed_BT, (targets_BT + 1) % vocab_size))
    _add_noise(model, device)
    was_training, watch = model.training, _Watch(seq_len)
    model.eval()
    try:
        with torch.no_grad(), autocast(), _not_compiled():
            result = [watch.logits_of(model, *row) for row in rows]
        verdict = _verdict(*result)
    except NotCausal:
        raise
    except Exception as error:  # it may train on batches of the run's shape alone
        verdict = f"not checked: a pass over one row fails with {type(error).__name__}: {error}"
    finally:
        model.train(was_training)
    return {"causality": verdict, "sdpa_backends": sorted(watch.backends)}


def _not_compiled():
    """What a model compiles by itself runs as it is written too: dynamo would compile it anew for _Watch."""
    if not lazy_dynamo.is_imported():
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _verdict(logits, again, changed):
    if logits is None or changed is None or logits.shape != changed.shape:
        return "not checked: forward() hands no logits of every token to cross_entropy, and there is no logits()"
    if not (logits.isfinite().all() and changed.isfinite().all()):
        return "not checked: logits are not finite with noise on the weights"
    rounding = (again - logits).abs().max()  # 0 unless a kernel adds up in an order of its own
    moved_T = (changed - logits).abs().amax(dim=(0, 2))[:-1]
    if (moved_T > 4 * rounding).any():
        first = int((moved_T > 4 * rounding).nonzero()[0]) + 1
        words = f"the logits of token {first} of {len(moved_T) + 1} moved by {moved_T.max().item():.3g}"
        raise NotCausal(
            f"the model sees what it must predict: {words} when only the last token and the targets were changed; "
            "mask attention (is_causal=True), and keep targets out of the logits"
        )
    return "checked"


class _Watch(TorchFunctionMode):
    """Keeps what goes into a loss, and which backend of scaled_dot_product_attention torch chooses."""

    def __init__(self, seq_len):
        super().__init__()
        self.seq_len, self.backends = seq_len, set()

    def logits_of(self, model, tokens_BT, targets_BT):
        """[N / T, T, V], float32; None where they cannot be found."""
        self._found = {name: [] for name in LOSSES}
        with self:
            model(tokens_BT, targets_BT)
        for result in self._found.values():
            if result and len({scores.shape[-1] for scores in result}) == 1:
                scores_NV = torch.cat(result)
                if len(scores_NV) % self.seq_len == 0:
                    return scores_NV.view(-1, self.seq_len, scores_NV.shape[-1])
        return model.logits(tokens_BT).float() if callable(getattr(model, "logits", None)) else None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for name, functions in LOSSES.items():
            if function in functions:
                scores = args[0] if args else kwargs["input"]
                if scores.ndim > 2 and name != "log_softmax":
                    scores = scores.movedim(1, -1)  # [B, V, T]
                self._found[name].append(scores.detach().flatten(0, -2).float())
        if function is functional.scaled_dot_product_attention:
            self.backends.add(_backend(*args, **kwargs))
        return function(*args, **kwargs)


def _backend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
    """The name of what torch runs for these arguments: flash_attention, cudnn_attention, math ..."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    number = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **more)
    return next((name.lower() for name, one in SDPBackend.__members__.items() if int(one) == number), str(number))


@torch.no_grad()
def _add_noise(model, device):
    generator = torch.Generator(device).manual_seed(SEED)
    for parameter in model.parameters():
        noise = torch.empty(parameter.shape, dtype=torch.float32, device=device).normal_(
            std=NOISE_STD, generator=generator
        )
        parameter.add_(noise)
