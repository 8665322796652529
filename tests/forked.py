"""A process that runs `python -m MODULE` begun as a fork of this one, which has imported what it will need.

For the tests' fork server (fork_server.py): torch's import is 1.5 of the 2.5 CPU seconds of a rank that trains for a
moment.  From fork to exit it is a child like any other: parent and process number, session, folder, standard streams,
closed files, signals, variables (also in /proc) are those that Popen asked for.  What is not new is the interpreter.
"""

import contextlib
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
OF_INTERPRETER = ("PYTHON", "LD_", "MALLOC")  # beginnings of variables that are read as a program starts
MODULES = ("bench.launch.agent", "bench.launch.guard", "bench.launch.own_model", "bench.telemetry.sampler")
MODULES += ("bench.training.worker", "bench", "bench.race.arm_process")  # the last two: a race's runs and its questions
ROOM = "_" * 2**16  # of /proc/PID/environ and cmdline of a fork: as long as they were when this program began
_started = dict(os.environ)
_exec = subprocess._fork_exec


def of_interpreter(variables):
    return {name: value for name, value in variables.items() if name.startswith(OF_INTERPRETER)}


def install():
    """From now on Popen forks where it would start one of MODULES with this interpreter and this code."""
    gc.freeze()
    subprocess._fork_exec = _fork_exec


def _fork_exec(words, executables, close_fds, kept, cwd, env, *more):
    """As _posixsubprocess.fork_exec of Python 3.11 to 3.13, for which subprocess keeps it."""
    *pipes, error_out, restore, new_session, group, gid, groups, uid, umask, prepare, _ = more
    words = [os.fsdecode(word) for word in words]
    variables = dict(os.environ) if env is None else dict(os.fsdecode(one).split("=", 1) for one in env)
    asks_more = not (close_fds and restore) or group != -1 or (gid, groups, uid) != (None,) * 3 or umask != -1
    is_ours = words[:2] == [sys.executable, "-m"] and words[2] in MODULES and cwd and Path(cwd) == REPO
    if not is_ours or asks_more or of_interpreter(variables) != of_interpreter(_started):
        return _exec(words, executables, close_fds, kept, cwd, env, *more)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    with ending():
        gc.freeze()  # what the parent has left may not be collected: its files' numbers are others here
        _close(pipes, set(kept) - {error_out})
        if new_session:
            os.setsid()
        if prepare:
            prepare()
        become(words[2:], words, variables)
        sys.modules.pop("bench.__main__" if words[2] == "bench" else words[2], None)
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def _close(pipes, kept):
    """pipes: both ends of standard input, output and error, -1 for as it is, and that which reads the child's error."""
    for number, fd in ((0, pipes[0]), (1, pipes[3]), (2, pipes[5])):
        if fd == number:
            os.set_inheritable(fd, True)
        elif fd != -1:
            os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def become(argv, words, variables):
    """In a fork: a program that has just begun, with sys.argv, command line and variables."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(variables)
    _show(words, [f"{name}={value}" for name, value in variables.items()])
    sys.argv[:] = argv
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def _show(words, variables):
    """In /proc: its command line and its variables, by which processes are found.  Linux only, as what looks there."""
    with contextlib.suppress(OSError):
        bounds = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]  # fields 48 to 51 of proc(5)
        bounds = list(map(int, bounds))
        for texts, start, end in ((words, *bounds[:2]), (variables, *bounds[2:])):
            content = b"".join(os.fsencode(text) + b"\0" for text in texts)
            assert len(content) < end - start, "more than ROOM"
            ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


@contextlib.contextmanager
def ending():
    """In a fork: the block is the program, and its end that of the process; nothing of the parent's is left to do."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
