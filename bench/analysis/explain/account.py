"""Accounts for the steps of one job's ranks, the --json answer of ./run.sh explain, and compares two accounts.

    {"of": "device" | "host" | "record", "step_ms", "num_steps", "parts": [line], "ranks": {"0": {...}}, "lateness",
     "is_retimed": whether gains were timed again through the graph of dependencies, "next": [...], "waits_for_host",
     "missing": what was not recorded that a bound needs, a sentence or None,
     "doubts": sentences on damage of the ranks' files, by which these times may be wrong}

step_ms is the mean over the counted steps and ranks.  A line of parts is {"part", "meaning", "is_limit", "ms", "pct",
"source"}, with the same mean; source says where the rates of a limit are from, None for other parts.  The lines of a
rank have "sum_ns" instead, integers that add up to its "step_sum_ns" exactly.

lateness: which rank the others wait for, what it does longer than they do, and how long their step would be without
that.  The rank that comes last to a collective has the shortest kernel (bench/analysis/trace/skew.py).  The reason is
what its account has more of than the median of the others, apart from waiting, of which a late rank has little.

waits_for_host: time in which no row of the device ran and its host had launched none, or was launching it, {"ms",
"part": the one with most of it or None, "most": [{"what", "ms"}]: the three longest}; None if no device was timed.
Exposed communication and waiting for a late rank are not in it: they are rows of the device.
"""

import collections
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from bench.analysis.explain import device_steps, host, parts, ranking, retimed
from bench.analysis.explain.ceilings import Ceilings
from bench.analysis.explain.parts import Piece, Pieces
from bench.analysis.trace import categories, events, launches, skew, window
from bench.analysis.trace.analysis import device_name, doubts_of_job, known_device_name
from bench.analysis.trace.rank import Rank
from bench.base.units import ms_from_ns
from bench.machine import passports

NUM_REASONS = 5
MAX_PIECES = 200
NUM_LINES = 20  # lines of a difference that are kept
KEPT = ("of", "lateness", "doubts")  # what a difference keeps of each account


class Account(NamedTuple):
    """The account of one rank.  rank: None for a record."""

    rank: Rank | None
    pieces: Pieces
    ceilings: Ceilings


Accounts = Mapping[int, Account]  # by rank, at least one


def accounts_of(
    ranks: Iterable[Rank],
    rules: tuple[categories.Rule, ...] = categories.RULES,
    include_last_step: bool = False,
    measured_of: Callable[[int, str | None], passports.Ceilings | None] = lambda rank, device: None,
    captured: Sequence[Rank] = (),
) -> tuple[dict[int, Account], dict[str, Any]]:
    """Returns ({rank: its account}, the answer for all).  Raises ValueError if nothing that took time was recorded.

    measured_of(rank, device's name in the trace) returns the rates in the passport of that device, or None.  captured:
    traces of the captures of the ranks' CUDA graphs.
    """
    ranks = [rank for rank in ranks if len(rank.ts)]
    on_device = [rank for rank in ranks if len(rank.device_rows())]
    waits: dict[int, parts.Waits] = {rank.rank: {} for rank in on_device}
    if on_device:
        rows = {rank.rank: device_steps.counted_rows(rank, rules, include_last_step) for rank in on_device}
    else:  # a thread waits for a message whether or not all ranks share it
        rows = {rank.rank: host.messages(rank, include_last_step) for rank in ranks}
        waits = {number: dict.fromkeys(mine.tolist(), (0, number, 0)) for number, (_, mine, _) in rows.items()}
    collectives, accounts = skew.waits(rows)[0], dict[int, Account]()
    for line in collectives:
        for number, row, wait_ns in zip(rows, line["rows"], line["wait_ns"]):
            waits[number][row] = (wait_ns, line["late_rank"], line["call"])
    for rank in on_device or ranks:
        spans = window.device_spans if on_device else host.host_spans
        steps = spans(rank, include_last_step)
        if not any(end > begin for _, begin, end in steps):
            continue
        name = known_device_name(rank) if on_device else None  # a GPU's limits are not those of its host
        ceilings = Ceilings(name, measured_of(rank.rank, device_name(rank)))
        if on_device:
            device = device_steps.Device(rank, rules, waits[rank.rank], captured)
            pieces = device_steps.Division(device, steps, ceilings).pieces
        else:
            pieces = host.host_pieces(rank, steps, ceilings, waits[rank.rank])
        accounts[rank.rank] = Account(rank, pieces, ceilings)
    if not accounts:
        raise ValueError("the trace holds no kernel and no operator that took time: record one with profile=window")
    if not on_device:
        return accounts, answer(accounts, "host")
    steps_of = {number: account.pieces.steps for number, account in accounts.items()}
    spans_ns = {number: (steps[0][1], steps[-1][2]) for number, steps in steps_of.items()}
    timed = [rank for rank in on_device if rank.rank in spans_ns]
    return accounts, answer(accounts, "device", retimed.of(timed, spans_ns, collectives))


def answer(accounts: Accounts, of: str, graph: retimed.Graph | None = None) -> dict[str, Any]:
    """Returns the answer for accounts.  of: what was timed, device, host or record; graph: to time gains again."""
    by_rank = {str(number): _rank_facts(account) for number, account in accounts.items()}
    step_ms = statistics.fmean(rank["step_ms"] for rank in by_rank.values())
    lines, ms_of_ranks = [], [{line["part"]: line["ms"] for line in rank["parts"]} for rank in by_rank.values()]
    for part in parts.ORDER:
        if ms := statistics.fmean(part_ms.get(part, 0.0) for part_ms in ms_of_ranks):
            sources = set().union(*(account.ceilings.sources.get(part, ()) for account in accounts.values()))
            lines.append(_line(part, ms, step_ms) | {"source": "; ".join(sorted(sources)) or None})
    return {
        "of": of,
        "step_ms": step_ms,
        "num_steps": len(next(iter(accounts.values())).pieces.steps),
        "limit_ms": sum(line["ms"] for line in lines if line["is_limit"]),
        "parts": lines,
        "ranks": by_rank,
        "lateness": _lateness(accounts),
        "is_retimed": graph is not None,
        "waits_for_host": _waits_for_host(accounts) if of == "device" else None,
        "next": ranking.of({number: account.pieces for number, account in accounts.items()}, step_ms, graph),
        "missing": _missing(accounts),
        "doubts": list(_doubts(accounts)),
    }


def _waits_for_host(accounts: Accounts) -> dict[str, Any]:
    """Returns "waits_for_host" of an answer: means over the ranks."""
    part_ms, name_ms = (collections.defaultdict[str, float](float) for _ in range(2))
    for account in accounts.values():
        for piece, ns in account.pieces.total().items():
            if piece.part in parts.BY_HOST:
                ms = account.pieces.mean_ms(ns) / len(accounts)
                part_ms[piece.part] += ms
                name_ms[f"{'launch ' * (piece.part in (parts.LATENCY, parts.LAUNCH))}{piece.what}"] += ms
    most = [{"what": what, "ms": ms} for what, ms in sorted(name_ms.items(), key=lambda item: -item[1])[:3]]
    return {"ms": sum(part_ms.values()), "part": max(part_ms, key=part_ms.__getitem__, default=None), "most": most}


def _missing(accounts: Accounts) -> str | None:
    """Returns "missing" of an answer: which options of the profiler would give the ranks' operators their bounds."""
    ranks = [account.rank for account in accounts.values() if account.rank is not None]
    if not ranks or any(extra[1] for rank in ranks for extra in rank.extras):
        return None
    if any(rank.is_kind(events.CPU_OP).any() for rank in ranks):
        return "no operator's shapes were recorded, so none has a bound: record with record_shapes=True"
    return (
        "no operators were recorded, so no kernel has a bound: record ProfilerActivity.CPU too, with record_shapes=True"
    )


def _doubts(accounts: Accounts) -> Iterator[str]:
    ranks = [account.rank for account in accounts.values() if account.rank is not None]
    yield from doubts_of_job(ranks)
    world_size = max((rank.world_size or 0 for rank in ranks), default=0)
    if world_size > len(ranks) and any(parts.EXPOSED in account.pieces.by_part() for account in accounts.values()):
        given = f"the traces are of {len(ranks)} of {world_size} ranks"
        yield f"{given}: the time that these waited for the others counts as exposed communication"
    for rank in ranks:
        number, _, end_ns = accounts[rank.rank].pieces.steps[-1]
        yield from (f"rank {rank.rank}: {doubt}" for doubt in launches.doubts(rank, end_ns))
        if number is None:
            yield f"rank {rank.rank}: the trace marks no steps (ProfilerStep#N), so all of it counts as one"


def _rank_facts(account: Account) -> dict[str, Any]:
    """Returns the entry of one rank in an answer's "ranks"; "pieces" has the MAX_PIECES longest."""
    pieces = account.pieces
    total, step_ms = pieces.total(), pieces.mean_ms(pieces.sum_ns)
    longest = sorted(total.items(), key=lambda item: (-item[1], str(item[0])))[:MAX_PIECES]
    return {
        "file": account.rank and account.rank.path.name,
        "step_ms": step_ms,
        "step_sum_ns": pieces.sum_ns,
        "device": account.ceilings.device,
        "ceiling": account.ceilings.source,
        "steps": [
            {"step": number, "ms": ms_from_ns(end - begin), "sum_ns": pieces.by_part(index)}
            for index, (number, begin, end) in enumerate(pieces.steps)
        ],
        "parts": [_line(part, pieces.mean_ms(ns), step_ms) | {"sum_ns": ns} for part, ns in pieces.by_part().items()],
        "pieces": [
            piece._asdict() | {"ms": pieces.mean_ms(ns), "sum_ns": ns, "count": pieces.count[piece]}
            for piece, ns in longest
        ],
    }


def _line(part: str, ms: float, step_ms: float) -> dict[str, Any]:
    pct = 100 * ms / step_ms if step_ms else 0.0
    return {"part": part, "meaning": parts.MEANING[part], "is_limit": part in parts.LIMIT, "ms": ms, "pct": pct}


# ---- who delays whom


def _lateness(accounts: Accounts) -> list[dict[str, Any]]:
    """Returns a line for each rank that others wait for, the latest first, in ms per step; [] for a single rank.

    wait_ms: median of the other ranks' exposed waiting for it; waits_ms: {rank: its waiting}; without_ms: median of
    what their steps would take without that; collectives: [{"what", "ms"}] in which they wait for it, mean over them;
    more: {part: ms} that it has more of than the median of the others, the largest first; reasons: the same for pieces,
    [{"part", "what", "where", "ms"}].
    """
    waiting = {number: account.pieces.ms_by(lambda piece: piece.late_rank) for number, account in accounts.items()}
    lines = []
    for late in accounts:
        others = [account.pieces for number, account in accounts.items() if number != late]
        waits_ms = {number: waiting[number][late] for number in accounts if number != late}
        if not any(waits_ms.values()):
            continue
        without_ms = [pieces.mean_ms(pieces.sum_ns) - wait_ms for pieces, wait_ms in zip(others, waits_ms.values())]
        mine, waited_ms = accounts[late].pieces, collections.Counter[str | None]()
        for pieces in others:
            by_call = pieces.ms_by(lambda piece: (piece.late_rank, piece.what))
            waited_ms.update({what: ms for (rank, what), ms in by_call.items() if rank == late})
        where = {(piece.part, piece.what): piece.where for piece in mine.total()}
        reasons = list(_more(mine, others, lambda piece: (piece.part, piece.what)).items())[:NUM_REASONS]
        line = {
            "rank": late,
            "wait_ms": statistics.median(waits_ms.values()),
            "waits_ms": waits_ms,
            "without_ms": statistics.median(without_ms),
            "collectives": [{"what": what, "ms": ms / len(others)} for what, ms in waited_ms.most_common(NUM_REASONS)],
            "more": _more(mine, others, lambda piece: piece.part),
            "reasons": [
                {"part": part, "what": what, "where": where[part, what], "ms": ms} for (part, what), ms in reasons
            ],
        }
        lines.append(line)
    return sorted(lines, key=lambda line: -line["wait_ms"])


def _more(mine: Pieces, others: Sequence[Pieces], name_of: Callable[[Piece], Any]) -> dict[Any, float]:
    """Returns {name: ms} of what a rank itself did for longer than the median of the others, the largest first.

    name_of() should name what was done, as the place where it was done has another name on each rank.
    """

    def own(piece: Piece) -> Any:
        return None if piece.part in (parts.WAITING, parts.EXPOSED) else name_of(piece)

    others_ms = [other.ms_by(own) for other in others]
    more_ms = {name: ms - statistics.median(other[name] for other in others_ms) for name, ms in mine.ms_by(own).items()}
    return {name: more_ms[name] for name in sorted(more_ms, key=lambda name: -more_ms[name]) if more_ms[name] > 0}


# ---- the difference of two accounts


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Compares two answers: {"a", "b": {"step_ms", "step_ns", KEPT}, "change_ms", "change_ns", "change_pct", "parts":
    [row], "lines": [line], "rest_ms", "outside": {"a", "b"}}.

    A row is {"part", "meaning", "a_ns", "b_ns", "change_ns", "a_ms", "b_ms", "change_ms"}; the rows' change_ns add up
    to that of the step.  A line is a kernel, an operator or a line of Python that changed, the largest change first:
    {"part", "what", "where", "a_ms", "b_ms", "change_ms", "rank"}; rank is the one for which the others wait, or on
    which alone it changed, or None.  rest_ms: the part of change_ms in no line; outside: explained.outside() of both.
    Raises ValueError if one was measured on a device and the other on its host.
    """
    if a["of"] != b["of"]:
        raise ValueError(f"one account is of the {a['of']}, the other of the {b['of']}: compare runs recorded alike")
    if any(line["part"] == parts.SEEN for side in (a, b) for line in side["parts"]):
        a, b = _products_together(a), _products_together(b)
    a_parts, b_parts = whole_ns(a), whole_ns(b)
    rows = []
    for part in parts.ORDER:
        if part in a_parts | b_parts:
            ns = {"a": a_parts.get(part, 0), "b": b_parts.get(part, 0)}
            ns["change"] = ns["b"] - ns["a"]
            row = {"part": part, "meaning": parts.MEANING[part]} | {f"{name}_ns": value for name, value in ns.items()}
            rows.append(row | {f"{name}_ms": ms_from_ns(value) for name, value in ns.items()})
    a_ns, b_ns = sum(a_parts.values()), sum(b_parts.values())
    lines, change_ms = _changed_lines(a, b), ms_from_ns(b_ns - a_ns)
    return {
        "a": {"step_ms": ms_from_ns(a_ns), "step_ns": a_ns} | {key: a[key] for key in KEPT},
        "b": {"step_ms": ms_from_ns(b_ns), "step_ns": b_ns} | {key: b[key] for key in KEPT},
        "change_ms": change_ms,
        "change_ns": b_ns - a_ns,
        "change_pct": 100 * (b_ns / a_ns - 1) if a_ns else None,
        "parts": rows,
        "lines": lines,
        "rest_ms": change_ms - sum(line["change_ms"] for line in lines),
        "outside": {"a": a.get("outside", []), "b": b.get("outside", [])},
    }


def whole_ns(account: dict[str, Any]) -> dict[str, int]:
    """Returns {part: whole ns of a mean step}, which add up to the rounded step: the largest remainders are rounded up.

    So the parts of a difference add up to the difference of the steps, however many steps each account has.
    """
    exact: dict[str, Fraction] = collections.defaultdict(Fraction)
    for rank in account["ranks"].values():
        for line in rank["parts"]:
            exact[line["part"]] += Fraction(line["sum_ns"], len(rank["steps"]) * len(account["ranks"]))
    whole = {part: int(ns) for part, ns in exact.items()}
    missing = round(sum(exact.values())) - sum(whole.values())
    for part in sorted(exact, key=lambda part: whole[part] - exact[part])[:missing]:
        whole[part] += 1
    return whole


def _products_together(account: dict[str, Any]) -> dict[str, Any]:
    """Returns an account whose products are one part, because the best rate that divides them is each trace's own."""
    ranks = account["ranks"].items()
    as_one = dict.fromkeys((parts.SEEN, parts.SLOWER), parts.PRODUCTS)
    lines = ("parts", "pieces")
    renamed = {
        number: {of: [line | {"part": as_one.get(line["part"], line["part"])} for line in rank[of]] for of in lines}
        for number, rank in ranks
    }
    return account | {"ranks": {number: rank | renamed[number] for number, rank in ranks}}


def _changed_lines(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    sides = _by_origin(a), _by_origin(b)
    ranks = list(b["ranks"]) if list(a["ranks"]) == list(b["ranks"]) else []
    lines = []
    for key in sides[0] | sides[1]:
        ms = [collections.Counter(side[key][0]) if key in side else collections.Counter[str]() for side in sides]
        a_ms, b_ms = (sum(by_rank.values()) / len(side["ranks"]) for by_rank, side in zip(ms, (a, b)))
        _, piece = sides[1].get(key) or sides[0][key]
        changes_ms = {rank: abs(ms[1][rank] - ms[0][rank]) for rank in ranks}
        most = max(ranks, key=lambda rank: changes_ms[rank], default="")
        is_alone = len(ranks) > 1 and changes_ms[most] > ranking.ALONE_FRAC * sum(changes_ms.values())
        line = {"part": key[0], "what": piece["what"], "where": piece["where"], "a_ms": a_ms, "b_ms": b_ms}
        rank = key[2] if key[2] is not None else int(most) if is_alone else None
        lines.append(line | {"change_ms": b_ms - a_ms, "rank": rank})
    lines.sort(key=lambda line: -abs(line["change_ms"]))
    return [line for line in lines[:NUM_LINES] if line["change_ms"]]


def _by_origin(account: dict[str, Any]) -> dict[ranking.Origin, tuple[dict[str, float], dict[str, Any]]]:
    """Returns {origin: ({rank: ms of its mean step}, the longest piece of that origin)}."""
    by_origin: dict[ranking.Origin, tuple[dict[str, float], dict[str, Any]]] = {}
    for number, rank in account["ranks"].items():
        for piece in rank["pieces"]:
            key = ranking.origin_of(Piece(*(piece[name] for name in Piece._fields)))
            ms, longest = by_origin.get(key, ({}, piece))
            ms[number] = ms.get(number, 0.0) + piece["ms"]
            by_origin[key] = (ms, max(longest, piece, key=lambda piece: piece["ms"]))
    return by_origin
