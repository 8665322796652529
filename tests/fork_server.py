"""`python -m bench WORDS` many times, for the tests: each a fork of one process that has imported all verbs already.

A command costs a second of imports and of hashing the code, and each of its ranks two seconds of torch, which a user
pays once and the tests hundreds of times.  install() is for the tests' own process: from then on subprocess has the
server fork where it would start such a command in the repository, and where not (PYTHONPATH, LD_PRELOAD ... that are
others than here) it starts the program.  The fork is a child of the tests' process by all that it and others see
(forked.py), and so are its agent, ranks, guard and sampler to it.
"""

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import time

import forked

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: who inherits a child whose parent ended is the next such ancestor
MAX_BYTES, MAX_FDS = 2**20, 64
_fork_exec = subprocess._fork_exec
_server = None


def install():
    if sys.platform == "linux":
        forked.started.update(os.environ)
        subprocess._fork_exec = _forked


def _forked(*given):
    asked = forked.asked(["bench"], *given)
    if asked is None or asked.prepare:
        return _fork_exec(*given)
    ours = _connected()
    what = {"words": asked.words, "variables": asked.variables, "new_session": asked.new_session}
    fds = [*asked.streams, *(kept := sorted(asked.kept))]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(ours, [json.dumps(what | {"kept": kept}).encode()], fds)
        pid = ours.recv(100)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
    if not pid:
        raise RuntimeError("the fork server has ended")
    return int(pid)


def _connected():
    global _server
    if _server is None:
        _server, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        program = [sys.executable, __file__, str(its.fileno()), forked.ROOM]
        env = forked.started | {"ROOM": forked.ROOM}
        with its:
            process = subprocess.Popen(program, cwd=forked.REPO, env=env, pass_fds=[its.fileno()])
        atexit.register(_close, process)
    return _server


def _close(process):
    _server.close()
    process.wait()


# ---- the server


def _serve(ours):
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
            if child:  # it is the tests' child as soon as this process has ended
                os.write(writer, str(child).encode())
                os._exit(0)
            with forked.ending():
                _become(json.loads(message), fds, between)
        os.waitpid(between, 0)
        ours.send(os.read(reader, 100))
        for fd in (reader, writer, *fds):
            os.close(fd)


def _import_all():
    """What a command imports anyway; hashes of sources are kept by their content."""
    sys.path[0] = str(forked.REPO)
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


def _become(asked, fds, between):
    """In the fork: the command, to its end."""
    while os.getppid() == between:
        time.sleep(0.0005)
    above = 1 + max(*asked["kept"], *fds, 2)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]  # out of the way of the numbers that they are to have
    for number, fd in zip(asked["kept"], moved[3:], strict=True):
        os.dup2(fd, number)
    child = forked.Asked(asked["words"], asked["variables"], moved[:3], set(asked["kept"]), asked["new_session"], None)
    forked.run(child)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
