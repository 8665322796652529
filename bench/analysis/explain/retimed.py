"""Computes what a step would take if some of its work were faster, by timing the trace's graph of dependencies again.

Nodes are moments: a call of the host begins, a call that waits for the device returns, a device row starts or ends.  A
moment comes when the last of those that it needs has come, each with a delay:

- a call begins as long after the host's previous moment, on whatever thread, as it did in the trace;
- a call that waits for the device returns when the row ends that was the last to end before it returned; a launch that
  found no room in the device's queue, when the row starts that was the last to start before it returned;
- a row starts after the previous row on its stream, after its launch, and, where neither explains why it started so
  late, after the row of another stream at whose end it started;
- a collective ends for every rank after the last of them has started it.

If a moment came later than all of these, the difference is added to the delay of the latest, so that an unchanged graph
gives the recorded times to the nanosecond.  A dependency that held nothing up cannot be seen in a trace, whose waits
for events do not name the event: a gain is too large by whatever such a dependency would have held up.
"""

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.analysis.explain.host import WAITS_FOR_DEVICE
from bench.analysis.explain.parts import Change
from bench.analysis.trace import events, window
from bench.analysis.trace.columns import sums
from bench.analysis.trace.rank import Rank

SLACK_NS = 1_000  # a row that starts later than this after all its known needs follows a row of another stream
FULL_QUEUE = 1_000  # pending launches, from which on a further call blocks: 1,029 to 1,041 were seen
LAUNCH_NS = 5_000  # from the beginning of a launching call to its row, if nothing else holds it up; assumed
BLOCKED_NS = 100_000  # a launch that takes longer with a full queue was blocked
MAX_ROWS = 100_000  # with more on all ranks, nothing is timed again, as it would take longer than the account
Needs = list[tuple[int, int]]  # (node, delay ns), the one that came last first


class _Device:
    """The nodes of a rank.  starts, ends: {row: node}; moments: [(ns, node)] of its host, by time; last: its end."""

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.moments: list[tuple[int, int]] = []
        self.last = -1


class Graph:
    """The dependencies of all ranks of a job.  spans: {rank: (begin ns, end ns)} of the steps that count."""

    def __init__(
        self, ranks: Sequence[Rank], spans: Mapping[int, tuple[int, int]], collectives: Sequence[Mapping[str, Any]]
    ) -> None:
        self.at_ns: list[int] = []
        self.needs: list[Needs] = []
        self.begin_of_return: dict[int, int] = {}  # {node of a call's return: node of its beginning}
        self.is_end: set[int] = set()
        self.devices = {rank.rank: self._device(rank, spans[rank.rank][1]) for rank in ranks}
        self._meet([rank.rank for rank in ranks], collectives)
        at_ns = self.at_ns
        for node, needs in enumerate(self.needs):
            if needs:  # the one that was met last comes first, with the delay that it then had
                latest = max(needs, key=lambda need: at_ns[need[0]] + need[1])
                needs.remove(latest)
                needs.insert(0, self._after(latest[0], at_ns[node]))
        self.order = self._sorted()

    def _node(self, at_ns: int, needs: Needs | None = None) -> int:
        self.at_ns.append(at_ns)
        self.needs.append(needs or [])
        return len(self.at_ns) - 1

    def _after(self, node: int, at_ns: int) -> tuple[int, int]:
        """Returns a need of node with the delay that puts the moment where it was, at at_ns."""
        return node, at_ns - self.at_ns[node]

    def _device(self, rank: Rank, until_ns: int) -> _Device:
        device, rows = _Device(), rank.device_rows()
        rows = rows[rank.ts[rows] < until_ns]
        rows = rows[np.argsort(rank.ts[rows], kind="stable")]
        calls = window.launches(rank, rows).tolist()
        starts, ends = rank.ts[rows].tolist(), rank.end[rows].tolist()
        for row, start, end in zip(rows.tolist(), starts, ends):
            device.starts[row] = self._node(start)
            device.ends[row] = self._node(end, [(device.starts[row], end - start)])
            self.is_end.add(device.ends[row])
        self._host(rank, device, rows.tolist(), calls, until_ns)
        self._streams(rank, device, rows)
        last_of_track = dict(zip(rank.track[rows].tolist(), rows.tolist()))
        needs = [(device.ends[row], 0) for row in last_of_track.values() if rank.end[row] <= until_ns]
        if device.moments:
            needs.append((device.moments[-1][1], 0))
        device.last = self._node(until_ns, needs)
        return device

    def _host(self, rank: Rank, device: _Device, rows: list[int], calls: list[int], until_ns: int) -> None:
        """Adds the moments of the host, and what rows and calls need of each other."""
        runtime = np.flatnonzero(rank.is_kind(events.RUNTIME) & (rank.ts < until_ns))
        waiting = set(runtime[rank.is_named(WAITS_FOR_DEVICE.search, runtime)].tolist())
        blocked = self._blocked(rank, rows, calls)
        launched = collections.defaultdict(list)
        for row, call in zip(rows, calls):
            if call >= 0:
                launched[call].append(row)
        moments = [(int(rank.ts[call]), False, call) for call in waiting | set(launched)]
        moments += [(int(rank.end[call]), True, call) for call in waiting | set(blocked) if rank.end[call] < until_ns]
        moments += [(end, False, -1) for _, _, end in window.steps(rank, include_last_step=True) if end <= until_ns]
        begun: dict[int, int] = {}
        ended: list[tuple[int, int]] = []  # (end ns, row) of rows launched so far
        previous: int | None = None
        for at_ns, is_return, call in sorted(moments):
            if is_return:
                num_ended = bisect.bisect_right(ended, at_ns, key=lambda entry: entry[0])
                node = self._node(at_ns, [(begun[call], 0)])
                if call in blocked:
                    self.needs[node].append((device.starts[blocked[call]], 0))
                elif num_ended:
                    self.needs[node].append((device.ends[ended[num_ended - 1][1]], 0))
                self.begin_of_return[node] = begun[call]
            else:
                node = self._node(at_ns)
                if previous is not None:
                    self.needs[node].append(self._after(previous, at_ns))
                begun[call] = node
                for row in launched.get(call, ()):
                    self.needs[device.starts[row]].append((node, min(LAUNCH_NS, int(rank.ts[row]) - at_ns)))
                    bisect.insort(ended, (int(rank.end[row]), row))
            device.moments.append((at_ns, node))
            previous = node

    def _blocked(self, rank: Rank, rows: list[int], calls: list[int]) -> dict[int, int]:
        """Returns {launching call that found the queue full: the last row that had started when it returned}."""
        launched = np.array([(row, call) for row, call in zip(rows, calls) if call >= 0], np.int64).reshape(-1, 2)
        long = np.unique(launched[rank.dur[launched[:, 1]] > BLOCKED_NS, 1])
        called, started = np.sort(rank.ts[launched[:, 1]]), rank.ts[launched[:, 0]]  # rows are sorted by start
        has_started = np.searchsorted(started, rank.end[long], side="right")
        is_full = np.searchsorted(called, rank.ts[long]) - np.searchsorted(started, rank.ts[long]) >= FULL_QUEUE
        return {
            call: int(launched[count - 1, 0])
            for call, count in zip(long[is_full].tolist(), has_started[is_full].tolist())
            if count
        }

    def _streams(self, rank: Rank, device: _Device, rows: np.ndarray) -> None:
        tracks = rank.track[rows]
        on_track = {track: rows[tracks == track] for track in np.unique(tracks).tolist()}
        stamps = {
            track: (mine.tolist(), np.maximum.accumulate(rank.end[mine]).tolist()) for track, mine in on_track.items()
        }
        for track, mine in on_track.items():
            previous: int | None = None
            for row in mine.tolist():
                node, start = device.starts[row], int(rank.ts[row])
                needs = self.needs[node]
                if previous is not None:
                    needs.append((device.ends[previous], min(0, start - int(rank.end[previous]))))
                others = [entry for other, entry in stamps.items() if other != track]
                ready_ns = max((self.at_ns[need] + delay for need, delay in needs), default=None)
                if ready_ns is None or start - ready_ns > SLACK_NS:
                    fits = [
                        (ends[index], rows_there[index])
                        for rows_there, ends in others
                        if (index := bisect.bisect_right(ends, start) - 1) >= 0
                    ]
                    if fits and (ready_ns is None or max(fits)[0] > ready_ns):
                        needs.append((device.ends[max(fits)[1]], 0))
                previous = row

    def _meet(self, numbers: Sequence[int], collectives: Sequence[Mapping[str, Any]]) -> None:
        """Makes a collective that ranks share end after the last of them has started it.

        The clocks of ranks are not compared but aligned so that collectives end for all at once, in the median.
        """
        if not collectives:
            return
        ends = [self.devices[number].ends for number in numbers]
        shared = [
            [rank_ends[row] for rank_ends, row in zip(ends, line["rows"])]
            for line in collectives
            if all(row in rank_ends for rank_ends, row in zip(ends, line["rows"]))
        ]
        if not shared:
            return
        ends_ns = np.array([[self.at_ns[node] for node in nodes] for nodes in shared])
        offsets_ns = np.median(ends_ns - ends_ns[:, :1], axis=0).astype(np.int64).tolist()
        for nodes in shared:
            starts = [self.needs[node][0][0] for node in nodes]
            come_ns = max(self.at_ns[start] - offset for start, offset in zip(starts, offsets_ns))
            for node, offset in zip(nodes, offsets_ns):
                own_ns = self.at_ns[node] - offset - come_ns
                self.needs[node] = [(start, own_ns + offset - their_ns) for start, their_ns in zip(starts, offsets_ns)]

    def _sorted(self) -> list[int] | None:
        """Returns the nodes, each after those that it needs; None if the ranks' collectives contradict each other."""
        num_needed = [len(needs) for needs in self.needs]
        followers: list[list[int]] = [[] for _ in self.needs]
        for node, needs in enumerate(self.needs):
            for need, _ in needs:
                followers[need].append(node)
        order = [node for node, count in enumerate(num_needed) if not count]
        for node in order:
            for follower in followers[node]:
                num_needed[follower] -= 1
                if not num_needed[follower]:
                    order.append(follower)
        return order if len(order) == len(self.needs) else None

    def ends_ns(self, changes: Sequence[Mapping[int, Iterable[Change]]]) -> np.ndarray:
        """Returns when each rank's last step ends with each set of changes, {rank: changes}: int64 ns [rank, set]."""
        shortened_ns: dict[int, np.ndarray] = collections.defaultdict(lambda: np.zeros(len(changes), np.int64))
        for column, by_rank in enumerate(changes):
            for number, rank_changes in by_rank.items():
                for node, ns in self._shortened(self.devices[number], rank_changes):
                    shortened_ns[node][column] += ns
        assert self.order is not None
        times = list(np.zeros((len(self.needs), len(changes)), np.int64))
        for node in self.order:
            needs, moment, less = self.needs[node], times[node], shortened_ns.get(node)
            if not needs:  # such as the host's first moment, which comes earlier by what the step did before it
                moment[:] = self.at_ns[node] - (0 if less is None else less)
                continue
            first, delay = needs[0]
            np.add(times[first], delay, out=moment)
            is_return = node in self.begin_of_return
            if less is not None and not is_return:
                moment -= less
            for need, delay in needs[1:]:
                without = less if less is not None and node in self.is_end else 0
                np.maximum(moment, times[need] + (delay - without), out=moment)
            if less is not None and is_return:  # the call waits less, whatever it waits for
                begin = self.begin_of_return[node]
                alone = times[begin] + np.maximum(0, self.at_ns[node] - self.at_ns[begin] - less)
                moment[:] = np.where(less > 0, np.minimum(moment, alone), moment)
        return np.stack([times[device.last] for device in self.devices.values()])

    def saved_ns(self, changes: Sequence[Mapping[int, Iterable[Change]]]) -> np.ndarray:
        """Returns how much earlier the last step of each rank ends with each set of changes: int64 ns [rank, set]."""
        ends_ns = self.ends_ns([{}, *changes])
        return ends_ns[:, :1] - ends_ns[:, 1:]

    def _shortened(self, device: _Device, changes: Iterable[Change]) -> Iterator[tuple[int, int]]:
        """Yields (node, ns) of the nodes that changes make earlier, without those that the graph does not have."""
        on_host: list[Change] = []
        for change in changes:
            if change.row is None:
                on_host.append(change)
            elif (node := (device.starts if change.is_start else device.ends).get(change.row)) is not None:
                yield node, change.ns
        if on_host and device.moments:
            moments_ns, nodes = np.array(device.moments, np.int64).T
            ns = np.hstack([change.ns for change in on_host])
            index = np.searchsorted(moments_ns, np.hstack([change.begin_ns for change in on_host]) + ns)
            index[index == len(nodes)] = -1
            total_ns = sums(index, len(nodes), ns)
            changed = np.flatnonzero(total_ns)
            yield from zip(nodes[changed].tolist(), total_ns[changed].tolist())


def of(
    ranks: Sequence[Rank], spans_ns: Mapping[int, tuple[int, int]], collectives: Sequence[Mapping[str, Any]]
) -> Graph | None:
    """Returns the graph of all ranks; None if there are more than MAX_ROWS rows or collectives contradict each other.

    spans_ns: {rank: (begin, end)} of the steps that count; collectives: of skew.waits().
    """
    if sum(len(rank.device_rows()) for rank in ranks) > MAX_ROWS:
        return None
    graph = Graph(ranks, spans_ns, collectives)
    return graph if graph.order is not None else None
