"""Checks whether this machine is ready to benchmark.  A check has a finding and, unless it is ok, a remedy.

fail: the run cannot start or its record cannot be written.  warn: it can, but its times will be less reliable.
checks() are the quick ones, which every run makes and records; ./run.sh doctor (bench/cli/doctor.py) makes more.
"""

import os
import shutil
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.base import text_table
from bench.base.units import GIB, format_gib, gib_from_bytes
from bench.config.schema import HardwareConfig
from bench.machine import environment, gpus
from bench.machine.gpus import Facts
from bench.machine.meters import CpuMeter

MIN_FREE_GIB = 0.0625  # 64 MiB, a thousand times a small record; below it the disk counts as full
LOW_FREE_GIB = 2.0  # traces and snapshots are large
PROCESS_GIB = 0.6  # a worker after importing torch, before its model: 0.5 measured with the CPU build
MAX_FOREIGN_CPU_CORES = 0.1  # the limit of bench/record/validity.py, above which a CPU run is suspect
SAMPLE_S = 0.3
MAX_CHARS = 300  # of git's message
GIT_REMEDIES = {  # words in git's message: remedy
    "dubious ownership": "git config --global --add safe.directory {repo}",
    "lfs": "git lfs install, or install git-lfs: the repository's files pass through it",
    "filter": "install the program of that filter, or remove it: git config --get-regexp '^filter'",
    "timed out": "run git status in {repo} to see what takes so long: a slow disk, or one of your hooks",
    "cannot be run": "install git",
    "Permission denied": "make the file readable for this user",
}
GIT_REMEDY = "git fsck in {repo}, or run from a fresh clone"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: str  # ok, warn or fail
    found: str
    remedy: str = ""  # empty if ok


def report(checks: list[Check], min_width: int = 0) -> str:
    """Formats checks for a terminal: one line each, with the remedy below."""
    cells = []
    for check in checks:
        cells.append((check.status.rjust(text_table.MARK_WIDTH), check.name.ljust(min_width), check.found))
        cells += [("", "", f"try: {check.remedy}")] * bool(check.remedy)
    return text_table.render((), cells)


def disk_space(results: Path | str) -> Check:
    """Checks the free space where the record is written."""
    results = Path(results).absolute()
    folder = next(path for path in (results, *results.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        remedy = "set SPEEDRUN_RESULTS to a folder that is"
        return Check("disk", "fail", "the results folder is not writable", remedy)
    free_gib = gib_from_bytes(shutil.disk_usage(folder).free)
    status = "fail" if free_gib < MIN_FREE_GIB else "warn" if free_gib < LOW_FREE_GIB else "ok"
    remedy = "" if status == "ok" else "free some space, or set SPEEDRUN_RESULTS=FOLDER to a larger disk"
    return Check("disk", status, f"{format_gib(free_gib)} free for results", remedy)


def memory(num_processes: int, dataset_bytes: int, available_gib: float | None) -> Check:
    """Checks for enough memory for the workers, and for the data to stay in the page cache."""
    if available_gib is None:
        return Check("memory", "ok", "unknown on this system")
    need_gib, data_gib = num_processes * PROCESS_GIB, dataset_bytes / GIB
    found = f"{format_gib(available_gib)} available, at least {format_gib(need_gib)} needed"
    if available_gib < need_gib:
        return Check("memory", "fail", found, "stop other programs, raise this job's limit, or use fewer processes")
    if available_gib < need_gib + data_gib:
        found = f"{found}, and {format_gib(data_gib)} for the data"
        return Check("memory", "warn", found, "stop other programs: the data will be read from disk again and again")
    return Check("memory", "ok", found)


def cpu_load(hardware: HardwareConfig, foreign_cores: float | None, num_cpus: int) -> Check:
    """Checks the CPU use of other programs.  A CPU run uses every core; a GPU run needs a free one per process."""
    if foreign_cores is None:
        return Check("cpu load", "ok", "unknown on this system")
    limit = MAX_FOREIGN_CPU_CORES if hardware.device == "cpu" else max(0, num_cpus - (hardware.num_processes or 1))
    found = f"other programs use {foreign_cores:.2f} of {num_cpus} cores"
    if round(foreign_cores, 2) <= limit:  # as displayed: what is displayed as the limit is not above it
        return Check("cpu load", "ok", found)
    remedy = "stop them (top lists them); otherwise steps are slower and uneven, and the run is suspect"
    return Check("cpu load", "warn", f"{found} (limit {limit:g})", remedy)


def threads(hardware: HardwareConfig, num_cpus: int, quota_cores: float | None) -> Check:
    """Checks that there are no more busy threads than cores."""
    num_processes, num_threads = hardware.num_processes or 1, hardware.num_threads or 1
    wanted = num_threads * num_processes if hardware.device == "cpu" else num_processes
    cores = min(num_cpus, quota_cores or num_cpus)
    busy = f"{text_table.counted(num_processes, 'process')} with {text_table.counted(wanted, 'busy thread')}"
    found = f"{busy}; usable cores: {cores:g}"
    if wanted <= cores:
        return Check("threads", "ok", found)
    if hardware.device == "cpu":
        threads_each = max(1, int(cores // num_processes))
        if threads_each < num_threads:
            return Check("threads", "warn", found, f"hardware.num_threads={threads_each}, or fewer processes")
        return Check("threads", "warn", found, f"hardware.num_processes={max(1, int(cores))} or fewer")
    return Check("threads", "warn", found, "give the job more cores: each GPU's process needs one for itself")


def waiting_threads(hardware: HardwareConfig, env_variables: Mapping[str, str]) -> Check:
    """Checks that idle OpenMP threads do not spin, which makes steps 10 to 90 times slower; launchers set PASSIVE."""
    policy = env_variables.get("OMP_WAIT_POLICY")
    if policy is None or policy.upper() == "PASSIVE" or hardware.num_threads == 1:
        return Check("openmp", "ok", "idle threads sleep" if hardware.num_threads != 1 else "one thread per process")
    return Check("openmp", "warn", f"OMP_WAIT_POLICY={policy}: idle threads spin", "unset OMP_WAIT_POLICY")


def governor(name: str | None) -> Check:
    """Checks the CPU governor: with any other than performance, the clock, and so the steps, follow the load."""
    if name is None:
        return Check("governor", "ok", "unknown, as is usual in a container or a virtual machine")
    if name == "performance":
        return Check("governor", "ok", name)
    return Check("governor", "warn", f"{name}: clocks follow the load", "sudo cpupower frequency-set -g performance")


def quota(num_cpus: int, quota_cores: float | None) -> Check:
    """Checks a container's CPU quota: a run that exceeds it is stopped for the rest of every 100 ms."""
    if quota_cores is None or quota_cores >= num_cpus:
        return Check("cpu quota", "ok", "no limit" if quota_cores is None else f"{quota_cores:g} cores of {num_cpus}")
    remedy = "give the container whole cores instead of a share of time (--cpuset-cpus, not --cpus)"
    return Check("cpu quota", "warn", f"{quota_cores:g} cores' worth of time on {num_cpus} cores", remedy)


def git(failure: str | None, repo: Path) -> Check:
    """Checks that git can tell which commit the code is.  failure: its message if not (code_state.git_failure())."""
    if failure is None:
        return Check("git", "ok", "the code can be identified")
    remedy = next((remedy for text, remedy in GIT_REMEDIES.items() if text in failure), GIT_REMEDY).format(repo=repo)
    found = f"the commit is unknown, so runs cannot be claimed: {failure[:MAX_CHARS]}"
    return Check("git", "warn", found, remedy)


def sample_foreign_cores(sample_s: float = SAMPLE_S) -> float | None:
    """Returns the cores that other programs use now, mean over sample_s seconds, or None if unknown."""
    meter = CpuMeter()
    time.sleep(sample_s)
    return meter.foreign_cpu_cores()


def compiler() -> Check:
    """Checks for the C compiler with which Triton, for torch.compile, builds a small extension module of Python."""
    name = next((name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and shutil.which(name)), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if name and header.is_file():
        return Check("compiler", "ok", f"{name}, Python.h")
    missing = " and ".join(["no C compiler"] * (not name) + ["no Python.h"] * (not header.is_file()))
    remedy = "apt install gcc python3-dev, or hardware.compile=false"
    return Check("compiler", "warn", f"{missing}, which torch.compile needs on a GPU", remedy)


SLOWED_BY = ("sw_thermal", "hw_slowdown", "hw_thermal", "hw_power_brake")  # reasons that a healthy idle GPU never has
POWER_SLACK_W = 1.0  # the driver rounds
UNKNOWN = "unknown: the driver does not say"


def gpu_checks(gpus: list[Facts]) -> list[Check]:
    """Returns the checks of the GPUs that a run uses, from their facts."""
    looks = (idle, roomy, alike, persistent, power_limit, slowed, ecc, pcie)
    return [look(gpus) for look in looks]


def _check(name: str, faults: list[str], remedy: str, good: str, lead: str = "") -> Check:
    """Returns a warning that lists all faults, or ok if there are none."""
    return Check(name, "warn", lead + "; ".join(faults), remedy) if faults else Check(name, "ok", good)


def idle(gpus: list[Facts]) -> Check:
    """Checks that no other program computes on the GPUs."""
    busy = [f"GPU {gpu['visible']}: {gpu['num_compute_processes']}" for gpu in gpus if gpu["num_compute_processes"]]
    remedy = "wait or end them (nvidia-smi shows which), or choose others with CUDA_VISIBLE_DEVICES"
    is_known = all(gpu["num_compute_processes"] is not None for gpu in gpus)
    used = text_table.counted(len(gpus), "GPU")
    good = f"no other program computes on {used}" if is_known else f"{UNKNOWN} who computes"
    return _check("gpus idle", [", ".join(busy)] * bool(busy), remedy, good, "other programs compute on ")


def roomy(used: list[Facts]) -> Check:
    """Checks that the GPUs' memory is free: a run that fills a GPU lacks what others use."""
    full = [(gpu["visible"], gpus.crowded(gpu.get("memory_gib"), gpu.get("used_memory_gib"))) for gpu in used]
    remedy = "end what uses it (nvidia-smi shows which), or choose others with CUDA_VISIBLE_DEVICES"
    is_known = all(gpu.get("used_memory_gib") is not None for gpu in used)
    return _check("gpu memory", [f"GPU {n}: {why}" for n, why in full if why], remedy, "free" if is_known else UNKNOWN)


def alike(gpus: list[Facts]) -> Check:
    """Checks that the GPUs have one model and one power limit; the slowest sets the pace of all."""
    kinds = {(gpu["name"], gpu["power_limit_w"]) for gpu in gpus}
    found = " and ".join(sorted(name if limit_w is None else f"{name} at {limit_w:.0f} W" for name, limit_w in kinds))
    remedy = "nvidia-smi -pl WATTS sets a power limit; CUDA_VISIBLE_DEVICES chooses GPUs of one model"
    return _check("gpus alike", [found] * (len(kinds) > 1), remedy, f"{len(gpus)} x {found}")


def persistent(gpus: list[Facts]) -> Check:
    """Checks persistence mode, which keeps the driver loaded: without it clocks and start-up vary."""
    without = [str(gpu["visible"]) for gpu in gpus if gpu["persistence"] is False]
    good = UNKNOWN if any(gpu["persistence"] is None for gpu in gpus) else "on"
    return _check("persistence", [", ".join(without)] * bool(without), "sudo nvidia-smi -pm 1", good, "off on GPU ")


def power_limit(gpus: list[Facts]) -> Check:
    """Checks that power limits are the default: times of a GPU with a lower one are comparable to no other's."""
    other = []
    for gpu in gpus:
        limit_w, default_w = gpu.get("power_limit_w"), gpu.get("default_power_limit_w")
        if limit_w is not None and default_w is not None and abs(limit_w - default_w) > POWER_SLACK_W:
            other.append(f"GPU {gpu['visible']}: {limit_w:.0f} W instead of {default_w:.0f} W")
    known_w = gpus[0].get("power_limit_w")
    good = UNKNOWN if known_w is None else f"{known_w:.0f} W, the default"
    return _check("power limit", other, "sudo nvidia-smi -pl WATTS with the default", good)


def slowed(gpus: list[Facts]) -> Check:
    """Checks that nothing limits the clocks of idle GPUs, such as heat, or a power supply that is too weak."""
    slow = []
    for gpu in gpus:
        reasons = [reason for reason in gpu.get("clocks_event_reasons") or () if reason in SLOWED_BY]
        if reasons:
            slow.append(f"GPU {gpu['visible']}: {', '.join(reasons)} at {gpu.get('temp_c')} C")
    tops = sorted({gpu["max_sm_clock_mhz"] for gpu in gpus if gpu.get("max_sm_clock_mhz") is not None})
    good = f"nothing slows them down; at most {' and '.join(map(str, tops)) or '?'} MHz"
    if all(gpu.get("clocks_event_reasons") is None for gpu in gpus):
        good = UNKNOWN
    remedy = "let it cool, look at fans, airflow and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
    return _check("clocks", slow, remedy, good, "slowed down: ")


def ecc(gpus: list[Facts]) -> Check:
    """Checks for uncorrected errors, and for memory rows that will be replaced at a reset."""
    bad, modes = [], {gpu.get("ecc") for gpu in gpus} - {None}
    for gpu in gpus:
        who = f"GPU {gpu['visible']}"
        if gpu.get("ecc_uncorrected"):
            bad.append(f"{who}: {gpu['ecc_uncorrected']} uncorrected errors since the driver was loaded")
        if gpu.get("remap_failed"):
            bad.append(f"{who}: a memory row could not be replaced")
        elif gpu.get("remap_pending"):
            bad.append(f"{who}: a memory row waits to be replaced")
    if len(modes) > 1 and not bad:
        return Check("ecc", "warn", "on for some GPUs, off for others", "sudo nvidia-smi -e 1, then reboot")
    remedy = "reset the GPU (sudo nvidia-smi -r) or reboot; if that does not help, replace the GPU"
    return _check("ecc", bad, remedy, {True: "on, no errors", False: "off", None: UNKNOWN}[next(iter(modes), None)])


def pcie(gpus: list[Facts]) -> Check:
    """Checks for fewer lanes than board and slot have: a badly seated card.  The generation may drop at rest."""
    thin: list[str] = []
    widths: set[int] = set()
    for gpu in gpus:
        width, most = gpu.get("pcie_width"), gpu.get("pcie_max_width")
        if width is not None:
            widths.add(width)
        if width is not None and most is not None and width < most:
            thin.append(f"GPU {gpu['visible']}: x{width} of x{most}")
    good = f"x{' and x'.join(map(str, sorted(widths)))}" if widths else UNKNOWN
    return _check("pcie", thin, "seat the card again, or use another slot", good)


def checks(
    hardware: HardwareConfig,
    dataset_bytes: int,
    env: Facts,
    results: Path | str,
    foreign_cpu_cores: float | None = None,
) -> list[Check]:
    """Runs the quick checks.  hardware: resolved; env: environment(); foreign_cpu_cores: None samples it for 0.3 s."""
    quota_cores = env.get("cpu_quota_cores")
    foreign_cpu_cores = sample_foreign_cores() if foreign_cpu_cores is None else foreign_cpu_cores
    machine_checks = [
        disk_space(results),
        memory(hardware.num_processes or 1, dataset_bytes, environment.available_memory_gib()),
        cpu_load(hardware, foreign_cpu_cores, env["num_cpus"]),
        threads(hardware, env["num_cpus"], quota_cores),
        governor(env.get("governor")),
        quota(env["num_cpus"], quota_cores),
    ]
    if hardware.device == "cpu":
        return [*machine_checks, waiting_threads(hardware, env["env"])]
    if hardware.compile is not False:  # None: not yet resolved, which means compiled on a GPU
        machine_checks.append(compiler())
    used = gpus.used_by_run(env["gpus"], hardware)
    return [*machine_checks, *gpu_checks(used)] if used else machine_checks
