"""Peak memory of this process' device: of the whole run, and of each segment of it.

One object a process, shared by the run and its instruments, because a peak that one of them resets is lost to the
others: split() ends a segment and keeps its peak for whole_gib().
"""

from pathlib import Path

from bench.base.units import GIB, KIB, gib_from_bytes
from bench.machine import environment

COUNTS = ("num_alloc_retries", "num_ooms")  # since the process began


class CudaPeaks:
    """What torch's caching allocator held: bytes of tensors, of blocks in use, and reserved from the driver."""

    what = "CUDA allocator"
    KINDS = {"allocated": "allocated_bytes", "active": "active_bytes", "reserved": "reserved_bytes"}

    def __init__(self, device):
        import torch

        self._cuda, self._device, self._whole = torch.cuda, device, {}
        torch.cuda.init()  # before it there is no allocator to ask

    def reset(self) -> None:
        """From here on is whole(): the warm-up has ended."""
        self._cuda.reset_peak_memory_stats(self._device)
        self._whole = {}

    def split(self) -> dict:
        """{"peak_bytes": {kind: bytes}, "num_alloc_retries", "num_ooms"}: peaks since the last split, all counts."""
        stats = self._cuda.memory_stats(self._device)
        peak_bytes = self._of(stats)
        self._keep(peak_bytes)
        self._cuda.reset_peak_memory_stats(self._device)
        return {"peak_bytes": peak_bytes, **{name: stats.get(name, 0) for name in COUNTS}}

    def counts(self) -> dict[str, int]:
        """{"num_alloc_retries", "num_ooms"}; some tens of microseconds."""
        stats = self._cuda.memory_stats(self._device)
        return {name: stats.get(name, 0) for name in COUNTS}

    def whole_gib(self) -> dict[str, float]:
        """{kind: GiB} since reset()."""
        self._keep(self._of(self._cuda.memory_stats(self._device)))
        return {kind: gib_from_bytes(num_bytes) for kind, num_bytes in self._whole.items()}

    def now_bytes(self) -> int:
        """Of tensors, at this moment."""
        return self._cuda.memory_allocated(self._device)

    def total_gib(self) -> float:
        """Of the GPU."""
        return gib_from_bytes(self._cuda.get_device_properties(self._device).total_memory)

    def _of(self, stats):
        return {kind: stats.get(f"{key}.all.peak", 0) for kind, key in self.KINDS.items()}

    def _keep(self, peak_bytes):
        self._whole = {kind: max(num_bytes, self._whole.get(kind, 0)) for kind, num_bytes in peak_bytes.items()}


class ProcessPeaks:
    """The resident set of the whole process, imports included: without a GPU, torch counts no allocations.

    Linux forgets a peak when 5 is written to /proc/self/clear_refs (proc(5)).  Where that is refused, a segment's peak
    is what its two ends show, unless the process' peak grew in it: a lower bound.
    """

    what = "resident set of the process"
    KINDS = {"rss": None}

    def __init__(self, folder: Path | str = "/proc/self"):
        self._folder, self._whole_bytes, self._last_bytes, self._highest_bytes = folder, 0, 0, 0

    def reset(self) -> None:
        """Nothing: the memory of a process from before the run cannot be separated from the run's."""

    def split(self) -> dict:
        """As CudaPeaks.split(); the counts are None."""
        now_bytes, highest_bytes = self._read()
        self._whole_bytes = max(self._whole_bytes, highest_bytes)
        if not self._forget() and highest_bytes <= self._highest_bytes:
            peak_bytes = max(now_bytes, self._last_bytes)
        else:
            peak_bytes = highest_bytes
        self._last_bytes, self._highest_bytes = now_bytes, highest_bytes
        return {"peak_bytes": {"rss": peak_bytes}, **dict.fromkeys(COUNTS)}

    def counts(self) -> dict[str, None]:
        return dict.fromkeys(COUNTS)

    def whole_gib(self) -> dict[str, float]:
        """{"rss": GiB} since the process began."""
        return {"rss": gib_from_bytes(max(self._whole_bytes, self._read()[1]))}

    def total_gib(self) -> float:
        """Of the machine."""
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB

    def now_bytes(self) -> int:
        return self._read()[0]

    def _read(self):
        """(bytes now, most bytes since the last _forget())."""
        try:
            with open(f"{self._folder}/status") as file:
                lines = dict(line.split(":", 1) for line in file if ":" in line)
            return int(lines["VmRSS"].split()[0]) * KIB, int(lines["VmHWM"].split()[0]) * KIB
        except (OSError, KeyError):  # not Linux: the peak of its life is all that is known
            highest_bytes = round(environment.peak_rss_gib() * GIB)
            return highest_bytes, highest_bytes

    def _forget(self):
        try:
            with open(f"{self._folder}/clear_refs", "w") as file:
                file.write("5")
            return True
        except OSError:
            return False


def peaks_for(device_type: str, device=None) -> CudaPeaks | ProcessPeaks:
    """ "cuda" or "cpu", and which GPU as torch.cuda takes it, None for the current one -> peaks."""
    return CudaPeaks(device) if device_type == "cuda" else ProcessPeaks()
