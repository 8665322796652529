"""Processes that start and end together: workers never outlive their launcher, even if it is killed.

Imports nothing heavy, because workers use it before they import torch.  On Linux a pidfd sleeps in the kernel and costs
nothing; elsewhere the process is checked once a second.
"""

import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeGuard

from bench.machine.signals import ENDING, held

WITHIN = "SPEEDRUN_WITHIN"  # set for ranks: the program below which they run (nsys), their parent
LOOK_EVERY_S = 1.0  # if the kernel cannot wake us
END_LOOK_S = 0.05
DIES_WITHIN_S = 10.0  # after its parent: torch's DataLoader workers look every 5 s whether theirs is there
PF_EXITING = 4  # of linux/sched.h, in field 9 of /proc/PID/stat
# names that a published record may have; any other may say what somebody works on
KNOWN = re.compile(
    r"(python|pypy|node|ruby|julia|java|perl|php|R|cargo|rustc|go|cc1|cc1plus|ld|ninja|make|nvcc|cicc|ptxas|git|ssh"
    r"|sshd|bash|sh|tar|gzip|rsync|docker|dockerd|containerd|Xorg|chrome|firefox|code|kswapd|kworker)[\d.]*(/.*)?"
    r"|pt_main_thread"
)
SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of processes, memory or open files
WAKE_AFTER_S = 1.0  # from SIGTERM to SIGCONT for stopped processes, which have not received it


def shortage(message: str) -> int | None:
    """Returns which of SHORTAGES a program's message names, or None: the same command may succeed later."""
    if "can't start new thread" in message:  # Python's words for EAGAIN
        return errno.EAGAIN
    return next((code for code in SHORTAGES if os.strerror(code) in message), None)


@contextlib.contextmanager
def child(
    command: Sequence[str],
    cwd: Path | str,
    env: Mapping[str, str],
    out: IO[Any] | None,
    end_within_s: float,
    wrappers: int = 0,
    stdin: int = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """Context that yields a Popen in a new session; it is ended with the context, and on Linux with this process.

    out: a file for both its outputs, None for this process's own.  SIGTERM lets it end what it started itself; it is
    killed after end_within_s.  wrappers: processes around it that pass no signal on, as in inside().  stdin: PIPE gives
    it a standard input that ends with the context or this process.
    """
    process = None
    try:
        with held():  # a signal between fork and here would leave a child without an owner
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        yield process
    finally:
        if process is not None:
            if process.stdin:
                process.stdin.close()
            # a stopped process gets no signal but SIGKILL until it is continued
            ways = (
                (signal.SIGTERM, min(WAKE_AFTER_S, end_within_s)),
                (signal.SIGCONT, end_within_s),
                (signal.SIGKILL, None),
            )
            for number, within_s in ways:
                reached = {process.pid} if number == signal.SIGKILL else inside(process.pid, wrappers)
                if process.poll() is None:
                    signal_all(reached, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(within_s)


def call_and_exit(main: Callable[..., object], *args: Any) -> NoReturn:
    """Ends this process as soon as main(*args) returns, with exit code 0, or 1 and a traceback if it raised.

    Avoids sys.exit, because DDP over gloo aborts in its static destructors in about 1 exit of 20.
    """
    exit_code = 0
    try:
        main(*args)
    except BaseException:
        import traceback

        traceback.print_exc()
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def when_gone(pid: int, then: Callable[[], object], name: str) -> None:
    """Calls then() in a daemon thread as soon as process pid has ended."""

    def wait() -> None:
        while not has_ended(pid, within_s=None):
            pass
        then()

    threading.Thread(target=wait, name=name, daemon=True).start()


def has_ended(pid: int, within_s: float | None) -> bool:
    """Waits at most within_s (None: without limit); returns whether process pid has ended.  A zombie has ended too."""
    return one_has_ended([pid], within_s)


def one_has_ended(pids: Sequence[int], within_s: float | None) -> bool:
    """Waits at most within_s (None: without limit); returns whether one of these processes has ended."""
    with contextlib.ExitStack() as opened:
        poller = select.poll()
        try:
            for pid in pids:
                pidfd = os.pidfd_open(pid)
                opened.callback(os.close, pidfd)
                poller.register(pidfd, select.POLLIN)
        except ProcessLookupError:
            return True
        except (AttributeError, OSError):  # no pidfd on this system
            time.sleep(LOOK_EVERY_S if within_s is None else within_s)
            return not all(_exists(pid) for pid in pids)
        return bool(poller.poll(None if within_s is None else within_s * 1e3))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def die_with_parent() -> None:
    """Makes this process be killed when the thread that started it ends.  Linux only; does nothing elsewhere.

    Call it between fork and exec, or first in the program, which must then check that its parent is still there.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def adopt_orphans(adopts: bool = True) -> None:
    """Makes orphaned descendants of this process its children, whatever their session or environment.  Linux only; does
    nothing elsewhere."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, int(adopts), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@contextlib.contextmanager
def strays() -> Iterator[Callable[[], list[str]]]:
    """with strays() as end_strays: ...   Inside, orphaned descendants of this process become its children.

    end_strays() ends them; returns "NAME (process PID)" of each one that did not end by itself soon after its parent.
    """
    elders = children()
    adopt_orphans()

    def end_strays() -> list[str]:
        until_s, names = time.monotonic() + DIES_WITHIN_S, dict[int, str]()
        while alive := children() - elders:
            going_on = {pid for pid in alive if time.monotonic() > until_s and not _is_dying(pid)}
            for pid in going_on - names.keys():
                with contextlib.suppress(OSError):
                    names[pid] = f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} (process {pid})"
            signal_all(going_on.union(*map(descendants, going_on)), signal.SIGKILL)
            one_has_ended([*alive], END_LOOK_S)
            reap(alive)
        return list(names.values())

    try:
        yield end_strays
    finally:
        adopt_orphans(False)


def _is_dying(pid: int) -> bool:
    """Whether every thread of a process ends or has SIGKILL pending: it may still wait for a core, or for a disk."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):  # none once it is gone
        with contextlib.suppress(OSError):
            fields = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if not int(fields[6]) & PF_EXITING and not int(fields[28]) & 1 << signal.SIGKILL - 1:
                return False
    return True


def children(pid: int | None = None) -> set[int]:
    """Returns the children of a process, zombies too; pid: None for this process.  Empty without /proc.

    Reads the kernel's lists, one per thread: searching all processes of a large machine takes a tenth of a second.
    """
    pid = os.getpid() if pid is None else pid
    try:
        lists = [Path(path, "children").read_text() for path in Path(f"/proc/{pid}/task").iterdir()]
        return {int(child) for text in lists for child in text.split()}
    except OSError:  # a kernel without these lists, or a thread that has just ended
        return _children_among_all(pid)


def _children_among_all(parent: int) -> set[int]:
    pids = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.parent.name)
            if int(stat_fields(pid)[1]) == parent:
                pids.add(pid)
    return pids


def inside(pid: int, wrappers: int) -> set[int]:
    """Returns the processes inside so many wrappers, each the parent of the next; pid: the outermost."""
    pids = {pid}
    for _ in range(wrappers):
        pids = set[int]().union(*map(children, pids))
    return pids


def descendants(pid: int) -> set[int]:
    """Returns the children of a process, and theirs, zombies too.  Empty without /proc."""
    pids: set[int] = set()
    waiting = {pid}
    while waiting:
        waiting = set[int]().union(*map(children, waiting)) - pids
        pids |= waiting
    return pids


def cpu_s(pids: Iterable[int], with_reaped: bool = False) -> dict[int, float]:
    """Returns {pid: CPU seconds so far} of those processes that exist.  with_reaped: and of what they waited for."""
    spent_s, ticks_per_s = {}, os.sysconf("SC_CLK_TCK")
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            spent_s[pid] = sum(map(int, fields[11 : 15 if with_reaped else 13])) / ticks_per_s
    return spent_s


def everyones_cpu_s() -> dict[int, float]:
    """Returns {pid: CPU seconds so far} of all processes of this machine that are visible."""
    return cpu_s(int(path.name) for path in Path("/proc").glob("[0-9]*"))


def busiest_others(before_s: Mapping[int, float], most: int = 3) -> list[tuple[str, int, float]]:
    """Returns [(program, pid, CPU seconds since everyones_cpu_s() returned before_s)] of the busiest processes, without
    this one and its descendants.  A program that has ended is missing."""
    own = descendants(os.getpid()) | {os.getpid()}
    spent_s = {pid: now_s - before_s.get(pid, 0.0) for pid, now_s in everyones_cpu_s().items() if pid not in own}
    busiest = []
    for pid in sorted(spent_s, key=lambda pid: -spent_s[pid])[:most]:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
            busiest.append((name, pid, spent_s[pid]))
    return busiest


def public_name(program: str) -> str:
    """Returns the name of a program as records have it, which are published: "another program" if it is not KNOWN."""
    return program if KNOWN.fullmatch(program) else "another program"


def waited_ns(pids: Iterable[int]) -> int | None:
    """Returns for how long the process that waited longest was ready to run but did not run: its main thread, since it
    began.  None if the system does not report it, or there is none."""
    waits = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            waits.append(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]))
    return max(waits, default=None)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Sends a signal to each of these processes that exists."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def reap(pids: Iterable[int]) -> None:
    """Reaps those of these children that have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def end_descendants(within_s: float) -> set[int]:
    """Kills every descendant of this process, which adopts orphans, until none is left or time is up; returns those
    that are left."""
    until_s = time.monotonic() + within_s
    while (alive := descendants(os.getpid())) and time.monotonic() < until_s:
        signal_all(alive, signal.SIGKILL)
        one_has_ended([*alive], END_LOOK_S)
        reap(alive)
    return alive


def boot_id_hash() -> str | None:
    """Returns a hash of this boot and PID namespace, with which a pid identifies a process; None if not on Linux."""
    from bench.base import private  # here, as importing it takes half of a guard's CPU time

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return private.salted_hash(boot + os.readlink("/proc/self/ns/pid"))
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Returns when process pid started, in ticks since boot (field 22 of /proc/PID/stat); None: gone, or a zombie."""
    if not isinstance(pid, int):  # from a foreign record: must not become part of a path
        return None
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # fields[0] is field 3


def identity(pid: int) -> dict[str, Any]:
    """Returns {"pid", "start_ticks", "boot_id_hash"}, which identifies a process of this machine in a file."""
    return {"pid": pid, "start_ticks": start_ticks(pid), "boot_id_hash": boot_id_hash()}


def is_of_this_boot(mark: object) -> TypeGuard[dict[str, Any]]:
    """Whether an identity read from a file is of a process of this machine since it was booted."""
    return isinstance(mark, dict) and mark.get("boot_id_hash") == boot_id_hash() and isinstance(mark.get("pid"), int)


def is_there(mark: object) -> bool:
    """Whether the process of an identity read from a file is running on this machine."""
    return is_of_this_boot(mark) and mark == identity(mark["pid"]) and not has_ended(mark["pid"], 0)


def stat_fields(pid: int) -> list[str]:
    """Returns /proc/PID/stat from field 3, the state, on; field 2, the name, may have spaces.  Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


@contextlib.contextmanager
def started(work: Callable[[Any], Any], jobs: Sequence[Any], are_many: bool) -> Iterator[Iterator[Any]]:
    """with started(...) as results: ...   results: work(job) for each job, in the order of completion.

    Two processes work beside the block if are_many; otherwise, or if a fork is not safe, jobs are done while iterating.
    """
    if not are_many or threading.active_count() > 1 or not hasattr(os, "fork"):
        yield map(work, jobs)
        return
    import multiprocessing

    # the signal that ends a worker waits until the worker has replaced the handlers of this process
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        pool = multiprocessing.get_context("fork").Pool(2, _take_default_handlers, [blocked])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with pool:
        yield pool.imap_unordered(work, jobs)


def _take_default_handlers(blocked: set[int]) -> None:
    for number in ENDING:
        if callable(signal.getsignal(number)):  # an ignored signal, as nohup sets it, remains so
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
