"""What a user types after ./run.sh ladder -> the request of a race, or the folder of an earlier ladder."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.base import atomic
from bench.launch import prepare
from bench.plans.ladder import sizes
from bench.plans.ladder.sizes import Fitted, Size
from bench.plans.race import plan, state
from bench.record import named, race_folder

N = 3  # runs a rung
NAME = "ladder"
OWN_WORDS = ("size",)
TARGET = (
    "goal.target_val_loss of the runs; without one the highest val_loss of the lowest rung's runs at their last step"
)


def asked(words: Sequence[str]) -> tuple[Size, list[Fitted], dict]:
    """Words -> the size, each rung at it, and the request: of plan.parse_request(), with "ladder" for the plan.

    A rung that is not named and cannot run here has its fault and is not an arm.  ValueError: what is wrong.
    """
    names = [word for word in words if "=" not in word]
    own = dict(word.split("=", 1) for word in words if word.split("=")[0] in OWN_WORDS and "=" in word)
    given = [word for word in words if "=" in word and word.split("=")[0] not in OWN_WORDS]
    size = sizes.named(own["size"]) if "size" in own else sizes.of_machine(prepare.this_machine().num_gpus)
    settings = plan.parse_request(given)
    if settings.pop("arms"):
        raise ValueError(
            "a ladder makes its own arms, the rungs: name rungs, or ./run.sh race A=... B=... races others"
        )
    overrides = [word for word in given if word.partition("=")[0] not in plan.SETTINGS]
    if experiment := [word for word in overrides if word.startswith(f"{sizes.GROUP}=")]:
        raise ValueError(f"{experiment[0]}: each rung is an experiment: name it alone, {experiment[0].split('=')[1]}")
    fitted = sizes.fitted(_chosen(names), size, overrides)
    runnable = [one for one in fitted if one.fault is None]
    _refuse(fitted, runnable, size, named=bool(names))
    arms = {one.rung.arm: {"overrides": [*size.words, *one.overrides, *overrides], "rev": None} for one in runnable}
    return size, fitted, {"n": N, "name": NAME} | settings | {"arms": arms, "ladder": _for_the_plan(size, fitted)}


def _chosen(names):
    """The rungs of these names in the user's order, all that there are without any.  ValueError: not a ladder."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]}: it is named twice: name each rung once")
    result = [sizes.rung_named(name) for name in names] or sizes.known_rungs()
    if len(result) < 2:
        raise ValueError(f"{result[0].name}: a ladder has two rungs or more: ./run.sh ladder r04 r08, or none for all")
    return result


def _refuse(fitted, runnable, size, named):
    """ValueError: a rung that was named cannot run at this size, or fewer than two of all can."""
    faults = [f"{one.rung.name} cannot run at size={size.name}: {one.fault}" for one in fitted if one.fault]
    if faults and (named or len(runnable) < 2):
        others = f"; {len(faults) - 1} others cannot either" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{others}; name other rungs, or another size: {', '.join(sizes.SIZES)}")


def _for_the_plan(size, fitted):
    """What the plan keeps of the rungs, so that the page needs no yaml of today."""
    return {
        "size": size.name,
        "about": size.about,
        "target": TARGET,
        "rungs": {
            one.rung.arm: asdict(one.rung) | {"changed": [list(change) for change in one.changed]}
            for one in fitted
            if one.fault is None
        },
        "excluded": {one.rung.name: one.fault for one in fitted if one.fault},
    }


def ended(results: Path, word: str) -> Path:
    """The ladder named, or the latest of these results that has ended.  ValueError: there is none."""
    if word:
        return _named(word)
    result = sorted(path.parent for path in (results / race_folder.FOLDER).glob("*/race.json"))
    return _latest(result, "has ended")


def unfinished(results: Path, word: str) -> Path:
    """The ladder named, or the latest of these results that has not ended.  ValueError: there is none."""
    return _named(word) if word else _latest(state.unfinished(results), "is unfinished")


def _latest(folders, what):
    result = [folder for folder in folders if _is_ladder(folder)]
    if not result:
        raise ValueError(f"no ladder {what}: ./run.sh ladder begins one")
    return result[-1]


def _named(word):
    (one,) = named.find([word])[:1]
    if one.race is None or not _is_ladder(one.race):
        raise ValueError(f"{word}: is not a ladder: ./run.sh ladder begins one, and prints its id")
    return one.race


def _is_ladder(folder):
    return "ladder" in atomic.read_json(folder / "plan.json", {})
