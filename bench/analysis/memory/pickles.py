"""Reads recordings of memory as plain data: a snapshot's pickle, or the samples of a resident set.

A pickle is a program.  This reader cannot name a function or a class, so that it builds only data; then the shape of
the data is checked, so that later code can rely on it.

Without a GPU, NAME_rankN.rss.json holds the resident set of a process at the marks of a recording: {"what", "rank",
"marks": [[time_us, "forward"], ...], "rss_bytes": [one for each mark]}.  It covers the whole process, including the
interpreter and its libraries, and does not say what allocated the memory.
"""

import pickle
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, cast

import msgspec

from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.record import run_folder

RSS_SUFFIX = ".rss.json"
REMEDY = "give what torch.cuda.memory._dump_snapshot wrote"
MAX_ENTRIES = 20_000_000  # of all traces together: shared lists could make a small file endless to walk through
PATTERNS = ("memory/*.pickle", "memory/*" + RSS_SUFFIX, "traces/**/*_mem.pickle")


Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # no allocator has a larger number
Moment = Count | Annotated[float, msgspec.Meta(ge=-(2.0**63), le=2.0**63)]
Frames = list[dict[Any, Any]]


class Snapshot(TypedDict):
    segments: list[Any]
    device_traces: list[list[Any]]


class Block(TypedDict):
    size: Count
    state: str
    address: NotRequired[Count]
    requested_size: NotRequired[Count]
    frames: NotRequired[Frames]


class Segment(TypedDict):
    total_size: Count
    blocks: list[Block]
    device: NotRequired[Count]
    address: NotRequired[Count]


class Entry(TypedDict):
    action: str
    size: Count
    addr: NotRequired[Count]
    time_us: NotRequired[Moment]
    frames: NotRequired[Frames]


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
    return checked(snapshot, path)


def checked(snapshot: object, where: object = "snapshot") -> dict[str, Any]:
    """Returns the snapshot if it has the shape of one.  Raises Damaged, which says what is wrong.

    A list is taken for the segments alone, as torch.cuda.memory_snapshot() returns them.
    """
    if isinstance(snapshot, list):
        snapshot = {"segments": snapshot, "device_traces": []}
    whole = cast(dict[str, Any], json_file.check_kind(snapshot, Snapshot, where, REMEDY))
    traces = whole["device_traces"]
    if len({id(trace) for trace in traces if trace}) < sum(map(bool, traces)):
        raise Damaged(f"{where}: several devices share one list of entries: {REMEDY}")
    if sum(map(len, traces)) > MAX_ENTRIES:
        raise Damaged(f"{where}: it has more than {MAX_ENTRIES} trace entries: {REMEDY}")
    for number, segment in enumerate(whole["segments"]):
        json_file.check_kind(segment, Segment, f"{where}: segment {number}", REMEDY)
    for device, trace in enumerate(traces):
        for number, entry in enumerate(trace):
            json_file.check_kind(entry, Entry, f"{where}: entry {number} of device {device}", REMEDY)
    return whole


def in_folder(folder: Path) -> list[Path]:
    """Returns the sorted paths of the snapshots and samples in a run's folder; [] without any.  Raises ValueError if a
    link leads out of it."""
    found = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    run_folder.refuse_links_out(folder, found)
    return found


class Samples(TypedDict):
    marks: list[tuple[int | float, str]]
    rss_bytes: list[int]


def load_rss(path: Path) -> Samples:
    """Reads the samples of a resident set.  Raises ValueError if the file has none."""
    samples = cast(Samples, json_file.read(path, Samples, plain_file.MAX_LINES_BYTES))
    if not len(samples["marks"]) == len(samples["rss_bytes"]) > 0:
        raise ValueError(f"{path}: holds no samples of a process: as many rss_bytes as marks, at least one")
    return samples
