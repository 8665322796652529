"""A child that forked.py forks is what Popen would have started, by all that other programs see of it."""

import os
import subprocess
import sys

import forked
import pytest

from bench.launch import guard

PARENT = """
import contextlib, os, signal, subprocess, sys
from pathlib import Path
repo, goodbye, variables = sys.argv[1], sys.argv[2].encode(), sys.argv[3:-1]
sys.path[:0] = [repo, f"{repo}/tests"]
import forked
forked.install()
forks = []
os.register_at_fork(before=lambda: forks.append(1))
signal.signal(signal.SIGHUP, lambda *args: None)  # the guard itself catches SIGTERM
os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
def files(pid):
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed since
            links |= {os.readlink(path)} if int(path.name) > 2 else set()
    return links
command = [sys.executable, "-m", "bench.launch.guard", "FOLDER"]
env = {name: value for name, value in os.environ.items() if name != "ROOM"}
env |= {"SPEEDRUN_IN_RUN": "1"} | dict(pair.split("=") for pair in variables)
with subprocess.Popen(command, cwd=repo, env=env, stdin=subprocess.PIPE, start_new_session=True) as child:
    about, wanted = Path(f"/proc/{child.pid}"), sorted(f"{name}={value}" for name, value in env.items())
    while sorted((about / "environ").read_bytes().rstrip(b"\\0").decode().split("\\0")) != wanted:
        assert child.poll() is None
    assert (about / "cmdline").read_bytes().rstrip(b"\\0").decode().split("\\0") == command
    assert files(os.getpid()) and not files(child.pid) & files(os.getpid())  # the guard opens other files
    assert os.getsid(child.pid) == child.pid and os.readlink(about / "cwd") == repo
    status = dict(line.split(":", 1) for line in (about / "status").read_text().splitlines())
    assert int(status["PPid"]) == os.getpid()
    assert not int(status["SigCgt"], 16) & 1 << signal.SIGHUP - 1
    child.communicate(goodbye)
    assert child.returncode == 0
command[2:] = ["bench.launch.own_model"]
refused = subprocess.run(command, cwd=repo, env=env, input="?", capture_output=True, text=True)
assert refused.returncode == 1 and "Expecting value" in refused.stderr and not refused.stdout
print(len(forks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("variables", "num_forks"), [((), 2), (("PYTHONHASHSEED=0",), 0)])
def test_a_fork_is_a_child_as_popen_makes_it_and_another_interpreter_is_none(variables, num_forks):
    command = [sys.executable, "-c", PARENT, str(forked.REPO), guard.GOODBYE.decode(), *variables, forked.ROOM]
    env = os.environ | {"ROOM": forked.ROOM}
    done = subprocess.run(command, cwd=forked.REPO, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{num_forks}\n"), done.stderr
