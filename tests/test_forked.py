"""A child that forked.py forks is what Popen would have started, by all that other programs see of it."""

import os
import subprocess
import sys
from pathlib import Path

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


LOOKS_UP = """
import os, signal, socket, sys, threading, time
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/tests"]
import forked
def look_up():
    while True:
        socket.getnameinfo(("127.0.0.1", 0), 0)
for _ in range(4):
    threading.Thread(target=look_up, daemon=True).start()
make = {"fork": os.fork, "forked.fork": forked.fork}[sys.argv[2]]
stuck = 0
for _ in range({"fork": 5000, "forked.fork": 300}[sys.argv[2]]):
    pid = make()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 1)
        socket.getnameinfo(("127.0.0.1", 0), 0)
        os._exit(0)
    stuck += os.waitpid(pid, 0)[1] != 0
    if stuck and make is os.fork:
        break
print(stuck)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/etc/resolv.conf").exists(), reason="what glibc locks is not there")
def test_a_fork_beside_a_thread_that_looks_up_names_can_look_up_names():
    def stuck(make):
        command = [sys.executable, "-W", "ignore", "-c", LOOKS_UP, str(forked.REPO), make]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout

    assert stuck("forked.fork") == "0\n"
    assert stuck("fork") == "1\n"  # or the test shows nothing
