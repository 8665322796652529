"""One run of a record's code and settings, in a checkout; its record lies in a results folder of replays."""

import contextlib
import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.base import private
from bench.base.paths import REPO
from bench.machine import env_values
from bench.machine import environment as machine
from bench.machine.processes import child, has_ended
from bench.machine.signals import raise_interrupted
from bench.plans.race import arm_process
from bench.plans.replay.certificate import VARIABLES
from bench.plans.replay.rebuilding import Checkout
from bench.record import run_folder
from bench.record.certificates import replays_root

END_WITHIN_S = 30.0  # the launcher ends its workers, then finishes the record
TAIL_LINES = 15
TICK_S = 0.5
LOCK = ".replay.lock"


def environment(made: Checkout, variables: Mapping[str, str] | None) -> dict[str, str]:
    """Of the replay's process: what environment.passed() lets through of this one's, with the record's variables in
    place of those like them here.

    variables: environments.variables() of the record; None: this shell's stay.
    """
    env = machine.passed(arm_process.environment(replays_root()))  # no tokens: it may be a stranger's code
    env |= {"SPEEDRUN_CWD": str(made.own), "TMPDIR": str(made.temp)}
    if variables is None:
        return env
    known = {name: value for name, value in variables.items() if env_values.is_whole(value)}
    hashed = {name: value for name, value in variables.items() if name not in known}
    known |= {name: env[name] for name, value in hashed.items() if _shown(env.get(name)) == value}
    return {name: value for name, value in env.items() if not name.startswith(VARIABLES)} | known


def _shown(value):
    """As environment.json has it."""
    return value and env_values.shown(private.redact(value, REPO))


@contextlib.contextmanager
def alone(say: Callable[[str, str], None]) -> Iterator[None]:
    """In this block no other replay of this results folder trains: both are timed, and each looks for a new folder."""
    path = replays_root() / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("replay", "waiting for another replay in this results folder to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def run(code: Path, words: Sequence[str], env: Mapping[str, str], name: str, show: bool = True) -> Path:
    """Train once by this code -> the new run folder.  show: pass on what it prints, to standard error.

    name: of the record, for messages.  ValueError: it did not start, or left no record.  Raises Interrupted after the
    run has been ended and recorded.
    """
    before = set(_folders())
    command = [sys.executable, "-m", "bench", "run", *words]
    log = replays_root() / ".replay.log.tmp"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            open(log, "wb") as hidden,
            raise_interrupted() as signals,
            child(command, code, env, sys.stderr if show else hidden, END_WITHIN_S) as process,
        ):
            while not has_ended(process.pid, TICK_S):
                signals.check()
            process.wait()
        new = sorted(set(_folders()) - before)
        if not new:
            tail = "" if show else ":\n" + "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise ValueError(f"{name}: its replay did not start{tail or ': what it printed says why'}")
        return new[0]
    finally:
        log.unlink(missing_ok=True)


def _folders():
    return list(run_folder.find_runs([replays_root()])) if replays_root().is_dir() else []


def identity(code: Path, words: Sequence[str], env: Mapping[str, str]) -> dict | None:
    """{"config_id", "source_sha256"} that the code in this folder gives; None where it is too old to be asked, or an
    instrument of the run makes it no contestant.  ValueError: what it refuses.
    """
    module = next((one for one in arm_process.FACTS_MODULES if (code / f"{one.replace('.', '/')}.py").exists()), None)
    if module is None:
        return None
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=code, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode == 0:
        return arm_process.last_line(done.stdout)
    refusal = done.stderr.strip().rpartition("race: ")[2]
    if refusal.startswith("instruments."):
        return None
    raise ValueError(refusal or f"exit code {done.returncode}")
