"""A trace file -> Rank: its rows as numpy columns, and what the file says of itself.

Large files are read by several processes, a folder of ranks by one process a file.
"""

import concurrent.futures
import gc
import itertools
import json
import multiprocessing
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from bench.trace import events
from bench.trace.source import NoTrace, Source

PARALLEL_BYTES = 100 * 2**20  # of JSON; below, starting a process costs more than it saves
MAX_PARTS = 4
GZIP_FACTOR = 15  # of JSON, about
SUFFIXES = (".json", ".json.gz")
RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.I)
STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")


class Rank:
    """The rows of one file.  Columns are numpy arrays of one length; times are integer nanoseconds.

    .kind (bench.trace.events: KERNEL ... SYNC)  .ts .dur .end  .name (index into .names)  .track (index into .tracks:
    (True, device, stream) or (False, pid, tid))  .correlation .external (-1: none)  .extra (index into .extras, -1:
    none) .rank .world_size (None: the file does not say)  .meta (what stood around the events)  .num_events .num_bad
    .cut
    """

    def __init__(self, path, parts, head, tail, cut):
        merged = _merge(parts)
        for name in events.COLUMNS:
            setattr(self, name, merged["columns"][name])
        self.end = self.ts + self.dur
        self.names, self.tracks, self.extras = merged["names"], merged["tracks"], merged["extras"]
        self.num_events, self.num_bad = merged["num_events"], merged["num_bad"]
        self.path, self.cut = Path(path), cut
        self.meta = _meta(head, tail)
        info = self.meta.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        self.rank, self.world_size = _number(info.get("rank")), _number(info.get("world_size"))
        if self.rank is None and (in_name := RANK_IN_NAME.search(self.path.name)):
            self.rank = int(in_name[1])

    def add_ranges(self, kind: int, track: int, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Rows that the file lacks, known from elsewhere: (name, start ns, end ns) each, on one of .tracks."""
        first, num = len(self.names), len(ranges)
        self.names += [name for name, _, _ in ranges]
        start, end = ([one[side] for one in ranges] for side in (1, 2))
        dur = np.subtract(end, start) if num else []
        columns = {"kind": [kind] * num, "ts": start, "dur": dur, "name": range(first, first + num)}
        columns |= {"track": [track] * num} | dict.fromkeys(("correlation", "external", "extra"), [-1] * num)
        for name, values in columns.items():
            setattr(self, name, np.concatenate((getattr(self, name), np.array(list(values), events.COLUMNS[name]))))
        self.end = self.ts + self.dur

    def is_kind(self, *kinds):
        return np.isin(self.kind, kinds)

    def device_rows(self) -> np.ndarray:
        """Indices of kernels, copies and memsets."""
        return np.flatnonzero(self.is_kind(*events.DEVICE_KINDS))

    def names_that(self, predicate):
        """Mask over .names, False where it is empty; .is_named() gives it for rows."""
        return np.array([bool(predicate(name)) for name in self.names] or [False])

    def is_named(self, predicate, rows):
        return self.names_that(predicate)[self.name[rows]]

    def step_ranges(self, *kinds):
        """[(number, start ns, end ns)] of the ranges of these kinds that are named ProfilerStep#number, by start."""
        numbers = {index: int(step[1]) for index, name in enumerate(self.names) if (step := STEP.search(name))}
        rows = np.flatnonzero(self.is_kind(*kinds) & np.isin(self.name, list(numbers)))
        ranges = [(numbers[int(self.name[row])], int(self.ts[row]), int(self.end[row])) for row in rows]
        return sorted(ranges, key=lambda step: (step[1], step[0], step[2]))

    def steps(self):
        """[(number, start ns, end ns)] of the host's ProfilerStep annotations, by start; the first one of a number."""
        first = {}
        for step in self.step_ranges(events.ANNOTATION, events.CPU_OP):
            first.setdefault(step[0], step)
        return list(first.values())


def load(path: str | Path, kinds: Collection[int] | None = None) -> Rank:
    """One file -> Rank.  kinds: those to keep, None: all.  NoTrace (a ValueError) for a file that is not a trace."""
    source = Source(path)
    if source.is_zip:
        raise NoTrace(f"{path}: it is a zip archive: unpack it and name the .json in it")
    is_large = source.num_bytes * (GZIP_FACTOR if source.is_gzip else 1) >= PARALLEL_BYTES
    num_parts = min(os.cpu_count() or 1, MAX_PARTS) if is_large else 1
    if num_parts == 1:
        return _rank(path, [_read(path, kinds)])
    with _pool(num_parts - 1) as pool:
        others = [pool.submit(_read, path, kinds, part, num_parts) for part in range(1, num_parts)]
        return _rank(path, [_read(path, kinds, 0, num_parts), *(other.result() for other in others)])


def load_all(paths: Sequence[str | Path]) -> list[Rank]:
    """Files of one job -> Ranks in order of rank.  A file that cannot be read raises NoTrace."""
    return _numbered(_load_each(paths))


def by_window(paths: Sequence[str | Path]) -> dict[str | None, list[Rank]]:
    """Files -> {window: Ranks in order of rank}, the earliest first.  A file that is not a trace raises NoTrace.

    Traces of this project say of which window they are; the others are one, None.
    """
    windows = {}
    for rank in _load_each(paths):
        facts = rank.meta.get("speedrun")
        windows.setdefault(facts.get("window") if isinstance(facts, dict) else None, []).append(rank)

    def first_ns(name):
        return min((int(rank.ts.min()) for rank in windows[name] if len(rank.ts)), default=0)

    return {name: _numbered(windows[name]) for name in sorted(windows, key=first_ns)}


def _load_each(paths):
    processes = os.cpu_count() or 1
    num_bytes = sum(os.path.getsize(path) * (GZIP_FACTOR if str(path).endswith(".gz") else 1) for path in paths)
    if len(paths) == 1 or processes == 1 or num_bytes < PARALLEL_BYTES:
        return [load(path) for path in paths]
    with _pool(min(processes, len(paths))) as pool:
        return [_rank(path, [part]) for path, part in zip(paths, pool.map(_read, paths, itertools.repeat(None)))]


def find(word: str | Path) -> list[Path]:
    """What a user named -> trace files, at least one: a file, or all traces in a folder, else those in its traces/.

    NoTrace where there is none.
    """
    path = Path(word)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoTrace(f"{word}: no such file or folder")
    for folder in (path, path / "traces"):
        files = sorted(file for file in folder.rglob("*") if file.name.endswith(SUFFIXES) and _looks_like_a_trace(file))
        if files:
            return files
    raise NoTrace(f"{word}: it holds no trace (.json, .json.gz); a run records traces with profile=window")


def _looks_like_a_trace(path):
    try:
        next(iter(Source(path).chunks()), None)
    except (NoTrace, OSError):
        return False
    return True


def _pool(size):
    return concurrent.futures.ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn"))


def _read(path, kinds, part=0, num_parts=1):
    source, collector = Source(path), events.Collector(kinds)
    collects = gc.isenabled()
    gc.disable()  # a chunk is a hundred thousand objects in no circle
    try:
        for chunk in source.chunks(part, num_parts):
            collector.add(chunk)
    finally:
        if collects:
            gc.enable()
    return collector.finish() | {"head": source.head, "tail": source.tail, "cut": source.cut}


def _rank(path, parts):
    head = next((part["head"] for part in parts if part["head"]), b"")
    tail = next((part["tail"] for part in parts if part["tail"]), b"")
    cut = next((part["cut"] for part in parts if part["cut"]), None)
    if sum(part["num_events"] for part in parts) == 0 and cut is None and not head and not tail:
        raise NoTrace(f"{path}: it is not a Kineto trace: it has no events")
    return Rank(path, parts, head, tail, cut)


def _merge(parts):
    """Parts' tables of names, tracks and extras become one; their columns follow each other."""
    if len(parts) == 1:
        return parts[0]
    merged = {
        "columns": {},
        "num_events": sum(part["num_events"] for part in parts),
        "num_bad": sum(part["num_bad"] for part in parts),
    }
    for table, column in (("names", "name"), ("tracks", "track"), ("extras", "extra")):
        index = {}
        for part in parts:
            new = np.array([index.setdefault(entry, len(index)) for entry in part[table]] or [0], np.int32)
            old = part["columns"][column]
            part["columns"][column] = np.where(old < 0, np.int32(-1), new[np.maximum(old, 0)])
        merged[table] = list(index)
    for name in events.COLUMNS:
        merged["columns"][name] = np.concatenate([part["columns"].pop(name) for part in parts])
    return merged


def _meta(head, tail):
    """What stands before and after the events, as a dict, without what cannot be read."""
    meta = {}
    for text in (head.rstrip().rstrip(b",") + b"}", b"{" + tail.lstrip().lstrip(b",")):
        try:
            value = json.loads(text.decode("utf-8-sig", "replace"), strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            meta |= value
    return meta


def _number(value):
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _numbered(ranks):
    """In order of rank; files that do not say their rank, or say one that is taken, get the next free one."""
    taken = set()
    for one in sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.path.name)):
        if one.rank is None or one.rank in taken:
            one.rank = next(number for number in range(len(ranks) + len(taken) + 1) if number not in taken)
        taken.add(one.rank)
    return sorted(ranks, key=lambda rank: rank.rank)
