"""Runs `python -m MODULE` as a fork of this process, which has imported what the module needs.

It is part of the tests' fork server (fork_server.py): importing torch takes 1.5 of the 2.5 CPU seconds of a rank that
trains briefly.  The fork behaves like any child: parent, process id, session, folder, standard streams, closed files,
signals and environment variables (also in /proc) are those that Popen requested.  Only the interpreter is not fresh.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
OF_INTERPRETER = ("PYTHON", "LD_", "MALLOC")  # prefixes of variables that are read when a program starts
MODULES = (
    "bench",
    "torch.distributed.run",
    "bench.launch.guard",
    "bench.launch.own_model",
    "bench.plans.race.arm_process",
)
MODULES += ("bench.machine.telemetry.sampler", "bench.training.worker")
SCRIPT_WORKER = "bench/training/script_worker.py"  # the only program started by its path: it may not import bench
NOT_OF_SCRIPTS = ("bench", "models", "forked", "hydra", "omegaconf")  # modules that a script must import itself
CHANGED = "FORKED_CHANGED"  # environment variable of forks: JSON {"module.NAME": value} of constants to change
ROOM = "_" * 2**16  # reserves space in /proc/PID/environ and cmdline, which cannot grow after the start
LOOKUP_S = 1.0  # limit of a name lookup under any load of the tests; after it, the fork is tried again
started = {}  # this process's environment variables at install()
_exec = subprocess._fork_exec


def interpreter_variables(variables):
    return {name: value for name, value in variables.items() if name.startswith(OF_INTERPRETER)}


def install():
    """Makes Popen fork when it would start one of MODULES with this interpreter and this code."""
    gc.freeze()
    started.update(os.environ)
    subprocess._fork_exec = _fork_exec


class Child(NamedTuple):
    """What Popen requests of a child."""

    command: list[str]
    cwd: str
    variables: dict[str, str]
    streams: list[int]  # file descriptors that become 0, 1 and 2
    kept: set[int]  # file descriptors that stay open
    new_session: bool
    prepare: Callable | None


def requested_child(modules, command, executables, close_fds, kept, cwd, env, *rest):
    """Parses the arguments of _posixsubprocess.fork_exec (Python 3.11 to 3.13); None if it is another program."""
    *pipes, error_out, restore, new_session, group, gid, groups, uid, umask, prepare, _ = rest
    command = [os.fsdecode(argument) for argument in command]
    variables = dict(os.environ) if env is None else dict(os.fsdecode(variable).split("=", 1) for variable in env)
    folder = os.fsdecode(cwd) if cwd else os.getcwd()
    asks_more = not (close_fds and restore) or group != -1 or (gid, groups, uid) != (None,) * 3 or umask != -1
    is_module = command[:2] == [sys.executable, "-m"] and command[2] in modules
    is_ours = (is_module or _is_script_worker(command)) and Path(folder) in _code()
    if not is_ours or asks_more:
        return None
    streams = [number if fd == -1 else fd for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
    return Child(command, folder, variables, streams, set(kept) - {error_out}, bool(new_session), prepare)


def _is_script_worker(command):
    """Returns whether this starts the script worker without a profiler, which waits for the script to import torch."""
    if command[0] != sys.executable or command[1:2] not in [[str(code / SCRIPT_WORKER)] for code in _code()]:
        return False
    return not json.loads(Path(command[2], ".launch.tmp").read_text())["script"]["profile"]


def _code():
    """Returns the folders whose programs are forked: the repository, and the copy from which bench was imported."""
    return {REPO, *(sys.modules[name].CODE for name in ("bench.base.paths",) if name in sys.modules)}


def _fork_exec(*args):
    """Replaces subprocess._fork_exec."""
    child = requested_child(MODULES, *args)
    if child is None or interpreter_variables(child.variables) != interpreter_variables(started):
        return _exec(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid:
        return pid
    with ending():
        gc.freeze()  # collecting the parent's objects would close files whose numbers have another meaning here
        run(child)


def fork():
    """Forks, and repeats that until the child can look up a host name.

    An agent serves its ranks' store in a thread of torch, which looks up the name of each rank that connects.  If the
    next rank is forked at that moment, glibc's lock on resolv.conf stays locked in it, and it hangs in
    init_process_group, as do all others that wait for it.  A program that is started has fresh locks.
    """
    while True:
        free, tells = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tells)
            is_free = os.read(free, 1)
            os.close(free)
            if is_free:
                return pid
            os.waitpid(pid, 0)
            continue
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LOOKUP_S)
        with contextlib.suppress(OSError):
            socket.getnameinfo(("127.0.0.1", 0), 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.write(tells, b"1")
        os.close(free)
        os.close(tells)
        return 0


def run(child):
    """Runs the module in a fork to its end."""
    for number, fd in enumerate(child.streams):
        os.dup2(fd, number) if fd != number else os.set_inheritable(fd, True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in child.kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if child.new_session:
        os.setsid()
    os.chdir(child.cwd)
    if child.prepare:
        child.prepare()
    become(child.command, child.variables)
    if child.command[1] != "-m":
        return _run_script_worker(child)
    module = "bench.__main__" if child.command[2] == "bench" else child.command[2]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_script_worker(child):
    """Runs the script worker with torch imported, but none of our modules."""
    import torch

    torch.set_num_threads(int(child.variables["OMP_NUM_THREADS"]))
    for name in [name for name in sys.modules if name.partition(".")[0] in NOT_OF_SCRIPTS]:
        del sys.modules[name]
    traceback.format_stack()  # else torch.manual_seed() opens the sources of all callers, which only a fork has
    runpy.run_path(child.command[1], run_name="__main__")


def become(command, variables):
    """Gives a fork the signals, command line, variables and streams of a program that has just started."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    changed = json.loads(variables.pop(CHANGED, "{}"))
    os.environ.clear()
    os.environ.update(variables)
    _show(command, [f"{name}={value}" for name, value in variables.items()])
    for library in variables.get("LD_PRELOAD", "").split(":"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library or None).of_variables()  # a library of the tests reads its variables again
    for name, value in changed.items():
        module, _, constant = name.rpartition(".")
        module = importlib.import_module(module)
        assert hasattr(module, constant), name
        setattr(module, constant, value)
    sys.argv[:] = command[1 + (command[1] == "-m") :]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def _show(command, variables):
    """Writes the command line and variables to /proc, by which processes are found (on Linux only)."""
    with contextlib.suppress(OSError):
        bounds = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]  # fields 48 to 51 of proc(5)
        bounds = list(map(int, bounds))
        for texts, start, end in ((command, *bounds[:2]), (variables, *bounds[2:])):
            content = b"".join(os.fsencode(text) + b"\0" for text in texts)
            assert len(content) < end - start, "more than ROOM"
            ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


@contextlib.contextmanager
def ending():
    """Ends the process at the end of the block, without the clean-up that belongs to the parent of the fork."""
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
