"""The SLURM allocation that this process runs in, when a batch script or salloc started it: its nodes become the run's.

Within one, hardware.nodes=N needs no rendezvous and no second command: srun starts the other nodes' part, for each run
anew, so that races, sweeps and speedruns span nodes as well.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.launch.nodes import channel, slurm
from bench.launch.nodes.coordinator import Coordinator
from bench.launch.prepare import Job
from bench.machine import processes
from bench.paths import REPO

END_S = 15.0
GRACE_S = 20.0  # for srun to end its tasks after SIGTERM; it kills them itself before


@dataclass(frozen=True)
class Allocation:
    """What SLURM gave this job."""

    job_id: str
    num_nodes: int
    num_restarts: int  # how often the job was requeued

    def facts(self) -> dict:
        """run.json["launched_by"]."""
        return {"by": "slurm", "job_id": self.job_id, "num_restarts": self.num_restarts}


def found(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """None outside of a job of SLURM's."""
    if "SLURM_JOB_ID" not in environ:
        return None
    num_nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return Allocation(environ["SLURM_JOB_ID"], int(num_nodes), int(environ.get("SLURM_RESTART_COUNT", "0")))


@contextlib.contextmanager
def led(job: Job, allocation: Allocation) -> Iterator[Coordinator]:
    """A context that yields the coordinator of a run over this allocation, the other nodes' processes started.

    ValueError: it has too few nodes.
    """
    hardware = job.config.hardware
    if hardware.nodes > allocation.num_nodes:
        what = f"job {allocation.job_id} has {allocation.num_nodes} node(s)"
        raise ValueError(f"hardware.nodes={hardware.nodes}: {what}: ask for more, sbatch --nodes={hardware.nodes}")
    host = slurm.address_of_first(os.environ)
    listener = channel.listen(host, [0])
    rendezvous = f"{host}:{listener.getsockname()[1]}"
    others = hardware.nodes - 1
    node = ("--overlap", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--relative=1")
    ends = ("--kill-on-bad-exit=1", "--wait=30", "--unbuffered")
    words = [word for word in job.overrides if not word.startswith("hardware.rendezvous=")]
    follow = [sys.executable, "-m", "bench.launch.follow", *words, f"hardware.rendezvous={rendezvous}"]
    own_ranks = hardware.num_processes // hardware.nodes
    with (
        processes.child(["srun", *node, *ends, *follow], REPO, os.environ, None, GRACE_S) as srun,
        Coordinator(listener, rendezvous, others, own_ranks, is_adopted=False) as coordinator,
    ):
        coordinator.still = lambda: None if srun.poll() is None else f"srun ended with exit code {srun.returncode}"
        yield coordinator
        with contextlib.suppress(subprocess.TimeoutExpired):
            srun.wait(END_S)  # its tasks end by themselves now
