"""What need not be run again: records of the same config, seed, raced code and data."""

import json
from collections.abc import Sequence

from bench.base.paths import results_root
from bench.launch.console import say
from bench.launch.prepare import Job
from bench.record import index, run_folder


def complete(jobs: Sequence[Job], stopped_too: bool = False) -> dict[int, dict]:
    """Index of a job: its record, with its folder; a valid one where there is one, else a suspect one.

    A race's warm-up runs do not count.  stopped_too: where none is complete, one that a sweep stopped.
    """
    folders = {results_root() / job.config.track.name for job in jobs}
    wanted = ("complete", "stopped") if stopped_too else ("complete",)
    known = {}
    for folder, row in index.read_rows(folder for folder in folders if folder.is_dir()):
        if row["status"] in wanted and not row["discarded"]:
            files = json.loads(row["setting"])
            data = frozenset((files["train_data"] or []) + (files["val_data"] or []))
            kind = (row["track"], row["config_id"], row["seed"], row["source_sha256"], data)
            known.setdefault((kind, row["status"], row["validity"] == "valid"), folder)
    result = {}
    for number, job in enumerate(jobs):
        data = frozenset(shard.sha256 for shard in job.dataset.train + job.dataset.val)
        kind = (job.config.track.name, job.config_id, job.config.seed, job.source_sha256, data)
        ways = [(kind, status, is_valid) for status in wanted for is_valid in (True, False)]
        if folder := next((known[way] for way in ways if way in known), None):
            result[number] = run_folder.read(folder) | {"folder": folder}
    return result


def say_complete(job: Job, run: dict) -> None:
    """That a run is not made again, and what doubts there are of the one that stands for it."""
    say("sweep", f"{' '.join(job.overrides)}: {run['status']} before, {run['run_id']}{_doubts(run)}")
    if exporters := ",".join(job.config.exporters):
        say("sweep", f"not exported again: ./run.sh dashboard {run['run_id']} --to {exporters}")


def _doubts(run):
    if run["validity"] == "valid" or run["status"] != "complete":
        return ""
    return f", {run['validity']}: {'; '.join(run['validity_reasons'])}"
