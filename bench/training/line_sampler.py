"""Samples where a training script is and what it uses, a hundred times a second, for ./run.sh audit --only clock.

A thread reads the main thread's stack, the CPU time of the process (without the thread's own) and of the processes that
it started (including daemons that the run's guard has inherited), and the bytes read.  So does every reading of a clock
by the script, because its phases may change there.  bench/record/off_clock.py evaluates the samples.  It needs only the
standard library of Python 3.8, as script_worker.py runs it beside another torch.  Reads by memory maps are not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

VARIABLE = "SPEEDRUN_SAMPLE_LINES"  # the launcher's folder for the samples
FILE = "samples.jsonl"  # in that folder
EVERY_S = 0.01
CHILDREN_EVERY = 5  # other processes are read at every fifth sample
APART_NS = 1_000_000
MAX_FRAMES = 12
CLOCKS = ("perf_counter", "perf_counter_ns", "time", "time_ns", "monotonic", "monotonic_ns")
BATCH = 100  # samples per write
TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


def start(path: str, work: str, launcher_pid: int | None) -> Callable[[], None]:
    """Starts to write samples to a file; returns the function that ends it.

    The file has lines of JSON.  [chain] defines the next chain, numbered from 0, as a list of [file below work, line,
    function], innermost first.  A sample is [t_ns by time.perf_counter_ns, CPU ns of the process, CPU ns of other
    processes, bytes read, number of its chain].
    """
    stop, main_id = threading.Event(), threading.main_thread().ident or 0
    folders = tuple({os.path.abspath(work) + os.sep, os.path.realpath(work) + os.sep})
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    now_ns, process_ns, thread_ns, wait = time.perf_counter_ns, time.process_time_ns, time.thread_time_ns, stop.wait
    current_frames, guard_pid = sys._current_frames, _guard(launcher_pid)
    elders = {*_children(guard_pid)} if guard_pid else set()
    chains: dict[tuple[tuple[str, int, str], ...], int] = {(): 0}
    lines = [json.dumps([[]])]
    lock, last_ns, others_ns, own_ns = threading.RLock(), 0, 0, 0

    def sample(frame: FrameType | None, own_ns: int) -> None:
        nonlocal last_ns
        frames: list[tuple[str, int, str]] = []
        while frame is not None and len(frames) < MAX_FRAMES:
            name = frame.f_code.co_filename
            inside = next((name[len(folder) :] for folder in folders if name.startswith(folder)), None)
            if inside is not None:
                frames.append((inside, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        chain = tuple(frames)
        with lock:
            if chain not in chains:
                chains[chain] = len(chains)
                lines.append(json.dumps([chain]))
            last_ns = now_ns()
            lines.append(json.dumps([last_ns, process_ns() - own_ns, others_ns, _bytes_read(), chains[chain]]))

    def flush() -> None:
        with lock:
            text = "\n".join(lines) + "\n" if lines else ""
            lines.clear()
        os.write(fd, text.encode())

    def loop() -> None:
        nonlocal others_ns, own_ns
        number = 0
        while not wait(EVERY_S):
            if number % CHILDREN_EVERY == 0:
                others_ns = _others_ns(guard_pid, elders)
            own_ns = thread_ns()
            sample(current_frames().get(main_id), own_ns)
            number += 1
            if number % BATCH == 0:
                flush()

    last_place: object = None

    def reading(clock: Callable[[], float]) -> Callable[[], float]:
        """Wraps a clock to take a sample when the script reads it, because its phases may change there."""

        def read() -> float:
            nonlocal last_place
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(folders):
                place = (frame.f_code, frame.f_lineno)  # a loop that polls the clock is sampled now and then only
                if place != last_place or now_ns() - last_ns > APART_NS:
                    sample(frame, own_ns)
                last_place = place
            return clock()

        return read

    for name in CLOCKS:
        setattr(time, name, reading(getattr(time, name)))
    sample(None, 0)
    thread = threading.Thread(target=loop, name="line-sampler", daemon=True)
    thread.start()

    def end() -> None:
        nonlocal others_ns
        stop.set()
        thread.join()
        others_ns = _others_ns(guard_pid, elders)
        sample(None, own_ns)
        flush()
        os.close(fd)

    return end


def _bytes_read() -> int:
    """Returns the bytes that read calls of this process and its ended children have returned."""
    try:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _others_ns(guard_pid: int, elders: set[int]) -> int:
    """Returns the CPU time of all processes that this one has started, ended or not."""
    times = os.times()
    ended_ns = round(1e9 * (times.children_user + times.children_system))
    orphans = [pid for pid in _children(guard_pid) if pid not in elders] if guard_pid else []
    return ended_ns + sum(_cpu_ns(pid) for pid in _below([*_children(os.getpid()), *orphans]))


def _below(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        yield pid
        yield from _below(_children(pid))


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                pids += [int(child) for child in file.read().split()]
    return pids


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _cpu_ns(pid: int) -> int:
    try:
        return sum(map(int, _stat(pid)[11:15])) * TICK_NS  # utime, stime, and both of its ended children
    except (OSError, ValueError):
        return 0


def _guard(launcher_pid: int | None) -> int:
    """Returns the pid of the run's guard, which inherits orphans: the ancestor just below the launcher; 0: not found.
    In a sandbox, where the launcher is not visible, it is the first process."""
    if launcher_pid is None:
        return 1
    pid = os.getpid()
    try:
        while (parent := int(_stat(pid)[1])) != launcher_pid:
            if parent <= 1:
                return 0
            pid = parent
    except (OSError, ValueError, IndexError):
        return 0
    return pid if pid != os.getpid() else 0
