"""cluster=slurm cluster.KEY=VALUE: what a command asks of SLURM, to which it goes as a job (bench/launch/cluster.py).

Settings of the command and not of its runs: no config.yaml and no config_id has them.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from bench.config import overrides, typed
from models.settings import PositiveInt

CHOICE = "cluster=slurm"
ABOUT = f"{CHOICE} sends run, speedrun, race, ladder, calibrate or doctor to SLURM as a job, over hardware.nodes nodes"


@dataclass(kw_only=True)
class Cluster:
    partition: str | None = None  # where the job goes, sbatch --partition; null: the cluster's default
    account: str | None = None  # who pays, sbatch --account; null: your default
    nodes: PositiveInt | None = None  # sbatch --nodes; null: the most that hardware.nodes=N asks for
    time_min: PositiveInt | None = None  # minutes until SLURM ends the job, sbatch --time; null: the partition's limit
    gpus_per_node: str | None = None  # GPUs of each node, 8 or h100:8, sbatch --gpus-per-node; null: not asked for
    cpus_per_node: PositiveInt | None = None  # CPUs of each node, sbatch --cpus-per-task; null: SLURM's default
    requeue: bool | None = None  # begin again after a preemption or a lost node, sbatch --requeue; null: as SLURM does
    name: str = "speedrun"  # of the job, as squeue shows it, sbatch --job-name
    options: str | None = None  # any other of sbatch's, in quotes: '--exclusive --constraint=h100'; null: none


def split(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words of a command -> (those of the cluster, all others)."""
    words = list(words)
    of_cluster = [word for word in words if word.startswith(("cluster=", "cluster."))]
    return of_cluster, [word for word in words if word not in of_cluster]


def read(of_cluster: Iterable[str]) -> Cluster:
    """Those words, checked.  Raises ValueError."""
    values = {}
    for word in of_cluster:
        key, _, value = word.partition("=")
        if key != "cluster":
            values[key.removeprefix("cluster.")] = overrides.value_of(value)
        elif word != CHOICE:
            raise ValueError(f"{word}: choose slurm, or remove it to run on this machine")
    if values and CHOICE not in of_cluster:
        raise ValueError(f"{next(iter(of_cluster))}: say which: {CHOICE}")
    return typed.build(Cluster, values, "cluster.")


def as_dict(of_cluster: Iterable[str]) -> dict:
    """The settings by name; {} where no cluster is asked for."""
    return dataclasses.asdict(read(of_cluster)) if CHOICE in of_cluster else {}
