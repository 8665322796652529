"""Memory of this process's device: peaks of the whole run and of its segments, and CUDA's memory history.

The run and its instruments share one object for peaks, because a peak that one of them resets is lost to the others:
split() ends a segment and keeps its peak for whole_gib().

    history = History("steps", max_entries=200_000)
    history.start(); ...; history.mark("forward"); ...; history.dump(path); history.stop()

A process can record one history at a time.  Its file has no private paths, and opens at pytorch.org/memory_viz and with
./run.sh memory.  Blocks keep the stack of their allocation when a history ends, so a history of the build names the
weights in later ones.
"""

import contextlib
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.base import atomic, private
from bench.base.paths import REPO
from bench.base.units import GIB, KIB, gib_from_bytes
from bench.machine import meters

COUNTS = ("num_alloc_retries", "num_ooms")  # since the process began
PICKLE_PROTOCOL = 4  # the newest that the viewer at pytorch.org/memory_viz reads

OutOfMemoryCallback = Callable[[int, int, int, int], object]
_holder: "History | None" = None
_oom_callback: OutOfMemoryCallback | None = None
_is_observing = False


# ---- peaks


class CudaPeaks:
    """Peaks of torch's caching allocator: bytes of tensors, of blocks in use, and reserved from the driver."""

    source = "CUDA allocator"

    def __init__(self, device: Any):
        import torch

        self._cuda, self._device = torch.cuda, device
        self._whole_bytes: dict[str, int] = {}
        torch.cuda.init()  # before that there is no allocator

    def reset(self) -> None:
        """Makes whole_gib() begin here, after the warm-up."""
        self._cuda.reset_peak_memory_stats(self._device)
        self._whole_bytes = {}

    def split(self) -> dict[str, Any]:
        """Returns {"peak_bytes": {kind: bytes} since the last split, "num_alloc_retries", "num_ooms"}."""
        stats = self._cuda.memory_stats(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        return {"peak_bytes": self._peak_bytes(stats), **{name: stats.get(name, 0) for name in COUNTS}}

    def counts(self) -> dict[str, int]:
        """Returns {"num_alloc_retries", "num_ooms"} since the process began; takes some tens of microseconds."""
        stats = self._cuda.memory_stats(self._device)
        return {name: stats.get(name, 0) for name in COUNTS}

    def whole_gib(self) -> dict[str, float]:
        """Returns the peaks since reset(), {kind: GiB}."""
        self._peak_bytes(self._cuda.memory_stats(self._device))
        return {kind: gib_from_bytes(num_bytes) for kind, num_bytes in self._whole_bytes.items()}

    def now_bytes(self) -> int:
        """Returns the bytes that tensors hold now."""
        return int(self._cuda.memory_allocated(self._device))

    def total_gib(self) -> float:
        """Returns the memory of the GPU."""
        return gib_from_bytes(self._cuda.get_device_properties(self._device).total_memory)

    def _peak_bytes(self, stats: dict[str, int]) -> dict[str, int]:
        """Returns the peaks of this segment, and takes them into those of the whole run."""
        peak_bytes = {kind: stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "active", "reserved")}
        self._whole_bytes = {
            kind: max(num_bytes, self._whole_bytes.get(kind, 0)) for kind, num_bytes in peak_bytes.items()
        }
        return peak_bytes


class ProcessPeaks:
    """Peaks of the process's resident set, imports included: without a GPU, torch counts no allocations.

    Linux resets the peak when 5 is written to /proc/self/clear_refs (proc(5)).  If that is refused, a segment's peak is
    that of the process so far.
    """

    source = "resident set of the process"

    def __init__(self, folder: Path | str = "/proc/self"):
        self._folder, self._whole_bytes = folder, 0

    def reset(self) -> None:
        """Does nothing: a process's memory from before the run cannot be separated from the run's."""

    def split(self) -> dict[str, Any]:
        """Returns the same as CudaPeaks.split(), with None for the counts."""
        _, peak_bytes = self._read()
        self._whole_bytes = max(self._whole_bytes, peak_bytes)
        with contextlib.suppress(OSError), open(f"{self._folder}/clear_refs", "w") as file:
            file.write("5")
        return {"peak_bytes": {"rss": peak_bytes}, **self.counts()}

    def counts(self) -> dict[str, None]:
        return dict.fromkeys(COUNTS)

    def whole_gib(self) -> dict[str, float]:
        """Returns the peak since the process began, {"rss": GiB}."""
        return {"rss": gib_from_bytes(max(self._whole_bytes, self._read()[1]))}

    def total_gib(self) -> float:
        """Returns the memory of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB

    def now_bytes(self) -> int:
        return self._read()[0]

    def _read(self) -> tuple[int, int]:
        """Returns (bytes now, peak bytes since Linux last reset the peak)."""
        try:
            with open(f"{self._folder}/status") as file:
                lines = dict(line.split(":", 1) for line in file if ":" in line)
            return int(lines["VmRSS"].split()[0]) * KIB, int(lines["VmHWM"].split()[0]) * KIB
        except (OSError, KeyError):  # not Linux: only the peak since the process began is known
            highest_bytes = round(meters.peak_rss_gib() * GIB)
            return highest_bytes, highest_bytes


def peaks_for(device_type: str, device: Any = None) -> CudaPeaks | ProcessPeaks:
    """Returns the peaks for "cuda" or "cpu"; device is the GPU as torch.cuda takes it, None for the current one."""
    return CudaPeaks(device) if device_type == "cuda" else ProcessPeaks()


# ---- CUDA's history


class History:
    """CUDA's memory history, of which the newest max_entries are kept.

    start() raises RuntimeError while another history is recorded.  stacks is "python", or "all" to include C++ frames,
    whose names take minutes to look up.
    """

    def __init__(self, name: str = "memory history", max_entries: int = 200_000, stacks: str = "python"):
        self.name, self._max_entries, self._stacks = name, max_entries, stacks
        self._marks: list[tuple[float, str]] = []  # (us, name)

    @property
    def is_running(self) -> bool:
        return _holder is self

    def start(self) -> None:
        """Starts an empty history."""
        global _holder
        import torch

        if _holder is not self and (_holder or getattr(torch._C, "_cuda_isHistoryEnabled", bool)()):
            other = _holder.name if _holder else "another program"
            raise RuntimeError(f"{self.name}: {other} is recording the memory history, and there is only one")
        self._marks = []
        torch.cuda.memory._record_memory_history(enabled=None)  # empties the buffer
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks=self._stacks, max_entries=self._max_entries
        )
        _holder = self

    def mark(self, name: str) -> None:
        """Marks an edge, by the clock of the snapshot's time_us."""
        self._marks.append((time.time_ns() / 1e3, name))

    def dump(self, path: Path | str, **facts: Any) -> int:
        """Writes atomically what is recorded and what the allocator holds now.  Returns the number of bytes written.

        facts go beside the marks into the snapshot's "speedrun".
        """
        import torch

        snapshot = torch.cuda.memory._snapshot()
        redact(snapshot)
        snapshot["speedrun"] = {**facts, "marks": [list(mark) for mark in self._marks]}
        return write(snapshot, Path(path))

    def stop(self) -> None:
        global _holder
        if self.is_running:
            import torch

            torch.cuda.memory._record_memory_history(enabled=None)
            _holder = None


def write(snapshot: dict[str, Any], path: Path) -> int:
    """Writes a snapshot as a pickle, atomically.  Returns the number of bytes written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path, durable=False) as file:
        pickle.dump(snapshot, file, protocol=PICKLE_PROTOCOL)
        return file.tell()


def redact(snapshot: dict[str, Any]) -> None:
    """Removes private paths from the names of source files, in place."""
    seen: set[int] = set()
    clean: dict[str, str] = {}
    for holder in _holders(snapshot):
        for frame in holder.get("frames") or ():
            name = frame.get("filename")
            if id(frame) in seen or not isinstance(name, str):  # stacks share frames
                continue
            seen.add(id(frame))
            if name not in clean:  # the repository's files become relative to it, others lose home and user
                relative = private.redact(name, REPO).removeprefix("./")
                clean[name] = re.sub(r"torchinductor_[^/]+", "torchinductor", relative)  # followed by the user's name
            frame["filename"] = clean[name]


def _holders(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields everything in a snapshot that has frames."""
    for segment in snapshot.get("segments") or ():
        yield segment
        yield from segment.get("blocks") or ()
    for entries in snapshot.get("device_traces") or ():
        yield from entries


def when_out_of_memory(callback: OutOfMemoryCallback | None) -> None:
    """Calls callback(device, requested_bytes, limit_bytes, free_bytes) when CUDA runs out of memory, before unwinding.

    There is one callback at a time; None removes it.  It may be called more than once for a failure, and from any
    thread.  Its exceptions are only printed, so that the run sees its own error.
    """
    global _oom_callback, _is_observing
    _oom_callback = callback
    if callback is not None and not _is_observing:
        import torch

        torch.cuda.init()  # observers that are attached earlier are lost
        torch._C._cuda_attach_out_of_memory_observer(_out_of_memory)  # it stays attached: torch cannot detach it
        _is_observing = True


def _out_of_memory(*facts: int) -> None:
    if _oom_callback is not None:
        try:
            _oom_callback(*facts)
        except Exception:
            traceback.print_exc()
