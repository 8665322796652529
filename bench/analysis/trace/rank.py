"""The rows of one trace file as numpy columns, and what the file says of itself."""

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.analysis.trace import events

RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.I)
STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")


class Rank:
    """The rows of one file.  Columns are numpy arrays of one length; times are integer nanoseconds.

    .kind (events.py: KERNEL ... SYNC)  .ts .dur .end  .name (index into .names)  .track (index into .tracks:
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

    def only(self, rows: np.ndarray) -> "Rank":
        """A Rank with these rows and what their file says of itself, to be kept when the others are forgotten."""
        few = copy.copy(self)
        for name in events.COLUMNS:
            setattr(few, name, getattr(self, name)[rows])
        used, few.name = np.unique(few.name, return_inverse=True)
        few.name, few.names = few.name.astype(np.int32), [self.names[index] for index in used]
        few.extras, few.extra = [], np.full(len(rows), -1, np.int32)
        few.end, few.meta = few.ts + few.dur, {"speedrun": self.meta.get("speedrun")}
        return few

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
