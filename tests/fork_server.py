"""Speeds up `python -m bench ...` in tests: each command is a fork of a server that has imported all verbs already.

A command takes a second to import and to hash the code, and each of its ranks two seconds to import torch; the tests
start hundreds of them.  After install() in the tests' process, subprocess asks the server to fork when it would start
such a command in the repository.  A command with other settings of the interpreter (PYTHONPATH ...) is started as a
program; for an LD_PRELOAD there can be a separate server, see preloaded().  The fork looks like a child of the tests'
process in every respect (forked.py), as its agent, ranks, guard and sampler look like its children.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time

import forked

REPO = forked.REPO
ARM = "bench.plans.race.arm_process"  # prepares by dying with its parent
MODULES = (  # started by tests
    "bench",
    "bench.launch.own_model",
    ARM,
    "bench.training.worker",
    "torch.distributed.run",
)
HOST = "FORKED_HOST"  # environment variable of forks: JSON [network namespace of iproute2, host name] to enter
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphaned descendants become children of the nearest such ancestor
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000  # linux/sched.h
MS_SLAVE, MS_REC, MNT_DETACH = 1 << 19, 1 << 14, 2  # sys/mount.h
HAS_GPU = bool(shutil.which("nvidia-smi"))  # whether a fork can use a GPU has not been tried
MAX_BYTES, MAX_FDS = 2**20, 64
_fork_exec = subprocess._fork_exec
_servers = {}  # {LD_PRELOAD or "": (socket, process)}
_preloaded = []
_held = contextlib.ExitStack()


def install():
    if sys.platform == "linux":
        forked.started.update(os.environ)
        subprocess._fork_exec = _forked


def fits(variables):
    """Returns whether a command with these additional environment variables would be a fork."""
    variables = forked.interpreter_variables(variables)
    return subprocess._fork_exec is _forked and (
        not variables or list(variables.items()) == [("LD_PRELOAD", _known(variables))]
    )


@contextlib.contextmanager
def preloaded(library):
    """Makes commands with LD_PRELOAD=library forks too.

    The library needs a function of_variables() that reads its environment variables again, because a fork gets its
    variables after the library was loaded.
    """
    _preloaded.append(str(library))
    try:
        yield
    finally:
        _preloaded.remove(str(library))
        if str(library) in _servers:
            _close(str(library))


def _known(variables):
    """Returns the registered library that these variables preload, or ""."""
    library = variables.get("LD_PRELOAD")
    return library if library in _preloaded else ""


def _forked(*args):
    child = forked.requested_child(MODULES, *args)
    library = _known(child.variables) if child else ""
    may_use_gpu = child and HAS_GPU and "hardware=cpu" not in child.command
    as_here = forked.interpreter_variables(forked.started | ({"LD_PRELOAD": library} if library else {}))
    prepares = child and child.prepare and child.command[2] != ARM
    if child is None or prepares or may_use_gpu or forked.interpreter_variables(child.variables) != as_here:
        assert not child or not {HOST, forked.CHANGED} & child.variables.keys(), "they are for forks alone"
        return _fork_exec(*args)
    kept = sorted(child.kept)
    request = {"command": child.command, "variables": child.variables, "new_session": child.new_session, "kept": kept}
    request |= {"cwd": child.cwd, "dies_with_parent": child.prepare is not None}
    ours, libc = _connected(library), ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(ours, [json.dumps(request).encode()], [*child.streams, *kept])
        pid = ours.recv(100)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    if not pid:
        raise RuntimeError("the fork server has ended")
    return int(pid)


def _connected(library):
    if library not in _servers:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        env = forked.started | {"ROOM": forked.ROOM} | ({"LD_PRELOAD": library} if library else {})
        with its:
            program = [sys.executable, __file__, str(its.fileno()), str(_copy()), forked.ROOM]
            process = subprocess.Popen(
                program, cwd=REPO, env=env | {"SPEEDRUN_CHECKOUT": str(REPO)}, pass_fds=[its.fileno()]
            )
        _servers[library] = ours, process
        atexit.register(_close, library)
    return _servers[library][0]


@functools.cache
def _copy():
    """Returns a copy of the code that exists until the tests end; ranks must import it from nowhere else."""
    from bench.machine import code_copy  # imported here, because the server also imports this file

    return _held.enter_context(code_copy.held(REPO))


def _close(library):
    if library in _servers:
        ours, process = _servers.pop(library)
        ours.close()
        process.wait()


# ---- the server


def _serve(ours, code):
    sys.path[0] = code
    _import_all()
    while True:
        message, fds, _, _ = socket.recv_fds(ours, MAX_BYTES, MAX_FDS)
        if not message:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child:  # becomes a child of the tests' process once this process has ended
                os.write(writer, str(child).encode())
                os._exit(0)
            with forked.ending():
                _become(json.loads(message), fds, between)
        os.waitpid(between, 0)
        ours.send(os.read(reader, 100))
        for fd in (reader, writer, *fds):
            os.close(fd)


def _import_all():
    """Imports what commands and ranks import anyway, and fills the cache of the sources' hashes."""
    from bench.cli.main import VERBS, module_of
    from bench.config import compose
    from bench.launch import ready
    from bench.machine import code_state, preflight

    ready.SAMPLE_S = preflight.SAMPLE_S  # of CPU load before a race: 0.3 s instead of 1
    for verb in VERBS:
        module_of(verb)
    for groups in (["track=free"], ["track=cpu_nano"]):  # saves a third of the rest of a short run
        compose.compose(groups)
        compose.compose([*groups, "hardware=cpu"])
    code_state.raced_files()
    assert "torch" not in sys.modules  # no command may import it
    for module in ("bench.training.run", "models.gpt2", "models.optimizers.adamw"):  # imported by ranks
        importlib.import_module(module)
    _compare_bytecode_once()
    forked.install()


def _compare_bytecode_once():
    """Caches the comparison of bytecode with its source, which a fork then repeats only for files that have changed.

    At its end rank 0 compiles the source of every imported module, in a fork all of bench: half of a short run's time.
    """
    from bench.training import imported

    compare = imported._has_other_bytecode
    answers = {}

    def compared(module):
        files = [getattr(module, "__file__", None), getattr(module.__spec__, "cached", None)]
        try:
            stats = [os.stat(file) for file in files]
        except (OSError, TypeError):
            return compare(module)
        key = (*files, *((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats))
        if key not in answers:
            answers[key] = compare(module)
        return answers[key]

    imported._has_other_bytecode = compared
    imported.facts(hashes=True)


def _become(what, fds, between):
    """Runs the command in the fork to its end."""
    while os.getppid() == between:
        time.sleep(0.0005)
    if what["dies_with_parent"]:
        from bench.machine import processes

        processes.die_with_parent()
    if host := what["variables"].pop(HOST, None):
        _enter(*json.loads(host))
    above = 1 + max(*what["kept"], *fds, 2)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]  # frees the numbers that they will get
    for number, fd in zip(what["kept"], moved[3:], strict=True):
        os.dup2(fd, number)
    kept = set(what["kept"])
    child = forked.Child(what["command"], what["cwd"], what["variables"], moved[:3], kept, what["new_session"], None)
    forked.run(child)


def _enter(namespace, hostname):
    """Enters a network namespace as `ip netns exec` does, including /sys, and sets the host name as `unshare -u`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *args):
        if getattr(libc, name)(*args):
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


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
