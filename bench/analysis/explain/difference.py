"""Two accounts -> what of the difference between their steps lies in which part: rows that add up to it exactly.

Each account's means over steps and ranks are brought to whole nanoseconds that add up to its step, rounded: the largest
remainders are rounded up.  So the rows' integers add up to the steps' difference, whatever the numbers of steps.
"""

import collections
from fractions import Fraction

from bench.analysis.explain import parts
from bench.analysis.explain.ranking import origin_of
from bench.base.units import ms_from_ns

NUM_LINES = 20


def of(a: dict, b: dict) -> dict:
    """Two answers of account.py -> {"a", "b": {"step_ms", "step_ns", "of"}, "change_ms", "change_ns", "change_pct",
    "parts": [row], "lines": [line], "rest_ms"}.

    A row: {"part", "meaning", "a_ns", "b_ns", "change_ns", "a_ms", "b_ms", "change_ms"}, change_ns of all adds up to
    change_ns.  A line, the largest change first: {"part", "what", "where", "a_ms", "b_ms", "change_ms"}: the kernels,
    operators, lines of Python that changed; rest_ms: what of change_ms is in none of them.
    ValueError: one was measured on a device and the other on its host.
    """
    if a["of"] != b["of"]:
        raise ValueError(f"one account is of the {a['of']}, the other of the {b['of']}: compare runs recorded alike")
    of_a, of_b = whole_ns(a), whole_ns(b)
    rows = [_row(part, of_a.get(part, 0), of_b.get(part, 0)) for part in parts.ORDER if part in of_a | of_b]
    step_ns = [sum(one.values()) for one in (of_a, of_b)]
    lines = _lines(a, b)
    change_ms = ms_from_ns(step_ns[1] - step_ns[0])
    return {
        **{
            name: {"step_ms": ms_from_ns(ns), "step_ns": ns, "of": one["of"]}
            for name, ns, one in zip("ab", step_ns, (a, b))
        },
        "change_ms": change_ms,
        "change_ns": step_ns[1] - step_ns[0],
        "change_pct": 100 * (step_ns[1] / step_ns[0] - 1) if step_ns[0] else None,
        "parts": rows,
        "lines": lines,
        "rest_ms": change_ms - sum(line["change_ms"] for line in lines),
    }


def whole_ns(answer: dict) -> dict[str, int]:
    """{part: ns of a mean step}, whole, adding up to the rounded step."""
    exact: dict[str, Fraction] = collections.defaultdict(Fraction)
    for one in answer["ranks"].values():
        for line in one["parts"]:
            exact[line["part"]] += Fraction(line["sum_ns"], len(one["steps"]) * len(answer["ranks"]))
    whole = {part: int(ns) for part, ns in exact.items()}
    missing = round(sum(exact.values())) - sum(whole.values())
    for part in sorted(exact, key=lambda part: whole[part] - exact[part])[:missing]:
        whole[part] += 1
    return whole


def _row(part, a_ns, b_ns):
    ns = {"a_ns": a_ns, "b_ns": b_ns, "change_ns": b_ns - a_ns}
    ms = {name.replace("_ns", "_ms"): ms_from_ns(value) for name, value in ns.items()}
    return {"part": part, "meaning": parts.MEANING[part]} | ns | ms


def _lines(a, b):
    of_a, of_b = _by_origin(a), _by_origin(b)
    lines = []
    for key in of_a | of_b:
        (a_ms, a_piece), (b_ms, b_piece) = (one.get(key, (0.0, None)) for one in (of_a, of_b))
        piece = b_piece or a_piece
        line = {"part": key[0], "what": piece["what"], "where": piece["where"], "a_ms": a_ms, "b_ms": b_ms}
        lines.append(line | {"change_ms": b_ms - a_ms})
    lines.sort(key=lambda line: -abs(line["change_ms"]))
    return [line for line in lines[:NUM_LINES] if line["change_ms"]]


def _by_origin(answer):
    """{origin: (ms of a mean step, its longest piece)}"""
    by_origin = {}
    for one in answer["ranks"].values():
        for piece in one["pieces"]:
            key = origin_of(parts.Piece(*(piece[name] for name in parts.Piece._fields)))
            ms, longest = by_origin.get(key, (0.0, piece))
            ms += piece["ms"] / len(answer["ranks"])
            by_origin[key] = (ms, max(longest, piece, key=lambda piece: piece["ms"]))
    return by_origin
