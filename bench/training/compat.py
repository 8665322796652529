"""KempnerForge's timers and memory monitor for your own training loop, built on this harness's marks and peaks.

    timers = CUDATimerCollection(["forward", "backward"])
    monitor = DeviceMemoryMonitor(device=0, snapshot_step=3)

Unlike the originals, timers accumulate over micro-steps until reset(), both work without a GPU (host time, resident
set), and a snapshot's history begins a step before it.  As in the originals, keys that end in _gb hold GiB.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from bench.base.units import gib_from_bytes
from bench.training.memory import History, peaks_for
from bench.training.timing.clock import HostMarks, Marks, marks_for

logger = logging.getLogger(__name__)


def device_type() -> str:
    """Returns "cuda" if there is a GPU, whose memory can be recorded, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class CUDATimer:
    """Accumulates milliseconds between start() and stop() until reset(); also a context manager.

    elapsed_ms() waits until the device has passed the last stop, and is 0.0 before the first one.  Raises RuntimeError
    for a second start without a stop, or a stop without a start.
    """

    def __init__(self, marks: Marks | None = None):
        self._marks = marks or marks_for(device_type())
        self._pairs: list[tuple[Any, Any]] = []  # (start, stop) marks that have not been read yet
        self._started: Any = None
        self._total_ms = 0.0

    def start(self) -> None:
        if self._started is not None:
            raise RuntimeError("CUDATimer.start() twice: call stop() first")
        self._started = self._marks.mark()

    def stop(self) -> None:
        if self._started is None:
            raise RuntimeError("CUDATimer.stop() without start()")
        self._pairs.append((self._started, self._marks.mark()))
        self._started = None

    def elapsed_ms(self) -> float:
        for start, end in self._pairs:
            self._marks.wait(end)
            self._total_ms += self._marks.ms_between(start, end)
            self._marks.free(start, end)
        self._pairs = []
        return self._total_ms

    def reset(self) -> None:
        self.elapsed_ms()  # frees the marks
        self._total_ms = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class CUDATimerCollection:
    """A CUDATimer per named region; reset() begins the next step.  Raises KeyError for an undeclared region.

    With enabled=False calls cost nothing and every time is 0.0.
    """

    def __init__(self, regions: Iterable[str], enabled: bool = True, marks: Marks | None = None):
        self.enabled = enabled
        marks = marks or (marks_for(device_type()) if enabled else HostMarks())
        self._timers = {region: CUDATimer(marks) for region in regions}

    def start(self, region: str) -> None:
        if self.enabled:
            self._timers[region].start()

    def stop(self, region: str) -> None:
        if self.enabled:
            self._timers[region].stop()

    def elapsed_ms(self, region: str) -> float:
        return self._timers[region].elapsed_ms()  # 0.0 if it never started

    def elapsed_all(self) -> dict[str, float]:
        """Returns {region: milliseconds}."""
        return {region: self.elapsed_ms(region) for region in self._timers}

    def reset(self) -> None:
        for timer in self._timers.values():
            timer.reset()


class DeviceMemoryMonitor:
    """Call report(step) after each step.  A snapshot is written after snapshot_step; None writes none."""

    def __init__(
        self,
        device: int = 0,
        snapshot_step: int | None = None,
        snapshot_dir: Path | str = "memory_snapshots",
        rank: int = 0,
    ):
        self._snapshot_step, self._folder = snapshot_step, Path(snapshot_dir)
        self._name, self._rank = f"device_{device}_rank_{rank}", rank
        self._peaks = peaks_for(device_type(), device)
        self._history = History(f"DeviceMemoryMonitor of device {device}")
        if snapshot_step is not None and snapshot_step <= 1 and device_type() == "cuda":
            self._history.start()

    def report(self, step: int) -> dict[str, Any]:
        """Returns peaks since the last report, {"allocated_gb" (now), "peak_gb", "reserved_gb", "total_gb", "what",
        "mem_utilization" (0 to 1), "max_active_gib", "num_alloc_retries", "num_ooms"}; on a CPU of the resident set.
        """
        now_bytes = self._peaks.now_bytes()  # before the peaks: read later, it might exceed them
        peaks, total_gib = self._peaks.split(), self._peaks.total_gib()
        gib = {kind: gib_from_bytes(num_bytes) for kind, num_bytes in peaks.pop("peak_bytes").items()}
        peak_gib = gib["allocated"] if "allocated" in gib else gib["rss"]
        if step == self._snapshot_step:
            self.capture_snapshot(step)
        elif self._snapshot_step is not None and step == self._snapshot_step - 1 and device_type() == "cuda":
            self._history.start()
        return peaks | {
            "what": self._peaks.source,
            "allocated_gb": gib_from_bytes(now_bytes),
            "peak_gb": peak_gib,
            "reserved_gb": gib.get("reserved", peak_gib),
            "total_gb": total_gib,
            "mem_utilization": peak_gib / total_gib,
            "max_active_gib": gib.get("active"),
        }

    def capture_snapshot(self, step: int) -> str | None:
        """Writes snapshot_step_S_device_D_rank_R.pickle; returns its path, or None without a GPU or if that failed."""
        if device_type() != "cuda":
            return None
        path = self._folder / f"snapshot_step_{step}_{self._name}.pickle"
        try:
            self._history.dump(path, rank=self._rank, step=step)
            self._history.stop()
        except Exception as error:  # for example a full disk: the training goes on
            logger.warning("no memory snapshot: %s: %s", type(error).__name__, error)
            return None
        return str(path)
