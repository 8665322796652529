"""Compares a record's losses with those of its replays, step by step, and says what the replays show of the record.

1. Losses that are all equal, bit for bit, are `identical`.
2. If machine and software are those of the record, a run that gives the same losses twice gives the record's too: if
   two replays agree with each other and not with the record, it is `not reproduced`.  If they disagree with each other,
   the run is not deterministic here, and nothing follows: `undecided`.
3. Elsewhere additions happen in another order.  Replays at other instruction sets measure how far that moves the losses
   of this run (below).  Near that at every step: `equal within rounding`.  Far beyond it: `not reproduced`.
4. Differences between the two, and those where rounding could not be measured (a GPU has no other instruction set) or
   another torch may do more than round, are `undecided`.

A difference in the last place grows with the training, and how fast depends on the run: over 120 steps of cpu_nano,
honest pairs of two instruction sets were 1e-6 apart with one seed and 1e-4 with the next, 1e-3 with Muon, and 0.2 with
five times the learning rate. So no table of bounds can be right for all runs. Only its beginning can be tabulated:
rounding.json has, for each dtype, the largest relative difference of honest pairs in the losses of steps 0 and 1,
before any update. The rest is measured: replays of the record's own seed, one as the record was and others at lower
instruction sets, are honest pairs of the same run. Their largest difference, never less than that beginning, is the
effect of rounding: of training losses up to each step, of a validation at it.

Compared are the root mean square of the differences of training losses over windows of steps that double, and each
validation. tests/benchmarks rounding FOLDER makes rounding.json again and shows what is detected and what is not.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypedDict

from bench.base.reading import json_file

IDENTICAL = "identical"
ROUNDED = "equal within rounding"
REPRODUCED = "statistically reproduced"
DIFFERS = "not reproduced"
UNDECIDED = "undecided"
IMPOSSIBLE: Final = "impossible here"
LOSSES = ("train_loss", "val_loss")
TWIN = "twin"  # a further replay that runs as the first did
PERTURBED = "perturbed"  # a further replay at another instruction set
FRESH_SEEDS = "./run.sh replay --times 3 compares distributions instead"
ROUNDING_FILE = Path(__file__).with_name("rounding.json")
HOLDS_SHARE = 3.0  # times the effect of rounding: up to it a difference is explained by rounding
REFUSED_SHARE = 10.0  # above it a difference is not; between the two the outcome is undecided
MOST_FRAC = 0.02  # a run that rounding moves further is not certified by it: honest runs of cpu_nano reach 0.008
# A validation of many batches moves less than single losses: for honest pairs by half their window's root mean square.
VALIDATED = 0.5
# Variables of the replays that measure rounding, by the dtype of activations: at the lowest level of oneDNN
# bfloat16 would be emulated, ten times as slowly.  They have no effect on processors other than x86.
INSTRUCTION_SETS = {
    "float32": (
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    "bfloat16": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, {"ATEN_CPU_CAPABILITY": "default"}),
}
Key = tuple[int, str]  # (step, train_loss or val_loss)
Losses = Mapping[Key, float]  # in order of steps
Fracs = Mapping[Key, float]  # differences relative to the loss, in order


@dataclass(frozen=True)
class Outcome:
    """The outcome of the replays in a word and in a sentence."""

    word: str
    why: str
    num_equal_losses: int | None = None  # before the first that differs; None for fresh seeds
    num_losses: int | None = None  # number of recorded losses
    share: float | None = None  # the largest difference, in multiples of rounding's effect on this run
    needs: str | None = None  # TWIN or PERTURBED: the replay that would say more
    facts: dict[str, Any] = field(default_factory=dict)  # for fresh seeds: the numbers behind the word


@dataclass(frozen=True)
class Conditions:
    """The conditions, besides the losses, on which the outcome depends."""

    is_same: bool  # whether machine and software are known to be the record's in all that decides bits
    dtype: str  # dtype of the activations
    is_cpu: bool  # whether rounding can be measured by other instruction sets
    is_script: bool = False  # whether a script printed the losses, with limited digits
    is_other_software: bool = False  # whether torch or libraries differ: no replay here ran the record's kernels

    @property
    def may_refuse(self) -> bool:
        """Whether rounding has the same effect here as where the record was made."""
        return self.is_cpu and not self.is_other_software


def from_losses(
    recorded: Sequence[Mapping[str, Any]],
    replayed: Sequence[Mapping[str, Any]],
    conditions: Conditions,
    twins: Sequence[Sequence[Mapping[str, Any]]] = (),
    perturbed: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> Outcome:
    """Returns the outcome of rows of the record's and its replay's steps.csv. twins, perturbed: of further replays."""
    theirs, ours = _losses(recorded), _losses(replayed)
    differing = _differing(theirs, ours)
    if not differing:
        return Outcome(IDENTICAL, f"all {len(theirs)} losses are the same, bit for bit", len(theirs), len(theirs))
    others, where = [_losses(rows) for rows in (*twins, *perturbed)], _where(differing[0], theirs, ours)
    if conditions.is_same:
        outcome = _on_the_same_machine(where, ours, others[: len(twins)])
    else:
        outcome = _elsewhere(where, theirs, [ours, *others], conditions, len(perturbed))
    num_equal = list(theirs).index(differing[0]) if differing[0] in theirs else len(theirs)
    return replace(outcome, num_equal_losses=num_equal, num_losses=len(theirs))


def _on_the_same_machine(where: str, ours: Losses, twins: Sequence[Losses]) -> Outcome:
    same = f"{where}; machine and software match the record in everything that decides bits"
    if not twins:
        why = f"{same}, and only a second replay can show whether this run is deterministic"
        return Outcome(UNDECIDED, why, needs=TWIN)
    if apart := _differing(ours, twins[0]):
        step, kind = apart[0]
        values = f"{_shown(ours.get(apart[0]))} and {_shown(twins[0].get(apart[0]))}"
        why = f"two replays here also differ from each other, in {kind} of step {step}: {values}"
        return Outcome(UNDECIDED, f"{where}; {why}: the run is not deterministic on this machine; {FRESH_SEEDS}")
    return Outcome(DIFFERS, f"{same}, and two replays here agree with each other: only identical losses hold")


def _elsewhere(
    where: str, theirs: Losses, replays: Sequence[Losses], conditions: Conditions, num_perturbed: int
) -> Outcome:
    """Returns the outcome on another machine. replays: losses of each, the first of one that ran as the record did."""
    ours = replays[0]
    lasts = [[loss for (_, kind), loss in losses.items() if kind == "val_loss"][-1:] for losses in (theirs, ours)]
    end = ""
    if all(lasts) and not math.isnan(lasts[0][0] - lasts[1][0]):
        end = f"; the last val_loss is {abs(lasts[0][0] - lasts[1][0]):.2g} nats away"
    pairs = list(itertools.starmap(fracs_between, itertools.combinations(replays, 2)))
    if not any(any(pair.values()) for pair in pairs):
        kind, most = (PERTURBED, len(perturbations(conditions.dtype))) if conditions.is_cpu else (TWIN, 1)
        why = "the effect of rounding on this run could not be measured here: all replays gave the same losses"
        needs = kind if len(replays) <= most else None
        return Outcome(UNDECIDED, f"{where}{end}; {why}; {FRESH_SEEDS}", needs=needs)
    for key in _differing(theirs, ours):
        if not _are_numbers(theirs.get(key), ours.get(key)):
            agree = len({_are_numbers(losses.get(key)) for losses in replays}) == 1
            why = "rounding cannot explain it" if agree else "the replays do not agree on it either"
            verdict = DIFFERS if agree and conditions.may_refuse else UNDECIDED
            return Outcome(verdict, f"{_where(key, theirs, ours)}: {why}")
    moved = moved_by_rounding(fracs_between(theirs, ours), pairs, _least(theirs, conditions))
    share = max(moment.share for moment in moved)
    if share <= HOLDS_SHARE:
        if (grown := most_by_rounding(pairs)) > MOST_FRAC:
            why = f"rounding alone moves the losses of this run by {100 * grown:.2g} %, too far for one run to check "
            return Outcome(UNDECIDED, f"{where}{end}; {why}another; {FRESH_SEEDS}", share=share)
        bound = f"at most {share:.2g} times the effect of rounding on this run (up to {HOLDS_SHARE:g} holds)"
        return Outcome(ROUNDED, f"{where}{end}; {bound}", share=share)
    is_refused = conditions.may_refuse and share > REFUSED_SHARE
    limit = REFUSED_SHARE if is_refused else HOLDS_SHARE
    first = min((moment for moment in moved if moment.share > limit), key=lambda moment: moment.step)
    text = f"the training losses up to step {first.step} differ"
    if first.kind == "val_loss":
        text = _where((first.step, first.kind), theirs, ours)
    text += f", {first.share:.3g} times the effect of rounding on this run"
    needs = PERTURBED if conditions.is_cpu and num_perturbed < len(perturbations(conditions.dtype)) else None
    if is_refused:
        trained = [step for step, kind in _differing(theirs, ours) if kind == "train_loss" and step <= first.step]
        room = "" if first.kind == "train_loss" or trained else "; every training loss before it is the same"
        return Outcome(DIFFERS, f"{text} (more than {REFUSED_SHARE:g} is refused){room}{end}", share=share, needs=needs)
    between = f"up to {HOLDS_SHARE:g} holds" + f", more than {REFUSED_SHARE:g} is refused" * conditions.may_refuse
    return Outcome(UNDECIDED, f"{text} ({between}){end}; {FRESH_SEEDS}", share=share, needs=needs)


def _least(recorded: Losses, conditions: Conditions) -> dict[str, float]:
    """Returns the smallest effect of rounding on each kind of loss; a script's last printed digit may always differ."""
    least = dict(first_frac(conditions.dtype))
    if conditions.is_script:
        for name in LOSSES:
            losses = [loss for (_, kind), loss in recorded.items() if kind == name and loss]
            digits = max((len(repr(loss).partition(".")[2]) for loss in losses), default=0)
            least[name] = max([least[name], *(10.0**-digits / abs(loss) for loss in losses)])
    return least


def _losses(rows: Sequence[Mapping[str, Any]]) -> Losses:
    """Returns the losses of these rows in order: a step's val_loss follows its train_loss."""
    return {(row["step"], name): row[name] for row in rows for name in LOSSES if row.get(name) is not None}


def _differing(theirs: Losses, ours: Losses) -> list[Key]:
    """Returns the keys, in order, whose losses differ in any bit; keys that only the replay has come last."""
    nan, differing = math.isnan, []
    for key, loss in theirs.items():
        if key not in ours or (loss != ours[key] and not (nan(loss) and nan(ours[key]))):
            differing.append(key)
    return differing + [key for key in ours if key not in theirs]


def _are_numbers(*values: float | None) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)


def _where(key: Key, theirs: Losses, ours: Losses) -> str:
    step, kind = key
    if key not in theirs:
        return f"the replay has a {kind} at step {step} that the record has not"
    return f"{kind} of step {step} is {_shown(ours.get(key))} and was recorded as {_shown(theirs[key])}"


def _shown(loss: float | None) -> str:
    return "missing" if loss is None else repr(loss)


class Kept(TypedDict):
    """The content of rounding.json: {dtype: {kind of loss: frac}}."""

    schema_version: int
    first_frac: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Moved:
    """The change of a validation, or of a window's training losses, in multiples of rounding's effect."""

    share: float
    step: int  # the last step of the window
    kind: str  # train_loss or val_loss


@functools.cache
def first_frac(dtype: str) -> dict[str, float]:
    """Returns the effect of rounding before any update, by kind of loss; the widest known for an unmeasured dtype."""
    kept = json_file.read(ROUNDING_FILE, Kept)["first_frac"]
    return kept.get(dtype) or max(kept.values(), key=lambda fracs: fracs["train_loss"])


def perturbations(dtype: str) -> Sequence[Mapping[str, str]]:
    """Returns the variables of the replays by which rounding is measured."""
    return INSTRUCTION_SETS.get(dtype, INSTRUCTION_SETS["float32"])


def fracs_between(losses: Losses, others: Losses) -> dict[Key, float]:
    """Returns relative differences of common keys; infinite if one loss is not finite, 0 if both are NaN."""
    return {key: _frac(losses[key], others[key]) for key in losses if key in others}


def _frac(first: float, second: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    return abs(second - first) / max(abs(first), 1e-12) if math.isfinite(first) and math.isfinite(second) else math.inf


def moved_by_rounding(recorded: Fracs, pairs: Sequence[Fracs], least: Mapping[str, float]) -> list[Moved]:
    """Returns how far the record lies from a replay, relative to the replays' own distances, in order of steps.

    least: the smallest effect of rounding on each kind of loss.
    """
    trained, others = _windows(recorded), [_windows(pair) for pair in pairs]
    most, moved, is_steady = least["train_loss"], list[Moved](), True
    for window, keys in itertools.groupby(recorded, key=lambda key: key[0].bit_length()):
        own = max([0.0, *(other.get(window, 0.0) for other in others)])
        most, steps = max(most, own), []
        for key in keys:
            step, kind = key
            steps.append(step)
            if kind == "train_loss":
                is_steady = is_steady and not recorded[key]
                continue
            # Until a training loss differs nothing has grown: a validation differs only by one evaluation's rounding.
            validated = [] if is_steady else [VALIDATED * own, *(pair.get(key, 0.0) for pair in pairs)]
            moved.append(Moved(recorded[key] / max([least["val_loss"], *validated]), step, kind))
        if window in trained:
            moved.append(Moved(trained[window] / most, steps[-1], "train_loss"))
    return moved


def most_by_rounding(pairs: Sequence[Fracs]) -> float:
    """Returns the largest effect of rounding on this run, over windows of training losses and validations."""
    validated = [frac for pair in pairs for (_, kind), frac in pair.items() if kind == "val_loss"]
    return max([0.0, *validated, *(rms for pair in pairs for rms in _windows(pair).values())])


def _windows(fracs: Fracs) -> dict[int, float]:
    """Returns {number of a window: root mean square of its training losses}; windows double in length."""
    fracs_in: dict[int, list[float]] = {}
    for (step, kind), frac in fracs.items():
        if kind == "train_loss":
            fracs_in.setdefault(step.bit_length(), []).append(frac)
    return {window: math.sqrt(sum(frac * frac for frac in group) / len(group)) for window, group in fracs_in.items()}
