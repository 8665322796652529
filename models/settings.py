"""Types of settings that know their range: bench/config/schema.py refuses a value outside, with the range's words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    holds: Callable[[Any], bool]
    words: str  # what to try, e.g. "use 1 or more"


def one_of(*names: str) -> Range:
    """A Range of words."""
    return Range(lambda value: value in names, f"use {', '.join(names[:-1])} or {names[-1]}")


ABOVE_0 = Range(lambda value: value > 0, "it must be above 0")
Positive = Annotated[float, ABOVE_0]
PositiveInt = Annotated[int, ABOVE_0]
NotNegative = Annotated[float, Range(lambda value: value >= 0, "it must not be below 0")]
Frac = Annotated[float, Range(lambda value: 0 <= value <= 1, "it must be in [0, 1]")]
Momentum = Annotated[float, Range(lambda value: 0 <= value < 1, "it must be in [0, 1)")]
