"""Starts short runs for tests as a user starts them, in a results folder of the test."""

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

REPO = Path(__file__).resolve().parent.parent
BATCH_TOKENS = 512  # 8 sequences * 64 tokens, enough for 8 ranks
SMALL = ["model.num_layers=2", "model.width=64", "data.seq_len=64", f"data.batch_tokens={BATCH_TOKENS}"]
SHORT = ["track=free", *SMALL, "goal.num_steps=6", "goal.val_tokens=1024", "goal.val_every_steps=3", "hardware=cpu"]
LONG = ["track=free", "goal.num_steps=5000", "goal.val_tokens=4096", "goal.val_every_steps=1000", "hardware=cpu"]
SLIGHT = ["model.num_layers=1", "model.width=32", "model.num_heads=1"]
ENDLESS = [*LONG, *SLIGHT, "goal.num_steps=100000", "hardware.num_threads=1"]
TWO = ["hardware.num_processes=2", "hardware.num_threads=1"]


def environment(results, **variables):
    return os.environ | {"SPEEDRUN_RESULTS": str(results), "OMP_WAIT_POLICY": "PASSIVE"} | variables


def bench(results, *arguments, cwd=REPO, timeout_s=240, code=None, **env):
    """Runs python -m bench ARGUMENTS in the checkout cwd and returns a CompletedProcess with text output.

    A command that takes longer is ended by SIGTERM, on which each rank logs its stacks; the test fails with the logs.
    So it does if the exit code is another than code; None: any.
    """
    command = [sys.executable, "-m", "bench", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=cwd, env=environment(results, **env), text=True, **pipes) as process:
        try:
            output = process.communicate(timeout=timeout_s)
            assert code in (None, process.returncode), f"{process.returncode}:\n{output}\n{logs(results)}"
            return subprocess.CompletedProcess(command, process.returncode, *output)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                output = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                output = process.communicate()
            pytest.fail(f"{' '.join(arguments)} took over {timeout_s} s:\n{output}\n{logs(results)}")


def track_with(folder, rules):
    """Makes a track like free with these rules, in YAML, and returns the arguments by which a run is on it."""
    (folder / "track").mkdir(parents=True)
    free = (REPO / "conf/track/free.yaml").read_text()
    (folder / "track/mine.yaml").write_text(free.replace("name: free", f"name: mine\n  rules: {rules}"))
    return "--config-dir", str(folder), "track=mine"


def started(results, *arguments, changed=None, program=("bench",), **env):
    """Starts python -m PROGRAM ARGUMENTS in the background and returns its Popen, with stdout and stderr together.

    changed: {"bench.module.NAME": value} of constants to change in this command.
    """
    if changed:
        env[forked.CHANGED] = json.dumps(changed)
    return subprocess.Popen(
        [sys.executable, "-m", *program, *arguments],
        cwd=REPO,
        env=environment(results, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(results, *overrides, **env):
    """Runs a short run that must complete, and returns its folder."""
    before = set(folders(results))
    bench(results, "run", *SHORT, *overrides, code=0, **env)
    (folder,) = set(folders(results)) - before
    return folder


def finish(base, *overrides):
    """Runs a short run that may fail, and writes results/, temp/ and the command's answer, ending(), into base."""
    done = bench(base / "results", "run", *SHORT, *overrides, TMPDIR=str(temp_in(base)))
    (base / "ending.json").write_text(json.dumps([done.returncode, done.stdout + done.stderr + logs(base / "results")]))


def ending(folder):
    """Returns (exit code, output with logs) of a shared run."""
    return json.loads((folder.parents[2] / "ending.json").read_text())


def copy_of(folder, to):
    """Copies the results folder of a shared run, including its ledger, and returns the run's folder there."""
    shutil.copytree(folder.parent.parent, to)
    return to / folder.parent.name / folder.name


def temp_in(base):
    """Makes a temporary directory for a command's TMPDIR and returns it."""
    (base / "temp").mkdir()
    return base / "temp"


def left_in_temp(base):
    """Returns the names that a command left in temp_in(), except torch's compile cache, which all runs share."""
    return sorted(path.name for path in (base / "temp").iterdir() if not path.name.startswith("torchinductor_"))


def git(folder, *arguments, code=0):
    """Returns what git prints in the folder for a user who has a name and no settings."""
    settings = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    options = [option for setting in settings for option in ("-c", setting)]
    done = subprocess.run(["git", *options, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout.rstrip("\n")


def fill(path):
    """Writes zeros into the file until its disk is full."""
    with pytest.raises(OSError, match="No space left"), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def wait_for(condition, timeout_s=120, every_s=0.05):
    """Waits until condition() is true and returns its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"it did not happen in {timeout_s} s"
        time.sleep(every_s)
    return value


def folders(results):
    runs = (path.parent for path in Path(results).glob("*/*/run.json"))
    return sorted(folder for folder in runs if not folder.parent.name.startswith("."))  # .nodes has copies


def logs(results):
    """Returns the end of each rank's log, long enough to include the innermost calls of the stacks there."""
    paths = [path for path in Path(results).glob("*/*/logs/*.log") if path.is_file() and path.stat().st_size < 2**30]
    return "".join(f"\n== {path.name}\n{path.read_text(errors='replace')[-9000:]}" for path in paths)


def run_json(folder):
    return json.loads((folder / "run.json").read_text())


def steps(folder):
    with open(folder / "steps.csv") as file:
        return list(csv.DictReader(file))


def losses(folder):
    """Returns every loss of a run as written; equal text means equal bits."""
    return [(row["step"], row["train_loss"], row["val_loss"]) for row in steps(folder)]


@contextlib.contextmanager
def in_time(base, setting, seconds, disturb, *overrides):
    """Disturbs a Background at step 3 so that it runs into a timeout; yields (running, exit code, output).

    seconds: timeouts to try, the shortest first.  On a busy machine a timeout may expire before the disturbance; then
    the next one is tried, so that a quiet machine waits no longer than necessary.
    """
    for timeout_s in seconds:
        with Background(base / f"{timeout_s}", *overrides, f"{setting}={timeout_s}") as running:
            try:
                running.wait_for_step(3)
                disturb(running)
                assert running.process.poll() is None
            except (AssertionError, OSError, ValueError):
                if timeout_s == seconds[-1]:
                    raise
                continue
            yield (running, *running.end(120))
            return


class Background:
    """A long run of a tiny model in the background, for tests that kill or disturb it.

    with Background(results, ...) as running: running.wait_for_step(3); ...
    """

    def __init__(self, results, *overrides, changed=None, **env):
        self.results = Path(results)
        self.process = started(results, "run", *ENDLESS, *overrides, changed=changed, **env)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for pid in self.all_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    @property
    def folder(self):
        (folder,) = folders(self.results)
        return folder

    def wait_for_record(self, timeout_s=60):
        """Waits until the workers are about to be started and all that they need is written."""
        deadline_s = time.monotonic() + timeout_s
        while not (folders(self.results) and (self.folder / "events.jsonl").exists()):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline_s, f"no record in {timeout_s} s"
            time.sleep(0.02)

    def wait_for_step(self, step, timeout_s=120):
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early:\n{self.process.communicate()[0]}{logs(self.results)}")
            try:
                if json.loads((self.folder / ".progress.tmp").read_text())["step"] >= step:
                    return
            except (OSError, ValueError, KeyError):
                pass
            time.sleep(0.1)
        raise AssertionError(f"no step {step} in {timeout_s} s{logs(self.results)}")

    def pids(self, module):
        """Returns the ids of this run's processes that run python -m MODULE, by their command lines."""
        ids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if module in arguments and any(str(self.results) in argument for argument in arguments):
                ids.append(int(path.parent.name))
        return sorted(ids)

    def rank_pid(self, rank):
        for pid in self.pids("bench.training.worker"):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environ:
                return pid
        raise AssertionError(f"no rank {rank}")

    def all_pids(self):
        names = (
            "bench.training.worker",
            "torch.distributed.run",
            "bench.launch.guard",
            "bench.machine.telemetry.sampler",
        )
        return [pid for name in names for pid in self.pids(name)]

    def all_gone(self, timeout_s=30):
        return wait_for(lambda: not self.all_pids(), timeout_s, every_s=0.2)

    def end(self, timeout_s=60):
        """Waits for the launcher and returns (exit code, output)."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out
