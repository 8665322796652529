"""The guard is the ancestor of all processes of a run and ends them:  python -m bench.launch.guard FOLDER [member]

The launcher starts it and writes to its standard input, a pipe that only the launcher holds, a line of JSON that says
what to start: {"words", "env", "log", "survives", "wrappers"} (ranks.py).  A process below the guard that loses its
parent becomes the guard's child (PR_SET_CHILD_SUBREAPER), even a daemon with its own session and environment, so no
process of the run escapes.

When the started program has ended, the guard kills what is left below it and answers with a line, {"exit_code",
"left": pids that the kernel does not release}.  Then it waits for GOODBYE.  STOP ends the run's processes.  If the pipe
ends without GOODBYE, the launcher was killed: the guard ends the processes at once and finishes the record, unless it
guards a member of a run over several nodes, whose record another process makes.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from bench.machine import processes

GOODBYE, STOP = b".", b"s"
GRACE_S = 5.0  # from SIGTERM to SIGKILL
GONE_WITHIN_S = 30.0  # for killed processes to disappear; one that waits for a dead disk or driver takes longer
LOOK_EVERY_S = 0.1  # polling interval while processes are being ended


def main(folder: str, member: str | None = None) -> None:
    processes.adopt_orphans()
    orders = _Orders()
    line = orders.line()
    if line:
        started = json.loads(line)
        orders.survives = started["survives"]
        log = os.open(started["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        exit_code = _run(started["words"], started["env"], orders, started["wrappers"])
        remaining = processes.end_descendants(GONE_WITHIN_S)
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps({"exit_code": exit_code, "left": sorted(remaining)}).encode() + b"\n")
    while orders.is_open and not orders.is_goodbye:
        orders.wait(None)
    if not orders.is_goodbye and not member:
        from bench.record import failures

        failures.write_launcher_killed(folder)


class _Orders:
    """Receives orders from standard input and signals: SIGTERM counts as STOP, and SIGCHLD ends wait()."""

    def __init__(self) -> None:
        self.is_open, self.is_goodbye, self.is_stop = True, False, False
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *args: None)
        self.survives = False  # SIGTERM is only a warning: the ranks and the launcher end the run

    def line(self) -> bytes:
        """Waits for the first line and returns it; b"" if GOODBYE or the end of the pipe came instead."""
        data = b""
        while self.is_open and b"\n" not in data and data != GOODBYE:
            chunk = os.read(0, 1 << 16)
            self.is_open, data = bool(chunk), data + chunk
        line, newline, rest = data.partition(b"\n")
        self._take(rest if newline else data[:1])
        return line if newline else b""

    def wait(self, timeout_s: float | None) -> None:
        """Waits for an order or a signal, at most timeout_s (None: forever)."""
        watched = [self._woken, *([0] if self.is_open else [])]
        ready = select.select(watched, [], [], timeout_s)[0]
        if self._woken in ready:
            self.is_stop |= signal.SIGTERM in os.read(self._woken, 1 << 12) and not self.survives
        if 0 in ready:
            orders = os.read(0, 1 << 12)
            self.is_open = bool(orders)
            self._take(orders)

    def _take(self, orders: bytes) -> None:
        self.is_goodbye |= GOODBYE in orders
        self.is_stop |= STOP in orders


def _run(command: list[str], env: dict[str, str], orders: _Orders, wrappers: int) -> int | None:
    """Runs the command to its end.  Returns its exit code, negative for a signal, None if the kernel does not end it.

    wrappers: number of sandbox processes around it, each the parent of the next.  They pass no signal on, and exit with
    128 plus its number if a signal ended the command.
    """
    try:
        # in its own session: the launcher handles Ctrl-C and a closed terminal
        child = subprocess.Popen(
            command,
            env=env,
            cwd=os.getcwd(),
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            start_new_session=True,
            preexec_fn=_confined if wrappers else processes.die_with_parent,
        )
    except OSError as error:  # such as a limit of processes
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
        return os.EX_OSERR
    stopped_s, is_woken = None, False
    while child.poll() is None and orders.is_open:
        if orders.is_stop and stopped_s is None:
            stopped_s = time.monotonic()
            processes.signal_all(processes.inside(child.pid, wrappers), signal.SIGTERM)
        since_s = 0.0 if stopped_s is None else time.monotonic() - stopped_s
        if since_s > GRACE_S:
            break
        if since_s > processes.WAKE_AFTER_S and not is_woken:
            is_woken = True
            processes.signal_all(processes.descendants(os.getpid()), signal.SIGCONT)
        orders.wait(None if stopped_s is None else LOOK_EVERY_S)
        processes.reap(processes.children() - {child.pid})
    if child.poll() is None:
        processes.signal_all(processes.descendants(os.getpid()), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GONE_WITHIN_S)
    code = child.returncode
    return 128 - code if wrappers and code is not None and code > 128 else code


def _confined() -> None:
    """Prepares the child before exec: if memory runs out, the kernel kills sandboxed processes first."""
    processes.die_with_parent()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    main(*sys.argv[1:])
