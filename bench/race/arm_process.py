"""The arms of a race as processes: what each is, asked of its own code, and one run of it in a fresh process group.

An arm is overrides and, if it names a revision, that revision's whole code in a worktree: conf/, models/ and bench/.
All arms are started alike, with this Python, this data folder and this results folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import own_code
from bench.machine import code_state
from bench.machine.processes import child
from bench.machine.signals import raise_interrupted
from bench.paths import REPO, working_folder
from bench.record import run_folder

END_WITHIN_S = 30.0  # the launcher ends its workers, then finishes the record
TAIL_LINES = 15


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
    code = code_state.state(REPO, job.own_sources)
    found = {"name": job.config.name, "config_id": job.config_id, "track": job.config.track.name}
    found |= {key: code[key] for key in ("source_sha256", "commit", "dirty")}
    found |= {"own": job.own} if job.own else {}
    found |= {"deviations": job.deviations, "session_id": machine.session_id(machine.environment())}
    print(json.dumps(found))
    return 0


def source_sha256(folder, own=()):
    """The identity of the code in this folder with the user's own classes of these import paths."""
    return code_state.source_sha256(folder, own=own_code.sources(own))


def start(folder, overrides, results, tag, show=False):
    """One run, from its start to its record.  tag: for run.json["race"].  Returns the last lines it printed.

    Raises Interrupted, after the run has been ended and recorded, when a signal comes.
    """
    words = [sys.executable, "-m", "bench", "run", "--race", json.dumps(tag), *overrides]
    with tempfile.TemporaryFile() as hidden, raise_interrupted():
        with child(words, folder, environment(results), None if show else hidden, END_WITHIN_S) as process:
            process.wait()
        hidden.seek(0)
        return "\n".join(hidden.read().decode(errors="replace").splitlines()[-TAIL_LINES:])


def record_of(results, run):
    """The record of "<track>/<run_id>", or None where it was never written."""
    try:
        return run_folder.read(Path(results) / run)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(print_facts(sys.argv[1:]))
