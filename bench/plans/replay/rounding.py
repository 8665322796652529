"""How far rounding alone moves the losses of a run: measured on this very run, by replays that add in another order.

From the first step on a difference in the last place grows with the training, and how fast is a matter of the run: over
120 steps of cpu_nano honest pairs of two instruction sets were seen to lie 1e-6 apart with one seed and 1e-4 with the
next one, 1e-3 with Muon, and 0.2 with five times the learning rate.  So no table of bounds can be right for all runs.
What can be tabulated is where it begins: rounding.json has, for each dtype, the largest relative difference of honest
pairs in the losses of steps 0 and 1, before any update.  The rest is measured: replays of the record's own seed, one as
the record was and others at lower instruction sets (PERTURBED), are honest pairs of the same run.  Their largest
difference, never less than where it begins, is what rounding does: of training losses up to each step, of a validation
at it.

Compared are the root mean square of the differences of training losses over windows of steps that double, and each
validation.  Up to HOLDS times what rounding does is explained by it, more than REFUSED times is not, and between the
two nothing is said.  tests/benchmarks rounding FOLDER makes rounding.json again and shows what is seen and what is not.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from bench.base.reading import json_file

FILE = Path(__file__).with_name("rounding.json")
HOLDS, REFUSED = 3.0, 10.0
MOST_FRAC = 0.02  # a run that rounding moves further is not certified by it: honest ones of cpu_nano reach 0.008
# A validation of many batches moves less than single ones do: honest pairs' by half their window's root mean square.
VALIDATED = 0.5
# Variables of the replays by which rounding is measured, by the dtype of activations: at the lowest level of oneDNN
# bfloat16 would be emulated, ten times as slowly.  They have no effect on processors that are not x86.
PERTURBED = {
    "float32": (
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    "bfloat16": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, {"ATEN_CPU_CAPABILITY": "default"}),
}

Key = tuple[int, str]  # (step, train_loss or val_loss)
Fracs = Mapping[Key, float]  # differences relative to the loss, in order


class Kept(TypedDict):
    """rounding.json: {dtype: {kind of loss: frac}}."""

    schema_version: int
    first_frac: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Moved:
    """A validation, or the training losses of a window, that moved, in multiples of what rounding does."""

    share: float
    step: int  # the window's last one
    what: str  # train_loss or val_loss


@functools.cache
def first_frac(dtype: str) -> dict[str, float]:
    """By kind of loss, what rounding does before any update; of a dtype that was not measured, the widest known."""
    kept = json_file.read(FILE, Kept)["first_frac"]
    return kept.get(dtype) or max(kept.values(), key=lambda of_dtype: of_dtype["train_loss"])


def perturbations(dtype: str) -> Sequence[Mapping[str, str]]:
    """Variables of the replays by which rounding is measured."""
    return PERTURBED.get(dtype, PERTURBED["float32"])


def between(losses: Mapping[Key, float], others: Mapping[Key, float]) -> dict[Key, float]:
    """Relative differences of what both have; infinite where one of them is no number, 0 where neither is."""
    return {key: _frac(losses[key], others[key]) for key in losses if key in others}


def _frac(one, other):
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(other - one) / max(abs(one), 1e-12) if math.isfinite(one) and math.isfinite(other) else math.inf


def moved(of_record: Fracs, pairs: Sequence[Fracs], least: Mapping[str, float]) -> list[Moved]:
    """How far the record lies from a replay, in what the replays lie from each other, in order of steps.

    least: of each kind of loss, what rounding does at the least.
    """
    trained, others = _windows(of_record), [_windows(pair) for pair in pairs]
    most, result, is_steady = least["train_loss"], [], True
    for window, keys in itertools.groupby(of_record, key=lambda key: key[0].bit_length()):
        here = max([0.0, *(other.get(window, 0.0) for other in others)])
        most, steps = max(most, here), []
        for key in keys:
            step, what = key
            steps.append(step)
            if what == "train_loss":
                is_steady = is_steady and not of_record[key]
                continue
            # While no training loss has differed nothing has grown: a validation has the room of one evaluation alone.
            validated = [] if is_steady else [VALIDATED * here, *(pair.get(key, 0.0) for pair in pairs)]
            result.append(Moved(of_record[key] / max([least["val_loss"], *validated]), step, what))
        if window in trained:
            result.append(Moved(trained[window] / most, steps[-1], "train_loss"))
    return result


def grown(pairs: Sequence[Fracs]) -> float:
    """What rounding does to this run at the most, of windows of training losses and of validations."""
    validated = [frac for pair in pairs for (_, what), frac in pair.items() if what == "val_loss"]
    return max([0.0, *validated, *(rms for pair in pairs for rms in _windows(pair).values())])


def _windows(fracs):
    """{number of a window: root mean square of its training losses}; a window is twice as long as the one before."""
    result: dict[int, list[float]] = {}
    for (step, what), frac in fracs.items():
        if what == "train_loss":
            result.setdefault(step.bit_length(), []).append(frac)
    return {window: math.sqrt(sum(frac * frac for frac in of_it) / len(of_it)) for window, of_it in result.items()}
