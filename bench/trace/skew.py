"""Ranks against each other: who was late, step by step and collective by collective.

Clocks of different hosts are not compared.  A collective ends for all at about the same time, so the rank whose kernel
ran shortest came last, and the others waited for it: wait = own duration - the shortest.
"""

import numpy as np

from bench.trace.columns import US
from bench.trace.kernels import COMMUNICATION

NUM_WORST = 10


def steps(by_rank):
    """{rank: lines of temporal.steps} -> [{"step", "fastest", "slowest", "skew_us"}] of steps that all ranks have.

    By own work: the step's busy time without communication that nothing hides, which is mostly waiting for others.
    """
    own_us = {}
    for rank, lines in by_rank.items():
        own_us[rank] = {line["step"]: line["busy_us"] - line["exposed_comm_us"] for line in lines}
    on_device = any(time_us for of_step in own_us.values() for time_us in of_step.values())
    if len(own_us) < 2 or not on_device:
        return []
    lines = []
    for step in sorted(set.intersection(*map(set, own_us.values()))):
        times = {rank: of_step[step] for rank, of_step in own_us.items()}
        fastest, slowest = min(times, key=times.get), max(times, key=times.get)
        lines.append({"step": step, "fastest": fastest, "slowest": slowest, "skew_us": times[slowest] - times[fastest]})
    return lines


def collectives(ranks):
    """{rank: (Rank, rows, types)} -> {"num_matched", "waits": [{"rank", "wait_us", "num_last"}], "worst": [...]} or
    None.

    The k-th communication kernel of a name on one rank meets the k-th on the others; names that do not occur equally
    often on all ranks are not matched (num_unmatched).
    """
    if len(ranks) < 2:
        return None
    numbers, sequences = list(ranks), [_sequences(*one) for one in ranks.values()]
    waits, num_last = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0)
    worst, num_unmatched = [], 0
    for name in sorted(set.union(*map(set, sequences))):
        durations = [of_rank.get(name, ()) for of_rank in sequences]
        if len(set(map(len, durations))) != 1:
            num_unmatched += max(map(len, durations))
            continue
        durations = np.array(durations)
        waited = durations - durations.min(axis=0)
        for number, of_rank in zip(numbers, waited):
            waits[number] += int(of_rank.sum())
        for call, (late, longest) in enumerate(zip(durations.argmin(axis=0).tolist(), waited.max(axis=0).tolist())):
            num_last[numbers[late]] += 1
            line = {"name": name, "call": call, "late_rank": numbers[late]}
            worst.append(line | {"longest_wait_us": longest / US})
    if not worst:
        return None
    worst.sort(key=lambda line: -line["longest_wait_us"])
    lines = [{"rank": number, "wait_us": waits[number] / US, "num_last": num_last[number]} for number in numbers]
    return {"num_matched": len(worst), "num_unmatched": num_unmatched, "waits": lines, "worst": worst[:NUM_WORST]}


def _sequences(rank, rows, kinds):
    """{name: durations in the order of start} of a rank's communication kernels."""
    mine = rows[kinds == COMMUNICATION]
    mine = mine[np.argsort(rank.ts[mine], kind="stable")]
    durations = {}
    for name, dur in zip(rank.name[mine].tolist(), rank.dur[mine].tolist()):
        durations.setdefault(rank.names[name], []).append(dur)
    return durations
