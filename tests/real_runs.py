"""Runs as their user starts them, for the tests: short ones, in a results folder of their own."""

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
BATCH_TOKENS = 512  # 8 sequences * 64: also for 8 ranks
SMALL = ["model.num_layers=2", "model.width=64", "data.seq_len=64", f"data.batch_tokens={BATCH_TOKENS}"]
SHORT = ["track=free", *SMALL, "goal.num_steps=6", "goal.val_tokens=1024", "goal.val_every_steps=3", "hardware=cpu"]
LONG = ["track=free", "goal.num_steps=5000", "goal.val_tokens=4096", "goal.val_every_steps=1000", "hardware=cpu"]
SLIGHT = ["model.num_layers=1", "model.width=32", "model.num_heads=1"]
ENDLESS = [*LONG, *SLIGHT, "goal.num_steps=100000", "hardware.num_threads=1"]
TWO = ["hardware.num_processes=2", "hardware.num_threads=1"]


def environment(results, **more):
    return os.environ | {"SPEEDRUN_RESULTS": str(results), "OMP_WAIT_POLICY": "PASSIVE"} | more


def bench(results, *words, cwd=REPO, timeout_s=240, **env):
    """python -m bench WORDS, in the checkout cwd -> CompletedProcess with text output.

    One that takes longer is ended by SIGTERM, on which each rank leaves its stacks, and fails with its logs.
    """
    command = [sys.executable, "-m", "bench", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=cwd, env=environment(results, **env), text=True, **pipes) as process:
        try:
            output = process.communicate(timeout=timeout_s)
            return subprocess.CompletedProcess(command, process.returncode, *output)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                output = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                output = process.communicate()
            pytest.fail(f"{' '.join(words)} took over {timeout_s} s:\n{output}\n{logs(results)}")


def started(results, *words, changed=None, **env):
    """The same in the background -> its Popen; output and errors together.

    changed: {"bench.module.NAME": value}, constants that are others in this command.
    """
    if changed:
        env[forked.CHANGED] = json.dumps(changed)
    return subprocess.Popen(
        [sys.executable, "-m", "bench", *words],
        cwd=REPO,
        env=environment(results, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(results, *overrides, **env):
    """A short run that must complete -> its folder."""
    before = set(folders(results))
    done = bench(results, "run", *SHORT, *overrides, **env)
    assert done.returncode == 0, done.stdout + done.stderr + logs(results)
    (folder,) = set(folders(results)) - before
    return folder


def finish(base, *overrides):
    """A short run, complete or failed: base gets results/, temp/ and what the command answered, said()."""
    done = bench(base / "results", "run", *SHORT, *overrides, TMPDIR=str(temp_in(base)))
    (base / "said.json").write_text(json.dumps([done.returncode, done.stdout + done.stderr + logs(base / "results")]))


def said(folder):
    """Of a shared run: (exit code, text), with the logs."""
    return json.loads((folder.parents[2] / "said.json").read_text())


def copy_of(folder, to):
    """The results folder of a shared run, ledger and all, copied to a new folder -> the run's folder there."""
    shutil.copytree(folder.parent.parent, to)
    return to / folder.parent.name / folder.name


def temp_in(base):
    """A new temp directory for a command's TMPDIR."""
    (base / "temp").mkdir()
    return base / "temp"


def left_in_temp(base):
    """But for torch's compile cache: one folder a user, which all runs share and which stays on purpose."""
    return sorted(path.name for path in (base / "temp").iterdir() if not path.name.startswith("torchinductor_"))


def git(folder, *words, code=0):
    """What git prints there for a person who has a name and no settings of their own."""
    settings = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    known = [word for setting in settings for word in ("-c", setting)]
    done = subprocess.run(["git", *known, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout.rstrip("\n")


def wait_for(condition, timeout_s=120, every_s=0.05):
    """What condition() gives, as soon as it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"it did not happen in {timeout_s} s"
        time.sleep(every_s)
    return found


def folders(results):
    found = (path.parent for path in Path(results).glob("*/*/run.json"))
    return sorted(folder for folder in found if not folder.parent.name.startswith("."))  # .nodes: copies of other nodes


def logs(results):
    """The end of each rank's log; of the stacks at its end the calls that it was in come first, so they are long."""
    paths = [path for path in Path(results).glob("*/*/logs/*.log") if path.is_file() and path.stat().st_size < 2**30]
    return "".join(f"\n== {path.name}\n{path.read_text(errors='replace')[-9000:]}" for path in paths)


def run_json(folder):
    return json.loads((folder / "run.json").read_text())


def steps(folder):
    with open(folder / "steps.csv") as file:
        return list(csv.DictReader(file))


def losses(folder):
    """Every loss of a run, as written: equal text is equal bits."""
    return [(row["step"], row["train_loss"], row["val_loss"]) for row in steps(folder)]


@contextlib.contextmanager
def in_time(base, setting, seconds, disturb, *overrides):
    """A Background with this timeout which has run into it: disturbed so at step 3.  -> (running, exit code, output)

    seconds: several timeouts, the shortest first.  On a busy machine it may be over before the disturbance is there;
    then the next is tried, so that a quiet one waits no longer than it must.
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
        """Until the workers are about to be started: all that they need is written."""
        deadline_s = time.monotonic() + timeout_s
        while not (folders(self.results) and (self.folder / "events.jsonl").exists()):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline_s, f"no record in {timeout_s} s"
            time.sleep(0.02)

    def wait_for_workers(self, count, timeout_s=60):
        deadline_s = time.monotonic() + timeout_s
        while len(self.pids("bench.training.worker")) < count:
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline_s, f"not {count} workers in {timeout_s} s"
            time.sleep(0.05)

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
        """Processes of this run that run python -m MODULE, by their command lines."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if module in words and any(str(self.results) in word for word in words):
                found.append(int(path.parent.name))
        return sorted(found)

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
        """Wait for the launcher -> (exit code, its output)."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out
