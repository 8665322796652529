"""A difference of two accounts (bench/analysis/explain/difference.py) -> words for a terminal."""

from bench.analysis.explain.text import OF, evidence, ms3
from bench.analysis.trace.text import plain, table
from bench.base.terminal import text_table
from bench.base.units import format_ms

NUM_LINES = 12


def as_text(result: dict, title: str) -> str:
    """result: of difference.of(); title: what was compared."""
    return "\n".join(_lines(result, title))


def _lines(result, title):
    a, b, pct = result["a"], result["b"], result["change_pct"]
    by_pct = "" if pct is None else f", {pct:+.1f} %"
    yield f"What changed: {text_table.line(plain(title, 200))}\n"
    change = f"{_signed(result['change_ms'])} ms{by_pct}"
    yield f"a step took {format_ms(a['step_ms'])} and takes {format_ms(b['step_ms'])}: {change}"
    yield f"by {OF[a['of']]}\n"
    rows = [row | {"sum_ms": 0.0} for row in result["parts"]]
    at_ns = 0
    for row in rows:
        at_ns += row["change_ns"]
        row["sum_ms"] = at_ns / 1e6
    columns = [
        ("part", "part", str),
        ("A, ms", "a_ms", ms3),
        ("B, ms", "b_ms", ms3),
        ("change, ms", "change_ms", _signed),
    ]
    yield table(rows, [*columns, ("sum, ms", "sum_ms", _signed)])
    if result["lines"]:
        yield "\nWhat changed most\n"
        lines = [line | {"evidence": evidence(line)} for line in result["lines"][:NUM_LINES]]
        yield table(
            lines, [*[(head.removesuffix(", ms"), *rest) for head, *rest in columns[1:]], ("what", "evidence", str)]
        )
        rest_ms = result["change_ms"] - sum(line["change_ms"] for line in lines)
        yield f"\n{_signed(rest_ms)} ms in all others together"


def _signed(ms):
    return f"{ms:+.3f}"
