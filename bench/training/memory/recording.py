"""CUDA's memory history: begun, marked, written and ended; one recording at a time in a process.

    recording = Recording("steps", max_entries=200_000)
    recording.start(); ...; recording.mark("forward"); ...; recording.dump(path); recording.stop()

What is written opens at pytorch.org/memory_viz and with ./run.sh memory, without private paths.  Blocks keep the stack
of their allocation when a recording ends, so that one over the build names the weights in a later one.
"""

import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path

from bench.base import atomic, private
from bench.base.paths import REPO

PICKLE_PROTOCOL = 4  # the newest that the viewer at pytorch.org/memory_viz reads
STACKS = ("python", "all")  # all adds C++ frames, whose names take minutes to look up

_holder = None
_oom_callback = None
_is_observing = False


def is_available() -> bool:
    """Whether this process has a GPU, whose allocator keeps a history; imports torch."""
    import torch

    return torch.cuda.is_available()


class Recording:
    """max_entries: the newest are kept.  RuntimeError from start() where another recording runs."""

    def __init__(self, name: str = "memory history", max_entries: int = 200_000, stacks: str = "python"):
        if stacks not in STACKS:
            raise ValueError(f"stacks={stacks}: use {' or '.join(STACKS)}")
        self.name, self._max_entries, self._stacks = name, max_entries, stacks
        self._marks: list[list] = []  # [us, name]

    @property
    def is_running(self) -> bool:
        return _holder is self

    def start(self) -> None:
        """Empty, also after an earlier recording."""
        global _holder
        if _holder not in (None, self):
            raise RuntimeError(f"{self.name}: {_holder.name} is recording the memory history, and there is only one")
        import torch

        if _holder is None and getattr(torch._C, "_cuda_isHistoryEnabled", bool)():
            raise RuntimeError(f"{self.name}: another program is recording the memory history, and there is only one")
        self._marks = []
        torch.cuda.memory._record_memory_history(enabled=None)  # empties the buffer
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks=self._stacks, max_entries=self._max_entries
        )
        _holder = self

    def mark(self, name: str) -> None:
        """An edge, on the clock of the trace's time_us."""
        self._marks.append([time.time_ns() / 1e3, name])

    def dump(self, path: Path | str, **facts) -> int:
        """Write what is recorded, and what the allocator holds now, whole or not at all.  Returns the bytes written.

        facts go beside the marks into the snapshot's "speedrun".
        """
        import torch

        snapshot = torch.cuda.memory._snapshot()
        redact(snapshot)
        snapshot["speedrun"] = {**facts, "marks": list(self._marks)}
        return write(snapshot, Path(path))

    def stop(self) -> None:
        global _holder
        if self.is_running:
            import torch

            torch.cuda.memory._record_memory_history(enabled=None)
            _holder = None


def write(snapshot: dict, path: Path) -> int:
    """Snapshot -> a pickle, whole or not there.  Returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path, durable=False) as file:
        pickle.dump(snapshot, file, protocol=PICKLE_PROTOCOL)
        num_bytes = file.tell()
    return num_bytes


def redact(snapshot: dict) -> None:
    """Take private paths out of the names of source files, in place."""
    seen: set[int] = set()
    clean: dict[str, str] = {}
    for holder in _holders(snapshot):
        for frame in holder.get("frames") or ():
            if id(frame) not in seen:  # frames are shared among stacks
                seen.add(id(frame))
                name = frame.get("filename")
                if isinstance(name, str):
                    frame["filename"] = clean[name] if name in clean else clean.setdefault(name, _without_private(name))


def _holders(snapshot):
    for segment in snapshot.get("segments") or ():
        yield segment
        yield from segment.get("blocks") or ()
    for trace in snapshot.get("device_traces") or ():
        yield from trace


def _without_private(name):
    """The repository's files relative to it, others without home and user; inductor's folder has the user's name."""
    name = private.redact(name, REPO).removeprefix("./")
    return re.sub(r"torchinductor_[^/]+", "torchinductor", name)


def when_out_of_memory(callback: Callable[[int, int, int, int], object] | None) -> None:
    """callback(device, requested_bytes, limit_bytes, free_bytes) as soon as CUDA has no memory, before unwinding.

    One at a time; None ends it.  It may be called again for one failure, and from any thread.  What it raises is
    printed only: the run must see its own error.
    """
    global _oom_callback, _is_observing
    _oom_callback = callback
    if callback is not None and not _is_observing:
        import torch

        torch.cuda.init()  # observers of before are not kept
        torch._C._cuda_attach_out_of_memory_observer(_out_of_memory)  # it stays attached: torch cannot detach it
        _is_observing = True


def _out_of_memory(device, requested_bytes, limit_bytes, free_bytes):
    if _oom_callback is not None:
        try:
            _oom_callback(device, requested_bytes, limit_bytes, free_bytes)
        except Exception:
            import traceback

            traceback.print_exc()
