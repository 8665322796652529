"""A record's losses and those of its replays, step by step -> what the replays show of the record.

1. Losses that are all equal, bit for bit, are `identical`.
2. Where machine and software are those of the record, a run that gives the same losses twice gives the record's too: if
   two replays agree with each other and not with the record, it is `not reproduced`.  If they disagree with each other,
   the run is not deterministic here, and nothing follows: `undecided`.
3. Elsewhere additions happen in another order.  Replays at other instruction sets measure how far that moves the losses
   of this run (rounding.py).  Near that at every step: `equal within rounding`.  Far beyond it: `not reproduced`.
4. What lies between, and where rounding could not be measured (a GPU has no other instruction set) or another torch may
   do more than round, is `undecided`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.plans.replay import rounding
from bench.plans.replay.rounding import Key

IDENTICAL = "identical"
ROUNDED = "equal within rounding"
REPRODUCED = "statistically reproduced"
DIFFERS = "not reproduced"
UNDECIDED = "undecided"
IMPOSSIBLE = "impossible here"

LOSSES = ("train_loss", "val_loss")
TWIN, PERTURBED = "twin", "perturbed"  # what a further replay should be: as the first, or at another instruction set
FRESH_SEEDS = "./run.sh replay --times 3 compares distributions instead"


@dataclass(frozen=True)
class Outcome:
    """What the replays show, in a word and in a sentence."""

    word: str
    why: str
    num_equal_losses: int  # before the first that differs
    num_losses: int  # recorded
    share: float | None = None  # the largest difference, in multiples of what rounding does to this run
    needs: str | None = None  # TWIN or PERTURBED: the replay that would say more


@dataclass(frozen=True)
class Conditions:
    """What the word depends on beside the losses."""

    is_same: bool  # machine and software are known to be the record's, in all that decides bits
    dtype: str  # of the activations
    is_cpu: bool  # rounding can be measured by other instruction sets
    is_script: bool = False  # a user's script prints its losses, with some digits
    is_other_software: bool = False  # another torch, or other libraries, whose kernels no replay here has run

    @property
    def may_refuse(self) -> bool:
        """Whether what rounding does here is what it did there."""
        return self.is_cpu and not self.is_other_software


def of_losses(
    recorded: Sequence[dict],
    replayed: Sequence[dict],
    conditions: Conditions,
    twins: Sequence[Sequence[dict]] = (),
    perturbed: Sequence[Sequence[dict]] = (),
) -> Outcome:
    """Rows of the record's steps.csv and of its replay's -> Outcome.  twins, perturbed: rows of further replays."""
    theirs, ours = _losses(recorded), _losses(replayed)
    differing = _differing(theirs, ours)
    if not differing:
        return Outcome(IDENTICAL, f"all {len(theirs)} losses are the same, bit for bit", len(theirs), len(theirs))
    keys = list(theirs)
    num_equal = keys.index(differing[0]) if differing[0] in theirs else len(theirs)
    where = _where(differing[0], theirs, ours)
    more = [_losses(rows) for rows in (*twins, *perturbed)]
    if conditions.is_same:
        word, why, needs = _on_the_same_machine(where, ours, more[: len(twins)])
        return Outcome(word, why, num_equal, len(theirs), needs=needs)
    word, why, share, needs = _elsewhere(where, theirs, [ours, *more], conditions, len(perturbed))
    return Outcome(word, why, num_equal, len(theirs), share, needs)


def _on_the_same_machine(where, ours, twins):
    """-> (word, sentence, needs)."""
    same = f"{where}; machine and software match the record in everything that decides bits"
    if not twins:
        return UNDECIDED, f"{same}, and only a second replay can show whether this run is deterministic", TWIN
    if apart := _differing(ours, twins[0]):
        step, what = apart[0]
        values = f"{_shown(ours.get(apart[0]))} and {_shown(twins[0].get(apart[0]))}"
        why = f"two replays here also differ from each other, in {what} of step {step}: {values}"
        return UNDECIDED, f"{where}; {why}: the run is not deterministic on this machine; {FRESH_SEEDS}", None
    return DIFFERS, f"{same}, and two replays here agree with each other: only identical losses hold", None


def _elsewhere(where, theirs, replays, conditions, num_perturbed):
    """replays: losses of each, the first as the record was.  -> (word, sentence, share, needs)."""
    ours = replays[0]
    last = _last_val(theirs) - _last_val(ours)
    end = "" if math.isnan(last) else f"; the last val_loss is {abs(last):.2g} nats away"
    pairs = [rounding.between(one, other) for one, other in combinations(replays, 2)]
    if not any(any(pair.values()) for pair in pairs):
        left = (PERTURBED, len(rounding.perturbations(conditions.dtype))) if conditions.is_cpu else (TWIN, 1)
        needs = left[0] if len(replays) <= left[1] else None
        why = "the effect of rounding on this run could not be measured here: all replays gave the same losses"
        return UNDECIDED, f"{where}{end}; {why}; {FRESH_SEEDS}", None, needs
    strange = [key for key in _differing(theirs, ours) if not _are_numbers(theirs.get(key), ours.get(key))]
    if strange:
        agree = len({_are_numbers(losses.get(strange[0])) for losses in replays}) == 1
        is_refused = agree and conditions.may_refuse
        why = "rounding cannot explain it" if agree else "the replays do not agree on it either"
        return DIFFERS if is_refused else UNDECIDED, f"{_where(strange[0], theirs, ours)}: {why}", None, None
    moved = rounding.moved(rounding.between(theirs, ours), pairs, _least(theirs, conditions))
    worst = max(moved, key=lambda one: one.share)
    if worst.share <= rounding.HOLDS and (grown := rounding.grown(pairs)) > rounding.MOST_FRAC:
        why = (
            f"rounding alone moves the losses of this run by {100 * grown:.2g} %, too far for one run to check another"
        )
        return UNDECIDED, f"{where}{end}; {why}; {FRESH_SEEDS}", worst.share, None
    if worst.share <= rounding.HOLDS:
        words = f"at most {worst.share:.2g} times the effect of rounding on this run (up to {rounding.HOLDS:g} holds)"
        return ROUNDED, f"{where}{end}; {words}", worst.share, None
    is_refused = conditions.may_refuse and worst.share > rounding.REFUSED
    limit = rounding.REFUSED if is_refused else rounding.HOLDS
    first = min((one for one in moved if one.share > limit), key=lambda one: one.step)
    what = f"{_moved(first, theirs, ours)}, {first.share:.3g} times the effect of rounding on this run"
    needs = PERTURBED if conditions.is_cpu and num_perturbed < len(rounding.perturbations(conditions.dtype)) else None
    if is_refused:
        is_alone = first.what == "val_loss" and _is_steady(theirs, ours, first.step)
        room = "; every training loss before it is the same" if is_alone else ""
        return DIFFERS, f"{what} (more than {rounding.REFUSED:g} is refused){room}{end}", worst.share, needs
    between = f"up to {rounding.HOLDS:g} holds" + f", more than {rounding.REFUSED:g} is refused" * conditions.may_refuse
    return UNDECIDED, f"{what} ({between}){end}; {FRESH_SEEDS}", worst.share, needs


def _least(theirs: Mapping[Key, float], conditions: Conditions) -> dict[str, float]:
    """Of each kind of loss, what rounding does at the least; a script's last digit may always be another."""
    least = dict(rounding.first_frac(conditions.dtype))
    if conditions.is_script:
        for what in LOSSES:
            losses = [loss for (_, kind), loss in theirs.items() if kind == what and loss]
            digits = max((len(repr(loss).partition(".")[2]) for loss in losses), default=0)
            least[what] = max([least[what], *(10.0**-digits / abs(loss) for loss in losses)])
    return least


def _moved(one, theirs, ours):
    if one.what == "train_loss":
        return f"the training losses up to step {one.step} differ"
    return _where((one.step, one.what), theirs, ours)


def _is_steady(theirs, ours, step):
    """Whether every training loss up to this step is the same in both."""
    return not any(key[1] == "train_loss" and key[0] <= step for key in _differing(theirs, ours))


def _differing(theirs, ours):
    """The keys of both, in order, whose losses are not the same bits; those that only one has come last."""
    common = [key for key in theirs if _differ(theirs[key], ours.get(key))]
    return common + [key for key in ours if key not in theirs]


def _losses(rows):
    """{(step, column): loss} in the order in which they were found: a step's val_loss follows its train_loss."""
    return {(row["step"], name): row[name] for row in rows for name in LOSSES if row.get(name) is not None}


def _last_val(losses):
    return next((loss for (_, name), loss in reversed(losses.items()) if name == "val_loss"), math.nan)


def _differ(a, b):
    return b is None or (a != b and not (math.isnan(a) and math.isnan(b)))


def _are_numbers(*values):
    return all(value is not None and math.isfinite(value) for value in values)


def _where(key, theirs, ours):
    step, what = key
    if key not in theirs:
        return f"the replay has a {what} at step {step} that the record has not"
    return f"{what} of step {step} is {_shown(ours.get(key))} and was recorded as {_shown(theirs[key])}"


def _shown(loss):
    return "missing" if loss is None else repr(loss)
