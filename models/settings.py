"""Types of settings that know what they allow, in the words of refusals (bench/config/typed.py) and `run --help`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    holds: Callable[[Any], bool]
    words: str  # what is allowed, after "use" and the kind: "a whole number", "above 0"


def one_of(*names: str) -> Range:
    """A Range of words."""
    return Range(lambda value: value in names, f"{', '.join(names[:-1])} or {names[-1]}")


ABOVE_0 = Range(lambda value: value > 0, "above 0")
Positive = Annotated[float, ABOVE_0]
PositiveInt = Annotated[int, ABOVE_0]
NOT_NEGATIVE = Range(lambda value: value >= 0, "of 0 or more")
NotNegative = Annotated[float, NOT_NEGATIVE]
NotNegativeInt = Annotated[int, NOT_NEGATIVE]
Frac = Annotated[float, Range(lambda value: 0 <= value <= 1, "from 0 to 1")]
Momentum = Annotated[float, Range(lambda value: 0 <= value < 1, "from 0 to below 1")]
