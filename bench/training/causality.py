"""Checks that the model is causal (does not see what it must predict), after the warm-up and after the run.

The model runs on random tokens in training, and in evaluation on a batch of the validation, so that one which looks
ahead only in batches that it recognises does so here; then with other tokens behind a cut in each row (if there are
several rows, one changes entirely), and each time with other targets before the cuts.
1. Logits: none before its row's cut may move with the tokens, and none at all with the targets.  Logits are what
   forward() passes to cross_entropy or nll_loss.  The model runs uncompiled, on at most MAX_TOKENS at a time.
2. Losses, as the run computes them (compiled, if it trains a compiled model) on the run's micro-batch shape.  What the
   targets before the cuts add to the loss must not depend on the tokens behind them: except for rounding,
   loss(changed, others) - loss(changed, targets) = loss(tokens, others) - loss(tokens, targets).
   In training mode losses are checked only if logits are not seen, or if the model is compiled.
A leak from one position to the next only is found if a cut falls between the two.
Legend: B rows, T tokens, V vocabulary, N positions with logits in a pass (B * T, or a multiple of it)
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from bench.machine import lazy_dynamo

MIN_CUTS = 6  # in each check of a mode
MAX_TOKENS = 4096  # of a pass whose logits are compared: 0.8 GB in float32 with a vocabulary of 50,304
MAX_CHUNK_BYTES = 2**26  # size of the float64 copy of logits that is made to compare them
MIN_NOISE_STD = 0.02  # noise on every weight: a projection that starts at zero would hide what comes through it
NUM_DIRECTIONS = 2  # K, the number of directions along which logits are compared
NUM_PROBES = 3  # measurements of a loss's rounding before a model is judged by its losses
LOSSES = {
    "cross_entropy": (functional.cross_entropy,),
    "log_softmax": (functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
    "nll_loss": (functional.nll_loss,),
}
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens_BT, targets_BT
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens_BT, targets_BT -> loss
HIDDEN = "forward() hands no logits of every token to cross_entropy"


class NotCausal(RuntimeError):
    """Logits or losses depend on a later token, on another row or on a target."""


@dataclass
class Way:
    """A way in which a run calls its model."""

    mode: str  # "evaluation" or "training"
    shape: tuple[int, int]  # B, T of its batches
    call: Call  # the model as the run calls it
    entered: Callable[[], AbstractContextManager[Any]]  # the context of such a call: model.eval(), autocast ...
    batch: Batch | None = None  # a batch that the run itself evaluates; None: random tokens


@dataclass
class Ask:
    """A check of one way and its outcome, as recorded in run.json["referee"]["causality"]."""

    mode: str
    by: list[str]  # "logits", "losses"
    is_compiled: bool
    num_rows: int
    seq_len: int
    cuts: list[int] = field(default_factory=list)  # number of tokens before each cut
    moved: float = 0.0  # largest change of logits that must not change; of losses, in nats, if only those are checked
    rounding: float = 0.0  # largest change in repetitions of the same pass, measured only if something moved
    unchecked: str | None = None  # the reason if no verdict is possible


def worst(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the least favourable of the ranks' check()s."""
    return min(by_rank, key=lambda rank: ("not causal", "not checked", "causal").index(rank["found"]))


def new_seed(seed: int) -> int:
    """Returns a seed that nobody can know before the run, small enough for a JSON number."""
    return int.from_bytes(os.urandom(6)) ^ (seed % 2**48)


def check(
    model: torch.nn.Module,
    ways: Sequence[Way],
    vocab_size: int,
    device: torch.device,
    seed: int,
    is_compiled: bool = False,
    has_noise: bool = True,
) -> dict[str, Any]:
    """Returns {"found": "causal" or "not checked", "why", "asks", "sdpa_backends"}.  Raises NotCausal.

    With has_noise it adds noise to the weights, and in training mode a model may change its buffers: the caller
    restores both.  torch's random state does not change.
    """
    if has_noise:
        _add_noise(model, device, seed)
    was_training = model.training
    asks: list[Ask] = []
    backends: set[str] = set()
    try:
        for way in ways:
            settings = vocab_size, device, seed, model, way.batch
            shape = asked_shape(*way.shape)
            watch = _Watch(shape, device, seed)
            compiles = is_compiled or lazy_dynamo.is_imported()  # a model may compile a part of itself
            is_whole = shape == way.shape and not compiles  # then the same passes serve logits and losses
            with way.entered(), forked_rng(device):
                with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext():
                    ask = Ask(way.mode, ["logits", "losses"] if is_whole else ["logits"], False, *shape)
                    asks.append(_Asking(ask, model, watch, *settings).answered())
                if not is_whole:
                    ask = Ask(way.mode, ["losses"], is_compiled, *way.shape)
                    asks.append(_Asking(ask, way.call, None, *settings).answered())
            backends |= watch.backends
    finally:
        model.train(was_training)
    modes = {way.mode: [ask for ask in asks if ask.mode == way.mode] for way in ways}
    reasons = [mode_asks[-1].unchecked for mode_asks in modes.values() if all(ask.unchecked for ask in mode_asks)]
    outcome = {"found": "not checked" if reasons else "causal", "why": reasons[0] if reasons else None}
    return outcome | {"asks": [asdict(ask) for ask in asks], "sdpa_backends": sorted(backends)}


def asked_shape(num_rows: int, seq_len: int) -> tuple[int, int]:
    """Returns a shape of at most MAX_TOKENS for a pass with logits; it has several rows if the run's batch has them."""
    seq_len = min(seq_len, MAX_TOKENS if num_rows == 1 else MAX_TOKENS // 2)
    return min(num_rows, MAX_TOKENS // seq_len), seq_len


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context that restores torch's random state."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class _Asking:
    """Fills in an Ask: runs passes over random batches of its shape, and compares them."""

    def __init__(
        self,
        ask: Ask,
        call: Call,
        watch: "_Watch | None",
        vocab_size: int,
        device: torch.device,
        seed: int,
        model: torch.nn.Module,
        batch: Batch | None,
    ):
        self.question, self.call, self.watch, self.vocab_size, self.device = ask, call, watch, vocab_size, device
        self._batch, self._generator = batch, torch.Generator().manual_seed(seed)
        self._eos_token: int | None = getattr(model, "eos_token", None)
        self._losses: list[float] = []
        self._eps = 0.0  # the largest machine epsilon of the losses' dtypes

    def answered(self) -> Ask:
        """Returns the Ask, filled in.  Raises NotCausal."""
        try:
            self._ask()
        except NotCausal:
            raise
        except Exception as error:  # the model may only accept batches of the run's shape
            shape = f"{self.question.num_rows} x {self.question.seq_len}"
            self.question.unchecked = f"a pass over {shape} tokens fails with {type(error).__name__}: {error}"
        return self.question

    def _ask(self) -> None:
        num_rows, seq_len = self.question.num_rows, self.question.seq_len
        batch = self._batch or (self._drawn(), self._drawn())
        tokens_BT, targets_BT = (numbers_BT[:num_rows, :seq_len].contiguous() for numbers_BT in batch)
        base, depends = self._pass(tokens_BT, targets_BT), False
        for group, cuts_B in enumerate(self._cuts()):
            position_T = torch.arange(seq_len, device=self.device)
            before_BT = position_T < torch.tensor(cuts_B, device=self.device)[:, None]
            changed_BT = torch.where(before_BT, tokens_BT, self._others(tokens_BT, group))
            others_BT = torch.where(before_BT, self._others(targets_BT, group), targets_BT)
            if self.question.mode == "training" and base.prints is not None:  # saves half the passes if nothing moves
                both = self._pass(changed_BT, others_BT)
                if both.prints is not None and not (base.moved_BT(both) * before_BT).any():
                    continue
            by_tokens, by_targets = self._pass(changed_BT, targets_BT), self._pass(tokens_BT, others_BT)
            if base.prints is not None:
                why = "only later tokens and other rows were changed; mask attention (is_causal=True)"
                self._compare_logits(base, by_tokens, before_BT, (tokens_BT, targets_BT), why)
                why = "only targets were changed; keep targets out of the logits"
                self._compare_logits(base, by_targets, torch.ones_like(before_BT), (tokens_BT, targets_BT), why)
            if "losses" in self.question.by:
                both = self._pass(changed_BT, others_BT)
                nats = (both.loss - by_tokens.loss) - (by_targets.loss - base.loss)
                self._judge_losses(nats, tokens_BT, targets_BT, others_BT)
                depends |= abs(by_targets.loss - base.loss) > self._loss_rounding()
        if base.prints is None:
            self.question.by = [name for name in self.question.by if name != "logits"]
            if not (self.question.by and depends):
                unseen = ", and what targets change is within the rounding of its loss" if self.question.by else ""
                self.question.unchecked = HIDDEN + unseen
        if not all(map(math.isfinite, self._losses)) or (base.prints is not None and not base.prints.isfinite().all()):
            self.question.unchecked = "logits or losses are not finite"

    def _cuts(self) -> Iterator[list[int]]:
        """Yields each pass's cuts, one for each row: at least MIN_CUTS in all, spread over a row, in random order."""
        num_rows, seq_len = self.question.num_rows, self.question.seq_len
        has_first = num_rows > 1  # one row changes entirely: the others must not see it
        num_groups = -(-MIN_CUTS // (num_rows - has_first))
        num_cuts = num_groups * (num_rows - has_first)
        within = torch.rand(num_cuts, generator=self._generator, dtype=torch.float64).tolist()
        cuts = [1 + int((part + place) * (seq_len - 1) / num_cuts) for part, place in enumerate(within)]
        cuts = [cuts[index] for index in torch.randperm(num_cuts, generator=self._generator).tolist()]
        self.question.cuts = sorted(cuts)
        for group in range(num_groups):
            rows = cuts[group::num_groups]
            if has_first:
                rows.insert(group % num_rows, 0)
            yield rows

    def _drawn(self) -> torch.Tensor:
        shape = self.question.num_rows, self.question.seq_len
        return torch.randint(self.vocab_size, shape, generator=self._generator).to(self.device)

    def _others(self, numbers_BT: torch.Tensor, group: int) -> torch.Tensor:
        """Returns tokens that all differ from numbers_BT; in every second row they are equal, so that leaks add up.

        Document boundaries stay, because with others attention may add up blocks in another order.
        """
        one_B1 = torch.randint(self.vocab_size, (self.question.num_rows, 1), generator=self._generator).to(self.device)
        is_one_B1 = (torch.arange(self.question.num_rows, device=self.device)[:, None] + group) % 2 == 0
        others_BT = torch.where(is_one_B1, one_B1, self._drawn())
        eos_token = -1 if self._eos_token is None else self._eos_token
        for _ in range(2):  # after one increment the token may be the second forbidden one
            is_taken_BT = (others_BT == numbers_BT) | (others_BT == eos_token)
            others_BT = torch.where(is_taken_BT, (others_BT + 1) % self.vocab_size, others_BT)
        return torch.where(numbers_BT == eos_token, numbers_BT, others_BT)

    def _pass(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> "_Seen":
        with forked_rng(self.device):  # the same dropout in every pass
            if self.watch is None:
                seen = _Seen(self.call(tokens_BT, targets_BT).detach(), None)
            else:
                seen = self.watch.over(self.call, tokens_BT, targets_BT)
        self._losses.append(seen.loss)
        self._eps = max(seen.eps, self._eps)
        return seen

    def _compare_logits(
        self, base: "_Seen", other: "_Seen", kept_BT: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor], why: str
    ) -> None:
        if other.prints is None:
            raise ValueError("not every pass hands its logits to a loss")
        moved_BT = base.moved_BT(other) * kept_BT
        if not moved_BT.any():
            return
        repeats = [self._pass(*batch).prints for _ in range(2)]  # a kernel may sum in a different order each time
        rounding = max((repeat - base.prints).abs().max().item() for repeat in repeats)
        self.question.moved, self.question.rounding = max(self.question.moved, moved_BT.max().item()), rounding
        if (moved_BT > 4 * rounding).any():
            token = int((moved_BT > 4 * rounding).any(0).nonzero()[0]) + 1
            numbers = f"the logits of token {token} of {self.question.seq_len} moved by {moved_BT.max().item():.3g}"
            self._refuse(f"{numbers} (repeated: by {rounding:.3g}) when {why}")

    def _loss_rounding(self) -> float:
        return 16 * self._eps * max(abs(loss) for loss in self._losses)

    def _judge_losses(
        self, nats: float, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, others_BT: torch.Tensor
    ) -> None:
        """Judges nats, which must be 0: could it be rounding, and is the loss a sum over its targets at all?"""
        if self.question.by == ["losses"]:
            self.question.moved = max(self.question.moved, abs(nats))
        if not abs(nats) > self._loss_rounding():
            return
        whole, changed = self._pass(tokens_BT, targets_BT).loss, self._pass(tokens_BT, others_BT).loss
        rounding = 0.0
        for _ in range(NUM_PROBES):
            some_BT = torch.randint(2, targets_BT.shape, generator=self._generator).to(self.device) == 0
            parts = [torch.where(some_BT, *pair) for pair in ((targets_BT, others_BT), (others_BT, targets_BT))]
            parts = [self._pass(tokens_BT, part_BT).loss for part_BT in parts]
            rounding = max(rounding, abs(sum(parts) - whole - changed))
        self.question.rounding = max(rounding, self._loss_rounding())
        if rounding > self._loss_rounding():  # then parts of the loss prove nothing about earlier tokens
            self.question.unchecked = f"its loss is not a sum over its targets: parts are off by {rounding:.3g} nats"
        elif abs(nats) > max(10 * rounding, self._loss_rounding()):
            numbers = f"the share of the loss from targets before a cut moved by {abs(nats):.3g} nats"
            why = "only tokens after the cut were changed; mask attention (is_causal=True)"
            self._refuse(f"{numbers} (rounding: {self.question.rounding:.3g}) when {why}")

    def _refuse(self, sentence: str) -> NoReturn:
        compiled = ", compiled" if self.question.is_compiled else ""
        raise NotCausal(f"the model sees what it must predict: in {self.question.mode}{compiled}, {sentence}")


class _Seen:
    """The outcome of a pass: its loss, and the prints of its logits, [N / (B * T), B, T, K] or None."""

    def __init__(self, loss: torch.Tensor, prints: torch.Tensor | None):
        self.loss: float = loss.item()
        self.prints: Any = prints
        dtypes = [loss.dtype] if loss.dtype == torch.float64 else [torch.bfloat16, torch.float16, torch.float32]
        # a loss that was rounded to a shorter dtype and converted back has the shorter one's epsilon
        self.eps = next(torch.finfo(dtype).eps for dtype in dtypes if loss.to(dtype).to(loss.dtype) == loss)

    def moved_BT(self, other: "_Seen") -> torch.Tensor:
        """Returns the largest difference between the prints of each token's logits."""
        moved: torch.Tensor = (other.prints - self.prints).abs().amax(dim=(0, 3))
        return moved


class _Watch(TorchFunctionMode):
    """Intercepts the inputs of losses, and torch's choice of a scaled_dot_product_attention backend."""

    def __init__(self, shape: tuple[int, int], device: torch.device, seed: int):
        super().__init__()
        self.shape, self.device, self.seed = shape, device, seed
        self.backends: set[str] = set()
        self._directions: dict[int, torch.Tensor] = {}  # {V: [V, K]}

    def over(self, call: Call, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> _Seen:
        """Runs a pass.  Its prints are None if there are no logits of every token in the order of the tokens."""
        self._found: dict[str, list[tuple[torch.Tensor, Any]]] = {name: [] for name in LOSSES}
        with self:
            loss = call(tokens_BT, targets_BT)
        prints = (self._in_order(calls, targets_BT) for calls in self._found.values())
        return _Seen(loss.detach(), next((fingerprint for fingerprint in prints if fingerprint is not None), None))

    def _in_order(self, calls: list[tuple[torch.Tensor, Any]], targets_BT: torch.Tensor) -> torch.Tensor | None:
        """Concatenates the prints of calls; None unless their targets show that they are in the order of the tokens."""
        if not calls or len({prints_NK.shape[-1] for prints_NK, _ in calls}) > 1:
            return None
        prints_NK, targets = torch.cat([prints_NK for prints_NK, _ in calls]), [beside for _, beside in calls]
        num_tokens = targets_BT.numel()
        if len(prints_NK) % num_tokens:
            return None
        if all(beside is not None for beside in targets):
            beside = torch.cat(targets)[:num_tokens].to(targets_BT.dtype)
            is_in_order = torch.equal(beside, targets_BT.flatten())
        else:
            is_in_order = self.shape[0] == 1 and all(beside is None for beside in targets)  # a row has one order only
        return prints_NK.view(-1, *self.shape, NUM_DIRECTIONS) if is_in_order else None

    @torch.no_grad()
    def _prints_of(self, scores_NV: torch.Tensor) -> torch.Tensor:
        """Projects logits, in chunks, onto directions unknown to contestants: any change shows.  [N, K], float64."""
        V = scores_NV.shape[-1]
        if V not in self._directions:
            generator = torch.Generator().manual_seed(self.seed)
            directions_VK = torch.randn(V, NUM_DIRECTIONS, generator=generator, dtype=torch.float64)
            self._directions[V] = directions_VK.to(scores_NV.device)
        chunks = scores_NV.split(max(1, MAX_CHUNK_BYTES // (8 * V)))
        return torch.cat([chunk_NV.double() @ self._directions[V] for chunk_NV in chunks])

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for name, functions in LOSSES.items():
            if function in functions:
                scores = args[0] if args else kwargs["input"]
                beside = None  # the targets
                if name == "log_softmax":
                    if (args[1] if len(args) > 1 else kwargs.get("dim")) not in (-1, scores.ndim - 1):
                        continue
                else:
                    beside = (args[1] if len(args) > 1 else kwargs["target"]).detach().flatten()
                    scores = scores.movedim(1, -1)  # [B, V, T] -> [B, T, V]; [N, V] stays
                self._found[name].append((self._prints_of(scores.detach().flatten(0, -2)), beside))
        if function is functional.scaled_dot_product_attention:
            self.backends.add(_backend(*args, **kwargs))
        return function(*args, **kwargs)


def _backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> str:
    """Returns the name of the backend that torch uses for these arguments: flash_attention, math ..."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    number = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    names = {int(backend): name.lower() for name, backend in SDPBackend.__members__.items()}
    return names.get(number, str(number))


@torch.no_grad()
def _add_noise(model: torch.nn.Module, device: torch.device, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        std = MIN_NOISE_STD if parameter.ndim < 2 else max(MIN_NOISE_STD, 0.5 * parameter.shape[-1] ** -0.5)
        noise = torch.empty(parameter.shape, dtype=torch.float32, device=device).normal_(std=std, generator=generator)
        parameter.add_(noise)
