"""The one owner of all processes of a run: after its block nothing of the run is alive, and no file of it changes.

Whichever program starts them (the agent, a rank, a script) and however the run ends; a launcher that is killed leaves
this to its guard (guard.py).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.base.paths import CHECKOUT, REPO
from bench.launch import guard
from bench.machine import run_processes
from bench.machine.signals import held


@contextlib.contextmanager
def owning(folder: Path, run: dict, code: Path) -> Iterator[None]:
    """Around everything that starts a process with run_processes.mark(folder).

    run: the record, which gets a warning where a process could not be ended: one that the kernel keeps in a driver or
    at a dead disk.  code: the folder that the guard imports from.
    """
    with held():
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.launch.guard", str(folder)],
            cwd=code,
            env=os.environ | {CHECKOUT: str(REPO)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and a closed terminal are the launcher's
        )
    try:
        yield
    finally:
        with held():
            if left := run_processes.end(folder):
                words = f"processes {sorted(left)} could not be ended: files of this record may still change"
                run["warnings"].append({"rank": None, "instrument": "launcher", "edge": "run end", "error": words})
            with contextlib.suppress(BrokenPipeError):
                process.communicate(guard.GOODBYE)
