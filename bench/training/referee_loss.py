"""The referee's loss: computed off the clock from the model's logits, with the referee's own cross entropy.

A model's forward() computes the loss, and a mistake or a lie there would win a race.  So logits(tokens_BT), which gets
no targets, is called for batches of the validation before the first step and of the last one.  At the end of the run it
is also called for two more validations: of tokens drawn uniformly at random, and of a held-out slice, tokens of the
validation shards beyond goal.val_tokens, which no run uses.  There logits() is called first, before forward() has seen
the targets.  bench/record/validity.py judges the numbers; docs/record.md is the guide.

Each run draws the batches that it checks from the system's random numbers, so that the model cannot foresee them and
the run's random state does not change.
Legend: B sequences, T tokens, V vocabulary, N tokens of a batch.
"""

import math
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from bench.base import private
from bench.base.metric import VAL_BPB, bits_per_byte
from bench.config import stages
from bench.data.sources import datasets
from bench.record.validity import bound_nats
from bench.training import distributed
from bench.training.causality import forked_rng
from bench.training.trainer import Trainer

T = TypeVar("T")

MAX_TOKENS = 8192  # in a pass of logits, but at least a row: a micro-batch's logits may not fit into memory
ROWS_AT_ONCE = 2048  # rows of logits that are float32 at a time: 0.4 GB if V is 50,257
COST_FRAC = 0.01  # share of the cost of the run's passes that checking the last validation's batches may take
LEAST_FRAC = 0.25  # share of the last validation's batches that are checked whatever they cost
START_FRAC = 0.125  # batches checked before the first step, as a share of those at the end
COUNTERFACTUAL_FRAC = 0.25  # batches of random tokens, and of the held-out slice, as a share of those at the end


class NoLogits(RuntimeError):
    """The model has no logits that the referee can compute a loss from."""


def nats_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Returns the nats of each target, [N] float32, computed a few thousand rows at a time."""
    rows = zip(logits_BTV.flatten(0, -2).split(ROWS_AT_ONCE), targets_BT.flatten().split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_nats(logits_NV.float(), targets_N) for logits_NV, targets_N in rows])


def _nats(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return logits_NV.logsumexp(-1) - logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)


class RefereeLoss:
    """Call at_start() before the first step, evaluate() instead of the trainer's during training, then at_end().

    If is_required, a model without usable logits ends the run; otherwise "not_checked" in at_end() says why.
    """

    def __init__(self, trainer: Trainer, is_required: bool):
        self._trainer, self._rows, self._is_required = trainer, trainer.val_rows, is_required
        self._random = random.SystemRandom()
        self._vocab_size = trainer.vocab_size
        self._first: list[torch.Tensor] = []  # the first validation's loss of each batch
        self._last: list[torch.Tensor] = []
        self._val_loss = self._val_loss_at_start = math.nan
        self._seconds = 0.0
        self._why: str | None = None
        self._at_start: tuple[list[int], list[torch.Tensor]] = ([], [])
        self.val_bpb: float | None = None  # bits per byte of the last validation; None unless it is the goal's metric
        self.val_bytes: int | None = None
        self._num_marks = 0  # number of targets that stand for no text, such as marks of documents
        if trainer.config.goal.of == VAL_BPB:
            sizes = datasets.chosen(trainer.config.data).token_bytes()
            self._bytes_V = torch.as_tensor(sizes, device=trainer.ranks.device)
            self.val_bytes, self._num_marks = self._count_bytes()

    def at_start(self) -> None:
        """Checks the logits of some batches of the first validation.  Raises NoLogits on every rank alike."""
        started_s = time.perf_counter()
        self._at_start = self._nats_of_some_batches(START_FRAC)
        self._seconds += time.perf_counter() - started_s
        if self._why and self._is_required:
            raise NoLogits(
                f"model.arch={self._trainer.arch}: its logits(tokens_BT) cannot be used ({self._why}), and the "
                "validation loss is computed from them: return the scores of the next token, [B, T, V], as forward() "
                "uses them, or use track=free, which accepts models without logits"
            )

    def evaluate(self) -> float:
        """Returns the trainer's evaluate(), and keeps its losses of each batch."""
        nats = self._trainer.evaluate()
        kept = [loss.double() for loss in self._trainer.val_nats]
        if not self._first:
            self._first, self._val_loss_at_start = kept, nats
        self._last, self._val_loss = kept, nats
        if self.val_bytes is not None:
            self.val_bpb = self._bits_per_byte(nats, self.val_bytes)
        return nats

    def state(self) -> dict[str, Any]:
        """Returns what is kept of the run's first validation, for a checkpoint."""
        return {"first": self._first, "val_loss_at_start": self._val_loss_at_start}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Takes up what an earlier segment saved; None: validates again, as other ranks had other parts of the data."""
        if state is None:
            self.evaluate()
        else:
            self._first, self._val_loss_at_start = state["first"], state["val_loss_at_start"]

    def at_end(self, num_steps: int) -> dict[str, Any]:
        """Returns run.json["referee"]["loss"].  The model must be in the state of the last validation."""
        started_s, hardware = time.perf_counter(), self._trainer.config.hardware
        checked: list[dict[str, Any]] = []
        random_tokens: dict[str, Any] | None = None
        held_out: dict[str, Any] = {}
        if self._why is None:
            checked = [self._compared(0, self._first, *self._at_start)]
            checked += [self._compared(num_steps, self._last, *self._nats_of_some_batches(1.0))]
        if self._why is None:
            random_tokens, held_out = self._check_random_tokens(), self._check_held_out()
        last = _gathered([loss.item() for loss in self._last])
        if self._why is not None:
            checked, random_tokens, held_out = [], None, {"not_checked": self._why}
        self._seconds += time.perf_counter() - started_s
        return {
            **({"not_checked": self._why} if self._why else {}),
            "vocab_size": self._vocab_size,
            "dtype": hardware.dtype,
            "is_compiled": bool(hardware.compile),
            "checked": checked,
            "val_loss_at_start": _finite(self._val_loss_at_start),
            "val_loss": _finite(self._val_loss),
            "validation": {"num_batches": len(last), "sd_nats": _finite(_sd(last))},  # the spread of other slices
            "random_tokens": random_tokens,
            "held_out": held_out,
            "seconds": self._seconds,
        }

    # ---- bits per byte

    def _count_bytes(self) -> tuple[int, int]:
        """Returns (bytes of the validation's targets, number of targets that stand for none), over all ranks."""
        counts = torch.zeros(2, dtype=torch.int64, device=self._bytes_V.device)
        for _, targets_BT in self._rows.at(self._rows.places):
            sizes_BT = self._bytes_V[targets_BT]
            counts += torch.stack([sizes_BT.sum(), (sizes_BT == 0).sum()])
        num_bytes, num_marks = distributed.all_sum(counts).tolist()
        return num_bytes, num_marks

    def _bits_per_byte(self, val_loss: float, num_bytes: int) -> float:
        """Returns it from forward()'s loss if every target stands for text, else from the logits of those that do."""
        if not self._num_marks:
            return bits_per_byte(val_loss * self._trainer.config.goal.val_tokens, num_bytes)

        def passes() -> torch.Tensor:
            nats = torch.zeros((), dtype=torch.float64, device=self._bytes_V.device)
            with self._trainer.validating():
                for tokens_BT, targets_BT in self._rows.at(self._rows.places):
                    nats_N = self._from_logits(tokens_BT, targets_BT).double()
                    nats += nats_N[self._bytes_V[targets_BT.flatten()] > 0].sum()
            return nats

        nats = self._guarded(passes)
        if nats is None:
            raise NoLogits(
                f"goal.metric=val_bpb: model.arch={self._trainer.arch} has no usable logits(tokens_BT) ({self._why}), "
                "without which marks of documents cannot be left out of it: give it some, or use goal.metric=val_loss"
            )
        return bits_per_byte(distributed.all_sum(nats).item(), num_bytes)

    # ---- the validations of the run

    def _nats_of_some_batches(self, frac: float) -> tuple[list[int], list[torch.Tensor]]:
        """Returns (indices of batches drawn from a validation, mean nats of each by its logits, float64)."""
        places = self._rows.places
        chosen = sorted(self._random.sample(range(len(places)), self._num_batches(len(places), frac)))

        def passes() -> list[torch.Tensor]:
            with self._trainer.validating():
                batches = self._rows.at([places[number] for number in chosen])
                return [self._from_logits(*batch).double().mean() for batch in batches]

        return chosen, self._guarded(passes) or []

    def _compared(
        self, step: int, claimed: list[torch.Tensor], chosen: list[int], nats: list[torch.Tensor]
    ) -> dict[str, Any]:
        """Returns the chosen batches' mean loss as claimed by forward(), and as computed from the logits."""
        hardware = self._trainer.config.hardware
        pairs = _gathered([(claimed[number].item(), mean.item()) for number, mean in zip(chosen, nats)])
        num_batches = max(1, len(pairs))
        return {
            "step": step,
            "num_tokens": len(pairs) * math.prod(self._rows.shape_BT),
            "claimed_nats": _finite(sum(claimed_nats for claimed_nats, _ in pairs) / num_batches),
            "from_logits_nats": _finite(sum(own_nats for _, own_nats in pairs) / num_batches),
            "bound_nats": bound_nats(str(hardware.dtype), bool(hardware.compile)),
        }

    def _num_batches(self, num_batches: int, frac: float) -> int:
        """Returns how many batches this rank checks, at least one.  A pass with gradients costs three without."""
        config = self._trainer.config
        num_validations = 1 + math.ceil(config.goal.num_steps / config.goal.val_every_steps)
        whole = 3 * stages.num_tokens(config) + num_validations * config.goal.val_tokens
        share = min(1.0, max(LEAST_FRAC, COST_FRAC * whole / config.goal.val_tokens))
        return max(1, math.floor(frac * share * num_batches))

    # ---- tokens that no run is given

    def _check_random_tokens(self) -> dict[str, Any]:
        """Checks tokens drawn uniformly from the data's vocabulary: no causal model has less than ln V nats."""
        shape = self._rows.shape_BT
        generator = torch.Generator().manual_seed(self._random.getrandbits(63))
        batches = []
        for _ in range(self._num_counterfactual()):
            flat_N = torch.randint(self._vocab_size, (shape[0] * shape[1] + 1,), generator=generator)
            tokens_BT, targets_BT = flat_N[:-1].view(shape), flat_N[1:].view(shape)
            batches.append((tokens_BT.to(self._trainer.ranks.device), targets_BT.to(self._trainer.ranks.device)))
        return self._examined(batches, asks_again=True)

    def _check_held_out(self) -> dict[str, Any]:
        """Checks tokens of the validation shards beyond goal.val_tokens, at random places."""
        val_tokens, num_tokens = self._trainer.config.goal.val_tokens, self._rows.num_tokens
        batch_tokens = math.prod(self._rows.shape_BT)
        last = num_tokens - 1 - batch_tokens
        if last < val_tokens:
            held = f"the val shards hold {num_tokens} tokens"
            return {"not_checked": f"{held}, and goal.val_tokens={val_tokens} leaves too few for a batch"}
        places = [self._random.randint(val_tokens, last) for _ in range(self._num_counterfactual())]
        return self._examined(self._rows.at(places))

    def _num_counterfactual(self) -> int:
        return self._num_batches(len(self._rows.places), COUNTERFACTUAL_FRAC)

    def _examined(
        self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], asks_again: bool = False
    ) -> dict[str, Any]:
        """Calls logits(), then forward(), for new tokens; with asks_again then logits() again for the first batch."""

        def examine() -> tuple[list[tuple[float, float, float]], float]:
            """Returns ([(claimed, mean, mean square) of each batch's nats], how far the first batch's mean moved)."""
            rows: list[tuple[float, float, float]] = []
            moved_nats = 0.0
            with self._trainer.validating() as forward:
                for tokens_BT, targets_BT in batches:
                    nats_N = self._from_logits(tokens_BT, targets_BT).double()
                    claimed = forward(tokens_BT, targets_BT).double()
                    if not rows and asks_again:
                        again_N = self._from_logits(tokens_BT, targets_BT).double()
                        moved_nats = (again_N.mean() - nats_N.mean()).abs().item()
                    rows.append((claimed.item(), nats_N.mean().item(), nats_N.square().mean().item()))
            return rows, moved_nats

        own_rows, moved_nats = self._guarded(examine) or ([], 0.0)
        rows, moved = _gathered(own_rows), _gathered([moved_nats])
        num_batches, num_tokens = max(1, len(rows)), len(rows) * math.prod(self._rows.shape_BT)
        claimed, nats, squares = (sum(row[column] for row in rows) / num_batches for column in range(3))
        return {
            "num_tokens": num_tokens,
            "num_batches": num_batches,
            "claimed_nats": _finite(claimed),
            "from_logits_nats": _finite(nats),
            "se_nats": _finite(math.sqrt(max(0.0, squares - nats * nats) / max(1, num_tokens - 1))),
            "sd_of_batches_nats": _finite(_sd([mean for _, mean, _ in rows])),
            "moved_nats": _finite(sum(moved) / len(moved)),
        }

    # ---- one pass

    def _from_logits(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Returns the nats of each target, [N].  Raises NoLogits."""
        logits = getattr(self._trainer.model, "logits", None)
        if not callable(logits):
            raise NoLogits("it has none")
        num_rows = max(1, MAX_TOKENS // tokens_BT.shape[1])
        nats = []
        for tokens, targets in zip(tokens_BT.split(num_rows), targets_BT.split(num_rows), strict=True):
            logits_BTV = logits(tokens)
            shape = tuple(logits_BTV.shape) if isinstance(logits_BTV, torch.Tensor) else type(logits_BTV).__name__
            if not isinstance(shape, tuple) or shape[:-1] != tuple(tokens.shape) or shape[-1] < self._vocab_size:
                needed = f"tokens of {tuple(tokens.shape)} and a vocabulary of {self._vocab_size}"
                raise NoLogits(f"they are {shape} for {needed}")
            nats.append(nats_of(logits_BTV, targets))
        return torch.cat(nats)

    def _guarded(self, passes: Callable[[], T]) -> T | None:
        """Returns passes(), run without gradients and with the random state restored; None on every rank if one fails.

        All ranks must agree, because their losses are added up afterwards.
        """
        value, why = None, None
        try:
            with torch.no_grad(), forked_rng(self._trainer.ranks.device):
                value = passes()
        except Exception as error:  # raised by the user's code, or out of memory
            said = f"{type(error).__name__}: " * (not isinstance(error, NoLogits)) + str(error)
            why = private.excerpt(said, 300)
        reasons = [reason for reason in distributed.gather(why) if reason]
        self._why = self._why or (reasons[0] if reasons else None)
        return None if reasons else value


def _gathered(own: list[T]) -> list[T]:
    return [item for items in distributed.gather(own) for item in items]


def _sd(values: list[float]) -> float:
    """Returns the standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / (len(values) - 1))


def _finite(value: float) -> float | None:
    """Returns the value, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None
