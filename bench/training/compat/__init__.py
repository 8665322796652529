"""KempnerForge's timers and memory monitor for a training loop of your own, on this harness' marks and peaks.

    timers = CUDATimerCollection(["forward", "backward"])
    monitor = DeviceMemoryMonitor(device=0, snapshot_step=3)

Unlike the originals, timers add up over micro-steps and forget at reset(), both work without a GPU (host time, resident
set), and a snapshot's history begins a step before it.  Keys that end in _gb hold GiB, as they do there.
"""

from bench.training.compat.memory_monitor import DeviceMemoryMonitor
from bench.training.compat.timers import CUDATimer, CUDATimerCollection

__all__ = ["CUDATimer", "CUDATimerCollection", "DeviceMemoryMonitor"]
