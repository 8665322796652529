"""A fake CUDA allocator: a test answers torch.cuda's memory calls on a machine without a GPU.

How real GPU memory behaves is tested by tests/test_gpu_memory.py.
"""

from pathlib import Path

from snapshots import Allocator

from bench.training.instruments.base import Context
from bench.training.timing.clock import HostMarks


class FakeCuda:
    """The fake memory; .peak() sets bytes, .stats are counts, .history lists calls that record history, in order."""

    def __init__(self, monkeypatch):
        import torch

        self.now, self.highest = dict.fromkeys(("allocated", "active", "reserved"), 0), {}
        self.stats = {"num_alloc_retries": 0, "num_ooms": 0}
        self.history, self.gpu, self.observer, self.num_reads = [], Allocator(), None, 0
        self.reset()
        for name, call in {
            "init": lambda: None,
            "is_available": lambda: True,
            "memory_stats": self.memory_stats,
            "reset_peak_memory_stats": self.reset,
            "get_device_properties": lambda device=None: type("Properties", (), {"total_memory": 80 * 2**30})(),
            "memory_allocated": lambda device=None: self.now["allocated"],
            "memory_reserved": lambda device=None: self.now["reserved"],
            "max_memory_allocated": lambda device=None: self.highest["allocated"],
            "synchronize": lambda device=None: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: self.gpu.snapshot())
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_recording, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", self.attach, raising=False)

    def peak(self, **num_bytes):
        self.now |= num_bytes
        self.highest = {kind: max(self.highest[kind], value) for kind, value in self.now.items()}

    def memory_stats(self, device=None):
        self.num_reads += 1
        return {f"{kind}_bytes.all.peak": value for kind, value in self.highest.items()} | self.stats

    def reset(self, device=None):
        self.highest = dict(self.now)

    def record(self, enabled="all", **settings):
        self.history.append({"enabled": enabled, **settings} if enabled else None)
        self.gpu.recording = bool(enabled)
        self.gpu.trace.clear()  # as torch does when a history ends; the harness ends one before each start

    def attach(self, observer):
        self.observer = observer

    @property
    def is_recording(self):
        return bool(self.history) and self.history[-1] is not None


def install(monkeypatch):
    """Installs a FakeCuda until the end of the test and returns it."""
    from bench.training import memory as device_memory

    monkeypatch.setattr(device_memory, "_holder", None)
    monkeypatch.setattr(device_memory, "_oom_callback", None)
    monkeypatch.setattr(device_memory, "_is_observing", False)
    return FakeCuda(monkeypatch)


class Events(list):
    def __call__(self, name, **facts):
        self.append({"event": name, **facts})


def context(folder, device_type="cuda", rank=0, num_steps=5, peaks=None):
    events, messages = Events(), []
    return (
        Context(Path(folder), rank, 2, device_type, num_steps, HostMarks(), 0, events, messages.append, peaks),
        events,
        messages,
    )
