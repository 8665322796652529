"""Types of settings with their allowed values, which refusals (bench/config/typed.py) and `run --help` print."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    holds: Callable[[Any], bool]
    phrase: str  # what is allowed, as refusals print it after "use" and the type: "above 0"


def one_of(*names: str) -> Range:
    """Returns a Range that allows these names."""
    return Range(lambda value: value in names, f"{', '.join(names[:-1])} or {names[-1]}")


ABOVE_0 = Range(lambda value: value > 0, "above 0")
Positive = Annotated[float, ABOVE_0]
PositiveInt = Annotated[int, ABOVE_0]
NOT_NEGATIVE = Range(lambda value: value >= 0, "of 0 or more")
NotNegative = Annotated[float, NOT_NEGATIVE]
NotNegativeInt = Annotated[int, NOT_NEGATIVE]
Frac = Annotated[float, Range(lambda value: 0 <= value <= 1, "from 0 to 1")]
Momentum = Annotated[float, Range(lambda value: 0 <= value < 1, "from 0 to below 1")]
