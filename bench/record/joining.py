"""Joins the ledgers of several results folders: each remains a separate chain, whose lines are copied unchanged.

    own line 1 ... own line 9 | theirs 1 ... theirs 5 | join (firsts: theirs 1, heads: theirs 5) | own line 11 ...

The join line follows own line 9 and names the ends of the other chain, so that lines removed from either chain later
are detected, as are chains that no join names.  Joining again adds the lines that the other ledger has gained since.
Lines are never removed, so if the other ledger is cut after it was joined, no line is lost here.
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

MAX_NAMED = 3  # faults that a message lists


def fault_of(other: Ledger, counted: object) -> str | None:
    """Returns why another folder's ledger must not be joined, or None if nothing is wrong with it.

    counted: the content of its line_count.NAME, None if that is missing or damaged.
    """
    if other.faults:
        return f"its ledger is not whole: {some(other.faults, MAX_NAMED, separator='; ')}"
    lost = line_count.lost_end(line_count.newest_of([counted], other.lines[0].get("sha256")), other.lines)
    return lost and f"its ledger has {lost}"


def clashes(own: Ledger, theirs: Ledger) -> list[str]:
    """Returns the names of runs and races whose lines in theirs contradict those in own, sorted.

    They do if each ledger has a line that the other lacks; if theirs adds lines to a run that is complete in own or was
    started here; or to a race that has ended in own.  Otherwise the ledger with more lines is the newer state.
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
    """Returns {run or race: {sha256: line about it}}."""
    names: dict[str, dict[str, Line]] = {}
    for line in lines:
        if name := line.get("run") or line.get("race_id"):
            names.setdefault(name, {})[line["sha256"]] = line
    return names


def join(results: Path, content: bytes) -> int:
    """Adds the lines of another ledger that this folder's ledger lacks, atomically.  Returns their number.

    content: the bytes of the other ledger, for which fault_of() and clashes() have returned nothing.  If OSError is
    raised, nothing has been written.
    """
    texts = [text for text in content.split(b"\n") if text]
    if not (results / ledger.NAME).exists():
        ledger.append(results, "opened")
    with ledger.turn(results) as file:
        file.seek(0)
        own = file.readall() or b""
        names = {name_of_line(text) for text in own.split(b"\n") if text}
        new = [text for text in texts if name_of_line(text) not in names]
        if new:
            line, text, _ = ledger.following(results, file, "join", _ends(texts))
            before = own if own.endswith(b"\n") else own + b"\n"
            with atomic.replacing(results / ledger.NAME) as replaced:
                with contextlib.suppress(OSError):  # keep its mode and group: whoever could append to it still can
                    os.fchmod(replaced.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
                    os.fchown(replaced.fileno(), -1, os.fstat(file.fileno()).st_gid)
                replaced.write(before + b"\n".join(new) + b"\n" + text.lstrip(b"\n"))
            line_count.keep(results, ledger.first_of(file), line)
    return len(new)


def _ends(texts: Sequence[bytes]) -> dict[str, list[str | None]]:
    """Returns the names of the lines at which the chains of a ledger begin, and of those that no line follows."""
    lines = [(name_of_line(text), ledger.parsed(text)) for text in texts]
    followed = {name for _, line in lines if line for name in [line.get("prev"), *line.get("heads", ())]}
    return {
        "firsts": [name for name, line in lines if line and line.get("prev") is None],
        "heads": [name for name, _ in lines if name not in followed],
    }
