"""Ranks against each other: who was late, step by step and collective by collective.

Clocks of different hosts are not compared.  A collective ends for all at about the same time, so the rank whose kernel ran
shortest came last, and the others waited for it: wait = own duration - the shortest.
"""

import numpy as np

US = 1000
COMMUNICATION = 1


def steps(by_rank):
    """{rank: lines of temporal.steps} -> [{"step", "fastest", "slowest", "skew_us"}] of steps that all ranks have, by own work.

    Own work: the step's busy time without communication that nothing hides, which is mostly waiting for others.
    """
    own_us = {
        rank: {line["step"]: line["busy_us"] - line["exposed_comm_us"] for line in lines}
        for rank, lines in by_rank.items()
    }
    common = set.intersection(*map(set, own_us.values())) if own_us else set()
    if not any(time_us for of_step in own_us.values() for time_us in of_step.values()):
        return []  # traces of the CPU alone
    found = []
    for step in sorted(common) if len(own_us) > 1 else ():
        times = {rank: of_step[step] for rank, of_step in own_us.items()}
        fastest, slowest = min(times, key=times.get), max(times, key=times.get)
        found.append({"step": step, "fastest": fastest, "slowest": slowest, "skew_us": times[slowest] - times[fastest]})
    return found


def collectives(ranks):
    """{rank: (Rank, rows, types)} -> {"num_matched", "waits": [{"rank", "wait_us", "num_last"}], "worst": [...]} or None.

    The k-th communication kernel of a name on one rank meets the k-th on the others; names that do not occur equally often
    on all ranks are left out (num_unmatched).
    """
    if len(ranks) < 2:
        return None
    sequences = {number: _sequences(*one) for number, one in ranks.items()}
    names = set.union(*(set(found) for found in sequences.values()))
    waits, last, worst, matched, unmatched = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0), [], 0, 0
    for name in names:
        lists = [sequences[number].get(name, ()) for number in ranks]
        if len({len(one) for one in lists}) != 1:
            unmatched += max(map(len, lists))
            continue
        durations = np.array(lists)
        matched += durations.shape[1]
        shortest = durations.min(axis=0)
        for place, number in enumerate(ranks):
            waits[number] += int((durations[place] - shortest).sum())
        order = list(ranks)
        for call in range(durations.shape[1]):
            last[order[int(durations[:, call].argmin())]] += 1
            spread = int(durations[:, call].max() - shortest[call])
            worst.append(
                {
                    "name": name,
                    "call": call,
                    "late_rank": order[int(durations[:, call].argmin())],
                    "longest_wait_us": spread / US,
                }
            )
    if not matched:
        return None
    worst.sort(key=lambda one: -one["longest_wait_us"])
    lines = [{"rank": number, "wait_us": waits[number] / US, "num_last": last[number]} for number in ranks]
    return {"num_matched": matched, "num_unmatched": unmatched, "waits": lines, "worst": worst[:10]}


def _sequences(rank, rows, kinds):
    """{name: durations in the order of start} of a rank's communication kernels."""
    mine = rows[kinds == COMMUNICATION]
    found = {}
    for row in mine[np.argsort(rank.ts[mine], kind="stable")]:
        found.setdefault(rank.names[rank.name[row]], []).append(int(rank.dur[row]))
    return found
