"""The NVIDIA GPUs of this machine, read through NVML without torch or a CUDA context; empty without a driver."""

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.base.units import gib_from_bytes

if TYPE_CHECKING:
    from types import SimpleNamespace

    from bench.config.schema import HardwareConfig

Facts = dict[str, Any]

# nvmlClocksEventReason*: bits that tell why a clock is not at its maximum (nvml.h)
CLOCKS_EVENT_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",  # this and the next: nvidia-ml-py 13.615
    0x400: "reliability",  # the voltage's limit
}

# Names under which other drivers know a function: R535 renamed throttle reasons, R510 introduced _v3 of processes, and
# CUDA 14 will remove nvmlDeviceGetTemperature.
OTHER_NAMES = {
    "CurrentClocksEventReasons": ("CurrentClocksThrottleReasons",),
    "ComputeRunningProcesses": ("ComputeRunningProcesses_v2",),
    "Temperature": ("TemperatureV",),
}
MAX_USED_FRAC = 0.1  # of a free GPU's memory: the driver uses up to 1 GiB, a desktop a little more
WORD_BITS = 64  # size of a word in NVML's affinity mask
FUNCTION_NOT_FOUND = 13  # NVML_ERROR_FUNCTION_NOT_FOUND


def visible() -> list[Facts]:
    """Returns facts of the GPUs that CUDA would show a process started here; [] without driver or GPU."""
    return [gpu for gpu in nvml_facts()["gpus"] if gpu["visible"] is not None]


class Device(NamedTuple):
    """A visible GPU, for a run that needs exclusive use of it."""

    number: int  # index among the visible, as CUDA counts
    name: str  # for CUDA_VISIBLE_DEVICES: its UUID, or that of its visible MIG slice
    memory_gib: float | None
    num_processes: int | None  # number of processes that compute on it now
    cpus: frozenset[int]  # logical CPUs of its NUMA node, from NVML; empty if unknown
    used_memory_gib: float | None = None


def devices() -> list[Device]:
    """Returns the visible GPUs in CUDA's order; [] without driver or GPU."""
    requested, listed = os.environ.get("CUDA_VISIBLE_DEVICES", ""), []
    with contextlib.suppress(Unavailable), _opened() as (nvml, handles, visible):
        for number, index in enumerate(visible):
            facts, handle = _gpu(nvml, handles[index]), handles[index]
            name = requested if requested.startswith("MIG-") else nvml.nvmlDeviceGetUUID(handle)
            memory_use = facts["memory_gib"], facts["num_compute_processes"]
            listed.append(Device(number, name, *memory_use, _cpus_near(nvml, handle), facts["used_memory_gib"]))
    return listed


class Unavailable(Exception):
    """NVML cannot answer; the message says why."""


@contextlib.contextmanager
def _opened() -> Iterator[tuple[Any, list[Any], list[int]]]:
    """Yields (pynvml, handles of all GPUs in PCI order, numbers of the visible ones in CUDA's order).  Raises
    Unavailable if NVML cannot answer."""
    if not _has_library():
        raise Unavailable("NVML Shared Library Not Found")  # as pynvml would raise
    try:
        import pynvml
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(num) for num in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        yield pynvml, handles, visible_order(uuids, requested_devices(pynvml))
    except pynvml.NVMLError as error:
        raise Unavailable(str(error)) from None
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # it may never have been initialised
            pynvml.nvmlShutdown()


def crowded(memory_gib: float | None, used_gib: float | None) -> str | None:
    """Returns how much of a GPU's memory is in use if it is more than a tenth, else (or if unknown) None."""
    if memory_gib is None or used_gib is None or used_gib <= MAX_USED_FRAC * memory_gib:
        return None
    return f"{used_gib:.0f} of its {memory_gib:.0f} GiB are in use"


def _cpus_near(nvml: Any, handle: Any) -> frozenset[int]:
    """Returns the logical CPUs in NVML's affinity mask, whose words have 64 bits; empty if unknown."""
    try:
        words = call(nvml, "CpuAffinity", handle, -(-(os.cpu_count() or 1) // WORD_BITS))
    except nvml.NVMLError:
        return frozenset()
    return frozenset(
        WORD_BITS * place + bit for place, word in enumerate(words) for bit in range(WORD_BITS) if word >> bit & 1
    )


def used_by_run(gpus: list[Facts], hardware: "HardwareConfig | SimpleNamespace") -> list[Facts]:
    """Returns the GPUs, out of all, that a run on this hardware uses on this node, by rank."""
    visible = [gpu for gpu in gpus if gpu["visible"] is not None]
    return sorted(visible, key=lambda gpu: gpu["visible"])[: hardware.ranks_of_node]


def visible_order(uuids: Sequence[str], cuda_visible_devices: str | None) -> list[int]:
    """Returns the numbers of the GPUs that CUDA_VISIBLE_DEVICES makes visible, in CUDA's order.  uuids: of all GPUs.

    As in CUDA, it lists numbers or beginnings of a UUID; it ends at the first entry that fits no GPU; a GPU named twice
    hides all.  Numbers count in PCI order, as NVML does (CUDA_DEVICE_ORDER=PCI_BUS_ID); CUDA's default, fastest first,
    differs only where GPUs of several models are mixed.
    """
    if cuda_visible_devices is None:
        return list(range(len(uuids)))
    order = []
    for entry in map(str.strip, cuda_visible_devices.split(",")):
        is_uuid = entry.startswith("GPU-")
        fits = [num for num, uuid in enumerate(uuids) if entry == str(num) or (is_uuid and uuid.startswith(entry))]
        if len(fits) != 1:
            break
        order += fits
    return order if len(set(order)) == len(order) else []


def torch_build() -> tuple[str, str | None] | None:
    """Returns the versions of torch and of its CUDA, None for a CPU build, without importing it; None without torch."""
    spec: Any = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = spec.loader.get_data(os.path.join(os.path.dirname(spec.origin), "version.py")).decode()
    versions = dict(re.findall(r"^(__version__|cuda)\b[^=]*= '(.*)'", text, re.M))
    return versions["__version__"], versions.get("cuda")


def torch_fault() -> tuple[str, str] | None:
    """Returns why the installed torch cannot use this machine's GPUs and what to try; None if it can, or if unknown.

    A driver runs what was built for any minor version of its CUDA, and for earlier CUDAs (docs.nvidia.com, CUDA
    Compatibility).  NVML reports libcuda's version, which a package of forward compatibility replaces.
    """
    torch, needed = torch_build() or ("", "0")
    if needed is None:
        return f"torch {torch} is a build for CPUs", "install its CUDA build (docs/start.md), or use hardware=cpu"
    with contextlib.suppress(Unavailable), _opened() as (nvml, _, _):
        major, minor = divmod(nvml.nvmlSystemGetCudaDriverVersion_v2() // 10, 100)
        if int(needed.partition(".")[0]) > major:
            driver = f"NVIDIA's driver {nvml.nvmlSystemGetDriverVersion()} supports CUDA {major}.{minor}"
            remedy = f"update the driver, install a torch for CUDA {major} (docs/start.md), or use hardware=cpu"
            return f"{driver}, and torch {torch} needs CUDA {needed}", remedy
    return None


def nvml_facts() -> Facts:
    """Returns {"driver", "nvml": None or why NVML cannot answer, "gpus": [...]}, GPUs in PCI order, each read once."""
    try:
        with _opened() as (nvml, handles, visible):
            places = [{"visible": visible.index(num) if num in visible else None} for num in range(len(handles))]
            gpu_facts = [_gpu(nvml, handle) | place for handle, place in zip(handles, places, strict=True)]
            return {"driver": nvml.nvmlSystemGetDriverVersion(), "nvml": None, "gpus": gpu_facts}
    except Unavailable as why:
        return {"driver": None, "nvml": str(why), "gpus": []}


def _has_library() -> bool:
    """Whether this machine has the driver's library where pynvml looks for it; importing pynvml takes 30 ms."""
    if "pynvml" in sys.modules:
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def call(nvml: Any, query: str, handle: Any, *args: Any) -> Any:
    """Calls nvmlDeviceGet<query> for a GPU, by an older name if the driver only knows that.  Raises nvml.NVMLError."""
    # If a driver is older than a function's newest version, nvidia-ml-py raises an error that is not an NVMLError.
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
    for name in (query, *OTHER_NAMES.get(query, ())):
        function = getattr(nvml, f"nvmlDeviceGet{name}", None)
        if function is not None:
            try:
                return function(handle, *args)
            except (nvml.NVMLError, mismatch) as error:
                if getattr(error, "value", FUNCTION_NOT_FOUND) != FUNCTION_NOT_FOUND:
                    raise
    raise nvml.NVMLError(FUNCTION_NOT_FOUND)


def requested_devices(nvml: Any) -> str | None:
    """Returns CUDA_VISIBLE_DEVICES, None if it is not set; for a MIG slice, the GPU to which it belongs."""
    requested = os.environ.get("CUDA_VISIBLE_DEVICES")
    if requested is None or not requested.startswith("MIG-"):
        return requested
    slice_handle = nvml.nvmlDeviceGetHandleByUUID(requested.partition(",")[0])
    return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice_handle)))


def _gpu(nvml: Any, handle: Any) -> Facts:
    """Returns the facts of one GPU; what the board or driver does not support is None and in "unsupported"."""
    unsupported: list[str] = []

    def ask(query: str, *args: Any) -> Any:
        try:
            return call(nvml, query, handle, *args)
        except nvml.NVMLError:
            unsupported.append(query)
            return None

    from bench.base import private  # many regular expressions, which the sampler does not need

    ecc, mig, processes = ask("EccMode"), ask("MigMode"), ask("ComputeRunningProcesses")
    memory = None if mig and mig[0] else ask("MemoryInfo")  # a run in a slice of the GPU has only a part of it
    capability, persistence = ask("CudaComputeCapability"), ask("PersistenceMode")
    reasons, rows = ask("CurrentClocksEventReasons"), ask("RemappedRows")
    return {
        "name": ask("Name"),
        "uuid_hash": private.salted_hash(ask("UUID") or ""),
        "memory_gib": None if memory is None else gib_from_bytes(memory.total),
        "used_memory_gib": None if memory is None else gib_from_bytes(memory.used),
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
        "power_limit_w": over(ask("PowerManagementLimit"), 1e3),  # NVML reports mW
        "default_power_limit_w": over(ask("PowerManagementDefaultLimit"), 1e3),
        "max_sm_clock_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
        "max_mem_clock_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_MEM),
        "persistence": None if persistence is None else bool(persistence),
        "temp_c": ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
        "clocks_event_reasons": None if reasons is None else reason_names(reasons),
        "ecc": None if ecc is None else bool(ecc[0]),  # (current, pending) mode
        "ecc_uncorrected": ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        "remap_pending": None if rows is None else bool(rows[2]),  # (corrected, uncorrected, pending, failed)
        "remap_failed": None if rows is None else bool(rows[3]),
        "mig": None if mig is None else bool(mig[0]),
        "pcie_width": ask("CurrPcieLinkWidth"),
        "pcie_max_width": ask("MaxPcieLinkWidth"),
        "num_compute_processes": None if processes is None else len(processes),
        "unsupported": unsupported,
    }


def over(value: float | None, size: float) -> float | None:
    """Returns value / size, or None for None."""
    return None if value is None else value / size


def reason_names(bits: int) -> list[str]:
    """Returns the names of a clocks event bit mask, an unknown bit as its number."""
    return [CLOCKS_EVENT_REASONS.get(1 << n, hex(1 << n)) for n in range(bits.bit_length()) if bits >> n & 1]
