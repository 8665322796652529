"""The process of a rank: its log, its failures, and its end when the launcher ends.  run.py is the run itself.

Started by bench/launch/ranks.py, or directly with torchrun, as  python -m bench.training.worker FOLDER  where FOLDER
holds config.yaml, run.json and, if a launcher started this, .launch.tmp.  Output goes to logs/rankN.log (without a
launcher, to the terminal); rank 0 writes steps.csv, events.jsonl and .result.tmp; a rank that fails writes
logs/rankN.failure.json.  Needs no Hydra.
"""

import os
import time

STARTED_S = time.monotonic()  # before the imports below, whose seconds are recorded
AGENT_PID = os.getppid()  # as early as possible: a process whose parent has ended gets another one

import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from bench.base.paths import CODE, REPO, results_root  # noqa: E402
from bench.config import user_code  # noqa: E402
from bench.machine import processes, signals  # noqa: E402
from bench.record import failures, run_folder  # noqa: E402
from bench.training import flight_recorder, open_watch  # noqa: E402


def main(path: str) -> None:
    folder = Path(path)
    rank = int(os.environ.get("RANK", 0))
    launch = _read_launch(folder)
    if launch:
        fd = os.open(folder / "logs" / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)  # all that this rank and the libraries in it print goes to one file
        os.dup2(fd, 2)
        os.close(fd)
        os.chdir(REPO)  # leaves the read-only copy of it in which this was started
        if "own" in launch:
            user_code.use_copies(launch["own"])
        if "t_offset_ns" in launch:
            print(f"node {os.environ['GROUP_RANK']}, rank {rank}", flush=True)
    else:
        _prepare_by_hand(folder, rank)
    _end_with_launcher(launch)
    flight_recorder.enable_stack_dumps(folder)
    warnings = signals.kept() if launch and launch.get("survival") else []  # otherwise a signal ends this rank
    run: Any = None
    try:
        gc.disable()  # imports leave no garbage, and looking for it is a tenth of their time
        from bench.training.run import Run  # imports torch

        if launch and "own" in launch:
            folders = [str(folder), launch["own"], *(str(CODE / name) for name in ("bench", "models", "conf"))]
            shards = [path for paths in launch["shards"].values() for path in paths]
            open_watch.watch(str(folder / f".rank{rank}.opened.tmp"), [*folders, *shards])
        gc.freeze()  # excludes torch's objects from collections, which saves 0.13 CPU s each
        run = Run(folder, launch, STARTED_S, warnings)
        gc.enable()
        run.train()
    except BaseException as error:
        kind = failures.write(folder, rank, run.step if run else 0, error)
        if kind in failures.BY_GPU:
            flight_recorder.dump(folder, rank)
        if kind == "gpu_error":
            time.sleep(failures.GPU_SEEN_S)
        raise


def _read_launch(folder: Path) -> dict[str, Any] | None:
    """Returns what the launcher wrote for its workers (initial_record.write_inputs); None without a launcher."""
    try:
        launch: dict[str, Any] = json.loads((folder / run_folder.LAUNCH).read_text())
    except FileNotFoundError:
        return None
    # another folder: this is a copy of a run that was killed with its launcher, and so never cleaned up
    return launch if launch["folder"] == str(folder.resolve()) else None


def _prepare_by_hand(folder: Path, rank: int) -> None:
    """Removes, on rank 0, what an earlier run wrote.  Raises ValueError if folder is not a copy of a run's."""
    if not all((folder / name).is_file() for name in ("config.yaml", "run.json")):
        raise ValueError(f"{folder}: has not both config.yaml and run.json: give a copy of a run's folder")
    if folder.resolve().is_relative_to(results_root().resolve()):
        raise ValueError(f"{folder}: a run by hand would overwrite this record: copy it to another folder first")
    (folder / "logs").mkdir(exist_ok=True)
    if rank == 0:
        run_folder.remove_outputs(folder)


def _end_with_launcher(launch: dict[str, Any] | None) -> None:
    """Makes this worker end when its launcher or agent does; on Linux the kernel kills it, even if it is stopped.

    Within nsys the parent is a separate process or thread that may end before the run: there the run's guard ends the
    worker, and writes the record that the launcher cannot write (bench/launch/guard.py).
    """
    watched = {"launcher-watch": launch["launcher_pid"]} if launch else {}
    if processes.WITHIN not in os.environ:
        processes.die_with_parent()
        watched["agent-watch"] = AGENT_PID
    for name, pid in watched.items():
        if pid:  # 0: it is in another PID namespace
            processes.when_gone(pid, lambda: os._exit(1), name)


if __name__ == "__main__":
    processes.call_and_exit(main, sys.argv[1])
