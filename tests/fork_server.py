"""python -m bench WORDS many times, for the tests: each a fork of one process that has imported all verbs already.

A command costs a second of imports and of hashing the code, which a user pays once and the tests hundreds of times.  A
fork begins where `python -m bench` is after its imports, with the environment, folder and output of its own, and so do
its agent, ranks, guard and sampler (forked.py); all else that it starts is a fresh process.  A command that is to see
another interpreter (PYTHONPATH ...) is started as a program with all its processes: fits().  For one with an LD_PRELOAD
there can be a server that has it too: preloaded().
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import platform
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import forked

REPO = forked.REPO
START_S = 120.0  # for the server to begin a command on a busy machine
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000  # linux/sched.h
MS_SLAVE, MS_REC, MNT_DETACH = 1 << 19, 1 << 14, 2  # sys/mount.h
_servers = {}  # by LD_PRELOAD, "": that which most are forks of
_preloaded = []


def fits(more):
    """Whether a command with these variables beside the tests' own may be a fork."""
    asked = forked.of_interpreter(more)
    return hasattr(os, "fork") and (not asked or list(asked) == ["LD_PRELOAD"] and asked["LD_PRELOAD"] in _preloaded)


@contextlib.contextmanager
def preloaded(library):
    """Within it, commands with LD_PRELOAD=library may be forks too.  It needs a function of_variables() that reads the
    variables which it obeys: a fork gets its own after the library was loaded.
    """
    _preloaded.append(str(library))
    try:
        yield
    finally:
        _preloaded.remove(str(library))
        if server := _servers.pop(str(library), None):
            _close(server)


def call(words, env, timeout_s, module="bench"):
    """subprocess.run([python, -m, module, *words], cwd=REPO) with captured text; TimeoutExpired as there."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"words": [module, *words], "env": dict(env), "folder": folder, "timeout_s": timeout_s}
        answer = _asked(asked)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    if answer == "timeout\n":
        raise subprocess.TimeoutExpired(words, timeout_s, out, err)
    return subprocess.CompletedProcess([module, *words], int(answer), out, err)


def _asked(what):
    """Of the server -> its answer."""
    library = what["env"].get("LD_PRELOAD")
    library = library if library in _preloaded else ""
    server = _servers.get(library)
    if server is None or server.poll() is not None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SPEEDRUN_")}  # no test's own
        plain |= {"ROOM": forked.ROOM} | ({"LD_PRELOAD": library} if library else {})
        program = [sys.executable, str(Path(__file__)), forked.ROOM]
        server = _servers[library] = subprocess.Popen(program, cwd=REPO, env=plain, **pipes)
        atexit.register(_close, server)
    server.stdin.write(json.dumps(what) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise RuntimeError(f"the fork server ended with {server.wait()}")
    return answer


class Started:
    """subprocess.Popen([python, -m, module, *words], cwd=REPO, stderr=STDOUT, text=True), with output into a file.

    The server answers at once: a fork of it is the command's parent, waits for it and says how it ended.  changed:
    {"module.NAME": value}, constants that are others for this command; new_session; host: (name of a network namespace
    of iproute2, host name), as `ip netns exec` and `unshare -u` give them.
    """

    def __init__(self, words, env, module="bench", changed=None, **more):
        self.args, self.returncode = [module, *words], None
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._out, said = Path(folder, "out"), Path(folder, "said")
        os.mkfifo(said)
        self._said, self._unread = os.open(said, os.O_RDONLY | os.O_NONBLOCK), b""
        weakref.finalize(self, os.close, self._said)
        asked = {"words": self.args, "env": dict(env), "folder": folder, "said": str(said), "changed": changed or {}}
        _asked(asked | more)
        self.pid = int(self._line(START_S))

    def poll(self):
        if self.returncode is None and (line := self._line(0)) is not None:
            self.returncode = int(line)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if (line := self._line(timeout)) is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(line)
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self._out.read_text(errors="replace"), None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _line(self, within_s):
        """The next of what the parent says: the process number, then the exit code.  None: nothing came in time."""
        until_s = None if within_s is None else time.monotonic() + within_s
        while b"\n" not in self._unread:
            left_s = None if until_s is None else max(0, until_s - time.monotonic())
            if not select.select([self._said], [], [], left_s)[0]:
                return None
            more = os.read(self._said, 100)
            if not more:
                raise RuntimeError("the parent of a command was killed")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _close(server):
    server.kill()  # and with it a command that was interrupted
    server.wait()
    for pipe in (server.stdin, server.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


# ---- the server


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    _import_all()
    _end_with_parent()
    parents = []  # of commands that were started
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers = None
            _become(asked) if "timeout_s" in asked else _begin(asked)
        elif "timeout_s" in asked:
            print(_end_of(pid, asked["timeout_s"]), file=answers, flush=True)
        else:
            parents.append(pid)
            print("begun", file=answers, flush=True)
        parents = [pid for pid in parents if not os.waitpid(pid, os.WNOHANG)[0]]


def _import_all():
    """What a command imports anyway; hashes of sources are kept by their content."""
    sys.path[0] = str(REPO)
    from bench.cli.verbs import VERBS
    from bench.config import compose
    from bench.machine import code_state

    for module, _ in VERBS.values():
        importlib.import_module(f"bench.cli.{module}")
    importlib.import_module("bench.__main__")
    compose.compose(["track=free"])
    code_state.raced_files()
    assert "torch" not in sys.modules  # no command imports it
    for module in ("bench.training.run", "models.gpt2", "models.optimizers.adamw"):  # what a rank does
        importlib.import_module(module)
    forked.install()


def _end_with_parent():
    from bench.machine import processes

    processes.die_with_parent()


def _begin(asked):
    """In the fork: the parent of a command, which says to Started what it has to know."""
    with forked.ending():
        _end_with_parent()
        said = os.open(asked["said"], os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            os.close(said)
            _become(asked)
        os.write(said, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(said, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(asked):
    """In the fork: the command, to its end.  One that was started has both outputs in one file."""
    with forked.ending():
        _end_with_parent()
        if asked.get("new_session"):
            os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(os.open(Path(asked["folder"], "out"), os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.dup2(1 if "said" in asked else os.open(Path(asked["folder"], "err"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
        if asked.get("host"):
            _enter(*asked["host"])
        module, words = asked["words"][0], asked["words"]
        forked.become(words, [sys.executable, "-m", *words], asked["env"])
        for name, value in asked.get("changed", {}).items():
            _change(name, value)
        if module == "bench":
            from bench.__main__ import run

            run()
        else:
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)


def _change(name, value):
    module, _, constant = name.rpartition(".")
    module = importlib.import_module(module)
    assert hasattr(module, constant), name
    setattr(module, constant, value)


def _enter(namespace, hostname):
    """As `ip netns exec` does, which also shows the namespace's interfaces in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *words):
        if getattr(libc, name)(*words):
            raise OSError(ctypes.get_errno(), name)

    opened = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    call("setns", opened, CLONE_NEWNET)
    os.close(opened)
    call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    call("mount", b"", b"/", b"none", MS_SLAVE | MS_REC, None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)
    call("sethostname", hostname.encode(), len(hostname))
    platform._uname_cache = None


def _end_of(pid, timeout_s):
    def late(number, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        _, status = os.waitpid(pid, 0)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "timeout"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    _serve()
