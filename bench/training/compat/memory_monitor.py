"""KempnerForge's DeviceMemoryMonitor on this harness's peaks and recordings."""

import logging
from pathlib import Path

from bench.base.units import gib_from_bytes
from bench.training.compat.timers import device_type
from bench.training.memory import recording
from bench.training.memory.peaks import peaks_for

logger = logging.getLogger(__name__)


class DeviceMemoryMonitor:
    """report(step) after each step.  snapshot_step: after which one to write a snapshot; None: never."""

    def __init__(
        self,
        device: int = 0,
        snapshot_step: int | None = None,
        snapshot_dir: Path | str = "memory_snapshots",
        rank: int = 0,
    ):
        self._device, self._snapshot_step = device, snapshot_step
        self._name = f"device_{device}_rank_{rank}"
        self._folder, self._facts = Path(snapshot_dir), {"rank": rank}
        self._peaks = peaks_for(device_type(), device)
        self._recording = recording.Recording(f"DeviceMemoryMonitor of device {device}")
        if snapshot_step is not None and snapshot_step <= 1:
            self._begin()

    def report(self, step: int) -> dict:
        """Peaks since the report before: {"allocated_gb" (now), "peak_gb", "reserved_gb", "total_gb", "mem_utilization"
        (0 to 1), "max_active_gib", "num_alloc_retries", "num_ooms", "what"}; without a GPU the process' resident set.
        """
        result, total_gib, now_bytes = self._peaks.split(), self._peaks.total_gib(), self._peaks.now_bytes()
        gib = {kind: gib_from_bytes(num_bytes) for kind, num_bytes in result.pop("peak_bytes").items()}
        peak_gib = gib.get("allocated", gib.get("rss"))
        if step == self._snapshot_step:
            self.capture_snapshot(step)
        elif self._snapshot_step is not None and step == self._snapshot_step - 1:
            self._begin()
        return result | {
            "what": self._peaks.what,
            "allocated_gb": gib_from_bytes(now_bytes),
            "peak_gb": peak_gib,
            "reserved_gb": gib.get("reserved", peak_gib),
            "total_gb": total_gib,
            "mem_utilization": peak_gib / total_gib,
            "max_active_gib": gib.get("active"),
        }

    def capture_snapshot(self, step: int) -> str | None:
        """Write snapshot_step_S_device_D_rank_R.pickle.  Its path; None without a GPU, or if that failed, logged."""
        if not recording.is_available():
            return None
        path = self._folder / f"snapshot_step_{step}_{self._name}.pickle"
        try:
            self._recording.dump(path, **self._facts, step=step)
            self._recording.stop()
        except Exception as error:  # a full disk, say: the training goes on
            logger.warning("no memory snapshot: %s: %s", type(error).__name__, error)
            return None
        return str(path)

    def _begin(self):
        if recording.is_available():
            self._recording.start()
