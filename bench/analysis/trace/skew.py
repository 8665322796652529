"""Compares ranks with each other: which of them was late, collective by collective.

Clocks of different hosts are not compared.  A collective ends for all at about the same time, so the rank whose kernel
is the shortest came last, and the others waited for it: wait = own duration - the shortest.
"""

from collections import Counter
from typing import Any

import numpy as np

from bench.analysis.trace.columns import US
from bench.analysis.trace.device_time import COMMUNICATION
from bench.analysis.trace.rank import Rank

NUM_WORST = 10
NUM_COLUMNS = 600  # of a picture; narrower bars could not be seen
MAX_LANES = 16
LEAD, TAIL = 0.5, 0.15  # shares of the slowest collective's duration that are shown before and after it
Ranks = dict[int, tuple[Rank, np.ndarray, np.ndarray]]  # {number: (rank, its device rows, their device_time.types)}


def waits(ranks: Ranks) -> tuple[list[dict[str, Any]], int]:
    """Returns ([{"name", "call", "late_rank", "rows", "wait_ns"}] of the shared collectives, number of unmatched
    calls).

    Calls are matched by process group and sequence number where the traces have them (of NCCL, in torch 2.13), even if
    the beginning of a trace is missing; call is that number.  Otherwise the k-th kernel of a name on one rank matches
    the k-th on the others, if the name occurs equally often on all.  rows, wait_ns: by rank, in the order of ranks: the
    kernel, and for how long of it its rank waited for the last one.
    """
    numbers, sequences = list(ranks), list[dict[str, list[int]]]()
    for rank, rows, kinds in ranks.values():
        mine = rows[kinds == COMMUNICATION]
        sequences.append({})
        for row in mine[np.argsort(rank.ts[mine], kind="stable")].tolist():
            sequences[-1].setdefault(rank.names[rank.name[row]], []).append(row)
    lines, num_unmatched = [], 0
    for name in sorted(set().union(*sequences)) if len(ranks) > 1 else ():
        calls = [(rank, by_name.get(name, [])) for (rank, *_), by_name in zip(ranks.values(), sequences)]
        is_numbered = all(row in rank.sequence for rank, mine in calls for row in mine)
        by_key: list[dict[Any, int]]
        by_key = [_by_number(rank, mine) if is_numbered else dict(enumerate(mine)) for rank, mine in calls]
        shared = [key for key in by_key[0] if all(key in rows for rows in by_key)]
        if not is_numbered and len(set(map(len, by_key))) > 1:
            shared = []
        num_unmatched += len(set().union(*by_key)) - len(shared)
        if not shared:
            continue
        rows = np.array([[row_by_key[key] for key in shared] for row_by_key in by_key])
        durations = np.array([rank.dur[mine] for (rank, *_), mine in zip(ranks.values(), rows)])
        waited, late = durations - durations.min(axis=0), durations.argmin(axis=0)
        for index, key in enumerate(shared):
            line = {"name": name, "call": key[1] if is_numbered else key, "late_rank": numbers[late[index]]}
            lines.append(line | {"rows": rows[:, index].tolist(), "wait_ns": waited[:, index].tolist()})
    return lines, num_unmatched


def collectives(ranks: Ranks, matched: list[dict[str, Any]], num_unmatched: int) -> dict[str, Any] | None:
    """Returns {"num_matched", "num_unmatched", "waits": [{"rank", "wait_us", "num_last"}], "worst": [...]} of what
    waits() returned; None if it matched nothing."""
    if not matched:
        return None
    sums_ns, num_last = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    worst = []
    for collective in matched:
        for number, wait_ns in zip(ranks, collective["wait_ns"]):
            sums_ns[number] += wait_ns
        num_last[collective["late_rank"]] += 1
        line = {name: collective[name] for name in ("name", "call", "late_rank")}
        worst.append(line | {"longest_wait_us": max(collective["wait_ns"]) / US})
    worst.sort(key=lambda line: -line["longest_wait_us"])
    lines = [{"rank": number, "wait_us": sums_ns[number] / US, "num_last": num_last[number]} for number in ranks]
    return {"num_matched": len(matched), "num_unmatched": num_unmatched, "waits": lines, "worst": worst[:NUM_WORST]}


def picture_of_collective(ranks: Ranks, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the ranks side by side around the collective in which one of them waited longest; None without one.

    calls: of waits().  {"name", "late_rank", "wait_us", "us", "lanes": [{"rank", "bars": [[start_us, us, kind, index
    into "names"]]}], "names"}; us: what is shown; kind: index into device_time.TYPES.  Bars too thin to see are joined
    with their neighbours of the same kind; such a bar's name says how many it holds.  Clocks of ranks are not compared:
    each is set by the end of this collective, which all leave at about the same time.
    """
    if not calls:
        return None
    slowest = max(calls, key=lambda call: max(call["wait_ns"]))
    members = list(zip(ranks, slowest["rows"], slowest["wait_ns"]))
    longest_ns = max(int(ranks[number][0].dur[row]) for number, row, _ in members)
    lead_ns = int(LEAD * longest_ns) + 1
    shown_ns = lead_ns + longest_ns + int(TAIL * longest_ns) + 1
    late, names = slowest["late_rank"], dict[str, int]()
    shown = sorted(members, key=lambda member: (member[0] != late, -member[2]))[:MAX_LANES]
    lanes = []
    for number, row, _ in sorted(shown):
        low = int(ranks[number][0].end[row]) - longest_ns - lead_ns
        lanes.append({"rank": number, "bars": _bars(*ranks[number], low, low + shown_ns, names)})
    facts = {"name": slowest["name"], "late_rank": late, "wait_us": max(slowest["wait_ns"]) / US}
    return facts | {"us": shown_ns / US, "lanes": lanes, "names": list(names)}


def _bars(
    rank: Rank, rows: np.ndarray, kinds: np.ndarray, low: int, high: int, names: dict[str, int]
) -> list[list[Any]]:
    """Returns bars of what ran from low to high ns, cut at both ends.  names: {name: number}; new ones are added."""
    inside = (rank.end[rows] > low) & (rank.ts[rows] < high)
    order = np.lexsort((rank.ts[rows[inside]], kinds[inside] == COMMUNICATION))
    thin_ns, bars = (high - low) / NUM_COLUMNS, list[list[Any]]()
    last_of_kind: dict[int, list[Any]] = {}
    for row, kind in zip(rows[inside][order].tolist(), kinds[inside][order].tolist()):
        begin, end = max(int(rank.ts[row]), low), min(int(rank.end[row]), high)
        last = last_of_kind.get(kind)
        if last and end - begin < thin_ns and begin - last[1] < thin_ns and last[1] - last[0] < 4 * thin_ns:
            last[1], last[4] = max(last[1], end), last[4] + 1
            continue
        last_of_kind[kind] = [begin, end, kind, rank.names[rank.name[row]], 1]
        bars.append(last_of_kind[kind])
    drawn = []
    for begin, end, kind, name, count in bars:
        number = names.setdefault(name if count == 1 else f"{count:,} of these", len(names))
        drawn.append([(begin - low) / US, (end - begin) / US, kind, number])
    return drawn


def _by_number(rank: Rank, rows: list[int]) -> dict[Any, int]:
    """Returns {(process group, sequence number, which of several kernels of that collective): row}."""
    num_seen: Counter[tuple[str, int]] = Counter()
    by_number = {}
    for row in rows:
        number = rank.sequence[row]
        by_number[*number, num_seen[number]] = row
        num_seen[number] += 1
    return by_number
