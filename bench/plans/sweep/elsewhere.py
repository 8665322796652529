"""Follows runs of a sweep that a launcher other than ours starts (submitit, joblib), from the sweep's process.

It reports each run that has ended. A signal ends submitit's jobs with the sweep, which waits for their records; a lost
job does not end the others. joblib kills its workers with everything that they started, and their records are finished
here.
"""

import contextlib
import glob
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.paths import shown
from bench.launch import summary
from bench.launch.console import say
from bench.machine.signals import Interrupted, raise_interrupted
from bench.record import failures, run_folder, sweep
from bench.record.shape import Record

KILLED = "the process of hydra/launcher that made this run was killed"
LOOK_EVERY_S = 2.0
END_WITHIN_S = 120.0  # SLURM's KillWait, by default 30 s, and the end of the record
LOST_AFTER_S = 15.0  # time between two looks for jobs without a result
LOST = "SLURM has ended it, and it left no result"
MAX_WORDS = 300  # characters of an error, which may contain a whole log
SUBMITTED = "_submitted.pkl"  # suffix of submitit's file of a job, after its id


class Unfinished(Exception):
    """Raised if not every point has a run; str() says why."""


@contextlib.contextmanager
def followed(folder: Path, launcher: str, settings: Mapping[str, Any], refusals: type[Exception]) -> Iterator[None]:
    """Follows the runs while Hydra's launcher of that name starts them and waits for them within the block.

    folder: the sweep's; settings: hydra.launcher.*; refusals: Hydra's own errors, which pass. Raises Interrupted after
    the jobs have ended, Unfinished after the others have ended if one was lost, and ValueError if none was started.
    """
    say("sweep", f"hydra/launcher={launcher} starts the runs; its output is in {shown(folder)}")
    jobs = Jobs(settings)

    def end() -> None:  # no run begins after the signal
        sweep.end(folder, "it was interrupted")

    with _watched(folder, jobs), raise_interrupted(end) as signals:
        try:
            try:
                yield
            except (ValueError, refusals, Unfinished, Interrupted):
                raise
            except Exception as error:
                message = " ".join(str(error).split())[:MAX_WORDS]
                why = f"job {' '.join(jobs.lost)}: {LOST}" if jobs.lost else f"{type(error).__name__}: {message}"
                if not jobs.ids() and not _runs(folder):
                    raise ValueError(f"hydra/launcher={launcher}: {why}") from None
                waiting = "; waiting for the other jobs" if jobs.ids() else ""
                say("sweep", f"hydra/launcher={launcher}: {why}{waiting}", always=True)
                while jobs.alive():
                    signals.check()
                    time.sleep(LOOK_EVERY_S)
                raise Unfinished("a job was lost") from None
        except Interrupted:
            signals()
            jobs.cancel()
            raise
        finally:
            jobs.finish_lost(folder)
            finish_gone(folder, lambda run, path: run_folder.effective(run, path)["status"] != "running", KILLED)


class Jobs:
    """The jobs that submitit has submitted since this object was made; none of another launcher's."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Remembers the jobs that exist already. settings: hydra.launcher.*"""
        self._pattern: str | None = None
        self.are_of_submitit = "submitit_folder" in settings
        if self.are_of_submitit:
            import submitit  # noqa: F401  importing it sets up its logging

            logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns if sacct has no accounts
            self._pattern = f"{glob.escape(settings['submitit_folder']).replace('%j', '*')}/*{SUBMITTED}"
        self._are_of_slurm = "Slurm" in settings["_target_"]
        self._num_tasks = (settings.get("nodes") or 1) * (settings.get("tasks_per_node") or 1)
        self._before = set(self._found())
        self._suspects: set[str] = set()  # ids without a result that were gone at the last look
        self._looked_s = time.monotonic()
        self.lost: list[str] = []  # ids of jobs that SLURM has ended without a result

    def _found(self) -> dict[str, Path]:
        """Returns {id: the job's folder}."""
        paths = map(Path, sorted(glob.glob(self._pattern)) if self._pattern else ())
        return {path.name.removesuffix(SUBMITTED): path.parent for path in paths}

    def ids(self) -> list[str]:
        """Returns the jobs as SLURM names them (5_0 in an array), or pids with submitit_local."""
        return [job_id for job_id in self._found() if job_id not in self._before]

    def alive(self) -> list[str]:
        """Returns the ids of jobs that have not ended; all of them if SLURM does not answer."""
        ids = self.ids()
        if not ids or not self._are_of_slurm:
            return [job_id for job_id in ids if _has_not_ended(int(job_id))]
        queued = _in_queue("%i")
        return [job_id for job_id in ids if queued is None or job_id in queued]

    def cancel(self) -> None:
        """Ends the jobs, and waits until they have ended."""
        if not (ids := self.alive()):
            return
        say("sweep", f"ending {len(ids)} job(s), {' '.join(ids)}, and waiting for their records", always=True)
        if self._are_of_slurm:
            subprocess.run(["scancel", *ids], capture_output=True)
        else:
            for job_id in ids:  # submitit's controller passes SIGTERM to the run; at SIGINT it would kill the run
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(job_id), signal.SIGTERM)
        until_s = time.monotonic() + END_WITHIN_S
        while (ids := self.alive()) and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S / 4)
        if ids:
            say("sweep", f"not ended in {END_WITHIN_S:.0f} s: {' '.join(ids)}", always=True)

    def give_up_lost(self) -> None:
        """Writes an error as the result of each job that SLURM has ended without one, so that submitit sees its end.

        submitit itself asks only every ten minutes, and waits for ever if SLURM keeps no accounts (sacct).
        """
        if not self._are_of_slurm or time.monotonic() - self._looked_s < LOST_AFTER_S:
            return
        from submitit.core.utils import cloudpickle_dump

        self._looked_s, alive = time.monotonic(), self.alive()
        gone = {}
        for job_id, folder in self._found().items():
            if job_id not in self._before and job_id not in alive:
                paths = [folder / f"{job_id}_{task}_result.pkl" for task in range(self._num_tasks)]
                if missing := [path for path in paths if not path.exists()]:
                    gone[job_id] = missing
        for job_id in sorted(gone.keys() & self._suspects):  # missing at two looks: files of another node may come late
            self.lost.append(job_id)
            for path in gone[job_id]:
                cloudpickle_dump(("error", LOST), path)
        self._suspects = set(gone)

    def finish_lost(self, folder: Path) -> None:
        """Finishes the records of the sweep that have status running although SLURM has ended their jobs."""
        queued = _in_queue("%A") if self._are_of_slurm else None
        if queued is None:
            return

        def is_gone(run: Record, path: Path) -> bool:
            job_id = (run.get("launched_by") or {}).get("job_id")
            return job_id is not None and job_id not in queued

        finish_gone(folder, is_gone, "SLURM ended its job before this record was finished")


def _in_queue(field: str) -> set[str] | None:
    """Returns squeue's field of this user's jobs, by task; None if it does not answer. It omits ended jobs."""
    command = ["squeue", "--noheader", "--array", f"--format={field}", f"--user={os.getuid()}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode else set(done.stdout.split())


def _has_not_ended(pid: int) -> bool:
    """Returns whether a controller of submitit's, a child of this process, still runs."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False


@contextlib.contextmanager
def _watched(folder: Path, jobs: Jobs) -> Iterator[None]:
    """Prints a line for each point that gets a record within the block, and gives up lost jobs."""
    before, over = _ended(folder), threading.Event()
    requested = sweep.read(folder)["points"]

    def watch() -> None:
        earlier, is_over = before, False
        while not is_over:
            is_over = over.wait(LOOK_EVERY_S)
            jobs.give_up_lost()
            now = _ended(folder)
            for overrides, path in now.items():
                if earlier.get(overrides) != path:
                    run = run_folder.read(path) | {"folder": str(path)}
                    say("run", f"{sweep.its_own(overrides, requested)}: {summary.outcome_text(run)}")
            earlier = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ended(folder: Path) -> dict[tuple[str, ...], Path]:
    return {tuple(point.overrides): point.folder for point in sweep.points(folder) if point.folder}


def _runs(folder: Path) -> list[tuple[Path, Record]]:
    """Returns the runs of the sweep, including running ones: (folder, record)."""
    records = [(path, atomic.read_json(path / "run.json", {})) for path in run_folder.find_runs([folder.parent.parent])]
    return [(path, run) for path, run in records if (run.get("sweep") or {}).get("sweep_id") == folder.name]


def finish_gone(folder: Path, is_gone: Callable[[Record, Path], bool], why: str) -> None:
    """Finishes the records of the sweep with status running for which is_gone(record, folder): no process is left.

    why: for the records.
    """
    for path, run in _runs(folder):
        if run["status"] == "running" and is_gone(run, path):
            failures.write_launcher_killed(path, why)
