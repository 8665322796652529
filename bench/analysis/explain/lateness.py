"""Several ranks: for whom the others wait, what that rank does longer than they, and what the step could be without.

A rank that comes last to a collective has the shortest kernel (bench/analysis/trace/skew.py).  Why it came last is what
its own account has more of than the median of the others: parts other than waiting, of which a late rank has little
itself.
"""

import collections
import statistics

from bench.analysis.explain import parts
from bench.base.units import ms_from_ns

NUM_REASONS = 5


def of(accounts: dict) -> list[dict]:
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


def _step_ms(one):
    return ms_from_ns(sum(end - begin for _, begin, end in one["steps"])) / len(one["steps"])


def _by_piece(one):
    return {piece: ms_from_ns(ns) / len(one["steps"]) for piece, ns in one["pieces"].total().items()}


def _waiting(one):
    """Late rank -> ms that this rank waited for it, exposed."""
    result = collections.Counter()
    for piece, ms in _by_piece(one).items():
        if piece.part == parts.WAITING:
            result[piece.late_rank] += ms
    return result


def _collectives(accounts, late):
    """[{"what", "ms"}]: where the others wait for a rank, mean over all of them, longest first."""
    result = collections.Counter()
    for one in accounts.values():
        for piece, ms in _by_piece(one).items():
            if piece.part == parts.WAITING and piece.late_rank == late:
                result[piece.what] += ms / (len(accounts) - 1)
    return [{"what": what, "ms": ms} for what, ms in result.most_common(NUM_REASONS)]


def _more(accounts, late):
    """{part: ms} of which a rank has more than the median of the others, the largest first."""
    by_part = {number: _by_part(one) for number, one in accounts.items()}
    mine = by_part.pop(late)
    more = {part: ms - statistics.median(other[part] for other in by_part.values()) for part, ms in mine.items()}
    return {part: more[part] for part in sorted(more, key=lambda part: -more[part]) if more[part] > 0}


def _by_part(one):
    result = collections.Counter()
    for (part, _), ms in _by_origin(one).items():
        result[part] += ms
    return result


def _reasons(accounts, late):
    mine, others = _by_origin(accounts[late]), [_by_origin(one) for number, one in accounts.items() if number != late]
    more = {key: ms - statistics.median(other[key] for other in others) for key, ms in mine.items()}
    longest = sorted((key for key in more if more[key] > 0), key=lambda key: -more[key])[:NUM_REASONS]
    where = {(piece.part, piece.what): piece.where for piece in accounts[late]["pieces"].total()}
    return [{"part": part, "what": what, "where": where[part, what], "ms": more[part, what]} for part, what in longest]


def _by_origin(one):
    """(part, what) -> ms of what a rank did itself; where it did it has names of its own on each rank."""
    result = collections.Counter()
    for piece, ms in _by_piece(one).items():
        if piece.part not in (parts.WAITING, parts.EXPOSED):
            result[piece.part, piece.what] += ms
    return result
