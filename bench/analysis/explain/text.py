"""An account (bench/analysis/explain/account.py), or the difference of two, in words for a terminal."""

import re

from bench.analysis.explain import parts, ranking
from bench.analysis.trace.text import plain, short, table
from bench.base import text_table
from bench.base.units import format_ms

BAR_CHARS = 30
NUM_NEXT = 10
MIN_LATE_FRAC = 0.01  # of the step: a rank for which the others wait less is not named
COMPILED = re.compile(r"## Call CompiledFxGraph \w+ ##")
OF = {
    "device": "the device's clock: a step ends when the host has left it and the device has finished what it launched",
    "host": "the host's main thread, as the trace has no device",
    "record": "the record's steps of rank 0, as the run has no trace; a trace says more: profile=window",
}
NUM_CHANGES = 12


def as_text(answer: dict, title: str) -> str:
    """answer: of account.of_ranks() or from_record.of(); title: what was explained."""
    return "\n".join(_lines(answer, title))


def _lines(answer, title):
    ranks = answer["ranks"]
    yield f"Where a step of {format_ms(answer['step_ms'])} goes: {text_table.line(plain(title, 200))}\n"
    many = f", mean of {len(ranks)} ranks" if len(ranks) > 1 else ""
    yield f"mean of {text_table.counted(answer['num_steps'], 'step')}{many}; by {OF[answer['of']]}"
    first = next(iter(ranks.values()))
    yield f"limit: {first['ceiling'] or 'no peak is known of this device'}{_on(first['device'])}"
    if first["host_step_ms"] is not None and answer["of"] == "device":
        yield f"the host's own step, of rank {next(iter(ranks))}: {format_ms(first['host_step_ms'])}"
    yield ""
    yield from _waterfall(answer)
    yield ""
    yield from _totals(answer)
    if late := lateness_lines(answer):
        yield "\nWho delays whom, ms a step\n"
        yield from late
    yield from _next(answer)


def _on(device):
    return f"; {plain(device)}" if device else ""


def _waterfall(answer):
    ranks, at_ms, lines = answer["ranks"], 0.0, []
    for line in answer["parts"]:
        of_ranks = {number: _ms(one, line["part"]) for number, one in ranks.items()}
        least, most = (choose(of_ranks, key=of_ranks.get) for choose in (min, max))
        lines.append(
            line
            | {"bar": _bar(at_ms, line["ms"], answer["step_ms"]), "at_ms": at_ms + line["ms"]}
            | {"least": f"{of_ranks[least]:.3f} ({least})", "most": f"{of_ranks[most]:.3f} ({most})"}
        )
        at_ms += line["ms"]
    columns = [("part", "part", str), ("ms", "ms", ms3), ("%", "pct", _one), ("sum, ms", "at_ms", ms3)]
    if len(ranks) > 1:
        columns += [("least (rank)", "least", str), ("most (rank)", "most", str)]
    yield _table(lines, [*columns, ("", "bar", str)])


def _ms(one, part):
    return next((line["ms"] for line in one["parts"] if line["part"] == part), 0.0)


def ms3(value: float) -> str:
    """1.5 -> "1.500"."""
    return f"{value:.3f}"


def _one(value):
    return f"{value:.1f}"


def _bar(at_ms, ms, step_ms):
    begin, end = (round(BAR_CHARS * value / step_ms) if step_ms else 0 for value in (at_ms, at_ms + ms))
    return "." * begin + "#" * max(end - begin, 1 if ms and begin < BAR_CHARS else 0)


def _totals(answer):
    known = {line["part"]: line["ms"] for line in answer["parts"]}
    unbound_ms = sum(known.get(part, 0.0) for part in parts.NO_BOUND)
    yield (
        f"The limit explains {format_ms(answer['limit_ms'])}; of {format_ms(unbound_ms)} the limit is not known; "
        f"{format_ms(answer['step_ms'] - answer['limit_ms'] - unbound_ms)} lie above it."
    )
    for line in answer["parts"]:
        yield f"  {line['part']}: {line['meaning']}{'; ' + line['source'] if line['source'] else ''}"


def lateness_lines(answer: dict) -> list[str]:
    """For whom ranks wait, and why; those reasons are indented."""
    return list(_lateness(line for line in answer["lateness"] if line["wait_ms"] > MIN_LATE_FRAC * answer["step_ms"]))


def _lateness(lines):
    for line in lines:
        collectives = ", ".join(f"{short(one['what'])} {one['ms']:.3f}" for one in line["collectives"][:2])
        yield (
            f"rank {line['rank']}: the others wait {line['wait_ms']:.3f} for it (median), in {collectives}; "
            f"without that their step would be {line['without_ms']:.3f}"
        )
        more = ", ".join(f"{part} {ms:.3f}" for part, ms in list(line["more"].items())[:3])
        yield f"    it has more than the median of the others of: {more or 'nothing that was recorded'}"
        for reason in line["reasons"][:3]:
            yield f"    {reason['ms']:.3f} more of: {reason['part']}: {_what(reason)}"


def evidence(line: dict) -> str:
    """A line of the ranking, or of a difference -> its part, rank, name and place."""
    rank = "" if line.get("rank") is None else f" (rank {line['rank']})"
    return f"{line['part']}{rank}: {_what(line)}"


def _what(line):
    what = short(line["what"]) if line["what"] else ""
    where = COMPILED.sub("a compiled graph", plain(line["where"], 200)) if line["where"] else ""
    return f"{what} at {plain(where)}" if what and where else what or where


def _next(answer):
    known = [line for line in answer["next"] if line["part"] not in parts.NO_BOUND][:NUM_NEXT]
    others = [line for line in answer["next"] if line["part"] in parts.NO_BOUND][:NUM_NEXT]
    if known:
        yield "\nWhere the next millisecond is: what each could give at most\n"
        yield _ranked(known)
    if others:
        yield "\nWhose bound is not known: the time of each, of which it could give a part\n"
        yield _ranked(others)
    yield ""
    hints = dict.fromkeys((line["part"], line["advice"]) for line in known + others)
    yield from (f"  {part}: {advice}" for part, advice in hints)
    if records := ranking.legend(known + others):
        yield "\nWhat people did about it: records of models/ladder that gained at such a place\n"
        yield from (f"  {record}" for record in records)


def _ranked(lines):
    shown = [line | {"evidence": evidence(line)} for line in lines]
    columns = [("ms", "gain_ms", ms3), ("%", "gain_pct", _one), ("a step", "count", _one), ("what", "evidence", str)]
    if any(line["ladder"] for line in lines):
        columns.append(("records", "ladder", " ".join))
    return _table(shown, columns)


def difference_as_text(difference: dict, title: str) -> str:
    """result: of difference.of(); title: what was compared."""
    return "\n".join(_difference_lines(difference, title))


def _difference_lines(difference, title):
    a, b, pct = difference["a"], difference["b"], difference["change_pct"]
    by_pct = "" if pct is None else f", {pct:+.1f} %"
    yield f"What changed: {text_table.line(plain(title, 200))}\n"
    change = f"{_signed(difference['change_ms'])} ms{by_pct}"
    yield f"a step took {format_ms(a['step_ms'])} and takes {format_ms(b['step_ms'])}: {change}"
    yield f"by {OF[a['of']]}\n"
    rows = [row | {"sum_ms": 0.0} for row in difference["parts"]]
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
    yield _table(rows, [*columns, ("sum, ms", "sum_ms", _signed)])
    if difference["lines"]:
        yield "\nWhat changed most\n"
        lines = [line | {"evidence": evidence(line)} for line in difference["lines"][:NUM_CHANGES]]
        yield _table(
            lines, [*[(head.removesuffix(", ms"), *rest) for head, *rest in columns[1:]], ("what", "evidence", str)]
        )
        rest_ms = difference["change_ms"] - sum(line["change_ms"] for line in lines)
        yield f"\n{_signed(rest_ms)} ms in all others together"


def _signed(ms):
    return f"{ms:+.3f}"


def _table(lines, columns):
    return table(lines, columns).text(False)
