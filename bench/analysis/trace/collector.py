"""Chunks of events as bytes -> columns.  Only what an analysis needs is decoded; stamps are exact, in nanoseconds."""

import json
import re

import msgspec
import numpy as np

from bench.analysis.trace.events import COLUMNS, DECODERS, KINDS, MEMORY, MOMENT, ON_DEVICE, Args, from_plain
from bench.analysis.trace.skip import Skip
from bench.analysis.trace.stamps import BAD, EXACT_BELOW, NO_NUMBER, integers, nanoseconds, whole

MIN_ROWS = 2**14
IDS, SMALL = ("correlation", "external"), np.iinfo(np.int32)
_LARGE = re.compile(rb'"ts"\s*:\s*"?(\d{13,})\.\d')
_NEXT = re.compile(r'\}\s*,\s*(?=\{\s*")')
_NO_ARGS = Args()


class Collector:
    """add(chunk) decodes; finish() gives {"columns", "names", "tracks", "extras", "num_events", "num_bad"}.

    tracks: (pid, tid) of host rows, (device, stream) of device rows.  extras: distinct facts of rows that have some, as
    (bytes, dims, types, collective, nelems, group, device type, group size, dtype).  kinds: the ones to keep, None:
    all.  Those that are not wanted are skipped undecoded (skip.py), which takes half the time and memory.
    """

    def __init__(self, kinds=None):
        self._kind_of = _Kinds({name: kind for name, kind in KINDS.items() if kinds is None or kind in kinds})
        self._skip = None if kinds is None else Skip(name for name, kind in KINDS.items() if kind not in kinds)
        self._names, self._extras = {}, {}
        self._tracks = {}  # (is device, number or text, number or text) -> index
        self._track_of = _Memo(self._track)  # the same by the raw values, which come again and again
        self._columns = {name: np.empty(0, dtype) for name, dtype in COLUMNS.items()}
        self._num_rows = 0
        self._exact = None
        self.num_events = self.num_bad = 0

    def add(self, chunk):
        if self._skip is not None:
            chunk, num_skipped = self._skip(chunk)
            self.num_events += num_skipped
        self._add(chunk)

    def _add(self, chunk):
        if self._exact is None:
            stamp = _LARGE.search(chunk)
            self._exact = stamp is not None and int(stamp[1]) >= EXACT_BELOW
        events, kind_of = self._decode(chunk), self._kind_of
        kept = [one for one in events if kind_of[one.cat] is not None and (one.ph == "X" or one.name == MOMENT)]
        if kept and not self._exact and (_is_rounded(kept[0].ts) or _is_rounded(kept[-1].ts)):
            self._exact = True  # the chunks before had no stamp that shows it
            self._add(chunk)
            return
        self.num_events += len(events)
        if kept:
            self._keep(kept, [kind_of[event.cat] for event in kept])

    def _decode(self, chunk):
        try:
            return DECODERS[self._exact].decode(b"[" + chunk + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decode_one_by_one(chunk)

    def _decode_one_by_one(self, chunk):
        """A damaged or odd chunk: every event that can be read is read, the others are counted."""
        scan = json.JSONDecoder(strict=False, parse_float=str).raw_decode  # as text: no digit is lost
        text, at, events = chunk.decode("utf-8", "replace"), 0, []
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
            events.append(from_plain(value))
        return events

    def _keep(self, kept, kinds):
        names, track_of, unset = self._names, self._track_of, msgspec.UNSET
        ts = nanoseconds([event.ts for event in kept])
        dur = nanoseconds([0 if kind == MEMORY else event.dur for kind, event in zip(kinds, kept)])
        columns = {"kind": kinds, "ts": ts, "dur": dur}
        columns["name"] = [names.setdefault(event.name, len(names)) for event in kept]
        facts = [event.args or _NO_ARGS for event in kept]
        columns["track"] = [
            track_of[ON_DEVICE[kind], event.pid, event.tid, args.device, args.stream]
            for event, kind, args in zip(kept, kinds, facts)
        ]
        columns["correlation"] = integers([args.correlation for args in facts])
        columns["external"] = integers([args.external_id for args in facts])
        columns["extra"] = [
            NO_NUMBER
            if args.dims is unset and args.bytes is None and args.collective is None and args.allocated is None
            else self._extra(args)
            for args in facts
        ]
        good = (ts != BAD) & (dur != BAD)
        self.num_bad += int((~good).sum())
        first, self._num_rows = self._num_rows, self._num_rows + int(good.sum())
        if self._num_rows > len(self._columns["ts"]):
            self._grow(self._num_rows + self._num_rows // 8 + MIN_ROWS)
        for name, dtype in COLUMNS.items():
            column = np.asarray(columns[name], dtype)
            self._columns[name][first : self._num_rows] = column if good.all() else column[good]

    def _grow(self, num_rows):
        """Also to less.  In place: parts of a column that were joined at the end would need twice its memory."""
        for column in self._columns.values():
            column.resize(num_rows, refcheck=False)

    def _track(self, key):
        on_device, pid, tid, device, stream = key
        track = (True, whole(device, pid), whole(stream, tid)) if on_device else (False, str(pid), str(tid))
        return self._tracks.setdefault(track, len(self._tracks))

    def _extra(self, args):
        dims = "" if args.dims is msgspec.UNSET else bytes(args.dims)
        types = "" if args.types is msgspec.UNSET else bytes(args.types)
        num_bytes = args.bytes if args.allocated is None else args.allocated
        fact = (num_bytes, dims, types, args.collective, args.nelems, args.group, args.device_type)
        fact += (args.group_size, args.dtype)
        return self._extras.setdefault(fact, len(self._extras))

    def finish(self):
        self._grow(self._num_rows)
        for name in IDS:
            column = self._columns[name]
            if len(column) and column.max() <= SMALL.max and column.min() >= SMALL.min:  # as a rule; half the memory
                self._columns[name] = column.astype(np.int32)
        return {
            "columns": self._columns,
            "names": [str(name) for name in self._names],
            "tracks": list(self._tracks),
            "extras": list(self._extras),
            "num_events": self.num_events,
            "num_bad": self.num_bad,
        }


def _is_rounded(ts):
    """Whether a stamp in microseconds was read as a float that has lost its nanoseconds."""
    return type(ts) is float and abs(ts) >= EXACT_BELOW


class _Memo(dict):
    """What make(key) gave, remembered."""

    def __init__(self, make):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        value = self[key] = self._make(key)
        return value


class _Kinds(dict):
    """Category -> kind, None if not wanted.  Categories come in capitals too: those seen are remembered."""

    def __missing__(self, cat):
        kind = self.get(cat.lower()) if cat else None
        if len(self) < 1000:  # a hostile file may have a category an event
            self[cat] = kind
        return kind
