"""Judges what a run reads and leaves behind: files, as bench/training/open_watch.py noted them, and shared memory."""

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from bench.base import private
from bench.base.paths import REPO
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.base.text_table import some
from bench.base.units import format_bytes
from bench.launch.prepare import Job
from bench.record.validity import FILES
from bench.training.open_watch import DATA

OTHER_DATA = "it read a file that is not the track's data: {}"
OTHER_SOURCE = "it read a source that its identity lacks: {}"
HIDING = "it left a link, an attribute or shared memory, in which a later run could find data: {}"
NAMES = "it left many files or folders outside of its run's folder, in whose names a later run could find data: {}"
PROGRAMS = (".py", ".pyc", ".cu", ".cuh", ".cpp", ".h", ".hpp")
MEMORY = "/dev/shm"
SETTINGS = (".json", ".toml", ".yaml", ".yml")
SMALL_BYTES = 2**16  # of files with other suffixes than DATA, all together: settings, not data (assumed)
MAX_NAMES = SMALL_BYTES // 255  # of files and folders that a run leaves elsewhere: a name has up to 255 bytes
# {size: sha256} of the files with GPT-2's vocabulary, which tiktoken reads from a cache in any folder
GPT2 = {
    456318: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    1042301: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


class Opened(TypedDict):
    """A file that a rank opened, moved or made, as it was before; the contestant itself can write such notes too."""

    path: str  # as it was named, absolute
    real: str  # with links resolved
    reads: bool
    writes: bool
    is_new: bool  # it did not exist, or was empty
    hides: bool  # a link, or a file that got a time or an attribute
    num_bytes: int
    changed_ns: int  # st_ctime_ns, which no program can set
    t_ns: int  # time.perf_counter_ns


def is_missing(note: Opened) -> bool:
    """Returns whether a note is of a file that was to be read and was not there."""
    return not (note["changed_ns"] or note["num_bytes"] or note["writes"] or note["hides"])


def noted(folder: Path, num_ranks: int) -> list[Opened]:
    """Returns the notes of all ranks in the order of their times."""
    notes: list[Opened] = []
    for rank in range(num_ranks):
        path = folder / f".rank{rank}.opened.tmp"
        with contextlib.suppress(Damaged), plain_file.lines(path) as lines:
            for line in lines:
                with contextlib.suppress(Damaged):  # a line that a killed rank left unfinished
                    notes.append(json_file.parsed(line, path, Opened))
    return sorted(notes, key=lambda note: note["t_ns"])


def foreign(
    notes: Sequence[Opened], known: Collection[str] = (), beside: tuple[str, ...] = (), work: str | None = None
) -> tuple[list[Opened], list[str]]:
    """Returns (first notes of data files, true paths of sources) that were read, are not known and not made by the run.

    known: true paths of the track's shards and the run's sources; beside: folders in which settings are sources; work:
    the script's folder, where no data was before.
    """
    first: dict[str, Opened] = {}
    notes = [note for note in notes if not is_missing(note)]
    for note in notes:
        first.setdefault(note["real"], note)
    made = {real for real, note in first.items() if note["is_new"]}  # also folders
    data, sources = list[Opened](), set[str]()
    for real in sorted({note["real"] for note in notes if note["reads"]}):
        if real in known or source_of(real) in known or made & {real, *map(str, Path(real).parents)}:
            continue
        if _has(first[real], PROGRAMS) or (real.startswith(beside) and real.endswith(SETTINGS)):
            sources.add(source_of(real))
        elif work is None or not real.startswith(work):
            data.append(first[real])
    return [note for note in data if not _is_gpt2s(note)], sorted(sources)


def without_small(data: Sequence[Opened]) -> list[Opened]:
    """Returns the data files without those that are small together and may be anybody's settings."""
    named = [note for note in data if _has(note, DATA)]
    others_bytes = sum(note["num_bytes"] for note in data) - sum(note["num_bytes"] for note in named)
    return list(data) if others_bytes > SMALL_BYTES else named


def doubts_about_own(folder: Path, job: Job, since_s: float) -> Iterator[dict[str, Any]]:
    """Yields the doubts about a run of a user's own classes, whose ranks note no shards and no sources.

    since_s: as in doubts_about_memory().
    """
    notes = noted(folder, job.config.hardware.num_processes or 1)
    data, sources = foreign(notes)
    below = f"{os.path.realpath(folder)}{os.sep}"
    elsewhere = [note for note in notes if not note["real"].startswith(below) and os.path.lexists(note["real"])]
    hiding = {note["real"] for note in elsewhere if note["hides"]}
    kept = sorted(hiding | {*_left_in_memory(since_s)}) if fixes_data(job) else []
    made = sorted({note["real"] for note in elsewhere if note["writes"] and note["is_new"]})
    names = made if fixes_data(job) and len(made) > MAX_NAMES else []
    # also small ones, which are no part of its identity: open_watch.py does not note those of the system
    files = [note["real"] for note in data if not note["real"].startswith(below)] if fixes_data(job) else []
    for sentence, paths in ((OTHER_DATA, files), (OTHER_SOURCE, sources), (HIDING, kept), (NAMES, names)):
        if paths:
            doubt = private.redact(sentence.format(some(paths, 1)), REPO)
            yield {"rank": None, "instrument": FILES, "doubt": doubt}


def doubts_about_memory(since_s: float) -> Iterator[dict[str, Any]]:
    """Yields a doubt about System V shared memory that processes used which have ended, perhaps the run's.

    It outlives processes, so that a run finds in it what an earlier one has left.  It stays, as it may be another
    program's.  since_s: when the run began, as time.time() gives it; memory that was last attached before, or by a
    program that still lives, is not the run's.
    """
    used = {}  # {id: bytes}
    with contextlib.suppress(OSError, ValueError):
        head, *lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
        for line in lines:
            of = dict(zip(head, map(int, line)))
            is_of_ended = of["uid"] == os.getuid() and of["nattch"] == 0 and not os.path.exists(f"/proc/{of['lpid']}")
            if is_of_ended and of["lpid"] and max(of["atime"], of["dtime"]) >= int(since_s):
                used[of["shmid"]] = of["size"]
    if used:
        what = f"{format_bytes(sum(used.values()))} of System V shared memory were used while it ran"
        remedy = " ".join(f"-m {shm_id}" for shm_id in used)
        why = f"{what}, and a later run finds data in them: if no program of yours needs them, ipcrm {remedy}"
        yield {"rank": None, "instrument": FILES, "doubt": why}


def _left_in_memory(since_s: float) -> list[str]:
    """Returns this user's files in /dev/shm that are new since then, and that no living process has open.

    They stay there, as they may be another program's.
    """
    new = set[str]()
    with contextlib.suppress(OSError):
        for entry in os.scandir(MEMORY):
            facts = entry.stat(follow_symlinks=False)
            if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and facts.st_ctime >= since_s:
                new.add(entry.path)
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):  # another user's, or it has ended
            mapped = maps.read_text(errors="replace")
            new = {path for path in new if path not in mapped}
    for fd in Path("/proc").glob("[0-9]*/fd/*") if new else ():
        with contextlib.suppress(OSError):
            new.discard(os.readlink(fd))
    return sorted(new)


def fixes_data(job: Job) -> bool:
    """Returns whether the track of a job fixes its data."""
    return any(key.split(".")[0] == "data" for key in job.config.track.fixed)


def source_of(path: str) -> str:
    """Returns the path of the source of a .pyc in __pycache__; any other path unchanged."""
    return re.sub(r"__pycache__/([^/]+?)\.[^/]*\.pyc$", r"\1.py", path)


def _has(note: Opened, suffixes: tuple[str, ...]) -> bool:
    return note["path"].endswith(suffixes) or note["real"].endswith(suffixes)


def _is_gpt2s(note: Opened) -> bool:
    if note["num_bytes"] not in GPT2:
        return False
    with contextlib.suppress(Damaged):
        return hashlib.sha256(plain_file.content(note["real"])).hexdigest() == GPT2[note["num_bytes"]]
    return False
