"""The ledgers of several results folders in one: each stays a chain of its own, whose lines are copied as they are.

    own line 1 ... own line 9 | theirs 1 ... theirs 5 | join (firsts: theirs 1, heads: theirs 5) | own line 11 ...

The join follows own line 9, so both ends are kept and named: what is removed from either chain later shows, as do lines
whose chain begins without a join that names it.  Joining again adds what the other ledger has got since.  Nothing is
ever taken out, so a ledger that was cut after it was joined loses no line here.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bench.base import atomic
from bench.base.text_table import some
from bench.record import ledger, line_count
from bench.record.ledger import Ledger, Line, name_of_line

MAX_NAMED = 3  # of what is refused


def fault_of(theirs: Ledger, counted: object) -> str | None:
    """Why another folder's ledger is not joined, None: nothing is wrong.

    counted: what its line_count.NAME holds, None where it is missing or damaged.
    """
    if theirs.faults:
        return f"its ledger is not whole: {some(theirs.faults, MAX_NAMED, separator='; ')}"
    lost = line_count.lost_end(line_count.newest_of([counted], theirs.lines[0].get("sha256")), theirs.lines)
    return lost and f"its ledger has {lost}"


def clashes(own: Ledger, theirs: Ledger) -> list[str]:
    """Names of runs and races of which theirs has lines that cannot be added to those that are here.

    Each ledger has a line that the other lacks; or the run is complete by own or was started here, so that nobody else
    has more to say of it; or the race has its end.  Else the one that has more lines is the newer state of the other.
    """
    mine, others = _by_name(own.lines), _by_name(theirs.lines)
    started_here = {line.get("run") for line in own.own_lines}
    clashing = []
    for name in mine.keys() & others.keys():
        events = {line["event"] for sha256, line in others[name].items() if sha256 not in mine[name]}
        is_complete = any(line["event"] == "end" and line.get("status") == "complete" for line in mine[name].values())
        is_ended = any(line["event"] == "race_end" for line in mine[name].values()) and events & {"plan", "race_end"}
        has_more = not mine[name].keys() <= others[name].keys()
        if events and (has_more or is_complete or is_ended or name in started_here):
            clashing.append(name)
    return sorted(clashing)


def _by_name(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """{run or race: {sha256: line about it}}"""
    names: dict[str, dict[str, Line]] = {}
    for line in lines:
        if name := line.get("run") or line.get("race_id"):
            names.setdefault(name, {})[line["sha256"]] = line
    return names


def join(results: Path, content: bytes) -> int:
    """Adds the lines of another ledger, of this content, that are not in this folder's yet.  Returns how many.

    It happens as a whole or not at all, whenever the process is killed.  The other one is whole and clashes with
    nothing here: fault_of(), clashes().  OSError: nothing is written.
    """
    texts = [text for text in content.split(b"\n") if text]
    if not (results / ledger.NAME).exists():
        ledger.append(results, "opened")
    with ledger.turn(results) as file:
        file.seek(0)
        own = file.readall() or b""
        known = {name_of_line(text) for text in own.split(b"\n") if text}
        new = [text for text in texts if name_of_line(text) not in known]
        if new:
            line, text, _ = ledger.following(results, file, "join", _ends(texts))
            before = own if own.endswith(b"\n") else own + b"\n"
            with atomic.replacing(results / ledger.NAME) as replaced:
                with contextlib.suppress(OSError):  # those who could append to it still can
                    os.fchmod(replaced.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
                    os.fchown(replaced.fileno(), -1, os.fstat(file.fileno()).st_gid)
                replaced.write(before + b"\n".join(new) + b"\n" + text.lstrip(b"\n"))
            line_count.keep(results, ledger.first_of(file), line)
    return len(new)


def _ends(texts: Sequence[bytes]) -> dict[str, list[str | None]]:
    """The lines at which its chains begin, and those that no other line follows."""
    lines = [(name_of_line(text), ledger.parsed(text)) for text in texts]
    followed = {name for _, line in lines if line for name in [line.get("prev"), *line.get("heads", ())]}
    return {
        "firsts": [name for name, line in lines if line and line.get("prev") is None],
        "heads": [name for name, _ in lines if name not in followed],
    }
