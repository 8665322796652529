"""Ranks of one job -> the account of their steps: the --json answer of ./run.sh explain for a trace.

    {"of": "device" | "host", "step_ms", "num_steps", "parts": [line], "ranks": {"0": {...}}, "lateness", "next": [...]}

step_ms is the mean over the counted steps and ranks.  A line of parts is {"part", "meaning", "is_limit", "ms", "pct",
"source"}, mean over the same, source: where a limit's rates are from, None where it is not a limit; a rank's own has
"sum_ns", integers that add up to its "step_sum_ns" exactly.
"""

from collections.abc import Callable, Iterable

from bench.analysis.explain import device_steps, host_steps, lateness, parts, ranking
from bench.analysis.explain.ceilings import Ceilings
from bench.analysis.trace import categories, skew, window
from bench.analysis.trace.analysis import device_name
from bench.analysis.trace.load import Rank
from bench.base.units import ms_from_ns
from bench.machine.passport import figures

MAX_PIECES = 200


def of_ranks(
    ranks: Iterable[Rank],
    rules: tuple[categories.Rule, ...] = categories.RULES,
    include_last_step: bool = False,
    measured_of: Callable[[int, str | None], figures.Ceilings | None] = lambda rank, device: None,
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
    result = {"of": of, "step_ms": step_ms, "num_steps": len(next(iter(accounts.values()))["steps"])}
    result |= {"limit_ms": sum(line["ms"] for line in lines if line["is_limit"]), "parts": lines, "ranks": by_rank}
    result["lateness"] = lateness.of(accounts)
    return result | {"next": ranking.of(accounts, step_ms)}


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
    result = {number: {} for number in rows}
    for line in skew.waits(rows)[0]:
        for number, row, wait_ns in zip(rows, line["rows"], line["wait_ns"]):
            result[number][row] = (wait_ns, line["late_rank"], line["call"])
    return result


def _on_host(ranks, include_last_step, ceilings):
    accounts = {}
    for rank in ranks:
        if steps := host_steps.spans(rank, include_last_step):
            pieces = host_steps.pieces(rank, steps, ceilings[rank.rank])
            accounts[rank.rank] = _account(rank, steps, pieces, ceilings[rank.rank], include_last_step)
    return accounts


def _account(rank, steps, pieces, ceilings, include_last_step):
    on_host = window.steps(rank, include_last_step) if rank.steps() else []
    host_ms = ms_from_ns(on_host[-1][2] - on_host[0][1]) / len(on_host) if on_host else None
    named = {"rank": rank, "steps": steps, "pieces": pieces, "ceilings": ceilings, "host_step_ms": host_ms}
    return named if any(end > begin for _, begin, end in steps) else None
