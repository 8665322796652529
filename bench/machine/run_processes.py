"""The processes of one run, found by a mark in their environment, and by the sessions that
a marked process leads.

Linux only: elsewhere nothing is found.  Imports nothing heavy: what guards a run uses it.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from bench.machine import processes

MARK = "SPEEDRUN_RUN"  # in the environment of all that a run starts: the run's folder
WITHIN = "SPEEDRUN_WITHIN"  # of ranks: the program that runs them, nsys, which is then their parent
GONE_WITHIN_S = 30.0  # of what has been killed; a process that waits for a dead disk or driver takes longer
LOOK_EVERY_S = 0.05


def mark(folder: Path) -> dict[str, str]:
    """What marks a process as one of the run in this folder."""
    return {MARK: str(Path(folder).resolve())}


def find(folder: Path) -> set[int]:
    """The run's processes that have not ended, but for this one: those with its mark, and the sessions they lead."""
    wanted = f"{MARK}={Path(folder).resolve()}".encode()
    marked, by_session = set(), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.parent.name)
            fields = processes.stat_fields(pid)
            if fields[0] in "ZX":
                continue
            by_session.setdefault(int(fields[3]), set()).add(pid)
            if wanted in (path.parent / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    return marked.union(*(by_session.get(leader, ()) for leader in marked)) - {os.getpid()}


def cpu_s(folder: Path) -> dict[int, float]:
    """CPU seconds of each of the run's processes so far."""
    result, ticks_per_s = {}, os.sysconf("SC_CLK_TCK")
    for pid in find(folder):
        with contextlib.suppress(OSError, ValueError):
            fields = processes.stat_fields(pid)
            result[pid] = (int(fields[11]) + int(fields[12])) / ticks_per_s
    return result


def wake(folder: Path) -> None:
    """Continue what was stopped: a stopped process gets no signal but SIGKILL."""
    _signal(find(folder), signal.SIGCONT)


def end(folder: Path, within_s: float = GONE_WITHIN_S) -> set[int]:
    """Kill what is left of a run, and wait until all of it is gone.  Returns those that are not, in so many seconds."""
    until_s = time.monotonic() + within_s
    while left := find(folder):  # again, because one may have started another before it got the signal
        if time.monotonic() > until_s:
            return left
        _signal(left, signal.SIGKILL)
        for pid in left:
            if not processes.has_ended(pid, LOOK_EVERY_S):
                break
    return set()


def _signal(pids, number):
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
