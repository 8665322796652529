"""The GPUs of a run, sampled through NVML (nvidia-ml-py): no torch, no CUDA context.

Devices are matched by UUID: CUDA counts them in its own order, NVML by PCI address.  nvmlDeviceGetPcieThroughput is
not used because it blocks for 20 ms a call (nvml.h); the field values' byte counters cost nothing.
"""

import os

from bench.gpus import reason_names, visible_order
from bench.units import gib_from_bytes

MIB = 2**20
ALL_LINKS = 0xFFFFFFFF  # scope of an NVLink field value: the sum over the links (nvml.h)


class Gpu:
    """One device.  sample() -> {column: value}; what it does not support is asked once and named in .unsupported."""

    def __init__(self, nvml, handle, name):
        self.nvml, self.handle, self.name = nvml, handle, name
        self.unsupported, self.denied = [], []
        self.lost = None  # why it cannot be asked any more
        self.num_failed_calls = 0
        self._off = set()
        self._counters = {}  # column: (ns, bytes) of the sample before
        self._fields = {
            "power_instant_w": (nvml.NVML_FI_DEV_POWER_INSTANT, 0),
            "pcie_tx_mib_s": (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0),
            "pcie_rx_mib_s": (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0),
            "nvlink_tx_mib_s": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
            "nvlink_rx_mib_s": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
        }
        self._limit_w = None

    def sample(self, t_ns):
        """Its row at t_ns, or None when it is lost."""
        nvml = self.nvml
        utilisation = self._ask("util_pct", "UtilizationRates")
        memory = self._ask("mem_gib", "MemoryInfo")
        reasons = self._ask("throttle_reasons", "CurrentClocksEventReasons")
        if self._limit_w is None:  # does not change in a run
            self._limit_w = _over(self._ask("power_limit_w", "EnforcedPowerLimit"), 1e3)
        row = {
            "t_ns": t_ns,
            "device": self.name,
            "power_w": _over(self._ask("power_w", "PowerUsage"), 1e3),  # NVML gives mW
            "energy_j": self.energy_j(),
            "sm_clock_mhz": self._ask("sm_clock_mhz", "ClockInfo", nvml.NVML_CLOCK_SM),
            "mem_clock_mhz": self._ask("mem_clock_mhz", "ClockInfo", nvml.NVML_CLOCK_MEM),
            "temp_c": self._ask("temp_c", "Temperature", nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": None if reasons is None else "|".join(reason_names(reasons)) or "none",
            "util_pct": None if utilisation is None else utilisation.gpu,
            "mem_gib": None if memory is None else gib_from_bytes(memory.used),
            "power_limit_w": self._limit_w,
            "ecc_uncorrected": self._ask(
                "ecc_uncorrected", "TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            **self._field_values(t_ns),
        }
        return None if self.lost else row

    def energy_j(self):
        """Joules since the driver was loaded; None where it is not counted (before Volta)."""
        energy_mj = self._ask("energy_j", "TotalEnergyConsumption")
        return None if energy_mj is None else energy_mj / 1e3

    def process_ids(self):
        """Of the processes that have a CUDA context on it; None where that is not told."""
        found = self._ask("processes", "ComputeRunningProcesses")
        return None if found is None else [process.pid for process in found]

    def _ask(self, column, what, *args):
        if self.lost or column in self._off:
            return None
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self.handle, *args)
        except self.nvml.NVMLError as error:
            self._failed(column, error)

    def _failed(self, column, error):
        nvml = self.nvml
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_RESET_REQUIRED):
            self.lost = str(error)
        elif error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            self._off.add(column)
            self.unsupported.append(column)
        elif error.value == nvml.NVML_ERROR_NO_PERMISSION:
            self._off.add(column)
            self.denied.append(column)
        else:  # perhaps the next call works
            self.num_failed_calls += 1

    def _field_values(self, t_ns):
        """Columns that come as field values, in one call; counters as rates since the sample before."""
        wanted = [column for column in self._fields if column not in self._off]
        if not wanted or self.lost:
            return {}
        try:
            values = self.nvml.nvmlDeviceGetFieldValues(self.handle, [self._fields[column] for column in wanted])
        except self.nvml.NVMLError as error:
            for column in wanted:
                self._failed(column, error)
            return {}
        row = {}
        for column, value in zip(wanted, values):
            if value.nvmlReturn:
                # a scope or field that this driver does not know is an invalid argument to it
                unknown = value.nvmlReturn == self.nvml.NVML_ERROR_INVALID_ARGUMENT
                code = self.nvml.NVML_ERROR_NOT_SUPPORTED if unknown else value.nvmlReturn
                self._failed(column, self.nvml.NVMLError(code))
            elif column == "power_instant_w":
                row[column] = value.value.uiVal / 1e3
            else:
                size = 1024 if column.startswith("nvlink") else 1  # KiB, or bytes
                row[column] = self._rate(column, t_ns, value.value.ullVal * size)
        return row

    def _rate(self, column, t_ns, num_bytes):
        """MiB/s since the sample before; None for the first one and where the counter has wrapped."""
        before_ns, before = self._counters.get(column, (t_ns, num_bytes))
        self._counters[column] = t_ns, num_bytes
        return (num_bytes - before) / MIB / ((t_ns - before_ns) / 1e9) if t_ns > before_ns and num_bytes >= before else None


def open_gpus(uuids, num_devices):
    """(the run's Gpus, warnings).  uuids in CUDA's order; [] asks CUDA_VISIBLE_DEVICES.  gpu0 is CUDA's device 0."""
    try:
        import pynvml as nvml
    except ImportError:
        return [], ["nvidia-ml-py is not installed"]
    try:
        nvml.nvmlInit()
        by_uuid = {}
        for num in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(num)
            by_uuid[nvml.nvmlDeviceGetUUID(handle)] = handle
        if not uuids:
            known = list(by_uuid)
            uuids = [known[num] for num in visible_order(known, os.environ.get("CUDA_VISIBLE_DEVICES"))][:num_devices]
    except nvml.NVMLError as error:
        return [], [f"NVML: {error}"]
    found, warnings = [], []
    for num, uuid in enumerate(uuids):
        if uuid in by_uuid:
            found.append(Gpu(nvml, by_uuid[uuid], f"gpu{num}"))
        else:
            warnings.append(f"gpu{num}: NVML shows no GPU with the UUID that CUDA gives it")
    return found, warnings


def _over(value, size):
    return None if value is None else value / size
