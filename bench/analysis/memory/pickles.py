"""Reads recordings of memory as plain data: a snapshot's pickle, or the samples of a resident set.

A pickle is a program.  This reader cannot name a function or a class, so that it builds only data; then the shape of
the data is checked, so that later code can rely on it.

Without a GPU, NAME_rankN.rss.json holds the resident set of a process at the marks of a recording: {"what", "rank",
"marks": [[time_us, "forward"], ...], "rss_bytes": [one for each mark]}.  It covers the whole process, including the
interpreter and its libraries, and does not say what allocated the memory.
"""

import pickle
from pathlib import Path
from typing import Any, TypedDict, cast

from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged

RSS_SUFFIX = ".rss.json"
REMEDY = "give what torch.cuda.memory._dump_snapshot wrote"
MAX_ENTRIES = 20_000_000  # of all traces together: shared lists could make a small file endless to walk through
PATTERNS = ("memory/*.pickle", "memory/*" + RSS_SUFFIX, "traces/**/*_mem.pickle")


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise PermissionError(f"it asks for {module}.{name}, and a snapshot needs no code")

    def persistent_load(self, pid: object) -> Any:
        raise PermissionError("it refers to something outside the file")


def load(path: Path | str) -> dict[str, Any]:
    """Reads a snapshot from a .pickle.  Raises ValueError if it is not a snapshot, or holds more than data."""
    try:
        with plain_file.opened(path) as file:
            snapshot = _Plain(file).load()
    except Damaged:
        raise
    except Exception as error:  # a damaged pickle raises almost anything, RecursionError and MemoryError included
        why = str(error) if isinstance(error, PermissionError) else "it is no pickle, or a damaged one"
        raise ValueError(f"{path}: is not a memory snapshot ({why}): {REMEDY}") from None
    try:
        return checked(snapshot)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {REMEDY}") from None


def checked(snapshot: object) -> dict[str, Any]:
    """Returns the snapshot if it has the shape of one.  Raises ValueError, which says what is wrong.

    A list is taken for the segments alone, as torch.cuda.memory_snapshot() returns them.
    """
    if isinstance(snapshot, list):
        snapshot = {"segments": snapshot, "device_traces": []}
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= set(snapshot):
        raise ValueError("it has no segments and device_traces")
    for number, segment in enumerate(_list(snapshot["segments"], "segments")):
        _check_segment(segment, f"segment {number}")
    traces = _list(snapshot["device_traces"], "device_traces")
    filled = [id(trace) for trace in traces if trace]
    if len(set(filled)) < len(filled):
        raise ValueError("several devices share one list of entries")
    if sum(len(_list(trace, "a device's trace")) for trace in traces) > MAX_ENTRIES:
        raise ValueError(f"it has more than {MAX_ENTRIES} trace entries")
    for device, trace in enumerate(traces):
        for number, entry in enumerate(trace):
            where = f"entry {number} of device {device}"
            if not _has(entry, action=str, size=int):
                raise ValueError(f"{where} has no action and size")
            if not _is(entry.get("addr", 0), int) or not _is(entry.get("time_us", 0), (int, float)):
                raise ValueError(f"{where} has an address or a time that is not a number")
            _check_frames(entry.get("frames", ()), where)
    return snapshot


def _has(value: object, **kinds: type) -> bool:
    return isinstance(value, dict) and all(_is(value.get(key), kind) for key, kind in kinds.items())


def _is(value: object, kind: Any) -> bool:
    """Returns whether a value is of a kind; a number must also be below 2**64 in size, as an allocator's are."""
    return isinstance(value, kind) and not (isinstance(value, (int, float)) and not abs(value) < 2**64)


def _check_segment(segment: Any, where: str) -> None:
    if not _has(segment, total_size=int):
        raise ValueError(f"{where} has no total_size")
    if not all(_is(segment.get(key, 0), int) for key in ("device", "address")):
        raise ValueError(f"{where} has a device or an address that is not a number")
    for block in _list(segment.get("blocks"), f"blocks of {where}"):
        if not _has(block, size=int, state=str):
            raise ValueError(f"{where} has a block without size and state")
        if not all(_is(block.get(key, 0), int) for key in ("address", "requested_size")):
            raise ValueError(f"{where} has a block whose address or requested_size is not a number")
        _check_frames(block.get("frames", ()), where)


def _check_frames(frames: object, where: str) -> None:
    if not isinstance(frames, (list, tuple)) or not all(isinstance(frame, dict) for frame in frames):
        raise ValueError(f"{where} has frames that are not dicts")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: not a list")
    return value


def in_folder(folder: Path) -> list[Path]:
    """Returns the sorted paths of the snapshots and samples in a run's folder; [] without any."""
    return sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})


class Samples(TypedDict):
    marks: list[tuple[int | float, str]]
    rss_bytes: list[int]


def load_rss(path: Path) -> Samples:
    """Reads the samples of a resident set.  Raises ValueError if the file has none."""
    samples = cast(Samples, json_file.read(path, Samples, plain_file.MAX_LINES_BYTES))
    if not len(samples["marks"]) == len(samples["rss_bytes"]) > 0:
        raise ValueError(f"{path}: holds no samples of a process: as many rss_bytes as marks, at least one")
    return samples
