"""Is this machine fit to measure?  Each check says what it found and, where that is not good, what to do.

fail: the race cannot run or its record cannot be written.  warn: it can, and its times will be worth less.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bench import environment
from bench.units import GIB, format_gib, gib_from_bytes

MIN_FREE_GIB = 0.0625  # 64 MiB: a thousand times a small record; below it the disk is as good as full
LOW_FREE_GIB = 2.0  # traces and snapshots are large
PROCESS_GIB = 0.6  # a worker that has imported torch, before its model: 0.5 measured with the CPU build
MAX_FOREIGN_CPU_CORES = 0.1  # the limit of bench/verdict.py, above which a CPU race is suspect
SAMPLE_S = 0.3


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn, fail
    found: str
    remedy: str = ""  # empty if ok


def checks(config, dataset_bytes, env, results, foreign_cpu_cores=None):
    """config resolved; env: environment(); results: folder of the records.  Samples the CPU for 0.3 s if not given.

    Returns a list of Check; those of GPUs only for a race on GPUs.
    """
    hardware = config.hardware
    found = [
        disk_space(results),
        memory(hardware.num_processes, dataset_bytes, environment.available_memory_gib()),
        cpu_load(hardware, _sample() if foreign_cpu_cores is None else foreign_cpu_cores, env["num_cpus"]),
        threads(hardware, env["num_cpus"], env.get("cpu_quota_cores")),
    ]
    if hardware.device == "cpu":
        return [*found, waiting_threads(hardware, env["env"])]
    visible = [gpu for gpu in env["gpus"] if gpu["visible"] is not None]
    gpus = sorted(visible, key=lambda gpu: gpu["visible"])[: hardware.num_processes]
    return [*found, gpus_idle(gpus), gpus_alike(gpus), gpus_persistent(gpus)] if gpus else found


def report(found):
    """list of Check -> lines for a terminal: one a check, with the remedy below where there is one."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{check.status:>8}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':>8}  {'':<{width}}  try: {check.remedy}")
    return "\n".join(lines)


def disk_space(results):
    """Free space where the record is written."""
    folder = next(path for path in (Path(results).absolute(), *Path(results).absolute().parents) if path.exists())
    if not os.access(folder, os.W_OK):
        return Check(
            "disk", "fail", "the results folder cannot be written", "set SPEEDRUN_RESULTS=FOLDER to one that can"
        )
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
    found = f"{format_gib(available_gib, 1)} available; {need}"
    if available_gib < need_gib:
        return Check("memory", "fail", found, "end other programs, or race with fewer: hardware.num_processes=1")
    if available_gib < need_gib + data_gib:
        found = f"{found}, the data {format_gib(data_gib, 1)}"
        return Check("memory", "warn", found, "end other programs: the data will be read from disk again and again")
    return Check("memory", "ok", found)


def cpu_load(hardware, foreign_cores, num_cpus):
    """What other programs take.  A CPU race shares every core; a GPU race needs a free one for each process."""
    if foreign_cores is None:
        return Check("cpu load", "ok", "unknown on this system")
    limit = MAX_FOREIGN_CPU_CORES if hardware.device == "cpu" else max(0, num_cpus - hardware.num_processes)
    found = f"other programs use {foreign_cores:.2f} of {num_cpus} cores"
    if foreign_cores <= limit:
        return Check("cpu load", "ok", found)
    remedy = "end them (top shows which): steps get slower and uneven, and the record will say suspect"
    return Check("cpu load", "warn", f"{found} (limit {limit:g})", remedy)


def threads(hardware, num_cpus, quota_cores):
    """No more busy threads than cores."""
    wanted = hardware.num_threads * hardware.num_processes if hardware.device == "cpu" else hardware.num_processes
    cores = min(num_cpus, quota_cores or num_cpus)
    found = f"{hardware.num_processes} process(es), {wanted} busy thread(s) on {cores:g} usable core(s)"
    if wanted <= cores:
        return Check("threads", "ok", found)
    if hardware.device == "cpu":
        threads_each = max(1, int(cores // hardware.num_processes))
        return Check("threads", "warn", found, f"hardware.num_threads={threads_each}, or fewer processes")
    return Check("threads", "warn", found, "give the job more cores: each GPU's process needs one for itself")


def waiting_threads(hardware, env_variables):
    """Spinning OpenMP threads beside a busy core make steps 10 to 90 times slower; the launcher sets PASSIVE."""
    policy = env_variables.get("OMP_WAIT_POLICY")
    if policy is None or policy.upper() == "PASSIVE" or hardware.num_threads == 1:
        return Check("openmp", "ok", "idle threads sleep" if hardware.num_threads > 1 else "one thread a process")
    return Check("openmp", "warn", f"OMP_WAIT_POLICY={policy}: idle threads spin", "unset OMP_WAIT_POLICY")


def gpus_idle(gpus):
    """Nobody else computes on them."""
    busy = [f"GPU {gpu['visible']}: {gpu['num_compute_processes']}" for gpu in gpus if gpu["num_compute_processes"]]
    if busy:
        remedy = "wait or end them (nvidia-smi shows which), or choose others with CUDA_VISIBLE_DEVICES"
        return Check("gpus idle", "warn", f"other programs compute on {', '.join(busy)}", remedy)
    if any(gpu["num_compute_processes"] is None for gpu in gpus):
        return Check("gpus idle", "ok", "unknown: the driver does not say who computes")
    return Check("gpus idle", "ok", f"no other program computes on {len(gpus)} GPU(s)")


def gpus_alike(gpus):
    """One model and one power limit; the slowest sets everybody's pace."""
    kinds = {(gpu["name"], gpu["power_limit_w"]) for gpu in gpus}
    found = " and ".join(sorted(f"{name}{'' if limit is None else f' at {limit:.0f} W'}" for name, limit in kinds))
    if len(kinds) == 1:
        return Check("gpus alike", "ok", f"{len(gpus)} x {found}")
    remedy = "nvidia-smi -pl WATTS sets a power limit; CUDA_VISIBLE_DEVICES chooses GPUs of one model"
    return Check("gpus alike", "warn", found, remedy)


def gpus_persistent(gpus):
    """Persistence mode keeps the driver loaded: without it clocks and start-up vary."""
    without = [str(gpu["visible"]) for gpu in gpus if gpu["persistence"] is False]
    if without:
        return Check("persistence", "warn", f"off on GPU {', '.join(without)}", "sudo nvidia-smi -pm 1")
    unknown = any(gpu["persistence"] is None for gpu in gpus)
    return Check("persistence", "ok", "unknown: the driver does not say" if unknown else "on")


def _sample():
    meter = environment.CpuMeter()
    time.sleep(SAMPLE_S)
    return meter.foreign_cpu_cores()
