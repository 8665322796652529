"""Ranks of one job -> the account of their steps: the --json answer of ./run.sh explain for a trace.

    {"of": "device" | "host", "step_ms", "num_steps", "parts": [line], "ranks": {"0": {...}}, "lateness", "next": [...]}

step_ms is the mean over the counted steps and ranks.  A line of parts is {"part", "meaning", "is_limit", "ms", "pct",
"source"}, mean over the same, source: where a limit's rates are from, None where it is not a limit; a rank's own has
"sum_ns", integers that add up to its "step_sum_ns" exactly.

lateness: for whom the others wait, what that rank does longer than they, and what the step could be without.  A rank
that comes last to a collective has the shortest kernel (bench/analysis/trace/skew.py).  Why it came last is what its
own account has more of than the median of the others: parts other than waiting, of which a late rank has little itself.
"""

import collections
import statistics
from collections.abc import Callable, Iterable

from bench.analysis.explain import device_steps, host, parts, ranking
from bench.analysis.explain.ceilings import Ceilings
from bench.analysis.trace import categories, skew, window
from bench.analysis.trace.analysis import device_name
from bench.analysis.trace.load import Rank
from bench.base.units import ms_from_ns
from bench.machine.passport import kept

NUM_REASONS = 5
MAX_PIECES = 200


def of_ranks(
    ranks: Iterable[Rank],
    rules: tuple[categories.Rule, ...] = categories.RULES,
    include_last_step: bool = False,
    measured_of: Callable[[int, str | None], kept.Ceilings | None] = lambda rank, device: None,
) -> dict:
    """Ranks of load.load_all() or load.by_window().  ValueError where none of them recorded anything that has time.

    measured_of: what the device of a rank, by the trace's name of it, reached by its passport, or None.
    """
    ranks = [rank for rank in ranks if len(rank.ts)]
    on_device = [rank for rank in ranks if len(rank.device_rows())]
    ceilings = {rank.rank: Ceilings(name := device_name(rank), measured_of(rank.rank, name)) for rank in ranks}
    if on_device:
        accounts = _on_device(on_device, rules, include_last_step, ceilings)
    else:
        accounts = _on_host(ranks, include_last_step, ceilings)
    accounts = {number: one for number, one in accounts.items() if one is not None}
    if not accounts:
        raise ValueError("the trace holds no kernel and no operator: record one with profile=window")
    return answer(accounts, "device" if on_device else "host")


def answer(accounts: dict, of: str) -> dict:
    """{rank: {"rank": Rank or None, "steps": [(number, begin ns, end ns)], "pieces", "ceilings", "host_step_ms"}} of at
    least one rank -> the answer; of: what was measured."""
    by_rank = {str(number): _of_rank(one) for number, one in accounts.items()}
    step_ms = _mean(one["step_ms"] for one in by_rank.values())
    lines, ns_by_part = [], {number: one["pieces"].by_part() for number, one in accounts.items()}
    for part in parts.ORDER:
        of_part = [_mean_ns(ns_by_part[number].get(part, 0), one) for number, one in accounts.items()]
        if any(of_part):
            sources = set().union(*(one["ceilings"].sources.get(part, ()) for one in accounts.values()))
            lines.append(_line(part, _mean(of_part), step_ms) | {"source": "; ".join(sorted(sources)) or None})
    answer = {"of": of, "step_ms": step_ms, "num_steps": len(next(iter(accounts.values()))["steps"])}
    answer |= {"limit_ms": sum(line["ms"] for line in lines if line["is_limit"]), "parts": lines, "ranks": by_rank}
    answer["lateness"] = lateness_of(accounts)
    return answer | {"next": ranking.of(accounts, step_ms)}


def _of_rank(one):
    """{"step_ms", "step_sum_ns", "host_step_ms", "device", "ceiling", "steps", "parts", "pieces"} of one rank."""
    pieces, steps = one["pieces"], one["steps"]
    sum_ns = sum(end - begin for _, begin, end in steps)
    total = pieces.total()
    lines = [
        _line(part, _mean_ns(ns, one), ms_from_ns(sum_ns) / len(steps)) | {"sum_ns": ns}
        for part, ns in pieces.by_part().items()
    ]
    return {
        "file": one["rank"] and one["rank"].path.name,
        "step_ms": ms_from_ns(sum_ns) / len(steps),
        "step_sum_ns": sum_ns,
        "host_step_ms": one["host_step_ms"],
        "device": one["ceilings"].device,
        "ceiling": one["ceilings"].source,
        "steps": [
            {"step": number, "ms": ms_from_ns(end - begin), "sum_ns": pieces.by_part(index)}
            for index, (number, begin, end) in enumerate(steps)
        ],
        "parts": lines,
        "num_pieces": len(total),
        "pieces": [
            piece._asdict() | {"ms": _mean_ns(ns, one), "sum_ns": ns, "count": pieces.count[piece]}
            for piece, ns in sorted(total.items(), key=lambda item: (-item[1], str(item[0])))[:MAX_PIECES]
        ],
    }


def _line(part, ms, step_ms):
    pct = 100 * ms / step_ms if step_ms else 0.0
    return {"part": part, "meaning": parts.MEANING[part], "is_limit": part in parts.LIMIT, "ms": ms, "pct": pct}


def _mean(values):
    values = list(values)
    return sum(values) / len(values)


def _mean_ns(ns, one):
    return ms_from_ns(ns) / len(one["steps"])


def _on_device(ranks, rules, include_last_step, ceilings):
    """{rank: {"rank", "steps", "pieces", "ceilings", "host_step_ms"}}"""
    waits, accounts = _waits(ranks, rules, include_last_step), {}
    for rank in ranks:
        steps, mine = device_steps.spans(rank, include_last_step), ceilings[rank.rank]
        pieces = device_steps.pieces(device_steps.Device(rank, rules, waits.get(rank.rank)), steps, mine)
        accounts[rank.rank] = _account(rank, steps, pieces, mine, include_last_step)
    return accounts


def _waits(ranks, rules, include_last_step):
    """{rank: {device row: (ns, late rank, call)}} of the collectives that all ranks share."""
    rows = {rank.rank: device_steps.counted_rows(rank, rules, include_last_step) for rank in ranks}
    waits = {number: {} for number in rows}
    for line in skew.waits(rows)[0]:
        for number, row, wait_ns in zip(rows, line["rows"], line["wait_ns"]):
            waits[number][row] = (wait_ns, line["late_rank"], line["call"])
    return waits


def _on_host(ranks, include_last_step, ceilings):
    accounts = {}
    for rank in ranks:
        if steps := host.host_spans(rank, include_last_step):
            pieces = host.host_pieces(rank, steps, ceilings[rank.rank])
            accounts[rank.rank] = _account(rank, steps, pieces, ceilings[rank.rank], include_last_step)
    return accounts


def _account(rank, steps, pieces, ceilings, include_last_step):
    on_host = window.steps(rank, include_last_step) if rank.steps() else []
    host_ms = ms_from_ns(on_host[-1][2] - on_host[0][1]) / len(on_host) if on_host else None
    named = {"rank": rank, "steps": steps, "pieces": pieces, "ceilings": ceilings, "host_step_ms": host_ms}
    return named if any(end > begin for _, begin, end in steps) else None


def lateness_of(accounts: dict) -> list[dict]:
    """{rank: account} -> [{"rank", "wait_ms", "waits_ms", "without_ms", "collectives", "more", "reasons"}], the latest
    first; empty for one rank.

    Milliseconds a step.  wait_ms: median of the other ranks' exposed waiting for it; waits_ms: of each of them;
    without_ms: the median of what their step would be without it; more: {part: ms} that it has more of than the median
    of the others, the largest first; reasons: pieces likewise, [{"part", "what", "where", "ms"}].
    """
    if len(accounts) < 2:
        return []
    waiting = {number: _waiting(one) for number, one in accounts.items()}
    lines = []
    for late in accounts:
        others = [number for number in accounts if number != late]
        waits_ms = {number: waiting[number][late] for number in others}
        if not any(waits_ms.values()):
            continue
        without_ms = [_step_ms(accounts[number]) - waits_ms[number] for number in others]
        line = {"rank": late, "wait_ms": statistics.median(waits_ms.values()), "waits_ms": waits_ms}
        line |= {"without_ms": statistics.median(without_ms), "collectives": _collectives(accounts, late)}
        lines.append(line | {"more": _more(accounts, late), "reasons": _reasons(accounts, late)})
    return sorted(lines, key=lambda line: -line["wait_ms"])


def _waiting(one):
    """Late rank -> ms that this rank waited for it, exposed."""
    waited_ms = collections.Counter()
    for piece, ms in _by_piece(one).items():
        if piece.part == parts.WAITING:
            waited_ms[piece.late_rank] += ms
    return waited_ms


def _collectives(accounts, late):
    """[{"what", "ms"}]: where the others wait for a rank, mean over all of them, longest first."""
    waited_ms = collections.Counter()
    for one in accounts.values():
        for piece, ms in _by_piece(one).items():
            if piece.part == parts.WAITING and piece.late_rank == late:
                waited_ms[piece.what] += ms / (len(accounts) - 1)
    return [{"what": what, "ms": ms} for what, ms in waited_ms.most_common(NUM_REASONS)]


def _more(accounts, late):
    """{part: ms} of which a rank has more than the median of the others, the largest first."""
    by_part = {number: _by_part(one) for number, one in accounts.items()}
    mine = by_part.pop(late)
    more = {part: ms - statistics.median(other[part] for other in by_part.values()) for part, ms in mine.items()}
    return {part: more[part] for part in sorted(more, key=lambda part: -more[part]) if more[part] > 0}


def _by_part(one):
    by_part_ms = collections.Counter()
    for (part, _), ms in _by_origin(one).items():
        by_part_ms[part] += ms
    return by_part_ms


def _reasons(accounts, late):
    mine, others = _by_origin(accounts[late]), [_by_origin(one) for number, one in accounts.items() if number != late]
    more = {key: ms - statistics.median(other[key] for other in others) for key, ms in mine.items()}
    longest = sorted((key for key in more if more[key] > 0), key=lambda key: -more[key])[:NUM_REASONS]
    where = {(piece.part, piece.what): piece.where for piece in accounts[late]["pieces"].total()}
    return [{"part": part, "what": what, "where": where[part, what], "ms": more[part, what]} for part, what in longest]


def _by_origin(one):
    """(part, what) -> ms of what a rank did itself; where it did it has names of its own on each rank."""
    by_origin_ms = collections.Counter()
    for piece, ms in _by_piece(one).items():
        if piece.part not in (parts.WAITING, parts.EXPOSED):
            by_origin_ms[piece.part, piece.what] += ms
    return by_origin_ms


def _by_piece(one):
    return {piece: ms_from_ns(ns) / len(one["steps"]) for piece, ns in one["pieces"].total().items()}


def _step_ms(one):
    return ms_from_ns(sum(end - begin for _, begin, end in one["steps"])) / len(one["steps"])
