"""Writes a recorded profile as a Chrome trace file: atomically, compressed, of bounded size, without private names.

torch writes the machine's name, its temporary path and, with stacks, the paths of all sources.  In these files the
name is empty, the repository is "." and home is "~".  A trace above the allowed size loses its least useful events
first; annotations, and events without a category (thread names, marks), always stay.
"""

import contextlib
import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from bench.base import atomic
from bench.base.paths import CODE, REPO
from bench.base.units import MIB

SEPARATOR = b",\n"
# Categories of events, from those that are kept longest to those that are dropped first.
KEPT_FIRST = (
    ("user_annotation", "gpu_user_annotation", "Trace"),
    ("kernel", "gpu_memcpy", "gpu_memset"),
    ("cpu_op",),
    ("cuda_runtime", "cuda_driver", "cuda_sync", "overhead"),
    ("ac2g", "fwdbwd", "async_cpu_to_gpu"),
    ("cpu_instant_event",),
    ("python_function",),
)
RANKS: dict[str | None, int] = {category: rank for rank, group in enumerate(KEPT_FIRST) for category in group}
RANKS[None] = 0  # events without a category: marks and thread names
GZIP_LEVEL = 6
MAX_READ_EVENTS = 1_000_000  # torch needs about 30 us and 2 KiB for each
END = b"\n]}\n"
BLOCK_EVENTS = 10_000  # events searched for private paths at once, a few MB
CONTROL_TO_SPACE = bytes(32 if byte < 32 and byte != 10 else byte for byte in range(256))  # JSON's strings hold none


Event = TypeVar("Event", bytes, msgspec.Raw)  # the JSON of an event


@dataclass(frozen=True)
class Saved:
    """A trace that has been written."""

    path: Path
    num_events: int
    num_bytes: int  # size of the file, compressed or not
    dropped: dict[str, int]  # {category: number of events} that max_mib did not allow

    def facts(self) -> dict[str, Any]:
        """Returns the facts for the record."""
        return {"num_events": self.num_events, "num_bytes": self.num_bytes, "dropped": self.dropped}

    @property
    def is_readable(self) -> bool:
        """Whether torch can summarize all the profile's events in a time for which the other ranks can wait."""
        return self.num_events + sum(self.dropped.values()) <= MAX_READ_EVENTS


def save(profile: Any, path: Path | str, max_mib: float | None = None) -> Saved:
    """Writes the trace of a stopped torch.profiler.profile to path, gzipped if that ends in .gz.  Raises OSError.

    max_mib limits the trace before compression; None sets no limit.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = path.with_name(f".{path.name}.{os.getpid()}.raw.tmp")
    try:
        profile.export_chrome_trace(os.fspath(raw))  # torch compresses names in .gz, and writes .tmp plainly
        facts, events = _read(raw)
        most_bytes = math.inf if max_mib is None else max_mib * MIB
        is_large = raw.stat().st_size > most_bytes
    finally:
        raw.unlink(missing_ok=True)
    facts |= {"host_name": b'""', "traceName": json.dumps(path.name).encode()}
    head = b",\n".join(b"%s: %s" % (json.dumps(key).encode(), value) for key, value in facts.items())
    head = b"{\n" + head + b',\n"traceEvents": [\n'
    dropped: dict[str, int] = {}
    if is_large:
        events, dropped = shrunk(events, most_bytes - len(head) - len(END))
    _write(path, head, events)
    return Saved(path, len(events), path.stat().st_size, dropped)


def write_tables(trace: Path, stem: str, **facts: Any) -> list[Path]:
    """Writes `./run.sh analyze`'s tables of a trace, ops/STEM.txt and ops/STEM.json (with facts); returns the paths.

    The separate folder is for HolisticTraceAnalysis, which takes every .json beside a trace for another trace.  This
    takes seconds for a million events: call it after training.
    """
    from bench.analysis.trace import analysis, text  # imports numpy, which the launcher does without

    (analyzed,) = analysis.analyze_files([trace], include_last_step=True).values()  # complete: the recording synced
    text_path, json_path = (trace.parent / "ops" / f"{stem}.{suffix}" for suffix in ("txt", "json"))
    text_path.parent.mkdir(exist_ok=True)
    atomic.write_text(text_path, text.document(analyzed, trace.name).terminal() + "\n", durable=False)
    atomic.write_json(json_path, facts | {"ranks": analyzed["ranks"]}, durable=False)
    return [text_path, json_path]


def _read(raw: Path) -> tuple[dict[str, Any], list[msgspec.Raw]]:
    """Returns ({key: JSON} of everything but the events, [JSON of each event]).

    Events are not decoded: 0.9 million of them (300 MB) take 0.8 s and 600 MB, a third of what torch holds.
    """
    text = raw.read_bytes().translate(CONTROL_TO_SPACE)
    try:
        facts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return facts, msgspec.json.decode(facts.pop("traceEvents"), type=list[msgspec.Raw])
    except (msgspec.DecodeError, KeyError):  # libkineto does not report a full disk
        raise OSError(f"the trace of {len(text)} bytes is cut: is the disk full?") from None


def _write(path: Path, head: bytes, events: Sequence[Event]) -> None:
    home: str = os.path.expanduser("~")
    replaced = [(f"{REPO}/", ""), (f"{CODE}/", ""), *([(f"{home}/", "~/")] if len(home) > 1 else [])]

    def clean(block: bytes) -> bytes:
        """Returns the block without private paths, and as UTF-8 (torch 2.13 may write other bytes in a name)."""
        for old, new in replaced:
            block = block.replace(old.encode(), new.encode())
        return block.decode(errors="replace").encode()

    with atomic.replacing(path, durable=False) as file, contextlib.ExitStack() as stack:
        if path.suffix == ".gz":
            file = cast(BinaryIO, stack.enter_context(gzip.GzipFile("", "wb", GZIP_LEVEL, file)))
        file.write(clean(head))
        for start in range(0, len(events), BLOCK_EVENTS):
            file.write(b"," * bool(start) + clean(SEPARATOR.join(events[start : start + BLOCK_EVENTS])))
        file.write(END)


def shrunk(events: Sequence[Event], max_bytes: float) -> tuple[list[Event], dict[str, int]]:
    """Returns (the events that fit into about max_bytes, in order; {category: number of events dropped}).

    Of the first category that does not fit as a whole, the earliest events are kept, so that there are no gaps.
    """
    decode = msgspec.json.Decoder(_Event).decode
    by_rank: dict[int, list[int]] = {}  # indices of events, by the usefulness of their categories
    categories = [decode(event).cat for event in events]
    for index, category in enumerate(categories):
        by_rank.setdefault(RANKS.get(category, len(KEPT_FIRST)), []).append(index)
    kept: set[int] = set()
    for rank in sorted(by_rank):
        for index in by_rank[rank]:
            max_bytes -= memoryview(events[index]).nbytes + len(SEPARATOR)
            if rank and max_bytes < 0:
                break
            kept.add(index)
    dropped = Counter(str(category) for index, category in enumerate(categories) if index not in kept)
    return [event for index, event in enumerate(events) if index in kept], dict(dropped)


class _Event(msgspec.Struct):
    cat: str | None = None
