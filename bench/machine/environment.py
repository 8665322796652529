"""Where a run took place and with what software: machine, GPUs, packages; ids for "same session" and "comparable".

No host name, user name, home path or remote URL leaves this module: values pass through private.redact, serial numbers
through private.salted_hash.  Nothing here fails because a GPU, a driver, git or /proc is missing: the fact is None.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench.base import credentials, private
from bench.base.paths import CHECKOUT, REPO
from bench.base.units import GIB, KIB, gib_from_bytes
from bench.machine import gpus, leases, meters

if TYPE_CHECKING:
    from bench.config.schema import HardwareConfig

# fmt: off
ENV_PREFIXES = (
    "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_", "MALLOC_", "HYDRA_", "SPEEDRUN_",
)
# fmt: on
ENV_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONMALLOC")
# The shell's variables that other people's code gets, besides those that a record keeps (env_variables).
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "TZ", "TMPDIR", "CC", "CXX", "CONDA_PREFIX",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TIKTOKEN_CACHE_DIR", "SSL_CERT_FILE",
)  # fmt: skip
PASSED_PREFIXES = ("LC_", "XDG_", "SLURM_")
VENDORED = "_vendor"  # setuptools' copies of packages, which its import (by torch's compiler) adds to sys.path
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup v2, v1
CACHES = "/sys/devices/system/cpu/cpu0/cache"
Facts = dict[str, Any]


def environment() -> Facts:
    """Returns the content of environment.json; takes about 0.1 s."""
    nvml, boot = gpus.nvml_facts(), text_of("/proc/sys/kernel/random/boot_id")
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu_model": cpu_model(),
        "cpu_details": cpu_details(),
        "num_cpus": usable_cpus(),
        "cpu_quota_cores": cpu_quota_cores(),
        "memory_gib": meminfo_gib("MemTotal"),
        "governor": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "boot": private.salted_hash(boot) if boot else None,
        "driver": nvml["driver"],
        "nvml": nvml["nvml"],
        "gpus": nvml["gpus"],
        "env": env_variables(os.environ),
        "packages": packages(),
    }


def summary(env: Facts, hardware: "HardwareConfig | SimpleNamespace") -> Facts:
    """Returns run.json["environment"], what the run used.  env: environment(); hardware: resolved, or recorded."""
    used = gpus.used_by_run(env["gpus"], hardware) if hardware.device == "cuda" else []
    keys = ("memory_gib", "power_limit_w", "max_sm_clock_mhz", "uuid_hash")
    shown = [{"name": gpu["name"] + (" MIG" if gpu["mig"] else "")} | {key: gpu[key] for key in keys} for gpu in used]
    facts = {key: env[key] for key in ("python", "os", "driver", "cpu_model", "num_cpus", "memory_gib", "governor")}
    known_later = {"cuda": None, "nccl": None}  # until the workers' torch_facts() gives them, with torch's version
    facts |= {"cpu_details": env.get("cpu_details")}  # hypervisors hide different CPUs behind one name
    facts |= {"torch": env["packages"].get("torch"), **known_later, "num_threads": hardware.num_threads}
    return facts | {"gpus": shown}


def torch_facts() -> Facts:
    """Returns the facts that only torch knows; it imports torch, so only workers call this."""
    import torch

    cuda = torch.version.cuda
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
    return {
        "torch": torch.__version__,
        "cuda": cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(str(part) for part in nccl) if nccl else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # instruction set of its kernels
        "libraries": numerical_libraries(torch.__config__.show()),
    }


def host_hash() -> str:
    """Returns a salted hash of this machine's name, to tell machines apart."""
    return private.salted_hash(platform.node())


def numerical_libraries(config_text: str) -> list[str]:
    """Parses torch.__config__.show() into ["MKL 2024.2", "oneDNN v3.12.0"], as far as it names them."""
    patterns = {"MKL": r"Math Kernel Library Version (\S+?)-", "oneDNN": r"(?:MKL-DNN|oneDNN) (v[\d.]+)"}
    patterns |= {"OpenBLAS": r"OpenBLAS ([\d.]+)"}
    matches = {name: re.search(pattern, config_text) for name, pattern in patterns.items()}
    return [f"{name} {match[1]}" for name, match in matches.items() if match]


# ---- ids


def session_id(env: Facts) -> str | None:
    """Returns an id of one boot, one set of GPUs and one software image; None if the boot is unknown."""
    if env["boot"] is None:
        return None
    return _digest([env["boot"], sorted(gpu["uuid_hash"] or "" for gpu in env["gpus"]), env["python"], env["packages"]])


def comparability_id(run: Facts) -> str:
    """Returns an id shared by runs with comparable times: same devices, software, protocol, data and world size."""
    env, protocol = run["environment"], run["timing_protocol"]
    software = [env[key] for key in ("driver", "cuda", "nccl", "torch")]
    data = [file["sha256"] for split in ("train", "val") for file in run["data"][split]]
    facts: list[Any] = [_devices(env), software, protocol["id"], protocol.get("instruments"), data, run["world_size"]]
    nodes = [[_devices(node["environment"]), node["fabric"]] for node in run.get("nodes") or ()]
    return _digest([*facts, nodes] if nodes else facts)


def _devices(env: Facts) -> list[Any]:
    """Returns what computes: GPUs with their limits; on a CPU its model, usable cores and threads per process."""
    gpus: list[Any] = sorted([gpu["name"], gpu["power_limit_w"]] for gpu in env["gpus"])
    return gpus or [env["cpu_model"], env["num_cpus"], env.get("num_threads")]


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


# ---- CPU and memory


def cpu_model() -> str | None:
    match = re.search(r"^model name\s*:(.*)$", text_of("/proc/cpuinfo") or "", re.M)
    return match[1].strip() if match else platform.processor() or platform.machine() or None


def cpu_details() -> str | None:
    """Returns what libraries choose their kernels by: a virtual machine's cpu_model may name only the manufacturer.

    Vendor, family, model and stepping, a hash of the flags, and the caches; None if /proc/cpuinfo lacks one of them.
    """
    text = text_of("/proc/cpuinfo") or ""
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags")
    facts = {key: match[1].strip() for key in keys if (match := re.search(rf"^{key}\s*:(.*)$", text, re.M))}
    if len(facts) < len(keys):
        return None
    flags = hashlib.sha256(" ".join(sorted(facts.pop("flags").split())).encode()).hexdigest()[:8]
    caches = "/".join(text_of(path) or "?" for path in sorted(Path(CACHES).glob("index*/size")))
    return f"{facts.pop('vendor_id')} " + " ".join(facts.values()) + f", flags {flags}, caches {caches}"


def usable_cpus() -> int:
    """Returns the number of logical CPUs that this process may use."""
    return len(meters.usable_cpus())


def cgroups(controller: str) -> list[Path]:
    """Returns folders of the control groups that limit this process's use of cpu or memory: its own, a container's, a
    systemd scope's or a SLURM step's, and those around it; of cgroup v2 and v1 (cgroups(7)).  Some may not exist."""
    folders = []
    for line in (text_of("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            tops = [CGROUPS / controllers, CGROUPS / controller] if controllers else [CGROUPS, CGROUPS / "unified"]
            below = Path(path.lstrip("/"))
            folders += [top / group for top in tops for group in (below, *below.parents)]
    return folders


def cpu_quota_cores() -> float | None:
    """Returns how many cores' worth of time this process's control groups may use, or None without a limit."""
    limits = []
    for group in cgroups("cpu"):
        quota, _, period = (text_of(group / "cpu.max") or "").partition(" ")
        quota = quota or text_of(group / "cpu.cfs_quota_us") or "max"
        period = period or text_of(group / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def available_memory_gib() -> float | None:
    """Returns the memory available in the machine or, if less, in this process's control groups; None if unknown."""
    limits_gib = [meminfo_gib("MemAvailable")]
    for group in cgroups("memory"):
        for limit_name, used_name in MEMORY_LIMITS:
            limit, used = text_of(group / limit_name), text_of(group / used_name)
            if limit and used and limit.isdecimal() and used.isdecimal():
                limits_gib.append(gib_from_bytes(int(limit) - int(used)))
    return min((gib for gib in limits_gib if gib is not None), default=None)


def meminfo_gib(name: str) -> float | None:
    """Returns a line of /proc/meminfo, which is of the whole machine, or None if it is missing."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", text_of("/proc/meminfo") or "", re.M)
    return int(match[1]) * KIB / GIB if match else None


# ---- software


def packages() -> dict[str, str]:
    """Returns {name: version} of the installed distributions, sorted; of duplicates the first, which Python imports.

    Finds what importlib.metadata does, whose import of all of Python's email takes a twentieth of a launch.
    """
    folders = [Path(folder) for folder in sys.path if Path(folder).name != VENDORED]
    infos = (path for folder in folders for path in folder.glob("*-info"))
    versions: dict[str, str] = {}
    for name, version in map(_name_and_version, (path for path in infos if path.suffix in (".dist-info", ".egg-info"))):
        versions.setdefault(name, version)
    return {name: versions[name] for name in sorted(versions) if name}


def _name_and_version(info: Path) -> tuple[str, str]:
    """Returns name and version, "" if unknown.  info: a folder NAME.dist-info, or .egg-info, which may be a file."""
    text = text_of(info / "METADATA") or text_of(info / "PKG-INFO") or text_of(info) or ""
    values = dict.fromkeys(("Name", "Version"), "")
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if not line:  # end of the header
            break
        if key in values and not values[key]:
            values[key] = value.strip()
    return values["Name"], values["Version"]


# ---- variables

# Numbers and words that a person may have typed are recorded as they are.  Words that look like a token are recorded as
# a hash, and so are paths outside the system's folders, as they may name people and projects.  Two values are equal if
# their recorded texts are.
SERIAL = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{8,}", re.I)
OWN_PATH = re.compile(r"(?<![\w.~/-])/(?!(?:usr|opt|lib(?:32|64)?|bin|etc|dev|proc|sys)(?![\w.-]))\w[^\s:;,=\"']*")
VALUE_WORD = re.compile(r"[\w.+-]+")
NUMBER = re.compile(r"[-+]?\d{1,10}(\.\d{1,10}){0,3}(e[-+]?\d{1,3})?[a-z]{0,3}(-\d{1,4})?|0x[0-9a-f]{1,8}", re.I)
HEX = re.compile(r"[0-9a-f]{12,}", re.I)
MAX_WORD_CHARS, MAX_WORD_DIGITS = 40, 5  # avx512_core_amx_fp16, x86_64-linux-gnu


def env_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change how torch, NCCL, OpenMP or this harness run, with suspicious words hashed."""
    names = [name for name in sorted(environ) if name.startswith(ENV_PREFIXES) or name in ENV_NAMES]
    names = [name for name in names if name not in (CHECKOUT, leases.INHERITED)]  # they do not change how anything runs
    return {
        name: shown_value(private.redact(environ[name], REPO))
        for name in names
        if not credentials.VARIABLE.search(name)
    }


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a training script, or the code of somebody's record, gets: no tokens."""
    names = {*PASSED, *env_variables(environ)}
    return {name: value for name, value in environ.items() if name in names or name.startswith(PASSED_PREFIXES)}


def shown_value(value: str) -> str:
    """Returns value with a # and 16 hex digits, salted, in place of what may be secret: a path outside the system's
    folders, and a word that is long, hexadecimal, has many digits, or has digits among letters of both cases."""

    def shown_word(match: re.Match[str]) -> str:
        word, num_digits = match[0], sum(map(str.isdigit, match[0]))
        if SERIAL.fullmatch(word):
            return "GPU#" + private.salted_hash(word)
        is_random = num_digits > 0 and not (word.islower() or word.isupper() or word.istitle())
        is_random = is_random or bool(HEX.fullmatch(word))
        is_plain = len(word) <= MAX_WORD_CHARS and num_digits <= MAX_WORD_DIGITS and not is_random
        return word if is_plain or NUMBER.fullmatch(word) else "#" + private.salted_hash(word)

    parts = OWN_PATH.split(value)  # one more than there are such paths
    paths = [f"/#{private.salted_hash(path)}" for path in OWN_PATH.findall(value)]
    return "".join(VALUE_WORD.sub(shown_word, part) + path for part, path in zip(parts, [*paths, ""], strict=True))


def is_shown_whole(value: str) -> bool:
    """Whether shown_value() left a recorded value unchanged: only such a value can be set again."""
    return "#" not in value


def text_of(path: Path | str) -> str | None:
    """Returns the stripped text of a system file, or None if it cannot be read."""
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return None
