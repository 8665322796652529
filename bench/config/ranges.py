"""What the values of settings may be, beside the types of models/settings.py."""

import re
from typing import Annotated

from models.settings import Range

AtLeast1 = Annotated[int, Range(lambda value: value >= 1, "of 1 or more")]
Repository = Annotated[
    str, Range(lambda repo: re.fullmatch(r"[\w.-]+/[\w.-]+", repo), "OWNER/NAME as in kjj0/fineweb10B-gpt2")
]
ShardNumbers = Annotated[
    str, Range(lambda word: re.fullmatch(r"\d{1,6}(-\d{1,6})?", word), "a number as 3, or numbers as 9-12")
]
Name = Annotated[
    str,
    Range(
        lambda name: name[:1] not in ("", ".") and all(char.isalnum() or char in "._-" for char in name),
        "letters, digits, '-', '_' and '.', because it becomes part of a folder's name",
    ),
]


def between(lowest: int, highest: int) -> Range:
    """A Range of whole numbers, both ends included."""
    return Range(lambda value: lowest <= value <= highest, f"from {lowest} to {highest}")
