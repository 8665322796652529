"""Which ladder a word of the user's means; without a word the latest."""

from pathlib import Path

from bench.base import atomic
from bench.plans.race import state
from bench.record import named, race_folder


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
