"""python -m bench WORDS many times, for the tests: each a fork of one process that has imported all verbs already.

A command costs a second of imports and of hashing the code, which a user pays once and the tests hundreds of times.  A
fork begins where `python -m bench` is after its imports, with the environment, folder and output of its own, and so do
its agent, ranks, guard and sampler (forked.py); all else that it starts is a fresh process.  A command that is to see
another interpreter (PYTHONPATH, LD_PRELOAD ...) is started as a program with all its processes: fits().
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import forked

REPO = forked.REPO
_server = None


def fits(more):
    """Whether a command with these variables beside the tests' own may be a fork."""
    return hasattr(os, "fork") and not forked.of_interpreter(more)


def call(words, env, timeout_s):
    """subprocess.run([python, -m, bench, *words], cwd=REPO) with captured text; TimeoutExpired as there."""
    global _server
    if _server is None or _server.poll() is not None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SPEEDRUN_")}  # no test's own
        program = [sys.executable, str(Path(__file__)), forked.ROOM]
        _server = subprocess.Popen(program, cwd=REPO, env=plain | {"ROOM": forked.ROOM}, **pipes)
        atexit.register(_close, _server)
    with tempfile.TemporaryDirectory() as folder:
        asked = {"words": list(words), "env": dict(env), "folder": folder, "timeout_s": timeout_s}
        _server.stdin.write(json.dumps(asked) + "\n")
        _server.stdin.flush()
        answer = _server.stdout.readline()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    if not answer:
        raise RuntimeError(f"the fork server ended with {_server.wait()}")
    if answer == "timeout\n":
        raise subprocess.TimeoutExpired(words, timeout_s, out, err)
    return subprocess.CompletedProcess(["bench", *words], int(answer), out, err)


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
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers = None
            _become(asked)
        print(_end_of(pid, asked["timeout_s"]), file=answers, flush=True)


def _import_all():
    """What a command imports anyway; hashes of sources are kept by their content."""
    sys.path[0] = str(REPO)
    from bench.cli.verbs import VERBS
    from bench.config import compose
    from bench.machine import code_state

    for module, _ in VERBS.values():
        importlib.import_module(f"bench.cli.{module}")
    importlib.import_module("bench.__main__")
    for groups in (["track=free"], ["track=cpu_nano"]):  # composed once: a third of what is left of a short run
        compose.compose(groups)
        compose.compose([*groups, "hardware=cpu"])
    code_state.raced_files()
    assert "torch" not in sys.modules  # no command imports it
    for module in ("bench.training.run", "models.gpt2", "models.optimizers.adamw"):  # what a rank does
        importlib.import_module(module)
    forked.install()


def _end_with_parent():
    from bench.machine import processes

    processes.die_with_parent()


def _become(asked):
    """In the fork: the command, to its end."""
    with forked.ending():
        _end_with_parent()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(Path(asked["folder"], name), os.O_WRONLY | os.O_CREAT, 0o600), number)
        words = ["bench", *asked["words"]]
        forked.become(words, [sys.executable, "-m", *words], asked["env"])
        from bench.__main__ import run

        run()


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
