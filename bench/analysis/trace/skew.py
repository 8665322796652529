"""Ranks against each other: who was late, collective by collective.

Clocks of different hosts are not compared.  A collective ends for all at about the same time, so the rank whose kernel
ran shortest came last, and the others waited for it: wait = own duration - the shortest.
"""

from collections import Counter
from typing import Any

import numpy as np

from bench.analysis.trace.columns import US
from bench.analysis.trace.critical import MAX_LANES, Picture
from bench.analysis.trace.device_time import COMMUNICATION
from bench.analysis.trace.rank import Rank

NUM_WORST = 10
LEAD, TAIL = 0.5, 0.15  # of the slowest collective's time that is shown before and after it
Ranks = dict[int, tuple[Rank, np.ndarray, np.ndarray]]  # number: rank, its device rows, device_time.types of them


def waits(ranks: Ranks) -> tuple[list[dict[str, Any]], int]:
    """([{"name", "call", "late_rank", "rows", "wait_ns"}] of the collectives that all ranks share, calls not matched).

    By process group and sequence number where the traces have them (of NCCL, in torch 2.13), so that a trace
    whose beginning is missing still meets the others; call is that number.  Otherwise the k-th kernel of a name on one
    rank meets the k-th on the others, and names that do not occur equally often on all ranks are not matched.
    rows, wait_ns: by rank, in the order of ranks: the kernel, and for how long of it its rank waited for the last one.
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
    """What waits() gave -> {"num_matched", "num_unmatched", "waits": [{"rank", "wait_us", "num_last"}], "worst":
    [...]}, or None.
    """
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
    """Ranks side by side around the collective for which one of them waited longest; None without one.

    calls: of waits().  {"name", "late_rank", "wait_us", "us", "lanes": [{"rank", "stream": None, "bars"}],
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
    shown = sorted(members, key=lambda member: (member[0] != late, -member[2]))[:MAX_LANES]
    picture, lanes = Picture(longest_ns + lead + tail), []
    for number, row, _ in sorted(shown):
        rank, rows, kinds = ranks[number]
        bars = picture.bars_of_rows(rank, rows, kinds, int(rank.end[row]) - longest_ns - lead)
        lanes.append({"rank": number, "stream": None, "bars": bars})
    facts = {"name": slowest["name"], "late_rank": late, "wait_us": max(slowest["wait_ns"]) / US}
    return facts | {"us": picture.ns / US, "lanes": lanes, "names": list(picture.names)}


def _by_number(rank: Rank, rows: list[int]) -> dict[Any, int]:
    """{(process group, sequence number, which of several kernels of that collective): row}."""
    num_seen: Counter[tuple[str, int]] = Counter()
    by_number = {}
    for row in rows:
        number = rank.sequence[row]
        by_number[*number, num_seen[number]] = row
        num_seen[number] += 1
    return by_number
