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


def host_and_port(rendezvous: str | None) -> tuple[str, int]:
    """hardware.rendezvous -> (host, port).  ValueError where it is not HOST:PORT."""
    host, _, port = (rendezvous or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        remedy = "use HOST:PORT, an address of the node that makes the record and a free port there, 10.0.0.1:29600"
        raise ValueError(f"hardware.rendezvous={rendezvous}: {remedy}")
    return host.strip("[]"), int(port)
