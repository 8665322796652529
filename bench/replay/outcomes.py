"""Two runs' losses, step by step -> what the replay shows of the record."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

IDENTICAL = "identical"
ROUNDED = "equal within rounding"
REPRODUCED = "statistically reproduced"
DIFFERS = "not reproduced"
IMPOSSIBLE = "impossible here"

LOSSES = ("train_loss", "val_loss")
# The largest relative difference at the first step that differs which another order of additions explains, by the dtype
# of the activations: 2^7 units of the last place of float32, 2 of bfloat16 (assumed; it bounds a record's edit, too).
ROUNDING_FRAC = {"float32": 2.0**-17, "bfloat16": 2.0**-7}
# What such a difference may grow to by the last validation, in nats a token: ten times the spread of modded-nanogpt's
# val_loss over seeds, 0.0013 (assumed).
GROWN_NATS = 0.013
ALIKE_ROWS = 3  # so many losses that are equal again after one that differs: it was not trained so


@dataclass(frozen=True)
class Difference:
    """The first loss that is not the recorded one, bit for bit."""

    step: int
    what: str  # train_loss or val_loss
    recorded: float
    replayed: float

    @property
    def frac(self) -> float:
        """Relative to the recorded loss; infinite where one of them is not a number or missing."""
        if not (_is_number(self.recorded) and _is_number(self.replayed)):
            return math.inf
        return abs(self.replayed - self.recorded) / max(abs(self.recorded), 1e-12)


@dataclass(frozen=True)
class Outcome:
    """What a replay shows, in a word and in a sentence."""

    word: str
    why: str
    num_equal_losses: int  # before the first that differs
    num_losses: int  # recorded
    first: Difference | None = None


def of_losses(recorded: Sequence[dict], replayed: Sequence[dict], dtype: str) -> Outcome:
    """Rows of two steps.csv -> Outcome.  dtype: of the activations."""
    theirs, ours = _losses(recorded), _losses(replayed)
    differing = [key for key in theirs if _differ(theirs[key], ours.get(key))]
    added = [key for key in ours if key not in theirs]
    if not differing and not added:
        return Outcome(IDENTICAL, f"all {len(theirs)} losses are the same, bit for bit", len(theirs), len(theirs))
    if not differing:
        step, what = added[0]
        why = f"the replay has a {what} at step {step} that the record has not"
        return Outcome(DIFFERS, why, len(theirs), len(theirs))
    first = Difference(*differing[0], theirs[differing[0]], ours.get(differing[0]))
    keys = list(theirs)
    num_equal = keys.index(differing[0])
    word, why = _judged(first, differing, keys, theirs, ours, ROUNDING_FRAC.get(dtype, ROUNDING_FRAC["float32"]))
    return Outcome(word, why, num_equal, len(theirs), first)


def _judged(first, differing, keys, theirs, ours, rounding_frac):
    where = (
        f"{first.what} of step {first.step} is {_shown(first.replayed)} and was recorded as {_shown(first.recorded)}"
    )
    if first.frac > rounding_frac:
        before = "; every loss before it is the same" if keys[0] != differing[0] else ""
        return DIFFERS, f"{where}: more than rounding explains{before}"
    last_differing = keys.index(differing[-1])
    if len(keys) - 1 - last_differing >= ALIKE_ROWS:
        return DIFFERS, f"{where}, and later losses are the same again: no training does that"
    grown = abs(_last_val(theirs) - _last_val(ours))
    if not grown <= GROWN_NATS:
        return DIFFERS, f"{where}, as rounding makes it, but the last val_loss is {grown:.4f} nats away"
    return ROUNDED, f"{where}; the last val_loss is {grown:.2g} nats away"


def _losses(rows):
    """{(step, column): loss} in the order in which they were found: a step's val_loss follows its train_loss."""
    return {(row["step"], name): row[name] for row in rows for name in LOSSES if row.get(name) is not None}


def _last_val(losses):
    return next((loss for (_, name), loss in reversed(losses.items()) if name == "val_loss"), math.nan)


def _differ(a, b):
    return b is None or (a != b and not (math.isnan(a) and math.isnan(b)))


def _is_number(value):
    return value is not None and math.isfinite(value)


def _shown(loss):
    return "missing" if loss is None else repr(loss)
