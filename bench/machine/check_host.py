"""What a run needs of the machine around it: disk, memory, cores that no other program takes, steady clocks."""

import os
import shutil
import sysconfig
import time
from pathlib import Path

from bench.base.units import GIB, format_gib, gib_from_bytes
from bench.machine.check import Check
from bench.machine.cpu_meter import CpuMeter

MIN_FREE_GIB = 0.0625  # 64 MiB: a thousand times a small record; below it the disk is as good as full
LOW_FREE_GIB = 2.0  # traces and snapshots are large
PROCESS_GIB = 0.6  # a worker that has imported torch, before its model: 0.5 measured with the CPU build
MAX_FOREIGN_CPU_CORES = 0.1  # the limit of bench/record/validity.py, above which a CPU run is suspect
SAMPLE_S = 0.3
MAX_CHARS = 300  # of what git says
GIT_REMEDIES = {  # a word of git's message: what to do
    "dubious ownership": "git config --global --add safe.directory {repo}",
    "lfs": "git lfs install, or install git-lfs: the repository's files pass through it",
    "filter": "install the program of that filter, or remove it: git config --get-regexp '^filter'",
    "timed out": "run git status in {repo} to see what takes so long: a slow disk, or one of your hooks",
    "cannot be run": "install git",
    "Permission denied": "make the file readable for this user",
}
GIT_REMEDY = "git fsck in {repo}, or run from a fresh clone"


def disk_space(results):
    """Free space where the record is written."""
    results = Path(results).absolute()
    folder = next(path for path in (results, *results.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        remedy = "set SPEEDRUN_RESULTS=FOLDER to one that can"
        return Check("disk", "fail", "the results folder cannot be written", remedy)
    free_gib = gib_from_bytes(shutil.disk_usage(folder).free)
    status = "fail" if free_gib < MIN_FREE_GIB else "warn" if free_gib < LOW_FREE_GIB else "ok"
    remedy = "" if status == "ok" else "free some space, or set SPEEDRUN_RESULTS=FOLDER to a larger disk"
    return Check("disk", status, f"{format_gib(free_gib, 1)} free for results", remedy)


def memory(num_processes, dataset_bytes, available_gib):
    """Room for the workers, and for the data to stay in the page cache."""
    if available_gib is None:
        return Check("memory", "ok", "unknown on this system")
    need_gib, data_gib = num_processes * PROCESS_GIB, dataset_bytes / GIB
    need = f"{num_processes} process(es) need {format_gib(need_gib, 1)} and more"
    result = f"{format_gib(available_gib, 1)} available; {need}"
    if available_gib < need_gib:
        return Check("memory", "fail", result, "end other programs, or use fewer processes: hardware.num_processes=1")
    if available_gib < need_gib + data_gib:
        result = f"{result}, the data {format_gib(data_gib, 1)}"
        return Check("memory", "warn", result, "end other programs: the data will be read from disk again and again")
    return Check("memory", "ok", result)


def cpu_load(hardware, foreign_cores, num_cpus):
    """What other programs take.  A CPU run shares every core; a GPU run needs a free one for each process."""
    if foreign_cores is None:
        return Check("cpu load", "ok", "unknown on this system")
    limit = MAX_FOREIGN_CPU_CORES if hardware.device == "cpu" else max(0, num_cpus - hardware.num_processes)
    result = f"other programs use {foreign_cores:.2f} of {num_cpus} cores"
    if round(foreign_cores, 2) <= limit:  # as it is shown: what reads as the limit is not above it
        return Check("cpu load", "ok", result)
    remedy = "end them (top shows which): steps get slower and uneven, and the record will say suspect"
    return Check("cpu load", "warn", f"{result} (limit {limit:g})", remedy)


def threads(hardware, num_cpus, quota_cores):
    """No more busy threads than cores."""
    wanted = hardware.num_threads * hardware.num_processes if hardware.device == "cpu" else hardware.num_processes
    cores = min(num_cpus, quota_cores or num_cpus)
    result = f"{hardware.num_processes} process(es), {wanted} busy thread(s) on {cores:g} usable core(s)"
    if wanted <= cores:
        return Check("threads", "ok", result)
    if hardware.device == "cpu":
        threads_each = max(1, int(cores // hardware.num_processes))
        if threads_each < hardware.num_threads:
            return Check("threads", "warn", result, f"hardware.num_threads={threads_each}, or fewer processes")
        return Check("threads", "warn", result, f"hardware.num_processes={max(1, int(cores))} or fewer")
    return Check("threads", "warn", result, "give the job more cores: each GPU's process needs one for itself")


def waiting_threads(hardware, env_variables):
    """Spinning OpenMP threads beside a busy core make steps 10 to 90 times slower; the launcher sets PASSIVE."""
    policy = env_variables.get("OMP_WAIT_POLICY")
    if policy is None or policy.upper() == "PASSIVE" or hardware.num_threads == 1:
        return Check("openmp", "ok", "idle threads sleep" if hardware.num_threads > 1 else "one thread a process")
    return Check("openmp", "warn", f"OMP_WAIT_POLICY={policy}: idle threads spin", "unset OMP_WAIT_POLICY")


def governor(name):
    """How the cores choose their clock: with any other governor than performance, it and the steps follow the load."""
    if name is None:
        return Check("governor", "ok", "unknown: the system does not say (usual in a container or a virtual machine)")
    if name == "performance":
        return Check("governor", "ok", name)
    return Check("governor", "warn", f"{name}: clocks follow the load", "sudo cpupower frequency-set -g performance")


def quota(num_cpus, quota_cores):
    """A container's share of time: a run that uses more is stopped for the rest of every 100 ms."""
    if quota_cores is None or quota_cores >= num_cpus:
        return Check("cpu quota", "ok", "no limit" if quota_cores is None else f"{quota_cores:g} cores of {num_cpus}")
    remedy = "give the container whole cores instead of a share of time (--cpuset-cpus, not --cpus)"
    return Check("cpu quota", "warn", f"{quota_cores:g} cores' worth of time on {num_cpus} cores", remedy)


def git(failure: str | None, repo: Path) -> Check:
    """Whether git can say which commit the code is.  failure: its words where it cannot (code_state.git_failure())."""
    if failure is None:
        return Check("git", "ok", "works, or there is no repository: the code is identified by its hash")
    remedy = next((one for word, one in GIT_REMEDIES.items() if word in failure), GIT_REMEDY).format(repo=repo)
    found = f"the commit is unknown, so runs cannot be claimed: {failure[:MAX_CHARS]}"
    return Check("git", "warn", found, remedy)


def sample_foreign_cores(sample_s: float = SAMPLE_S) -> float | None:
    """Cores that other programs use now, mean over sample_s seconds; None if unknown."""
    meter = CpuMeter()
    time.sleep(sample_s)
    return meter.foreign_cpu_cores()


def compiler():
    """torch.compile's kernels are Triton's, which builds a small extension module of Python with the C compiler."""
    name = next((name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and shutil.which(name)), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if name and header.is_file():
        return Check("compiler", "ok", f"{name}, Python.h")
    missing = " and ".join(["no C compiler"] * (not name) + ["no Python.h"] * (not header.is_file()))
    remedy = "apt install gcc python3-dev, or hardware.compile=false"
    return Check("compiler", "warn", f"{missing}, which torch.compile needs on a GPU", remedy)
