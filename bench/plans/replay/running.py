"""One run of a record's code and settings, in a checkout; its record lies in a results folder of replays."""

import contextlib
import fcntl
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base import private
from bench.base.paths import REPO
from bench.machine import environment as machine
from bench.plans.race import arm_process
from bench.plans.replay.certificate import VARIABLES
from bench.plans.replay.rebuilding import Checkout
from bench.record import run_folder
from bench.record.certificates import replays_root

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
    known = {name: value for name, value in variables.items() if machine.is_shown_whole(value)}
    hashed = {name: value for name, value in variables.items() if name not in known}
    known |= {name: env[name] for name, value in hashed.items() if _shown(env.get(name)) == value}
    return {name: value for name, value in env.items() if not name.startswith(VARIABLES)} | known


def _shown(value):
    """As environment.json has it."""
    return value and machine.shown_value(private.redact(value, REPO))


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
    with tempfile.TemporaryFile() as hidden:
        arm_process.run_to_end(code, words, env, sys.stderr if show else hidden)
        new = sorted(set(_folders()) - before)
        if not new:
            tail = "what it printed says why" if show else f"\n{arm_process.last_lines(hidden)}"
            raise ValueError(f"{name}: its replay did not start:{' ' * show}{tail}")
    return new[0]


def _folders():
    return list(run_folder.find_runs([replays_root()])) if replays_root().is_dir() else []


def identity(code: Path, words: Sequence[str], env: Mapping[str, str]) -> dict[str, Any] | None:
    """{"config_id", "source_sha256"} that the code in this folder gives; None where it is too old to be asked, or an
    instrument of the run makes it no contestant.  ValueError: what it refuses.
    """
    module = arm_process.facts_module(code)
    if module is None:
        return None
    try:
        answer: dict[str, Any] = arm_process.ask(code, module, words, env, timeout_s=600)
    except ValueError as error:
        refusal = str(error).rpartition("race: ")[2]
        if refusal.startswith("instruments."):
            return None
        raise ValueError(refusal) from None
    return answer
