"""Writes and reads the ledger: a line for the start and the end of every run, so that no run can be omitted later.

results/ledger.jsonl has a JSON object per line and is only ever appended to:
    {"prev", "at", "counter", "number", "event", ..., "sha256"}      prev: the sha256 of the line before, null for the
           first; counter, number: the count of its lines (absent in older ledgers)
    start  run ("<track>/<run_id>"), config_id, seed, source_sha256, identity_version (absent: 1), deviations,
           race (None: in no race), and bench.config.identity.shape() of its config (absent in older ledgers)
    end    run, status, validity, run_json_sha256, failure (its kind; absent without one and in older ledgers); if two
           ends without a resume between them differ, nothing vouches for the run's run.json
    checkpoint  run, step, checkpoint_sha256      resume  the same, segment: the run continues from the checkpoint
    plan   race_id, plan_sha256, baseline, arms     look  race_id, started, planned
    race_end  race_id, status, race_json_sha256
    join   firsts, heads: the names of the first and last lines of another folder's ledger, whose lines precede this one
           and are a chain of their own (joining.py)     opened   the first line of a ledger that begins with a join

A line's sha256 covers the rest of the line, so an edited line is detected, and a removed one by the line that names it.
Each run.json names its start line, so if the end of a ledger was removed, the runs that are present reveal it, and the
next line's number says how many lines are missing: the count is kept beside the ledger and also in this machine's
state folder (line_count.py).  If both files are gone, another count begins, which is detected too.  Times may go back
only by as much as clocks disagree.  Where two ledgers that grew from one are concatenated, two lines name one before.

This detects mistakes and edits.  Rewriting a whole ledger together with its count is only detected if an earlier state
was published (bench/claims/rules/records.py).
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

from bench.base import atomic, utc
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Missing
from bench.record import line_count, run_folder
from bench.record.shape import ConfigShape, Record

NAME = "ledger.jsonl"
TURN = ".ledger.turn"
MAX_REPLACED = 10  # how often a join may replace the file during one append
MAX_FIRST_BYTES = 2**16  # the limit for the first line, which identifies a ledger


class OfRace(TypedDict):
    """The place in a race of a run that was started."""

    race_id: str
    arm: NotRequired[str]
    position: NotRequired[int]
    attempt: NotRequired[int]
    discarded: NotRequired[bool]


class Line(TypedDict):
    """A line of the ledger, with the fields that are read."""

    sha256: str
    event: str
    prev: NotRequired[str | None]
    at: NotRequired[str | None]
    counter: NotRequired[str]
    number: NotRequired[int]
    run: NotRequired[str]
    race_id: NotRequired[str]
    config_id: NotRequired[str | None]
    seed: NotRequired[int | None]
    source_sha256: NotRequired[str | None]
    race: NotRequired[OfRace | None]
    identity_version: NotRequired[int | None]
    deviations: NotRequired[int]
    shape_id: NotRequired[str]
    floats: NotRequired[list[float]]
    effective: NotRequired[ConfigShape]
    status: NotRequired[str | None]
    failure: NotRequired[str | None]
    planned: NotRequired[bool]
    run_json_sha256: NotRequired[str | None]
    step: NotRequired[int]
    checkpoint_sha256: NotRequired[str]
    segment: NotRequired[int]
    race_json_sha256: NotRequired[str]
    plan_sha256: NotRequired[str]
    baseline: NotRequired[str]
    arms: NotRequired[Any]  # {name: config_id and source_sha256}
    firsts: NotRequired[list[str]]  # firsts and heads: lines by name_of_line(), in a join
    heads: NotRequired[list[str]]
    record: NotRequired[str]  # record and the fields below: in a certificate (certificates.py)
    losses_sha256: NotRequired[str]
    outcome: NotRequired[str]
    replays: NotRequired[list[str]]


class StartedRun(TypedDict):
    """The start and end lines of a run."""

    start: Line
    end: Line | None  # None: it is running, or was killed


ParsedLine = tuple[int, Line | None, bytes]  # number in the file from 1; the line, None if damaged; its bytes


def append(results: Path | str, event: str, **facts: object) -> Line:
    """Appends a line under a lock, durably, and returns it.  If OSError is raised, nothing has been written.

    A line that a power failure left unfinished is kept as it is; the next line names it by the hash of its bytes.
    """
    line_count.refuse_to_begin(Path(results) / NAME, event, facts)
    with turn(results) as file:
        line, text, size = following(Path(results), file, event, facts)
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(size)  # leave no incomplete line
            raise OSError(error.errno, error.strerror, str(Path(results) / NAME)) from error
        line_count.keep(Path(results), first_of(file), line)
    return line


@contextlib.contextmanager
def turn(results: Path | str) -> Iterator[FileIO]:
    """Opens the ledger for appending and locks it, so that only this process appends."""
    path = Path(results) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is opened after the lock is taken, as NFS shows what other nodes wrote only to files opened afterwards.
    # The file's own lock is held too: a suspended process loses TURN as stale, and earlier revisions use only flock.
    with atomic.locked(path.parent / TURN), contextlib.ExitStack() as opened:
        for _ in range(MAX_REPLACED):
            file = opened.enter_context(open(path, "a+b", buffering=0, opener=plain_file.open_here))
            with contextlib.suppress(OSError):  # the file system may not support flock
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    break
            # a join replaced the file while this process waited: what is written to the old one would be lost
        yield file


def following(results: Path, file: FileIO, event: str, facts: Mapping[str, object]) -> tuple[Line, bytes, int]:
    """Returns the next line of this file, the bytes to append for it, and the present size of the file."""
    size = file.seek(0, os.SEEK_END)
    last = _last_line(file, size)
    count = line_count.following(results, first_of(file), parsed(last) if last else None)
    line: dict[str, Any] = {"prev": name_of_line(last), "at": utc.now(), **count, "event": event, **facts}
    line["sha256"] = digest(line)
    text = _text(line).encode() + b"\n"
    return cast(Line, line), text if last is None or last.endswith(b"\n") else b"\n" + text, size


def first_of(file: FileIO) -> str | None:
    """Returns the name of the file's first line, None if the file is empty."""
    file.seek(0)
    return name_of_line(file.read(MAX_FIRST_BYTES).partition(b"\n")[0] or None)


def _last_line(file: FileIO, size: int) -> bytes | None:
    """Returns the last line that is not empty, with any newline; None if there is none.  Raises OSError if too long."""
    num_bytes = 4096
    while num_bytes <= plain_file.MAX_LINES_BYTES:
        start = max(0, size - num_bytes)
        file.seek(start)
        block = file.read(size - start)
        end = len(block.rstrip(b"\n"))
        newline = block.rfind(b"\n", 0, end)
        if end and (newline >= 0 or not start):
            return block[newline + 1 : end + 1]
        if not start:
            return None
        num_bytes *= 4  # growing blocks, read as a whole: the cost is linear in the length of a long line
    raise OSError(errno.EFBIG, f"its last line has over {num_bytes // 4:,} bytes: restore it from a copy", file.name)


def name_of_line(last: bytes | None) -> str | None:
    """Returns the name by which the next line refers to this one: its sha256, or that of its bytes if it is damaged."""
    if last is None:
        return None
    line = parsed(last)
    return line["sha256"] if line else hashlib.sha256(last.rstrip(b"\n")).hexdigest()


def parsed(line: bytes | str) -> Line | None:
    """Parses a line; returns None if it is damaged."""
    try:
        return json_file.parsed(line, NAME, Line)
    except ValueError:
        return None


def digest(line: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a line's fields other than "sha256"."""
    return hashlib.sha256(_text({key: value for key, value in line.items() if key != "sha256"}).encode()).hexdigest()


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, separators=(",", ":"))


def started(results: Path | str, folder: Path | str, run: Record, shape: Mapping[str, Any] | None = None) -> str:
    """Appends the start of a run whose folder was just created.  Returns the line's sha256, which run.json keeps."""
    code = {"source_sha256": run["code"]["source_sha256"], "identity_version": run["code"].get("identity_version", 1)}
    facts = {"config_id": run["config_id"], "seed": run["seed"], "deviations": len(run["deviations"])}
    facts |= {**code, **(shape or {})}
    return append(results, "start", run=name_of(results, folder), race=run.get("race"), **facts)["sha256"]


def ended(results: Path | str, folder: Path | str, run: Record, is_there: bool = True) -> Line:
    """Appends the end of a run whose run.json is final, or whose folder is gone (is_there=False).  Returns the line."""
    sha256 = sha256_of(Path(folder) / "run.json") if is_there else None
    facts = {"status": run["status"], "validity": run["validity"], "run_json_sha256": sha256}
    facts |= {"failure": failure["kind"]} if (failure := run["failure"]) else {}
    return append(results, "end", run=name_of(results, folder), **facts)


def sha256_of(path: Path | str) -> str:
    """Returns the SHA-256 of a file's content as hex.  Raises Missing or Damaged."""
    return sha256_of_bytes(plain_file.content(path))


def sha256_of_bytes(content: bytes) -> str:
    """Returns the SHA-256 of bytes as hex."""
    return hashlib.sha256(content).hexdigest()


def is_changed(folder: Path | str, end: Line) -> bool:
    """Whether the run.json of a folder has another hash than its end line recorded."""
    return end.get("run_json_sha256") != sha256_of(Path(folder) / "run.json")


def name_of(results: Path | str, folder: Path | str) -> str:
    """Returns the name of a run folder, "<track>/<run_id>"."""
    return Path(os.path.relpath(folder, results)).as_posix()


# ---- reading


@dataclass(frozen=True)
class Ledger:
    """The ledger of a results folder, parsed once: pass it on instead of reading it again."""

    results: Path  # the folder that the runs' names are relative to
    lines: list[Line]  # in order, with "sha256"; a damaged one is {"event": "damaged", "line": its number in the file}
    faults: list[str]  # sentences: what is wrong with the chain; [] if every line is whole and names an earlier one
    numbers: list[int] = dataclasses.field(default_factory=list)  # for each line, its number in the file, from 1
    # (number of a line at which the count started over, number of the first line of its chain)
    recounted: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    roots: list[int] = dataclasses.field(default_factory=list)  # for each line, the number of its chain's first line

    @functools.cached_property
    def runs(self) -> dict[str, StartedRun]:
        """{run: its start and end lines}, in the order of the starts."""
        return runs_of(self.lines)

    @property
    def own_lines(self) -> list[Line]:
        """The lines of this folder's own chain, without those that were collected from other folders."""
        return [line for root, line in zip(self.roots, self.lines) if root == self.roots[0]]

    def race_lines(self, race_id: str) -> list[Line]:
        """Returns the lines of a race: its plan, the starts and ends of its runs, its looks and its end."""
        races = ((name, run["start"].get("race")) for name, run in self.runs.items())
        mine = {name for name, race in races if race and race["race_id"] == race_id}
        return [line for line in self.lines if line.get("race_id") == race_id or line.get("run") in mine]


def read(results: Path | str) -> Ledger:
    """Reads the ledger of a results folder; without one, returns a Ledger without lines and faults."""
    try:
        return from_bytes(Path(results), plain_file.content(Path(results) / NAME, plain_file.MAX_LINES_BYTES))
    except Missing:
        return Ledger(Path(results), [], [])


def lost_end(book: Ledger) -> str | None:
    """Returns what is wrong if the end of a ledger was removed, by the count of its lines; else None."""
    counted = line_count.newest(book.results, book.lines[0].get("sha256"))
    # other processes may have added and counted lines since it was read
    return line_count.lost_end(counted, book.lines) and line_count.lost_end(counted, read(book.results).lines)


def lines_with(results: Path | str, pattern: re.Pattern[bytes]) -> Iterator[Line]:
    """Yields the lines that match a pattern, without checking the chain, which would take long."""
    with contextlib.suppress(Missing):
        content = plain_file.content(Path(results) / NAME, plain_file.MAX_LINES_BYTES)
        yield from filter(None, (parsed(text) for text in content.split(b"\n") if pattern.search(text)))


def from_bytes(results: Path, content: bytes) -> Ledger:
    """Parses and checks a ledger from the content of its file."""
    parsed_lines = [(number, parsed(text), text) for number, text in enumerate(content.split(b"\n"), 1) if text]
    lines = [line or cast(Line, {"event": "damaged", "line": number}) for number, line, _ in parsed_lines]
    book = Ledger(results, lines, _faults(parsed_lines), [number for number, _, _ in parsed_lines])
    book.faults.extend(_faults_along_the_chain(parsed_lines, book))
    return book


def _faults(lines: Sequence[ParsedLine]) -> list[str]:
    """Returns sentences about lines that are damaged, changed, duplicated or missing."""
    wrong, firsts = list[str](), list[str]()
    names, joined = set[str | None](), set[str]()
    for number, line, text in lines:
        if line is None:
            if number == lines[-1][0]:
                wrong.append(f"line {number}, the last, is damaged or unfinished")
            names.add(name_of_line(text))  # after a power failure, the next line names the damaged one like this
            continue
        if line["sha256"] != digest(line):
            wrong.append(f"line {number} was changed")
        if line.get("prev") is None:
            firsts.append(line["sha256"])
        elif line["prev"] not in names:
            wrong.append(f"line {number} names a line before it that is not there: lines were removed or changed")
        if line["sha256"] in names:
            wrong.append(f"line {number} is there twice")
        if not names.issuperset(line.get("heads", ())):
            wrong.append(f"line {number} joins a ledger whose end is not there: lines were removed or changed")
        joined.update(line.get("firsts", ()))
        names.add(line["sha256"])
    num_firsts = 1 + sum(name not in joined for name in firsts[1:])
    return wrong + ([f"{num_firsts} lines say that they are the first"] if num_firsts > 1 else [])


class _Link(NamedTuple):
    """The state of a chain at a line, against which the next line is checked."""

    number: int = 0  # of the line in the file
    root: int = 0  # number of the first line of the chain
    latest: tuple[datetime, int] | None = None  # the latest time up to here, and the number of its line
    counted: tuple[str, int] | None = None  # counter and number of the last line that has them


def _faults_along_the_chain(lines: Sequence[ParsedLine], book: Ledger) -> list[str]:
    """Compares each line with the one that it names; returns sentences about times that go back and missing numbers.

    Also fills in book.recounted and book.roots.
    """
    wrong: list[str] = []
    links: dict[str | None, _Link] = {}
    before = _Link()
    for number, line, text in lines:
        at = count = None
        link = links.get(line.get("prev"), _Link()) if line else before
        if line and (stamp := line.get("at")):
            with contextlib.suppress(ValueError):
                at = utc.parse(stamp)
        if line and "counter" in line and "number" in line:
            count = line["counter"], line["number"]
        if line and at and link.latest and (link.latest[0] - at).total_seconds() > run_folder.MAX_CLOCK_SKEW_S:
            both = f"{line.get('at')}, but follows line {link.latest[1]} of {utc.text(link.latest[0])}"
            wrong.append(f"line {number} is of {both}: a clock was set back, or lines were made up")
        if count and link.counted:
            (counter, position), (earlier, last) = count, link.counted
            num_removed = position - last - 1
            if counter != earlier:
                book.recounted.append((number, link.root))
            elif num_removed:
                lost = f"{num_removed} between them were removed" if num_removed > 0 else "the count was set back"
                wrong.append(f"line {number} is number {position} of this ledger but follows number {last}: {lost}")
        latest = max((at, number), link.latest) if at and link.latest else (at and (at, number)) or link.latest
        book.roots.append(link.root or number)
        before = links[name_of_line(text)] = _Link(number, link.root or number, latest, count or link.counted)
    return wrong


def runs_of(lines: Iterable[Line]) -> dict[str, StartedRun]:
    """Returns {run: its start and end lines} in the order of the starts.  Fields that old lines lack get a default."""
    runs: dict[str, StartedRun] = {}
    for line in lines:
        if line["event"] == "start" and "run" in line:
            runs[line["run"]] = {"start": {"config_id": None, "source_sha256": None, "race": None, **line}, "end": None}
        elif line["event"] == "end" and line.get("run", "") in runs:
            before, end = runs[line["run"]]["end"], Line({"status": "aborted", **line})
            if before and before.get("run_json_sha256") != end.get("run_json_sha256"):
                end["run_json_sha256"] = None  # run.json was written again after its end: nothing vouches for either
            runs[line["run"]]["end"] = end
        elif line["event"] == "resume" and (name := line.get("run", "")) in runs:
            before = runs[name]["end"]
            runs[name]["end"] = before if before and before["status"] == "complete" else None  # which is not resumed
    return runs


def find(start: Path | str) -> Path | None:
    """Returns the nearest folder, from this one upwards, that has a ledger; None if none has."""
    start = Path(start).absolute()
    return next((folder for folder in (start, *start.parents) if (folder / NAME).is_file()), None)
