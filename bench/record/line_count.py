"""Keeps the number of a ledger's lines in two other files, so that a ledger whose end was removed is detected.

results/.ledger.count                                {"ledger", "counter", "number"}
$XDG_STATE_HOME/speedrun/ledgers/<hash>.json         the same, for the results folder whose path has this hash;
                                                     without XDG_STATE_HOME in ~/.local/state
"""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from bench.base import atomic
from bench.base.paths import shown, state_root
from bench.record.shape import CALIBRATION

NAME = ".ledger.count"
COUNTER_BYTES = 8
FOLLOWING = ("end", "checkpoint", "resume", "look", "race_end")  # events whose line follows another one of its ledger


class Count(TypedDict):
    """The fields of a ledger's line that give its place: an id of the count, and the line's number in it."""

    counter: str
    number: int


def following(results: Path, first: str | None, last: Mapping[str, Any] | None) -> Count:
    """Returns the count of the next line, after last (None: there is no line, or it is damaged).

    first: the SHA-256 of the ledger's first line, None if there is none yet.
    """
    latest = newest(results, first)
    if latest is None:
        return {"counter": secrets.token_hex(COUNTER_BYTES), "number": 1}
    counter, number = latest
    if last and last.get("counter") == counter:
        number = max(number, last.get("number", 0))  # the process was killed before it kept the count
    return {"counter": counter, "number": number + 1}


def newest(results: Path, first: str | None) -> tuple[str, int] | None:
    """Returns counter and number of the last counted line of the ledger that begins with first; None if unknown."""
    return newest_of((atomic.read_json(path) for path in _paths(results)), first)


def newest_of(counts: Iterable[object], first: str | None) -> tuple[str, int] | None:
    """Does what newest() does with the content of the two files; None stands for a missing or damaged one."""
    kinds = {"ledger": str, "counter": str, "number": int}
    valid = [kept for kept in counts if isinstance(kept, dict)]
    valid = [kept for kept in valid if all(isinstance(kept.get(key), kind) for key, kind in kinds.items())]
    counted = [(kept["counter"], kept["number"]) for kept in valid if kept["ledger"] == first]
    return max(counted, key=lambda count: count[1], default=None)


def lost_end(count: tuple[str, int] | None, lines: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns what is wrong if more lines were counted than a ledger has, else None.  count: from newest()."""
    counter, number = count or (None, 0)
    last = max((line.get("number", 0) for line in lines if line.get("counter") == counter), default=0)
    return f"counted {number} lines, but the last one is number {last}: its end was removed" if last < number else None


def lost(ledger: Path) -> str | None:
    """Returns a sentence if a ledger that had lines, with runs beside it, is missing or empty; else None."""
    is_there = ledger.is_file()
    if is_there and ledger.stat().st_size:
        return None
    counts = [atomic.read_json(path) for path in _paths(ledger.parent)]
    numbers = [kept["number"] for kept in counts if isinstance(kept, dict) and isinstance(kept.get("number"), int)]
    runs = (atomic.read_json(path, {"provenance": "imported"}) for path in ledger.parent.glob("*/*/run.json"))
    if not any(numbers) or all(run.get("provenance") == "imported" for run in runs):  # logs belong to no ledger
        return None
    note = f"{shown(ledger)}: is {'empty' if is_there else 'gone'}, and had {max(numbers):,} lines"
    return f"{note}: restore it (a backup, a publication's copy): without it no claim can be made of the runs beside it"


def refuse_to_begin(ledger: Path, event: str, facts: Mapping[str, object]) -> None:
    """Raises FileNotFoundError if a line that follows others would begin a ledger, where a results folder was moved."""
    race: Any = facts.get("race") or {}
    is_planned = race.get("race_id", CALIBRATION) != CALIBRATION  # by a line of the ledger
    if (event in FOLLOWING or is_planned) and not ledger.exists():
        why = "is gone, and this line follows others of it: was the results folder moved while something ran?"
        raise FileNotFoundError(errno.ENOENT, f"{ledger.name} {why} Move it back", str(ledger))


def keep(results: Path, first: str | None, line: Mapping[str, Any]) -> None:
    """Keeps the count of the last line in both files; a file that cannot be written is skipped."""
    count = {"ledger": first, "counter": line["counter"], "number": line["number"]}
    for kept in _paths(results):
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(kept, count, durable=False)


def _paths(results: Path) -> Iterator[Path]:
    yield results / NAME
    with contextlib.suppress(RuntimeError):  # no home folder
        place = hashlib.sha256(os.fsencode(os.path.realpath(results))).hexdigest()[:16]
        yield state_root() / "ledgers" / f"{place}.json"
