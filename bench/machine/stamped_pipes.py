"""Reads pipes that other processes write to, and stamps each piece of data with the time at which it arrived.

One thread reads all pipes.  A stamp is never early.  It is late if the thread did not run at once, and the thread
estimates by how much: at most the time since it last looked, and usually the time that it and the main thread, which
may hold the GIL, spent ready but not running (/proc/*/schedstat of Linux; elsewhere the bound is used), plus the time
for which a running main thread may keep it.  It is an estimate because time that a hypervisor takes from a core is not
included.  The thread wakes five times a second, so it also notices when it did not run at all: the machine was frozen,
or this process was stopped.
"""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

from bench.base.units import MIB

PIPE_BYTES = MIB
WAKE_EVERY_S = 0.2
MIN_GAP_S = 0.05  # beyond WAKE_EVERY_S; a shorter delay of a wake-up is normal
F_SETPIPE_SZ = 1031  # linux/fcntl.h


class Sink(Protocol):
    """The receiver of the data of one pipe."""

    fd: int

    def take(self, data: bytes, t_ns: int, late_ns: int) -> None:
        """data arrived at t_ns (time.perf_counter_ns), or up to late_ns earlier."""


def opened(path: str) -> int:
    """Creates a named pipe and returns its file descriptor.  Raises OSError if the file system has none."""
    os.mkfifo(path)
    # Read and write, so that there is no end of file before a writer opens it, or opens it again.
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        fcntl.fcntl(fd, F_SETPIPE_SZ, PIPE_BYTES)  # a program that prints much must not wait for us
    return fd


class StampedPipes:
    """with StampedPipes([sink, ...]) as pipes: ...   Leaving the context reads what is left.

    pipes.gaps_ns: [(from, to)] in which the thread should have run and did not.
    """

    def __init__(self, sinks: Sequence[Sink], now_ns: Callable[[], int] = time.perf_counter_ns):
        self.gaps_ns: list[tuple[int, int]] = []
        self._sinks, self._now_ns = {sink.fd: sink for sink in sinks}, now_ns
        self._stop = threading.Event()
        self._woken_fd, self._wake_fd = os.pipe()
        self._thread = threading.Thread(target=self._read, name="stamped-pipes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        os.write(self._wake_fd, b".")
        self._thread.join()
        os.close(self._wake_fd)
        os.close(self._woken_fd)

    def _read(self) -> None:
        poller, timeout_ns = select.poll(), round(WAKE_EVERY_S * 1e9)
        for fd in (*self._sinks, self._woken_fd):
            poller.register(fd, select.POLLIN)
        with _Schedule() as schedule:
            read_ns = self._now_ns()  # everything that had arrived by then has been read
            while True:
                began_ns, before = self._now_ns(), schedule.read()
                ready = poller.poll(0 if self._stop.is_set() else WAKE_EVERY_S * 1e3)
                t_ns = self._now_ns()
                late_ns = t_ns - read_ns
                if t_ns - began_ns > timeout_ns + MIN_GAP_S * 1e9:
                    self.gaps_ns.append((began_ns + timeout_ns, t_ns))
                elif before is not None and (now := schedule.read()) is not None:
                    late_ns = min(late_ns, began_ns - read_ns + schedule.delay_ns(before, now))
                for fd, _ in ready:
                    if fd in self._sinks:
                        self._sinks[fd].take(os.read(fd, PIPE_BYTES), t_ns, late_ns)
                read_ns = t_ns
                if self._stop.is_set() and not any(fd in self._sinks for fd, _ in ready):
                    return


class _Schedule:
    """The kernel scheduler's account of this thread and of the main thread."""

    def __enter__(self) -> Self:
        self._fds: list[int] = []
        with contextlib.suppress(OSError):
            for path in (Path("/proc/thread-self/schedstat"), Path(f"/proc/self/task/{os.getpid()}/schedstat")):
                self._fds.append(os.open(path, os.O_RDONLY))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for fd in self._fds:
            os.close(fd)

    def read(self) -> list[tuple[int, int]] | None:
        """Returns [(ns on a core, ns ready but not running)] of this thread and the main thread; None if unknown."""
        if len(self._fds) < 2:
            return None
        ran_and_waited = (os.pread(fd, 64, 0).split() for fd in self._fds)
        return [(int(ran_ns), int(waited_ns)) for ran_ns, waited_ns, *_ in ran_and_waited]

    def delay_ns(self, before: list[tuple[int, int]], now: list[tuple[int, int]]) -> int:
        """Returns by how many nanoseconds this thread may have run too late between two readings."""
        (_, own), (_, main) = now
        locked_ns = min(now[1][0] - before[1][0], round(sys.getswitchinterval() * 1e9))
        return own - before[0][1] + main - before[1][1] + locked_ns
