"""Attackers in the sandbox: each is held, in bubblewrap and in our own namespaces."""

import os
import subprocess
import sys
import time

import pytest

from bench.machine import sandbox
from bench.machine.sandbox import BUBBLEWRAP, NAMESPACES, Limits

NO_LIMITS = Limits()


def works(kind):
    if sys.platform != "linux" or kind == BUBBLEWRAP and not sandbox.shutil.which("bwrap"):
        return False
    words, env = sandbox.command(["true"], os.environ, of=kind)
    return subprocess.run(words, env=env, capture_output=True).returncode == 0


@pytest.fixture(params=[BUBBLEWRAP, NAMESPACES])
def confined(request, tmp_path):
    """confined(code, limits): a Python program in a sandbox where it may write to work/ -> (exit code, output, why)."""
    if not works(request.param):
        pytest.skip(f"{request.param} does not work here")
    work = tmp_path / "work"
    work.mkdir()

    def run(code, limits=NO_LIMITS, env=os.environ, readable=()):
        readable = [*sandbox.of_python(sys.executable), *readable]
        words = [sys.executable, "-I", "-S", "-c", code]
        words, env = sandbox.command(words, env, readable, [work], limits, work, of=request.param)
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        watch, why = sandbox.Watch(process.pid, limits, [work]), None
        while process.poll() is None and not (why := watch.exceeded()):
            time.sleep(0.02)
        process.kill()
        return process.wait(), process.communicate()[0], why

    run.work = work
    return run


def test_nothing_of_the_system_can_be_written_and_no_other_file_or_variable_is_seen(confined, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("KEY")
    code = f"""
import os
for path in ({str(secret)!r}, "/etc/shadow", os.path.expanduser("~root/.ssh"), "/run", "/var", "/home"):
    assert not os.path.exists(path), path
for path in ("/usr/x", "/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"):
    try:
        open(path, "a")
    except OSError:
        continue
    raise SystemExit(f"{{path}} can be written")
open({str(tmp_path / "own")!r}, "w"); open("mine", "w")  # the first in a folder in memory
print(sorted(name for name in os.environ if "TOKEN" in name or "SSH" in name), os.environ["HOME"], os.getpid() < 10)
"""
    exit_code, out, _ = confined(code, env={**os.environ, "HF_TOKEN": "x", "SSH_AUTH_SOCK": "/run/agent"})
    assert (exit_code, out) == (0, "[] /tmp/home True\n")
    assert [path.name for path in confined.work.iterdir()] == ["mine"] and not (tmp_path / "own").exists()
