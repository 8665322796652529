"""A short stretch of a trace as bars for a picture: ranks around their slowest collective, streams around a gap.

A bar is [start_us, us, kind, index into "names"]; kind: index into kernels.TYPES, or HOST for a call.  Bars
too thin to see are joined with their neighbours of the same kind; such a bar's name says how many it holds.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bench.analysis.trace import events, window
from bench.analysis.trace.columns import US
from bench.analysis.trace.device_time import COMMUNICATION, TYPES
from bench.analysis.trace.load import Rank
from bench.analysis.trace.skew import Ranks

HOST = len(TYPES)
NUM_COLUMNS = 600  # of a picture: what is narrower cannot be seen
MAX_LANES = 16
LEAD, TAIL = 0.5, 0.15  # of the slowest collective's time that is shown before and after it
AROUND_GAP = 0.6  # of the gap, on either side


def of_collective(ranks: Ranks, calls: list[dict]) -> dict | None:
    """Ranks side by side around the collective for which one of them waited longest; None without one.

    calls: of skew.waits().  {"name", "late_rank", "wait_us", "us", "lanes": [{"rank", "stream": None, "bars"}],
    "names"}; us: what is shown.  Clocks of ranks are not compared: each is set by the end of this collective, which all
    leave at about the same time.
    """
    if not calls:
        return None
    slowest = max(calls, key=lambda call: max(call["wait_ns"]))
    members = list(zip(ranks, slowest["rows"], slowest["wait_ns"]))
    longest_ns = max(int(ranks[number][0].dur[row]) for number, row, _ in members)
    lead, tail = int(LEAD * longest_ns) + 1, int(TAIL * longest_ns) + 1
    late = slowest["late_rank"]
    shown = sorted(members, key=lambda one: (one[0] != late, -one[2]))[:MAX_LANES]
    names, lanes = Names(), []
    for number, row, _ in sorted(shown):
        rank, rows, kinds = ranks[number]
        end = int(rank.end[row])
        bars = _bars(rank, rows, kinds, end - longest_ns - lead, end + tail, names)
        lanes.append({"rank": number, "stream": None, "bars": bars})
    facts = {"name": slowest["name"], "late_rank": late, "wait_us": max(slowest["wait_ns"]) / US}
    return facts | {"us": (longest_ns + lead + tail) / US, "lanes": lanes, "names": list(names)}


def of_gap(rank: Rank, rows: np.ndarray, kinds: np.ndarray, gaps: list[dict]) -> dict | None:
    """The streams of a device, and the thread that launched what came next, around its longest gap; None without one.

    gaps: of critical.gaps().  {"gap_us", "start_us": of the gap, "us", "lanes": [{"rank": None, "stream": a number or
    "host", "bars"}], "names"}; start_us counts from the beginning of what is shown.
    """
    if not gaps or not gaps[0]["us"]:
        return None
    gap_ns = round(gaps[0]["us"] * US)
    begin = int(rank.ts[rows].min()) + round(gaps[0]["start_us"] * US)
    around = int(AROUND_GAP * gap_ns) + 1
    low, high = begin - around, begin + gap_ns + around
    names, lanes = Names(), []
    for track in np.unique(rank.track[rows]):
        mine = rank.track[rows] == track
        if bars := _bars(rank, rows[mine], kinds[mine], low, high, names):
            lanes.append({"rank": None, "stream": str(rank.tracks[track][2]), "bars": bars})
    after = rows[np.searchsorted(rank.ts[rows], begin + gap_ns)]  # rows are by start
    call = window.launches(rank, np.array([after]))[0]
    if call >= 0:
        calls = np.flatnonzero(rank.is_kind(events.RUNTIME) & (rank.track == rank.track[call]))
        calls = calls[np.argsort(rank.ts[calls], kind="stable")]
        bars = _bars(rank, calls, np.full(len(calls), HOST, np.int8), low, high, names)
        lanes.append({"rank": None, "stream": "host", "bars": bars})
    facts = {"gap_us": gap_ns / US, "start_us": around / US, "us": (high - low) / US}
    return facts | {"lanes": lanes[:MAX_LANES], "names": list(names)}


def bars_of(
    start: Sequence[int],
    end: Sequence[int],
    kinds: Sequence[int],
    name_of: Callable[[int], str],
    low: int,
    high: int,
    names: "Names",
) -> list[list]:
    """Ranges by start, as sequences of nanoseconds -> bars from low to high, cut at both.

    name_of(index): the name of a range; names: Names, in which a bar's is looked up.
    """
    thin, bars = (high - low) / NUM_COLUMNS, []
    open_of: dict[int, list[int]] = {}
    for index, (begin, stop, kind) in enumerate(zip(start, end, kinds)):
        begin, stop = max(begin, low), min(stop, high)
        if stop < begin:
            continue
        last = open_of.get(kind)
        if last and stop - begin < thin and begin - last[1] < thin and last[1] - last[0] < 4 * thin:
            last[1], last[4] = max(last[1], stop), last[4] + 1
            continue
        open_of[kind] = [begin, stop, kind, index, 1]
        bars.append(open_of[kind])
    return [
        [
            (begin - low) / US,
            (stop - begin) / US,
            kind,
            names.index(name_of(index) if num == 1 else f"{num:,} of these"),
        ]
        for begin, stop, kind, index, num in bars
    ]


class Names(dict):
    """Name -> its number, in the order in which they came."""

    def index(self, name: str) -> int:
        return self.setdefault(name, len(self))


def _bars(rank, rows, kinds, low, high, names):
    """Of device rows or calls, by start."""
    inside = (rank.end[rows] > low) & (rank.ts[rows] < high)
    rows, kinds = rows[inside], kinds[inside]
    order = np.lexsort((rank.ts[rows], kinds == COMMUNICATION))
    rows, kinds = rows[order], kinds[order]

    def name_of(index):
        return rank.names[rank.name[rows[index]]]

    return bars_of(rank.ts[rows].tolist(), rank.end[rows].tolist(), kinds.tolist(), name_of, low, high, names)
