"""Where a run ran and with what code: machine, GPUs, software, source; ids for "same session" and "comparable".

No host name, user name, home path or remote URL leaves this room: values pass through record.redact, serial numbers
through record.salted_hash.  Nothing here fails for want of a GPU, a driver, git or /proc: the fact is None.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench import record
from bench.units import GIB, MIB, gib_from_bytes, s_from_ns

REPO = record.REPO
# fmt: off
ENV_PREFIXES = (
    "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_", "MALLOC_", "HYDRA_", "SPEEDRUN_",
)
# fmt: on
ENV_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONMALLOC")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.I)
SERIAL = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{8,}", re.I)
MAX_UNTRACKED_BYTES = MIB  # a source file; anything larger is data


def environment():
    """The facts of environment.json, as a dict; takes about 0.1 s."""
    nvml = nvml_facts()
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu_model": cpu_model(),
        "num_cpus": usable_cpus(),
        "cpu_quota_cores": cpu_quota_cores(),
        "memory_gib": _meminfo_gib("MemTotal"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "boot": _boot(),
        "driver": nvml["driver"],
        "nvml": nvml["nvml"],
        "gpus": nvml["gpus"],
        "env": env_variables(os.environ),
        "packages": packages(),
    }


def summary(env, hardware):
    """env: of environment(); hardware: resolved -> run.json["environment"], what the run itself used."""
    gpus = [gpu for gpu in env["gpus"] if gpu["visible"] is not None] if hardware.device == "cuda" else []
    gpus = sorted(gpus, key=lambda gpu: gpu["visible"])[: hardware.num_processes]
    keys = ("memory_gib", "power_limit_w", "max_sm_clock_mhz", "uuid_hash")
    shown = [{"name": gpu["name"] + (" MIG" if gpu["mig"] else "")} | {key: gpu[key] for key in keys} for gpu in gpus]
    facts = {key: env[key] for key in ("python", "os", "driver", "cpu_model", "num_cpus", "memory_gib", "governor")}
    torch_version = env["packages"].get("torch")  # torch_facts() of the workers says it again, and cuda and nccl
    return facts | {
        "torch": torch_version,
        "cuda": None,
        "nccl": None,
        "num_threads": hardware.num_threads,
        "gpus": shown,
    }


def torch_facts():
    """What only torch knows; imports it, so only workers call this."""
    import torch

    cuda = torch.version.cuda
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
    return {
        "torch": torch.__version__,
        "cuda": cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(str(part) for part in nccl) if nccl else None,
    }


def this_process():
    """Who owns the record: run.json["launcher"]."""
    return {"pid": os.getpid(), "start_ticks": record.start_ticks(os.getpid()), "boot_id_hash": record.boot_id_hash()}


# ---- ids


def session_id(env):
    """One boot, one set of GPUs, one software image: runs that share it were in one sitting.  None: boot unknown."""
    if env["boot"] is None:
        return None
    return _digest(
        [env["boot"], sorted(gpu["uuid_hash"] or "" for gpu in env["gpus"]), env["python"], env["packages"]]
    )


def comparability_id(run):
    """Times of runs that share it may be compared: same devices, software, timing protocol, data and world size.

    On a CPU the model, its usable cores and the threads of each process stand in the place of the GPUs.
    """
    env, protocol = run["environment"], run["timing_protocol"]
    gpus = sorted([gpu["name"], gpu["power_limit_w"]] for gpu in env["gpus"])
    device = gpus or [env["cpu_model"], env["num_cpus"], env.get("num_threads")]
    software = [env[key] for key in ("driver", "cuda", "nccl", "torch")]
    data = [file["sha256"] for split in ("train", "val") for file in run["data"][split]]
    return _digest([device, software, protocol["id"], protocol.get("instruments"), data, run["world_size"]])


def _digest(facts):
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


# ---- CPU and memory


def cpu_model():
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def usable_cpus():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_quota_cores():
    """Cores' worth of time that the container may use (cgroup v2), or None without a limit."""
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def available_memory_gib():
    """What programs may still take: of the machine or, if less, of the container (cgroup v2); None if unknown."""
    found = [_meminfo_gib("MemAvailable")]
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and used and limit != "max":
        found.append(gib_from_bytes(int(limit) - int(used)))
    return min((gib for gib in found if gib is not None), default=None)


def _meminfo_gib(name):
    match = re.search(rf"^{name}:\s+(\d+) kB$", _read("/proc/meminfo") or "", re.M)
    return int(match[1]) * 1024 / GIB if match else None


def peak_rss_gib():
    """The largest resident set this process has had, imports included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS: getrusage(2)
    return gib_from_bytes(peak if sys.platform == "darwin" else peak * 1024)


class CpuMeter:
    """How much other programs use the cores that we may use.

    foreign = busy time of those cores in /proc/stat, minus our own CPU time, over wall time.  /proc/stat counts in
    ticks of 10 ms a core, so below a second or so it is coarse.  Time stolen by a hypervisor counts as foreign.
    """

    def __init__(self, now_ns=time.perf_counter_ns, read_busy_s=None, own_s=time.process_time):
        self._now_ns, self._read_busy_s, self._own_s = now_ns, read_busy_s or _busy_cpu_s, own_s
        self._start = (now_ns(), self._read_busy_s(), own_s())

    def own_cpu_s(self):
        """CPU seconds of this process, all threads, since the meter was made."""
        return self._own_s() - self._start[2]

    def foreign_cpu_cores(self, own_cpu_s=None):
        """Cores, mean since the meter was made; own_cpu_s: of all our processes together.  None without /proc."""
        wall_s, busy_s = s_from_ns(self._now_ns() - self._start[0]), self._read_busy_s()
        if busy_s is None or self._start[1] is None or wall_s <= 0:
            return None
        own_cpu_s = self.own_cpu_s() if own_cpu_s is None else own_cpu_s
        return max(0.0, busy_s - self._start[1] - own_cpu_s) / wall_s


def _busy_cpu_s():
    """Busy seconds since boot of the cores we may use: user, nice, system, irq, softirq and steal (man proc_stat)."""
    text = _read("/proc/stat")
    if text is None:
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in text.splitlines()]
    ticks = sum(int(line[column]) for line in lines if line[0] in ours for column in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK")


# ---- GPUs


def visible_gpus():
    """How many GPUs CUDA would show a process started here, without torch: 0 without driver or GPU."""
    return sum(gpu["visible"] is not None for gpu in nvml_facts()["gpus"])


def visible_order(uuids, cuda_visible_devices):
    """What CUDA_VISIBLE_DEVICES makes visible: uuids of all GPUs -> the numbers of the visible ones, in CUDA's order.

    As CUDA does: numbers, or beginnings of a UUID; it ends at the first one that fits no GPU; a GPU named twice hides
    all.  Numbers count in PCI order, as NVML does (CUDA_DEVICE_ORDER=PCI_BUS_ID); CUDA's own default, fastest first,
    differs only where GPUs of several models are mixed.
    """
    if cuda_visible_devices is None:
        return list(range(len(uuids)))
    order = []
    for word in cuda_visible_devices.split(","):
        word = word.strip()
        fits = [
            num
            for num, uuid in enumerate(uuids)
            if word == str(num) or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if len(fits) != 1:
            break
        order += fits
    return order if len(set(order)) == len(order) else []


def nvml_facts():
    """{"driver", "nvml": None or why there is nothing, "gpus": [...]}, GPUs in PCI order, asked once each."""
    nothing = {"driver": None, "gpus": []}
    try:
        import pynvml
    except ImportError:
        return nothing | {"nvml": "nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return nothing | {"nvml": str(error)}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(num) for num in range(pynvml.nvmlDeviceGetCount())]
        order = visible_order([pynvml.nvmlDeviceGetUUID(handle) for handle in handles], _asked_devices(pynvml))
        gpus = [
            _gpu(pynvml, handle) | {"visible": order.index(n) if n in order else None}
            for n, handle in enumerate(handles)
        ]
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), "nvml": None, "gpus": gpus}
    except pynvml.NVMLError as error:
        return nothing | {"nvml": str(error)}
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _asked_devices(nvml):
    """CUDA_VISIBLE_DEVICES; a MIG slice as the GPU it is part of (CUDA shows a process one slice only)."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not (asked or "").startswith("MIG-"):
        return asked
    slice_handle = nvml.nvmlDeviceGetHandleByUUID(asked.partition(",")[0])
    return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice_handle))


def _gpu(nvml, handle):
    """Facts of one GPU; what the board or the driver does not support is None and named in "unsupported"."""
    unsupported = []

    def ask(what, *args):
        try:
            return getattr(nvml, f"nvmlDeviceGet{what}")(handle, *args)
        except nvml.NVMLError:
            unsupported.append(what)
            return None

    def scaled(value, size):
        return None if value is None else value / size

    memory, ecc, mig, processes = ask("MemoryInfo"), ask("EccMode"), ask("MigMode"), ask("ComputeRunningProcesses")
    capability, persistence = ask("CudaComputeCapability"), ask("PersistenceMode")
    return {
        "name": ask("Name"),
        "uuid_hash": record.salted_hash(ask("UUID") or ""),
        "memory_gib": None if memory is None else gib_from_bytes(memory.total),
        "used_memory_gib": None if memory is None else gib_from_bytes(memory.used),
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
        "power_limit_w": scaled(ask("PowerManagementLimit"), 1e3),  # NVML gives mW
        "enforced_power_limit_w": scaled(ask("EnforcedPowerLimit"), 1e3),
        "default_power_limit_w": scaled(ask("PowerManagementDefaultLimit"), 1e3),
        "max_sm_clock_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
        "max_mem_clock_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_MEM),
        "persistence": None if persistence is None else bool(persistence),
        "ecc": None if ecc is None else bool(ecc[0]),  # [now, after the next boot]
        "mig": None if mig is None else bool(mig[0]),
        "pcie_generation": ask("CurrPcieLinkGeneration"),
        "pcie_max_generation": ask("MaxPcieLinkGeneration"),
        "pcie_width": ask("CurrPcieLinkWidth"),
        "pcie_max_width": ask("MaxPcieLinkWidth"),
        "num_compute_processes": None if processes is None else len(processes),
        "unsupported": unsupported,
    }


# ---- software


def packages():
    """Installed distributions: name -> version, sorted."""
    from importlib import metadata

    return {
        name: version
        for name, version in sorted((dist.name, dist.version) for dist in metadata.distributions())
        if name
    }


def env_variables(environ):
    """The variables that change how torch, NCCL, OpenMP or this harness run; no secret, home or serial number."""
    names = [name for name in sorted(environ) if name.startswith(ENV_PREFIXES) or name in ENV_NAMES]
    values = {name: record.redact(environ[name], REPO) for name in names if not SECRET.search(name)}
    return {
        name: SERIAL.sub(lambda serial: "GPU#" + record.salted_hash(serial[0]), value)
        for name, value in values.items()
    }


def source_sha256(repo=REPO):
    """One hash over every *.py of bench/ and models/, path and content, in sorted order."""
    total = hashlib.sha256()
    paths = [path for room in ("bench", "models") for path in Path(repo, room).rglob("*.py")]
    for path in sorted(paths, key=lambda path: path.relative_to(repo).as_posix()):
        content = path.read_bytes()
        total.update(f"{path.relative_to(repo).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def code_state(repo=REPO):
    """{"source_sha256", "commit", "dirty", "diff_sha256", "untracked"}; all but the first None outside git.

    dirty: a tracked file differs from the commit, or a source file is untracked; results/ does not count.
    """
    state = {
        "source_sha256": source_sha256(repo),
        "commit": None,
        "dirty": None,
        "diff_sha256": None,
        "untracked": None,
    }
    if _git(repo, "rev-parse", "--is-inside-work-tree") is None:
        return state
    diff, untracked = code_diff(repo), _untracked(repo)
    commit = _git(repo, "rev-parse", "--verify", "HEAD")
    state |= {"commit": commit.strip() if commit else None, "dirty": bool(diff or untracked), "untracked": untracked}
    return state | {"diff_sha256": hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest() if diff else None}


def code_diff(repo=REPO):
    """What `git apply` needs to get from the commit to this code; "" if nothing, or no commit, or no git."""
    return _git(repo, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary", "--", ".", ":(exclude)results") or ""


def write_code(repo, folder):
    """The run folder's code/: commit.json, diff.patch and untracked/ with the sources that git does not know."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = code_state(repo)
    record.write_json_atomic(folder / "commit.json", state)
    (folder / "diff.patch").write_text(code_diff(repo), errors="surrogateescape")
    for name in state["untracked"] or ():
        content = Path(repo, name).read_bytes()
        if len(content) <= MAX_UNTRACKED_BYTES:
            copy = folder / "untracked" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _untracked(repo):
    sources = ("*.py", "*.yaml", "*.toml", "*.sh")
    listed = _git(repo, "ls-files", "--others", "--exclude-standard", "-z", "--", *sources, ":(exclude)results")
    return sorted(name for name in (listed or "").split("\0") if name)


def _git(repo, *words):
    """Output of a git command in repo, or None where git, the repository or the commit is missing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=repo, env=env, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")


def _boot():
    boot = _read("/proc/sys/kernel/random/boot_id")
    return record.salted_hash(boot) if boot else None


def _read(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
