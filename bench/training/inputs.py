"""What a worker reads: config.yaml and run.json of its folder, and the launch file if a launcher started it."""

import json
from pathlib import Path

from bench.base.paths import results_root
from bench.data import shards as shard_files
from bench.data.sources import datasets
from bench.record import run_folder


def read_launch(folder: Path) -> dict | None:
    """What the launcher wrote for its workers (initial_record.write_inputs); None: started by hand."""
    try:
        launch = json.loads((folder / run_folder.LAUNCH).read_text())
    except FileNotFoundError:
        return None
    # another folder: a copy of a run that was killed with its launcher and so not cleaned up
    return launch if launch["folder"] == str(folder.resolve()) else None


def prepare_by_hand(folder: Path, rank: int):
    """Rank 0 removes what an earlier run wrote.  ValueError where folder is not a copy of a run's."""
    if not all((folder / name).is_file() for name in ("config.yaml", "run.json")):
        raise ValueError(f"{folder}: has not both config.yaml and run.json: give a copy of a run's folder")
    if folder.resolve().is_relative_to(results_root().resolve()):
        raise ValueError(f"{folder}: a run by hand would overwrite this record: copy it to another folder first")
    (folder / "logs").mkdir(exist_ok=True)
    if rank == 0:
        run_folder.remove_outputs(folder)


def find_shards(launch: dict | None, record: dict) -> dict:
    """{"train": [Shard], "val": [Shard]}, checked: the launcher's, or by hand those that run.json names."""
    if not launch:
        return datasets.recorded(record["data"])
    return {split: [shard_files.check(path) for path in launch["shards"][split]] for split in ("train", "val")}
