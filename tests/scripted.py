"""Starts runs of the scripts in tests/planted/scripts/ as a user starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import real_runs

SCRIPTS = real_runs.REPO / "tests" / "planted" / "scripts"
MODDED, NANO, ODD = SCRIPTS / "modded" / "train_gpt.py", SCRIPTS / "nano" / "train.py", SCRIPTS / "odd" / "train.py"
TRACK = ["track=cpu_nano", "hardware=cpu"]


def run(results, script, *overrides, expect=0, **env):
    """Runs a script once and returns the run's folder.  expect: the exit code."""
    before = set(real_runs.folders(results))
    done = real_runs.bench(results, "run", *TRACK, f"script={script}", *overrides, **env)
    assert done.returncode == expect, done.stdout + done.stderr + real_runs.logs(results)
    (folder,) = set(real_runs.folders(results)) - before
    return folder


def odd(results, what, *overrides, expect=0):
    """Runs tests/planted/scripts/odd/train.py WHAT; returns its record with the run's folder as "folder"."""
    folder = run(results, ODD, f"script.args=[{what}]", *overrides, expect=expect)
    return real_runs.run_json(folder) | {"folder": folder}


@contextlib.contextmanager
def hanging(results, *overrides):
    """Runs a script that trains for ten minutes and has a child in another session; yields (launcher, run folder)."""
    argv = [sys.executable, "-m", "bench", "run", *TRACK, f"script={ODD}", "script.args=[hangs]", *overrides]
    launcher = subprocess.Popen(
        argv, cwd=real_runs.REPO, env=real_runs.environment(results), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline_s = time.monotonic() + 60
        while not _step(results):
            assert time.monotonic() < deadline_s and launcher.poll() is None, real_runs.logs(results)
            time.sleep(0.05)
        yield launcher, real_runs.folders(results)[0]
    finally:
        for pid in pids(results):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


def _step(results):
    for path in Path(results).glob("*/*/.progress.tmp"):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text())["step"]
    return None


def pids(results):
    """Returns the ids of living processes of runs in this results folder, by their arguments or working folder."""
    ids, launcher = [], b"bench\0run\0"
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            names_it = str(results) in os.readlink(path / "cwd") or str(results).encode() in command
            if names_it and launcher not in command and _lives(path):
                ids.append(int(path.name))
    return ids


def is_worker(pid):
    """Returns whether a process is a rank's worker, not one that watches it."""
    stat, command = (Path(f"/proc/{pid}/{name}").read_text() for name in ("stat", "cmdline"))
    parent = int(stat.rpartition(")")[2].split()[1])
    starters = ("bench.launch.guard", "torch.distributed.run")
    begun_by = Path(f"/proc/{parent}/cmdline").read_text()
    return "script_worker" in command and any(name in begun_by for name in starters)


def _lives(process):
    return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def all_gone(results, timeout_s=20):
    return real_runs.wait_for(lambda: not pids(results), timeout_s, every_s=0.1)
