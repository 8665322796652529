"""Runs of a sweep that a launcher of somebody else's starts, as the sweep's own process sees them.

Each is said when it has ended.  A signal ends the runs under way with the sweep, which waits for their records; a job
of submitit's that is lost does not end the others.
"""

import contextlib
import glob
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bench.launch import summary
from bench.launch.console import say
from bench.machine.signals import Interrupted, raise_interrupted
from bench.paths import shown
from bench.record import run_folder, sweep
from bench.sweep import at_work

LOOK_EVERY_S = 2.0
END_WITHIN_S = 120.0  # SLURM's KillWait, 30 s where nobody set it, and the record's last words
SUBMITTED = "_submitted.pkl"  # submitit's file of a job, after its id


class Unfinished(Exception):
    """Not every point has a run; str() says why."""


@contextlib.contextmanager
def followed(folder: Path, launcher: str, settings: Mapping, refusals: type[Exception]) -> Iterator[None]:
    """The block in which Hydra's launcher of that name starts the runs of a sweep and waits for them.

    folder: of the sweep; settings: hydra.launcher.*; refusals: Hydra's own, which pass.  Raises Interrupted after the
    jobs have ended; Unfinished where one was lost and the others have ended; ValueError where it started none.
    """
    say("sweep", f"hydra/launcher={launcher} starts the runs; what it writes: {shown(folder)}")
    jobs = Jobs(settings)

    def end_runs():
        """Before the launcher's own code sees the signal: joblib's kills its workers, and all that they started."""
        sweep.end(folder, "it was interrupted")  # a run that would begin only now is not made
        if not jobs.are_of_submitit:
            at_work.end(folder, END_WITHIN_S)

    at_work.clear(folder)  # of a call of this sweep that was killed
    with _said_as_they_end(folder), raise_interrupted(end_runs) as signals:
        try:
            try:
                yield
            except (ValueError, refusals, Unfinished):
                raise
            except Exception as error:
                why = f"hydra/launcher={launcher}: {type(error).__name__}: {' '.join(str(error).split())}"
                if not jobs.ids():
                    raise ValueError(why) from None
                say("sweep", f"{why}; waiting for the other jobs", always=True)
                while jobs.alive():
                    signals.check()
                    time.sleep(LOOK_EVERY_S)
                raise Unfinished("a job was lost") from None
        except Interrupted:
            signals()
            jobs.cancel()
            raise
        finally:
            at_work.clear(folder)


class Jobs:
    """The jobs that submitit has submitted since this was made; none of another launcher's."""

    def __init__(self, settings: Mapping):
        """settings: hydra.launcher.*"""
        self._pattern = None
        self.are_of_submitit = "submitit_folder" in settings
        if self.are_of_submitit:
            import submitit  # noqa: F401  it sets up its logging when it is imported

            logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns where sacct has no accounts
            self._pattern = f"{glob.escape(settings['submitit_folder']).replace('%j', '*')}/*{SUBMITTED}"
        self._are_of_slurm = "Slurm" in settings["_target_"]
        self._before = set(self._found())

    def _found(self) -> Iterable[str]:
        found = glob.glob(self._pattern) if self._pattern else ()
        return sorted(Path(path).name.removesuffix(SUBMITTED) for path in found)

    def ids(self) -> list[str]:
        """As SLURM names them, 5_0 of an array; of submitit_local pids."""
        return [job_id for job_id in self._found() if job_id not in self._before]

    def alive(self) -> list[str]:
        """The ids of those that have not ended."""
        ids = self.ids()
        if not ids or not self._are_of_slurm:
            return [job_id for job_id in ids if _is_alive(int(job_id))]
        words = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(ids)}"]
        return subprocess.run(words, capture_output=True, text=True).stdout.split()  # it forgets what has ended

    def cancel(self) -> None:
        """End them, and wait until they have ended."""
        if not (ids := self.alive()):
            return
        say("sweep", f"ending {len(ids)} job(s), {' '.join(ids)}, and waiting for their records", always=True)
        if self._are_of_slurm:
            subprocess.run(["scancel", *ids], capture_output=True)
        else:
            for job_id in ids:  # submitit's controller hands SIGTERM to the run; by SIGINT it would kill it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(job_id), signal.SIGTERM)
        until_s = time.monotonic() + END_WITHIN_S
        while (ids := self.alive()) and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S / 4)
        if ids:
            say("sweep", f"not ended in {END_WITHIN_S:.0f} s: {' '.join(ids)}", always=True)


def _is_alive(pid):
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0  # submitit's controllers are children of this process
    return False


@contextlib.contextmanager
def _said_as_they_end(folder):
    """A line for each point that gets a record meanwhile."""
    before, over = _ended(folder), threading.Event()
    axes = sweep.axes(sweep.read(folder)["points"])

    def watch():
        known, is_over = before, False
        while not is_over:
            is_over = over.wait(LOOK_EVERY_S)
            now = _ended(folder)
            for words, path in now.items():
                if known.get(words) != path:
                    run = run_folder.read(path) | {"folder": str(path)}
                    its_own = [word for word in words if word.partition("=")[0] in axes] or words
                    say("run", f"{' '.join(its_own)}: {summary.last_words(run)}")
            known = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ended(folder):
    return {tuple(point.overrides): point.folder for point in sweep.points(folder) if point.folder}
