"""The SLURM allocation that this process runs in, when a batch script or salloc started it: its nodes become the run's.

Within one, hardware.nodes=N needs no rendezvous and no second command: srun starts the other nodes' part for each run
(nodes/leader.py), so that races, sweeps and speedruns span nodes as well.
"""

import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NODE_ADDR = re.compile(r"\bNodeAddr=(\S+)")


def tasks_per_node(word: str) -> list[int]:
    """SLURM_STEP_TASKS_PER_NODE, "2(x3),1" -> [2, 2, 2, 1].  ValueError."""
    result = []
    for part in word.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={word}: not as SLURM writes it, 2(x3),1")
        result += [int(match[1])] * int(match[2] or 1)
    return result


def hostnames(word: str) -> list[str]:
    """A host list, "n[01-03,7],gpu-a" -> ["n01", "n02", "n03", "n7", "gpu-a"]."""
    result = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", word):
        result += _expanded(part)
    return result


def _expanded(part) -> Iterable[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    numbers = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        numbers += [f"{num:0{len(first)}d}" for num in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expanded(after)]


def address_of_first(environ: Mapping[str, str]) -> str | None:
    """Of the first node of this step, where rank 0 is: its NodeAddr, else its name if that can be looked up."""
    names = hostnames(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    if not names:
        return None
    try:
        words = ["scontrol", "show", "node", names[0]]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    match = NODE_ADDR.search(answer)
    if match:
        return match[1]
    try:
        return socket.getaddrinfo(names[0], None)[0][4][0]
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR")


ASK_S = 5.0  # for scontrol, while the job has KillWait to end, 30 s where nobody set it
WHY = {  # by the state of a job that SLURM is ending, or while that is COMPLETING by its reason
    "NODE_FAIL": "because a node of it failed",
    "NodeDown": "because a node of it failed",
    "TIMEOUT": "at its time limit",
    "TimeLimit": "at its time limit",
    "PREEMPTED": "for another one (preempted)",
    "OUT_OF_MEMORY": "because it took more memory than it asked for",
    "DEADLINE": "at its deadline",
}


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


@dataclass(frozen=True)
class Ending:
    """What SLURM says of a job that it is ending."""

    is_requeued: bool  # SLURM starts it again
    words: str  # why it ends, behind a signal's name; "" where that is not known, as after scancel


def ending(environ: Mapping[str, str] = os.environ) -> Ending:
    """Of the job that this process runs in; outside of one nothing."""
    job = found(environ)
    if job is None:
        return Ending(False, "")
    try:
        command = ["scontrol", "show", "job", "--oneliner", job.job_id]
        said = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return Ending(False, "")
    facts = dict(re.findall(r"(JobState|Reason|Restarts)=(\S+)", said))
    is_requeued = int(facts.get("Restarts", "0")) > job.num_restarts
    if is_requeued:
        return Ending(True, f": SLURM starts job {job.job_id} again (a lost node, a preemption or scontrol requeue)")
    why = WHY.get(facts.get("JobState", "")) or WHY.get(facts.get("Reason", ""))
    return Ending(False, f": SLURM ended job {job.job_id}, {why}" if why else "")
