"""The arms of a race as processes: what each is, asked of its own code, and one run of it in a fresh process group.

An arm is overrides and, if it names a revision, that revision's whole code in a worktree: conf/, models/ and bench/.
All arms are started alike, with this Python, this data folder and this results folder.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine import code_state
from bench.machine.processes import die_with_parent
from bench.paths import REPO, working_folder
from bench.record import run_folder

END_WITHIN_S = 30.0  # the launcher ends its workers, then finishes the record
TAIL_LINES = 15


class Interrupted(Exception):
    """A signal came; what was running has been ended and recorded."""


def environment(results):
    """Variables of every arm's process: folders by their absolute names, because worktrees lie elsewhere."""
    from bench.data import sources

    return os.environ | {
        "SPEEDRUN_RESULTS": str(Path(results).absolute()),
        "SPEEDRUN_DATA": str(sources.data_root().absolute()),
        "SPEEDRUN_CWD": working_folder(),
    }


FACTS_MODULES = ("bench.race.arm_process", "bench.racers")  # this file's names, the newest first: a revision has one


def facts(folder, overrides, results):
    """What the code in this folder makes of the overrides: print_facts() there.  ValueError: what it refuses."""
    module = next((name for name in FACTS_MODULES if (Path(folder) / f"{name.replace('.', '/')}.py").exists()), None)
    if module is None:
        raise ValueError("that revision's harness has no races yet: choose a later one")
    words = [sys.executable, "-m", module, *overrides]
    done = subprocess.run(words, cwd=folder, env=environment(results), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("race: ") or f"exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def print_facts(overrides):
    """Check everything that can be checked before a run, and print what the plan must know of an arm, as JSON."""
    from bench import instruments
    from bench.launch.prepare import prepare
    from bench.machine import environment as machine

    try:
        job = prepare(overrides, say=lambda text: print(text, file=sys.stderr))
    except ValueError as error:
        print(f"race: {error}", file=sys.stderr)
        return 2
    disturbing = instruments.flagging(job.config.instruments)
    if disturbing:
        words = "the steps that it disturbs have no time that counts: race without it, and use it in a run of its own"
        print(f"race: instruments.{disturbing[0]}: {words}", file=sys.stderr)
        return 2
    code = code_state.state(REPO)
    found = {"name": job.config.name, "config_id": job.config_id, "track": job.config.track.name}
    found |= {key: code[key] for key in ("source_sha256", "commit", "dirty")}
    found |= {"deviations": job.deviations, "session_id": machine.session_id(machine.environment())}
    print(json.dumps(found))
    return 0


def source_sha256(folder):
    return code_state.source_sha256(folder)


def start(folder, overrides, results, tag, show=False):
    """One run, from its start to its record.  tag: for run.json["race"].  Returns the last lines it printed.

    Raises Interrupted, after the run has been ended and recorded, when a signal comes.
    """
    words = [sys.executable, "-m", "bench", "run", "--race", json.dumps(tag), *overrides]
    with tempfile.TemporaryFile() as hidden, _signals_raise():
        out = None if show else hidden
        settings = {"cwd": folder, "env": environment(results), "stdin": subprocess.DEVNULL}
        settings |= {"stdout": out, "stderr": out, "process_group": 0, "preexec_fn": die_with_parent}
        process = subprocess.Popen(words, **settings)
        try:
            process.wait()
        finally:
            _end(process)
        hidden.seek(0)
        return "\n".join(hidden.read().decode(errors="replace").splitlines()[-TAIL_LINES:])


def _end(process):
    """Let the run's launcher finish its record, then make sure that it is gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _signals_raise():
    """The first SIGTERM, SIGHUP or Ctrl-C raises Interrupted here, later ones are ignored: the end is under way."""

    def handler(number, frame):
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def record_of(results, run):
    """The record of "<track>/<run_id>", or None where it was never written."""
    try:
        return run_folder.read(Path(results) / run)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(print_facts(sys.argv[1:]))
