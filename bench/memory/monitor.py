"""GPU memory from step to step, for a training loop of one's own: KempnerForge's API, with torchtitan's fields besides.

    monitor = MemoryMonitor(device=0, snapshot_step=3)
    for step in range(1, 100): ...; facts = monitor.report(step)

The keys that end in _gb hold GiB, as they do there.  Without a GPU they hold the resident set of the process, and "what"
says so.  A snapshot's history begins a step before it (KempnerForge begins it afterwards, and so has no stacks).
"""

import logging
from pathlib import Path

from bench.memory import recording as memory_recording
from bench.memory.peaks import CudaPeaks, ProcessPeaks
from bench.units import GIB

logger = logging.getLogger(__name__)


def get_memory_stats(device=0):
    """{"allocated_gb", "peak_gb", "reserved_gb", "total_gb", "what"}, GiB; peak: of allocated, since the last reset."""
    import torch

    if not torch.cuda.is_available():
        peaks = ProcessPeaks()
        now_gib, total_gib = peaks.now_bytes() / GIB, peaks.total_gib()
        return {
            "allocated_gb": now_gib,
            "peak_gb": peaks.whole_gib()["rss"],
            "reserved_gb": now_gib,
            "total_gb": total_gib,
            "what": peaks.what,
        }
    return {
        "allocated_gb": torch.cuda.memory_allocated(device) / GIB,
        "peak_gb": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved_gb": torch.cuda.memory_reserved(device) / GIB,
        "total_gb": torch.cuda.get_device_properties(device).total_memory / GIB,
        "what": CudaPeaks.what,
    }


def get_memory_utilization(device=0):
    """Peak over total, 0 to 1."""
    stats = get_memory_stats(device)
    return stats["peak_gb"] / stats["total_gb"]


def format_memory_stats(device=0):
    stats = get_memory_stats(device)
    name = "GPU mem" if stats["what"] == CudaPeaks.what else stats["what"]
    return (
        f"{name}: {stats['allocated_gb']:.2f} GiB now, {stats['peak_gb']:.2f} GiB peak, {stats['reserved_gb']:.2f} GiB reserved"
        f" of {stats['total_gb']:.2f} GiB ({100 * stats['peak_gb'] / stats['total_gb']:.0f} %)"
    )


def log_memory_stats(device=0):
    """The stats, also logged."""
    logger.info(format_memory_stats(device))
    return get_memory_stats(device)


def reset_peak_memory(device=0):
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(device)


class MemoryMonitor:
    """report(step) after each step.  snapshot_step: after which one to write a snapshot, or None."""

    def __init__(
        self,
        device=0,
        snapshot_step=None,
        snapshot_dir="memory_snapshots",
        rank=0,
        max_entries=200_000,
        stacks="python",
    ):
        self.device, self.snapshot_step, self.snapshot_dir, self.rank = device, snapshot_step, Path(snapshot_dir), rank
        self._recording = memory_recording.Recording(f"MemoryMonitor of device {device}", max_entries, stacks)
        if snapshot_step is not None and snapshot_step <= 1:
            self._begin()

    def report(self, step):
        """Stats of this stretch, "mem_utilization" and torchtitan's fields; peaks then begin anew."""
        stats = get_memory_stats(self.device)
        stats["mem_utilization"] = stats["peak_gb"] / stats["total_gb"]
        stats |= self._device_stats(stats["total_gb"])
        logger.info("[step %s] %s", step, format_memory_stats(self.device))
        if step == self.snapshot_step:
            self.capture_snapshot(step)
        elif self.snapshot_step is not None and step == self.snapshot_step - 1:
            self._begin()
        reset_peak_memory(self.device)
        return stats

    def capture_snapshot(self, step):
        """Write snapshot_step_S_device_D_rank_R.pickle.  Returns its path; None without a GPU, or if it failed, logged."""
        if not memory_recording.is_available():
            return None
        path = self.snapshot_dir / f"snapshot_step_{step}_device_{self.device}_rank_{self.rank}.pickle"
        try:
            self._recording.dump(path, rank=self.rank, step=step)
            self._recording.stop()
        except Exception as error:  # a full disk, say: the training goes on
            logger.warning("no memory snapshot: %s: %s", type(error).__name__, error)
            return None
        logger.info("memory snapshot: %s", path)
        return str(path)

    def _begin(self):
        if memory_recording.is_available():
            self._recording.start()

    def _device_stats(self, total_gib):
        """max_active_gib, max_active_pct, max_reserved_gib, max_reserved_pct, num_alloc_retries, num_ooms; {} without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return {}
        stats = torch.cuda.memory_stats(self.device)
        active_gib, reserved_gib = (stats.get(f"{key}_bytes.all.peak", 0) / GIB for key in ("active", "reserved"))
        return {
            "max_active_gib": active_gib,
            "max_active_pct": 100 * active_gib / total_gib,
            "max_reserved_gib": reserved_gib,
            "max_reserved_pct": 100 * reserved_gib / total_gib,
            "num_alloc_retries": stats.get("num_alloc_retries", 0),
            "num_ooms": stats.get("num_ooms", 0),
        }


DeviceMemoryMonitor = MemoryMonitor  # KempnerForge's and torchtitan's name
