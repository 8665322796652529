"""Holds the rows of a trace file as numpy columns, and what the file says of itself.

Only what an analysis needs is decoded of each event; timestamps are exact, in nanoseconds.
"""

import collections
import copy
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.analysis.trace import events
from bench.analysis.trace.columns import take
from bench.analysis.trace.events import Args, Event, integers, nanoseconds, whole
from bench.base import private
from bench.base.paths import REPO

RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.I)
STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")
MAX_NAME_CHARS = 65_536  # kept of a name (real ones have up to 1,400), as a search may take their square
MIN_ROWS = 2**14
IDS, SMALL = ("correlation", "external"), np.iinfo(np.int32)
_NEXT = re.compile(r'\}\s*,\s*(?=\{\s*")')
_NO_ARGS, _UNSET = Args(), msgspec.UNSET


class Collector:
    """Decodes chunks with add(); finish() returns what Rank takes of them.

    tracks: (pid, tid) of host rows, (device, stream) of device rows.  extras: distinct facts of rows that have some, as
    (bytes, dims, types, collective, nelems, group, device type, group size, dtype, concrete inputs or kernel's name).
    """

    def __init__(self) -> None:
        self._names: dict[Any, int] = {}
        self._extras: dict[tuple[Any, ...], int] = {}
        self._tracks: dict[tuple[bool, Any, Any], int] = {}  # {(is device, number or text, number or text): index}
        self._needs_concrete = functools.cache(lambda name: events.NEEDS_CONCRETE.search(str(name)) is not None)
        self._track_of = functools.cache(self._track)  # cached by the raw values, which recur
        self._sequence: dict[int, tuple[str, int]] = {}  # {row: (process group, number in it)}
        self._columns = {name: np.empty(0, dtype) for name, dtype in events.COLUMNS.items()}
        self._num_rows = 0
        self.num_events = self.num_bad = 0
        self._unread = collections.Counter[str]()  # events with a duration, by category
        self._near_ns: int | None = None  # when the first chunk was recorded

    def add(self, chunk: bytes) -> None:
        try:
            decoded = events.DECODER.decode(b"[" + chunk + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = self._decode_one_by_one(chunk)
        all_kinds = [_kind_of(event.cat) for event in decoded]
        self._has_numbers = b'"Seq"' in chunk  # most traces have none, so that no event is checked
        kept, kinds = [], []
        for event, kind in zip(decoded, all_kinds):
            if kind is None:
                if event.ph == "X" and event.cat:
                    self._unread[event.cat] += 1
            elif event.ph == "X" or event.name == events.MOMENT:
                kept.append(event)
                kinds.append(events.kind_on_mtia(event.args) if kind == events.SYNC else kind)
        self.num_events += len(decoded)
        self._keep(kept, kinds)

    def _decode_one_by_one(self, chunk: bytes) -> list[Event]:
        """Decodes the events of a damaged or odd chunk that can be read, and counts the others."""
        scan = json.JSONDecoder(strict=False, parse_float=str).raw_decode  # as text: no digit is lost
        text, at, decoded = chunk.decode("utf-8", "replace"), 0, []
        while (at := text.find("{", at)) >= 0:
            try:
                value, end = scan(text, at)
            except (ValueError, RecursionError):
                self.num_bad += 1
                boundary = _NEXT.search(text, at + 1)
                if boundary is None:
                    break
                at = boundary.end()
                continue
            at = end
            decoded.append(events.from_plain(value))
        return decoded

    def _keep(self, kept: list[Event], kinds: list[Any]) -> None:
        names, track_of = self._names, self._track_of
        ts = nanoseconds([event.ts for event in kept])
        dur = nanoseconds([events.ZERO if kind == events.MEMORY else event.dur for kind, event in zip(kinds, kept)])
        columns = {"kind": kinds, "ts": ts, "dur": dur}
        columns["name"] = [names.setdefault(event.name, len(names)) for event in kept]
        facts = [event.args or _NO_ARGS for event in kept]
        columns["track"] = [
            track_of(events.ON_DEVICE[kind], event.pid, event.tid, args.device, args.stream)
            for event, kind, args in zip(kept, kinds, facts)
        ]
        columns["correlation"] = integers([args.correlation for args in facts])
        columns["external"] = integers([args.external_id for args in facts])
        columns["extra"] = [
            events.NO_NUMBER
            if args.dims is _UNSET
            and args.bytes is None
            and args.collective is None
            and args.allocated is None
            and args.kernel is None
            else self._extra(event.name, args)
            for event, args in zip(kept, facts)
        ]
        good = (ts != events.BAD) & (dur >= 0) & (dur <= events.FAR_NS)
        if self._near_ns is None and good.any():
            self._near_ns = int(np.median(ts[good]))
        good &= np.abs(ts - (self._near_ns or 0)) <= events.FAR_NS  # one row of another year would make a step of years
        self.num_bad += int((~good).sum())
        first, self._num_rows = self._num_rows, self._num_rows + int(good.sum())
        for index, args in enumerate(facts) if self._has_numbers else ():
            is_own = str(args.collective).lower().startswith(("send", "recv"))  # each rank numbers these for itself
            if args.seq is not None and good[index] and not is_own:
                self._sequence[first + int(good[:index].sum())] = str(args.group), whole(args.seq)
        if self._num_rows > len(self._columns["ts"]):
            self._grow(self._num_rows + self._num_rows // 8 + MIN_ROWS)
        for name, dtype in events.COLUMNS.items():
            column = np.asarray(columns[name], dtype)
            self._columns[name][first : self._num_rows] = column if good.all() else column[good]

    def _grow(self, num_rows: int) -> None:
        """Resizes the columns, also to fewer rows, in place: joining parts at the end would need twice their memory."""
        for column in self._columns.values():
            column.resize(num_rows, refcheck=False)

    def _track(self, on_device: bool, pid: Any, tid: Any, device: Any, stream: Any) -> int:
        track = (True, whole(device, pid), whole(stream, tid)) if on_device else (False, str(pid), str(tid))
        return self._tracks.setdefault(track, len(self._tracks))

    def _extra(self, name: Any, args: Args) -> int:
        dims, types, concrete = args.dims, args.types, args.concrete
        fact = (
            args.bytes if args.allocated is None else args.allocated,
            "" if dims is _UNSET else bytes(dims),
            "" if types is _UNSET else bytes(types),
            args.collective,
            args.nelems,
            args.group,
            args.device_type,
            args.group_size,
            args.dtype,
            args.kernel if concrete is _UNSET or not self._needs_concrete(name) else bytes(concrete),
        )
        return self._extras.setdefault(fact, len(self._extras))

    def finish(self) -> dict[str, Any]:
        self._grow(self._num_rows)
        for name in IDS:
            column = self._columns[name]
            if len(column) and column.max() <= SMALL.max and column.min() >= SMALL.min:  # half the memory
                self._columns[name] = column.astype(np.int32)
        # a kernel without a sequence number gets that of the host's operator that launched it
        kind, external = self._columns["kind"], self._columns["external"]
        by_operator = {int(external[row]): number for row, number in self._sequence.items() if external[row] >= 0}
        for row in np.flatnonzero((kind == events.KERNEL) & np.isin(external, list(by_operator))).tolist():
            self._sequence.setdefault(row, by_operator[int(external[row])])
        return {
            "columns": self._columns,
            "names": [_shown(str(name)) for name in self._names],
            "tracks": list(self._tracks),
            "extras": list(self._extras),
            "sequence": self._sequence,
            "num_events": self.num_events,
            "num_bad": self.num_bad,
            "unread": {name: num for name, num in self._unread.items() if name.lower() not in events.UNTIMED},
        }


def _shown(name: str) -> str:
    """Returns a name without private paths, which those of Python's functions have."""
    return (private.redact(name, REPO) if "/" in name else name)[:MAX_NAME_CHARS]


@functools.lru_cache(maxsize=1000)  # a hostile file may have a category per event
def _kind_of(cat: str | None) -> int | None:
    """Returns the kind of a category, also in capitals, None for any other."""
    return events.KINDS.get(cat.lower()) if cat else None


class Rank:
    """The rows of one file.  Columns are numpy arrays of one length; times are integer nanoseconds.

    .kind (events.py: KERNEL ... SYNC)  .ts .dur .end  .name (index into .names)  .track (index into .tracks:
    (True, device, stream) or (False, pid, tid))  .correlation .external (-1: none)  .extra (index into .extras, -1:
    none)  .sequence ({row: (process group, number of the collective in it)} where the file says it)
    .rank .world_size (None: the file does not say)  .meta (the fields around the events)  .num_events .num_bad  .cut
    .unread ({category that is not known here: number of events})  .is_taken (whether another file says the same rank)
    """

    kind: np.ndarray
    ts: np.ndarray
    dur: np.ndarray
    end: np.ndarray
    name: np.ndarray
    track: np.ndarray
    correlation: np.ndarray
    external: np.ndarray
    extra: np.ndarray
    rank: Any  # int, or None before load.number() gave it one

    def __init__(self, path: str | Path, rows: dict[str, Any], head: bytes, tail: bytes, cut: str | None) -> None:
        """Takes the rows of Collector.finish(), and as head and tail the bytes around the events."""
        for name in events.COLUMNS:
            setattr(self, name, rows["columns"][name])
        self.end = self.ts + self.dur
        self.nests: dict[int, dict[int, Any]] = {}  # {kind: {track: the columns.Nest of its ranges}} of attribution.py
        self.names, self.tracks, self.extras = rows["names"], rows["tracks"], rows["extras"]
        self.sequence: dict[int, tuple[str, int]] = rows["sequence"]
        self.num_events, self.num_bad, self.unread = rows["num_events"], rows["num_bad"], rows["unread"]
        self.is_taken = False
        self.path, self.cut = Path(path), cut
        self.meta = _meta(head, tail)
        info = self.meta.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        self.rank, self.world_size = _number(info.get("rank")), _number(info.get("world_size"))
        if self.rank is None and (in_name := RANK_IN_NAME.search(self.path.name)):
            self.rank = int(in_name[1])

    def only(self, rows: np.ndarray) -> "Rank":
        """Returns a Rank with these rows and what their file says of itself, to be kept when the others are dropped."""
        few = copy.copy(self)
        for name in events.COLUMNS:
            setattr(few, name, getattr(self, name)[rows])
        used, few.name = np.unique(few.name, return_inverse=True)
        few.name, few.names = few.name.astype(np.int32), [self.names[index] for index in used]
        few.sequence = {new: self.sequence[row] for new, row in enumerate(rows.tolist()) if row in self.sequence}
        few.extras, few.extra = [], np.full(len(rows), -1, np.int32)
        few.end, few.nests = few.ts + few.dur, {}
        return few

    def add_ranges(self, kind: int, track: int, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Adds rows that the file lacks.  ranges: [(name, start ns, end ns)]; track: index into .tracks."""
        first, num = len(self.names), len(ranges)
        self.names += [name for name, _, _ in ranges]
        start, end = ([span[side] for span in ranges] for side in (1, 2))
        dur = np.subtract(end, start) if num else []
        columns = {"kind": [kind] * num, "ts": start, "dur": dur, "name": range(first, first + num)}
        columns |= {"track": [track] * num} | dict.fromkeys(("correlation", "external", "extra"), [-1] * num)
        for name, values in columns.items():
            setattr(self, name, np.concatenate((getattr(self, name), np.array(list(values), events.COLUMNS[name]))))
        self.end, self.nests = self.ts + self.dur, {}

    def is_kind(self, *kinds: int) -> np.ndarray:
        return np.isin(self.kind, kinds)

    def device_rows(self) -> np.ndarray:
        """Returns the indices of kernels, copies and memsets."""
        return np.flatnonzero(self.is_kind(*events.DEVICE_KINDS))

    def names_that(self, predicate: Callable[[str], object]) -> np.ndarray:
        """Returns a mask over .names, [False] if there are none; is_named() returns it for rows."""
        return np.array([bool(predicate(name)) for name in self.names] or [False])

    def names_of(self, rows: Sequence[int] | np.ndarray) -> list[str | None]:
        """Returns the name of each row, None for -1."""
        index = take(self.name, np.asarray(rows, np.int64)).tolist()
        return [self.names[name] if name >= 0 else None for name in index]

    def is_named(self, predicate: Callable[[str], object], rows: np.ndarray) -> np.ndarray:
        return self.names_that(predicate)[self.name[rows]]

    def step_ranges(self, *kinds: int) -> list[tuple[int, int, int]]:
        """Returns [(number, start ns, end ns)] of the ranges of these kinds named ProfilerStep#number, by start."""
        numbers = {index: int(step[1]) for index, name in enumerate(self.names) if (step := STEP.search(name))}
        rows = np.flatnonzero(self.is_kind(*kinds) & np.isin(self.name, list(numbers)))
        ranges = [(numbers[int(self.name[row])], int(self.ts[row]), int(self.end[row])) for row in rows]
        return sorted(ranges, key=lambda step: (step[1], step[0], step[2]))

    def steps(self) -> list[tuple[int, int, int]]:
        """Returns [(number, start ns, end ns)] of the host's ProfilerSteps, by start; the first of each number."""
        first: dict[int, tuple[int, int, int]] = {}
        for step in self.step_ranges(events.ANNOTATION, events.CPU_OP):
            first.setdefault(step[0], step)
        return list(first.values())


def _meta(head: bytes, tail: bytes) -> dict[str, Any]:
    """Returns what stands before and after the events as a dict, without what cannot be read."""
    meta: dict[str, Any] = {}
    for text in (head.rstrip().rstrip(b",") + b"}", b"{" + tail.lstrip().lstrip(b",")):
        try:
            value = json.loads(text.decode("utf-8-sig", "replace"), strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            meta |= value
    return meta


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
