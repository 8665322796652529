"""cluster=slurm: submits a verb as a SLURM job from a login node, follows its output and lists the records it made.

The job runs the same verb, without cluster=, on the first node of its allocation (bench/launch/nodes/joining.py starts
the others).  The checkout, the data and the results must be on a file system that all its nodes share.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.base import atomic, escape
from bench.base.paths import REPO, results_root, shown, working_folder
from bench.config import overrides
from bench.launch import allocation
from bench.launch.console import say, show
from bench.machine.signals import Interrupted, Signals, raise_interrupted
from bench.record import run_folder

FOLDER = "jobs"  # in the results folder: batch scripts and their logs
LOOK_EVERY_S = 2.0
GONE = "Invalid job id"  # scontrol's error for a job that ended long ago
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")
ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
)  # fmt: skip
REMEDIES = {
    "TIMEOUT": ": give it more time, cluster.time_min=MINUTES",
    "NODE_FAIL": ": a node of it failed; sinfo -R says which, cluster.requeue=true starts it again by itself",
    "OUT_OF_MEMORY": ": ask for more memory, cluster.options='--mem=64G'",
}
PASSED_ON = ("SPEEDRUN_PYTHON", "SPEEDRUN_DATA", "SPEEDRUN_TORCH", "SPEEDRUN_CONFIG_DIR")
SBATCH = {  # setting cluster.NAME: option of sbatch
    "name": "job-name",
    "partition": "partition",
    "account": "account",
    "time_min": "time",
    "gpus_per_node": "gpus-per-node",
    "cpus_per_node": "cpus-per-task",
}


@dataclass
class Request:
    """The cluster resources that a command line requests."""

    arguments: list[str]  # the remaining arguments, for the job itself
    num_nodes: int = 1
    options: list[str] = field(default_factory=list)  # of sbatch


def request_from(arguments: list[str]) -> Request | None:
    """Returns the request of a command line, None without cluster=slurm.  Raises ValueError for an unknown setting."""
    cluster_overrides, rest = overrides.split_cluster(arguments)
    if not cluster_overrides:
        return None
    wanted = overrides.cluster_of(cluster_overrides)
    values = {option: getattr(wanted, name) for name, option in SBATCH.items()}
    options = [f"--{option}={value}" for option, value in values.items() if value is not None]
    if wanted.requeue is not None:
        options.append("--requeue" if wanted.requeue else "--no-requeue")
    # the largest number that any run of the command needs, including those of sweeps and arms
    counts = [int(number) for argument in rest for number in re.findall(r"\bhardware\.nodes=(\d+)", argument)]
    num_nodes = max(counts, default=1)
    if wanted.nodes and wanted.nodes < num_nodes:
        raise ValueError(f"cluster.nodes={wanted.nodes}: its runs need hardware.nodes={num_nodes}: ask for as many")
    return Request(rest, wanted.nodes or num_nodes, options + shlex.split(wanted.options or ""))


def script_of(verb: str, want: Request, log: Path) -> str:
    """Returns the batch script, which a person can read and submit again."""
    options = [f"--nodes={want.num_nodes}", "--ntasks-per-node=1", f"--output={log}", "--open-mode=append"]
    lines = [f"#SBATCH {option}" for option in [*options, *want.options]]
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    kept |= {"SPEEDRUN_RESULTS": str(results_root().absolute()), "SPEEDRUN_CWD": working_folder()}
    typed = shlex.join(["./run.sh", verb, *want.arguments])
    command = shlex.join([sys.executable, "-m", "bench", verb, *want.arguments])
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"# {escape.line(typed)}, as a job: sbatch THIS_FILE submits it again",
            "# SIGTERM, of scancel or a preemption, reaches the launcher, which ends its ranks and writes the record",
            *(f"export {name}={shlex.quote(value)}" for name, value in kept.items()),
            f"cd {shlex.quote(str(REPO))}",
            f"exec {command}",
            "",
        ]
    )


def go(verb: str, want: Request) -> int:
    """Submits the job, follows it to its end and lists its records.  Returns its exit code, 1 if it was ended early."""
    folder = results_root().absolute() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(".sh", f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{verb}-", folder)  # no other job's
    os.close(fd)
    path, log = Path(name), Path(name).with_suffix(".log")
    atomic.write_text(path, script_of(verb, want, log))
    before = set(_folders())
    job_id = _submit(path)
    say("slurm", f"job {job_id}, script {shown(path)}, log {shown(log)}")
    try:
        with raise_interrupted() as signals:
            state, exit_code = _follow(job_id, log, signals)
    except Interrupted:
        say(
            "slurm", f"no longer followed; the job goes on: squeue -j {job_id} shows it, scancel {job_id} ends it", True
        )
        return 1
    for folder_of_run in sorted(set(_folders()) - before):
        run = atomic.read_json(folder_of_run / "run.json", {})
        if (run.get("launched_by") or {}).get("job_id") == job_id:
            say("slurm", f"{run['status']}: {shown(folder_of_run)}", always=True)
    if state != "COMPLETED":
        say("slurm", f"job {job_id} ended as {state}, exit code {exit_code}{REMEDIES.get(state, '')}", always=True)
    return exit_code or (0 if state == "COMPLETED" else 1)


def _submit(path: Path) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"cluster=slurm: sbatch cannot be run ({error.strerror}): is this a login node?") from None
    if done.returncode:
        raise ValueError(f"cluster=slurm: sbatch: {done.stderr.strip()}: see {shown(path)}")
    return done.stdout.strip().partition(";")[0]


def _follow(job_id: str, log: Path, signals: Signals) -> tuple[str, int]:
    """Prints the job's output, and why it is pending, until it ends.  Returns (its state, its exit code)."""
    offset = 0
    reported: tuple[str, str] | str | None = None
    while True:
        signals.check()
        status = _state(job_id)
        offset = _show_new(log, offset)
        if isinstance(status, str):
            if reported != status:
                reported = status
                say("slurm", f"the controller does not answer, and is waited for; the job goes on ({status})", True)
            time.sleep(LOOK_EVERY_S)
            continue
        state, exit_code, why = status
        if state in WAITING and (state, why) != reported:
            reported = state, why
            say("slurm", f"{state.lower()}{f' ({why})' if why not in ('None', '') else ''}")
        if state.startswith(ENDED):
            time.sleep(0.5)  # for its last output
            _show_new(log, offset)
            return state, exit_code
        time.sleep(LOOK_EVERY_S)


def _state(job_id: str) -> tuple[str, int, str] | str:
    """Returns (state, exit code, reason) from scontrol, which keeps a job for some minutes after its end, or scontrol's
    error message.  Raises ValueError if SLURM no longer knows the job."""
    output, why = allocation.scontrol("show", "job", "--oneliner", job_id)
    facts = dict(re.findall(r"(JobState|ExitCode|Reason)=(\S+)", output))
    if why and GONE in why:
        raise ValueError(f"job {job_id}: SLURM no longer lists it ({why}): its log has the rest")
    if not facts:
        return why or "scontrol said nothing"
    code, _, signal = facts["ExitCode"].partition(":")
    return facts["JobState"], int(code) or (1 if signal not in ("0", "") else 0), facts.get("Reason", "")


def _show_new(log: Path, offset: int) -> int:
    """Prints the complete lines written to the log since offset.  Returns the offset of the next line."""
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return offset
    whole = text.rpartition(b"\n")[0]
    show(whole.decode(errors="replace").split("\n") if whole else [])
    return offset + len(whole) + (1 if whole else 0)


def _folders() -> Iterable[Path]:
    return run_folder.find_runs([results_root()]) if results_root().is_dir() else []
