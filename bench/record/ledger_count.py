"""How many lines a ledger has had: a count that is kept beside it and, once more, in this machine's own state folder.

Each line of the ledger says its number and the count's name, so that lines which were removed before the next one was
appended leave a gap in the numbers, wherever the ledger is read.  Where both files are gone, another count begins, and
that shows too.  What sets the ledger and both files back to an earlier state leaves no trace here.

    results/.ledger.count                                {"ledger", "counter", "number"}
    $XDG_STATE_HOME/speedrun/ledgers/<hash>.json         the same, of the results folder whose path has this hash;
                                                         without XDG_STATE_HOME in ~/.local/state
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from bench.base import atomic

NAME = ".ledger.count"
COUNTER_BYTES = 8


class Count(TypedDict):
    """What each line of a ledger says of its place."""

    counter: str
    number: int


def following(results: Path, first: str | None, last: Mapping[str, Any] | None) -> Count:
    """Of the line that is to follow last (None: it is the first, or no line of append()).

    first: the sha256 of the ledger's first line, None where there is none yet.
    """
    known = newest(results, first)
    if known is None:
        return {"counter": secrets.token_hex(COUNTER_BYTES), "number": 1}
    counter, number = known
    if last and last.get("counter") == counter:
        number = max(number, last.get("number", 0))  # a kill came before it was kept
    return {"counter": counter, "number": number + 1}


def newest(results: Path, first: str | None) -> tuple[str, int] | None:
    """Counter and number of the last line that was counted in the ledger that begins with first; None: nobody knows."""
    known = [kept for path in _paths(results) if (kept := _kept(path)) and kept["ledger"] == first]
    return max(((kept["counter"], kept["number"]) for kept in known), key=lambda count: count[1], default=None)


def keep(results: Path, first: str, count: Count) -> None:
    """Both files, each if it can be written: a ledger without its count is still a ledger."""
    for path in _paths(results):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(path, {"ledger": first, **count}, durable=False)


def _paths(results: Path) -> Iterator[Path]:
    yield results / NAME
    with contextlib.suppress(RuntimeError):  # no home folder
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        place = hashlib.sha256(os.fsencode(os.path.realpath(results))).hexdigest()[:16]
        yield Path(state) / "speedrun" / "ledgers" / f"{place}.json"


def _kept(path: Path) -> dict[str, Any] | None:
    kept = atomic.read_json(path) or {}
    kinds = {"ledger": str, "counter": str, "number": int}
    return kept if all(isinstance(kept.get(key), kind) for key, kind in kinds.items()) else None
