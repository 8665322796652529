"""Samples the GPUs of a run through NVML (nvidia-ml-py), without torch or a CUDA context.

Devices are matched by UUID: CUDA counts them in its own order, NVML by PCI address.
"""

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

from bench.base.units import gib_from_bytes
from bench.machine.gpus import call, over, reason_names, requested_devices, visible_order

Row = dict[str, Any]  # {column of telemetry.csv: value}
SLOW_S = 1.0  # interval of reading what hardly changes during a run
MOST_XIDS = 16  # read at a time: a broken GPU may repeat them endlessly
RETURNS_OF_LACK = ("INVALID_ARGUMENT", "NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION")  # of a field value
RETURNS_OF_LOSS = ("GPU_IS_LOST", "UNINITIALIZED", "RESET_REQUIRED")


class Gpu:
    """One device.  sample() returns {column: value}; an unsupported column is tried once and listed in .unsupported."""

    def __init__(self, nvml: Any, handle: Any, name: str):
        self.nvml, self.handle, self.name = nvml, handle, name
        self.unsupported: list[str] = []
        self.denied: list[str] = []
        self.lost: str | None = None  # why it can no longer be read
        self.num_failed_calls = 0
        self.pids: list[int] | None = None  # processes that computed on it at the last slow reading; None: unknown
        self._off: set[str] = set()
        self._slow: Row = {}
        self._slow_ns: int | None = None
        self._measures_instant_power = True

    def sample(self, t_ns: int, now_ns: int) -> Row | None:
        """Returns the device's row of the tick at t_ns, read at now_ns; None if the device is lost."""
        nvml = self.nvml
        if self._slow_ns is None or now_ns - self._slow_ns >= SLOW_S * 1e9:
            self._slow, self._slow_ns = self._slow_columns(), now_ns
        utilisation = self._ask("util_pct", "UtilizationRates")
        memory = self._ask("mem_gib", "MemoryInfo")
        reasons = self._ask("throttle_reasons", "CurrentClocksEventReasons")
        row = {
            "t_ns": t_ns,
            "device": self.name,
            "late_ms": round((now_ns - t_ns) / 1e6, 3),
            "power_w": self._power_w(),
            "energy_j": self.energy_j(),
            "sm_clock_mhz": self._ask("sm_clock_mhz", "ClockInfo", nvml.NVML_CLOCK_SM),
            "mem_clock_mhz": self._ask("mem_clock_mhz", "ClockInfo", nvml.NVML_CLOCK_MEM),
            "temp_c": self._ask("temp_c", "Temperature", nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": None if reasons is None else "|".join(reason_names(reasons)) or "none",
            "util_pct": None if utilisation is None else utilisation.gpu,
            "mem_gib": None if memory is None else gib_from_bytes(memory.used),
        }
        return None if self.lost else row | self._slow

    def _slow_columns(self) -> Row:
        """Returns the columns that are read once a second."""
        nvml = self.nvml
        corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        rows = self._ask("remapped_rows", "RemappedRows")  # (corrected, uncorrected, pending, failed)
        processes = self._ask("num_processes", "ComputeRunningProcesses")
        self.pids = None if processes is None else [process.pid for process in processes]
        return {
            "power_limit_w": over(self._ask("power_limit_w", "EnforcedPowerLimit"), 1e3),
            "remapped_rows": None if rows is None else rows[0] + rows[1],
            "num_processes": None if processes is None else len(processes),
            "ecc_corrected": self._ask("ecc_corrected", "TotalEccErrors", corrected, nvml.NVML_VOLATILE_ECC),
            "ecc_uncorrected": self._ask("ecc_uncorrected", "TotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC),
        }

    def energy_j(self) -> float | None:
        """Returns joules since the driver was loaded, or None if it does not count them (before Volta)."""
        energy_mj = self._ask("energy_j", "TotalEnergyConsumption")
        return None if energy_mj is None else energy_mj / 1e3

    def _ask(self, column: str, query: str, *args: Any) -> Any:
        if self.lost or column in self._off:
            return None
        try:
            return call(self.nvml, query, self.handle, *args)
        except self.nvml.NVMLError as error:
            self._failed(column, error)
            return None

    def _failed(self, column: str, error: Any) -> None:
        nvml = self.nvml
        if error.value in [getattr(nvml, f"NVML_ERROR_{name}") for name in RETURNS_OF_LOSS]:
            self.lost = str(error)
        elif error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            self._off.add(column)
            self.unsupported.append(column)
        elif error.value == nvml.NVML_ERROR_NO_PERMISSION:
            self._off.add(column)
            self.denied.append(column)
        else:  # the next call may work
            self.num_failed_calls += 1

    def _power_w(self) -> float | None:
        """Returns instantaneous power if the board measures it, else its usage, from Ampere on a mean over a second."""
        nvml = self.nvml
        if self._measures_instant_power and not self.lost:
            try:
                (value,) = nvml.nvmlDeviceGetFieldValues(self.handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
                if not value.nvmlReturn:
                    return float(value.value.uiVal) / 1e3  # NVML reports mW
                raise nvml.NVMLError(value.nvmlReturn)
            except nvml.NVMLError as error:
                never = [getattr(nvml, f"NVML_ERROR_{name}") for name in RETURNS_OF_LACK]
                self._measures_instant_power = error.value not in never
                if self._measures_instant_power:  # this call failed: its usage would be another quantity
                    self._failed("power_w", error)
                    return None
        return over(self._ask("power_w", "PowerUsage"), 1e3)


class Xids:
    """Critical errors of these GPUs (Xid) that the driver reports from now on."""

    def __init__(self, gpus: Sequence[Gpu]):
        self._gpus, self._events = gpus, None
        if gpus:
            nvml = gpus[0].nvml
            with contextlib.suppress(nvml.NVMLError):  # a driver without events, or a MIG slice, which has none
                events = nvml.nvmlEventSetCreate()
                for gpu in gpus:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._events = events

    def new(self) -> list[str]:
        """Returns a sentence for each error since the last call, without waiting."""
        sentences: list[str] = []
        if self._events is not None:
            nvml = self._gpus[0].nvml
            with contextlib.suppress(nvml.NVMLError):  # a timeout: there are no more
                while len(sentences) < MOST_XIDS:
                    event = nvml.nvmlEventSetWait_v2(self._events, 0)
                    names = [gpu.name for gpu in self._gpus if _address(gpu.handle) == _address(event.device)]
                    sentences += [f"{name} had Xid {event.eventData}" for name in names]
        return sentences


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def open_gpus(uuids: Sequence[str], num_devices: int) -> tuple[list["Gpu"], list[str]]:
    """Returns (the run's Gpus, warnings).  uuids: in CUDA's order; [] for CUDA_VISIBLE_DEVICES.  gpu0 is the first."""
    try:
        import pynvml as nvml
    except ImportError:
        return [], ["nvidia-ml-py is not installed"]
    by_uuid: dict[str, Any] = {}
    warnings: list[str] = []
    try:
        nvml.nvmlInit()
        for num in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(num)
                by_uuid[nvml.nvmlDeviceGetUUID(handle)] = handle
            except nvml.NVMLError as error:  # lost, or without permission: the others are still read
                warnings.append(f"GPU {num} of this machine, by NVML's count: {error}")
        if (os.environ.get("CUDA_VISIBLE_DEVICES") or "").startswith("MIG-"):
            uuids = []
            warnings.append("a MIG slice: power, energy and clocks are those of the whole GPU")
        if not uuids:
            all_uuids = list(by_uuid)
            uuids = [all_uuids[num] for num in visible_order(all_uuids, requested_devices(nvml))][:num_devices]
    except nvml.NVMLError as error:
        return [], [f"NVML: {error}"]
    gpus = [Gpu(nvml, by_uuid[uuid], f"gpu{num}") for num, uuid in enumerate(uuids) if uuid in by_uuid]
    if len(gpus) < num_devices:
        shown = f"NVML shows this process {len(gpus)} of the run's {num_devices} GPUs"
        warnings.append(f"{shown}: what they use together is unknown")
    return gpus, warnings
