"""The loss as the referee computes it: from the model's logits, in a cross entropy of its own, off the clock.

A model's forward() says what its loss is, and a mistake or a lie there would win a race.  So logits(tokens_BT), which
is given no target, is asked for the tokens of the validation before the first step and of the last one, and at the end
of the run for two validations more: of tokens drawn uniformly at random, and of a held-out slice, tokens of the
validation shards beyond goal.val_tokens, which no run is given.  There logits() is asked first, so that forward() has
not yet seen the targets.  bench/record/validity.py says what follows from the numbers; docs/HONESTY.md is the guide.

Which batches are asked for is drawn anew in every run, by the system's random numbers: the model cannot foresee it, and
the run's own random state is not touched.
Legend: B sequences, T tokens, V vocabulary, N tokens of a batch.
"""

import math
import random
import time
from collections.abc import Callable, Sequence

import torch

from bench.config import stages
from bench.record.validity import bound_nats
from bench.training import distributed
from bench.training.trainer import Trainer

MAX_TOKENS = 8192  # of a pass of logits, or one row: a fused loss never holds those of a whole micro-batch
ROWS_AT_ONCE = 2048  # of logits that are float32 at one time: 0.4 GB where V is 50,257
COST_FRAC = 0.01  # of the run's own passes: so many batches of the last validation are asked for, if they are not all
LEAST_FRAC = 0.25  # of the last validation's batches, whatever they cost
START_FRAC = 0.125  # before the first step, of as many as at the end
COUNTERFACTUAL_FRAC = 0.25  # of random tokens, and of the held-out slice: of as many as at the end


class NoLogits(RuntimeError):
    """The model has no logits that the referee can compute a loss from."""


def nats_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """[N] nats of each target, float32, a few thousand rows at a time."""
    rows = zip(logits_BTV.flatten(0, -2).split(ROWS_AT_ONCE), targets_BT.flatten().split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_nats(logits_NV.float(), targets_N) for logits_NV, targets_N in rows])


def _nats(logits_NV, targets_N):
    return logits_NV.logsumexp(-1) - logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)


class RefereeLoss:
    """at_start() before the first step, evaluate() in the place of the trainer's while it trains, at_end() after it.

    is_required: the run ends where the model has no usable logits; elsewhere facts()["not_checked"] says so.
    """

    def __init__(self, trainer: Trainer, is_required: bool):
        self._trainer, self._rows, self._is_required = trainer, trainer.val_rows, is_required
        self._random = random.SystemRandom()
        self._vocab_size = trainer.config.data.vocab_size
        self._first: list[torch.Tensor] = []  # of the first validation, each batch's loss
        self._last: list[torch.Tensor] = []
        self._val_loss = self._val_loss_at_start = math.nan
        self._seconds = 0.0
        self._why: str | None = None
        self._at_start: tuple[list[int], list[torch.Tensor]] = ([], [])

    def at_start(self) -> None:
        """Ask for the logits of some batches of the first validation.  Raises NoLogits on every rank alike."""
        started_s = time.perf_counter()
        places = self._rows.places
        chosen = sorted(self._random.sample(range(len(places)), self._num_batches(len(places), START_FRAC)))
        self._at_start = chosen, self._guarded(lambda: self._nats_of_batches([places[one] for one in chosen]))
        self._seconds += time.perf_counter() - started_s
        if self._why and self._is_required:
            raise NoLogits(
                f"model.arch={self._trainer.arch}: its logits(tokens_BT) cannot be used ({self._why}), and the "
                "validation loss is computed from them: return the scores of the next token, [B, T, V], as forward() "
                "uses them, or use track=free, which accepts models without logits"
            )

    def evaluate(self) -> float:
        """The trainer's, whose losses of each batch are kept."""
        nats = self._trainer.evaluate()
        kept = [loss.double() for loss in self._trainer.val_nats]
        if not self._first:
            self._first, self._val_loss_at_start = kept, nats
        self._last, self._val_loss = kept, nats
        return nats

    def at_end(self, num_steps: int) -> dict:
        """run.json["referee"]["loss"]; the model is in the state of the last validation."""
        started_s, hardware = time.perf_counter(), self._trainer.config.hardware
        checked, random_tokens, held_out = [], None, {"not_checked": self._why}
        if self._why is None:
            checked = [self._compared(0, self._first, *self._at_start), self._compared_at_end(num_steps)]
        if self._why is None:
            random_tokens, held_out = self._of_random_tokens(), self._of_held_out()
        self._seconds += time.perf_counter() - started_s
        return {
            **({"not_checked": self._why} if self._why else {}),
            "vocab_size": self._vocab_size,
            "dtype": hardware.dtype,
            "is_compiled": bool(hardware.compile),
            "checked": checked if self._why is None else [],
            "val_loss_at_start": _finite(self._val_loss_at_start),
            "val_loss": _finite(self._val_loss),
            "validation": self._spread(self._last),
            "random_tokens": random_tokens if self._why is None else None,
            "held_out": held_out if self._why is None else {"not_checked": self._why},
            "seconds": self._seconds,
        }

    # ---- the validations of the run

    def _compared_at_end(self, num_steps):
        places = self._rows.places
        chosen = sorted(self._random.sample(range(len(places)), self._num_batches(len(places), 1.0)))
        nats = self._guarded(lambda: self._nats_of_batches([places[one] for one in chosen]))
        return self._compared(num_steps, self._last, chosen, nats)

    def _compared(self, step, claimed, chosen, nats):
        """What forward() said of the chosen batches, and what follows from the logits."""
        hardware = self._trainer.config.hardware
        claimed = [claimed[one] for one in chosen[: len(nats)]]
        sums = [torch.stack(batches).sum() for batches in (claimed, nats)] if nats else [0, 0]
        num_batches, claimed_nats, own_nats = self._summed(len(nats), *sums)
        return {
            "step": step,
            "num_tokens": round(num_batches) * math.prod(self._rows.shape_BT),
            "claimed_nats": _finite(claimed_nats / max(1, num_batches)),
            "from_logits_nats": _finite(own_nats / max(1, num_batches)),
            "bound_nats": bound_nats(hardware.dtype, bool(hardware.compile)),
        }

    def _num_batches(self, num_batches, frac):
        """Of this rank, at least one.  A pass and its gradients cost as much as three without."""
        config = self._trainer.config
        num_validations = 1 + math.ceil(config.goal.num_steps / config.goal.val_every_steps)
        whole = 3 * stages.num_tokens(config) + num_validations * config.goal.val_tokens
        share = min(1.0, max(LEAST_FRAC, COST_FRAC * whole / config.goal.val_tokens))
        return max(1, math.floor(frac * share * num_batches))

    def _spread(self, claimed):
        """Of the last validation: how much the losses of its batches differ, for what another slice may have."""
        nats = torch.stack(claimed) if claimed else torch.zeros(0, dtype=torch.float64)
        num, total, squares = self._summed(len(nats), nats.sum(), nats.square().sum())
        return {"num_batches": round(num), "sd_nats": _finite(_sd(num, total, squares))}

    # ---- tokens that no run is given

    def _of_random_tokens(self):
        """Uniform over the data's vocabulary: no causal model has less than ln V."""
        shape = self._rows.shape_BT
        generator = torch.Generator().manual_seed(self._random.getrandbits(63))
        batches = []
        for _ in range(self._num_counterfactual()):
            flat_N = torch.randint(self._vocab_size, (shape[0] * shape[1] + 1,), generator=generator)
            batches.append(tuple(part.view(shape).to(self._trainer.ranks.device) for part in (flat_N[:-1], flat_N[1:])))
        return self._examined(batches, asks_again=True)

    def _of_held_out(self):
        """Tokens of the validation shards that lie beyond goal.val_tokens, at places drawn at random."""
        val_tokens, num_tokens = self._trainer.config.goal.val_tokens, self._rows.num_tokens
        batch_tokens = math.prod(self._rows.shape_BT)
        last = num_tokens - 1 - batch_tokens
        if last < val_tokens:
            held = f"the val shards hold {num_tokens} tokens"
            return {"not_checked": f"{held}, and goal.val_tokens={val_tokens} leaves too few for a batch"}
        places = [self._random.randint(val_tokens, last) for _ in range(self._num_counterfactual())]
        return self._examined(self._rows.at(places))

    def _num_counterfactual(self):
        return self._num_batches(len(self._rows.places), COUNTERFACTUAL_FRAC)

    def _examined(self, batches, asks_again=False):
        """Logits, then forward(), of tokens that neither has seen before; asks_again: of the first the logits again."""

        def examine():
            rows, moved = [], torch.zeros((), dtype=torch.float64)
            with self._trainer.validating() as forward:
                for tokens_BT, targets_BT in batches:
                    nats_N = self._from_logits(tokens_BT, targets_BT)
                    claimed = forward(tokens_BT, targets_BT).double()
                    if not rows and asks_again:
                        again_N = self._from_logits(tokens_BT, targets_BT)
                        moved = (again_N.double().mean() - nats_N.double().mean()).abs()
                    rows.append((claimed, nats_N.double()))
            return rows, moved

        rows, moved = self._guarded(examine) or ([], 0.0)
        claimed = torch.stack([one for one, _ in rows]).sum() if rows else 0.0
        nats_N = torch.cat([one for _, one in rows]) if rows else torch.zeros(0, dtype=torch.float64)
        of_batches = torch.stack([one.mean() for _, one in rows]) if rows else torch.zeros(0, dtype=torch.float64)
        sums = (claimed, nats_N.sum(), nats_N.square().sum(), of_batches.sum(), of_batches.square().sum(), moved)
        num, num_tokens, claimed, nats, squares, total, squares_of_batches, moved = self._summed(
            len(rows), len(nats_N), *sums
        )
        num, num_tokens = max(1, num), max(1, num_tokens)
        return {
            "num_tokens": round(num_tokens),
            "num_batches": round(num),
            "claimed_nats": _finite(claimed / num),
            "from_logits_nats": _finite(nats / num_tokens),
            "se_nats": _finite(_sd(num_tokens, nats, squares) / num_tokens**0.5),
            "sd_of_batches_nats": _finite(_sd(num, total, squares_of_batches)),
            "moved_nats": _finite(moved / self._trainer.ranks.world_size),
        }

    # ---- one pass

    def _nats_of_batches(self, places) -> list[torch.Tensor]:
        """The mean of each batch, float64."""
        with self._trainer.validating():
            return [self._from_logits(*batch).double().mean() for batch in self._rows.at(places)]

    def _from_logits(self, tokens_BT, targets_BT):
        logits = getattr(self._trainer.model, "logits", None)
        if not callable(logits):
            raise NoLogits("it has none")
        num_rows = max(1, MAX_TOKENS // tokens_BT.shape[1])
        parts = zip(tokens_BT.split(num_rows), targets_BT.split(num_rows), strict=True)
        return torch.cat([self._nats_of_rows(logits, *part) for part in parts])

    def _nats_of_rows(self, logits, tokens_BT, targets_BT):
        logits_BTV = logits(tokens_BT)
        shape = tuple(logits_BTV.shape) if isinstance(logits_BTV, torch.Tensor) else type(logits_BTV).__name__
        if not isinstance(shape, tuple) or shape[:-1] != tuple(tokens_BT.shape) or shape[-1] < self._vocab_size:
            raise NoLogits(
                f"they are {shape} for tokens of {tuple(tokens_BT.shape)} and a vocabulary of {self._vocab_size}"
            )
        return nats_of(logits_BTV, targets_BT)

    def _guarded(self, passes: Callable):
        """passes(), without gradients and leaving the random state alone; [] on every rank where one rank's fails.

        Losses of other ranks are added up afterwards: none may be missing from that.
        """
        device = self._trainer.ranks.device
        devices = [device] if device.type == "cuda" else []
        answers, why = [], None
        try:
            with torch.no_grad(), torch.random.fork_rng(devices, enabled=True):
                answers = passes()
        except Exception as error:  # of the user's own code, or memory
            why = str(error) if isinstance(error, NoLogits) else f"{type(error).__name__}: {str(error)[:200]}"
        everyone = [one for one in distributed.gather(why) if one]
        self._why = self._why or (everyone[0] if everyone else None)
        return [] if everyone else answers

    def _summed(self, *values) -> Sequence[float]:
        """Sums over all ranks."""
        tensor = torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu() for value in values])
        return distributed.all_sum(tensor.to(self._trainer.ranks.device)).tolist()


def _sd(num, total, squares):
    """Standard deviation of num values by their sum and sum of squares; 0 of fewer than two."""
    return math.sqrt(max(0.0, squares - total**2 / num) / (num - 1)) if num > 1 else 0.0


def _finite(value):
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None
