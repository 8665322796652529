"""Presents an account (bench/analysis/explain/account.py), or the difference of two, as a Document or on a run's page.

It shows a waterfall of the parts, what each of them holds, who delays whom, and what could be saved at most.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis.explain import explained, parts, ranking
from bench.analysis.trace import load
from bench.analysis.trace.source import NoTrace
from bench.analysis.trace.text import plain, short
from bench.base import text_table
from bench.base.paths import brief
from bench.base.units import MIB, format_ms
from bench.web.document import Block, Bullets, Document, Lines, Section, Table, Verdict
from bench.web.waterfall import CHANGES, Bar, Kind, Waterfall, from_changes

TITLE = "Where a step's time goes"
MAX_TITLE_CHARS = 200
MAX_WHAT_CHARS = 90  # an operator with its shapes is long, and a page wraps it
MAX_TRACE_BYTES = 32 * MIB  # larger traces of a run are not read for its page, as it would take longer than seconds
MAX_OUTSIDE, NUM_CAUSES = 3, 2
MIN_HELD_FRAC = 0.1  # share of the step: what holds up less is no verdict
MIN_GAIN_PCT = 0.1  # of the step: lines of the ranking that gain less are counted, not shown
MIN_LATE_FRAC = 0.01  # share of the step: a rank that delays the others by less is not named
COMPILED = re.compile(r"## Call CompiledFxGraph \w+ ##")
KINDS: tuple[tuple[Kind, str], ...] = (("limit", "roofline time"), ("above", "overhead"), ("unknown", "not modelled"))
MEASURED_BY = {
    "device": "by the device's clock; a step ends when the host has left it and the device has finished its work",
    "host": "on the host's main thread, because the trace has no device rows",
    "record": "by rank 0's steps in the record, because the run has no trace (look=on records one)",
}


def from_accounts(accounts: Mapping[str, dict[str, Any]]) -> Document:
    """Returns the answer of ./run.sh explain.  accounts: {title: answer of accounts_of() or explain_record()}."""
    return _document(TITLE, accounts, [_verdict(*item) for item in accounts.items()], _account)


def from_differences(differences: Mapping[str, dict[str, Any]]) -> Document:
    """Returns the answer of ./run.sh explain A B.  differences: {title: answer of account.difference()}."""
    verdicts = [_verdict_of_difference(*item) for item in differences.items()]
    return _document("What changed in a step", differences, verdicts, _difference)


def _document(
    title: str,
    accounts: Mapping[str, dict[str, Any]],
    verdicts: list[Verdict],
    blocks_of: Callable[[dict[str, Any]], list[Block]],
) -> Document:
    if len(accounts) == 1:
        (account,) = accounts.values()
        return Document(title, verdicts, blocks_of(account), account)
    sections = [Section(plain(brief(name), MAX_TITLE_CHARS), blocks_of(account)) for name, account in accounts.items()]
    return Document(title, verdicts, sections, accounts)


def section_of_run(folder: Path | str) -> Section:
    """Returns the folded section of a run's page; an empty one if the run has no measured step.

    It is made from the run's traces, or from its record if they are large; the section then says how to see more.
    """
    folder, hint = Path(folder), []
    traces = (path for path in folder.glob("traces/**/*") if path.name.endswith(load.SUFFIXES))
    try:
        if sum(path.stat().st_size for path in traces) > MAX_TRACE_BYTES:
            hint = ["Its traces are large, so this is by its record: ./run.sh explain RUN --html FILE reads them."]
            accounts = {"": explained.explain_record(folder)}
        else:
            accounts = explained.explain_paths("", [folder])
    except NoTrace as error:
        return Section(TITLE, [Lines([f"Its traces cannot be explained: {error}"], is_soft=True)])
    except ValueError:
        return Section(TITLE, [])  # no step that was timed undisturbed
    shown = [
        Section(f"One step, {format_ms(facts['step_ms'])}{name}", [Lines(hint, is_soft=True), *_account(facts)], True)
        for name, facts in accounts.items()
    ]
    return Section(TITLE, shown)


# ---- an account


def _verdict(title: str, account: dict[str, Any]) -> Verdict:
    limit, unbound, rest = (
        format_ms(sum(line["ms"] for line in account["parts"] if _kind(line) == kind))
        for kind in ("limit", "unknown", "above")
    )
    step = f"{plain(brief(title), MAX_TITLE_CHARS)}: a step takes {format_ms(account['step_ms'])}"
    sentence = f"{step}: {limit} of roofline time, {rest} of overhead and {unbound} without a known bound."
    notes, host, step_ms = [], account["waits_for_host"], account["step_ms"]
    if host and host["ms"] >= MIN_HELD_FRAC * step_ms:
        critical = "The host is the critical path: the" if 2 * host["ms"] > step_ms else "The"
        longest = ", ".join(f"{short(line['what'])} {_ms(line['ms'])}" for line in host["most"])
        waits = f"{critical} device waits {_ms(host['ms'])} of {_ms(step_ms)} ms for its host"
        notes.append(f"{waits}. The longest waits: {longest}. What may help: {ranking.ADVICE[host['part']]}.")
    return Verdict(sentence, "", notes=notes + _late(account))


def _late(account: Mapping[str, Any], start: str = "The", usual_ms: float = 0.0) -> list[str]:
    """Returns a sentence on the rank that holds up the others, if by a tenth of the step more than usual_ms, or []."""
    line, step_ms = next(iter(account.get("lateness", ())), None), account["step_ms"]
    if line is None or line["wait_ms"] - usual_ms < MIN_HELD_FRAC * step_ms:
        return []
    waits = f"{start} other ranks wait {_ms(line['wait_ms'])} of {_ms(step_ms)} ms for rank {line['rank']}"
    why = "".join(f": it spends {_ms(more['ms'])} ms more in {evidence(more)}" for more in line["reasons"][:1])
    return [f"{waits}, which is late{why}."]


def _account(account: dict[str, Any]) -> list[Block]:
    ranks = f", mean of {len(account['ranks'])} ranks" if len(account["ranks"]) > 1 else ""
    steps = text_table.counted(account["num_steps"], "step")
    about = f"mean of {steps}{ranks}, measured {MEASURED_BY[account['of']]}"
    first = next(iter(account["ranks"].values()))
    device = f"; {plain(first['device'])}" if first["device"] else ""
    limit = [f"Outside these steps, {_outside(line)}." for line in account.get("outside", ())[:MAX_OUTSIDE]]
    limit.append(f"Limit: {first['ceiling'] or 'no peak is known for this device'}{device}.")
    limit += [f"Not modelled: {account['missing']}."] if account["missing"] else []
    return [
        Bullets(account["doubts"]),
        Waterfall("One step, ms:", about, _bars(account), KINDS),
        Lines(limit, is_soft=True),
        *_next(account),
        Section("Who delays whom, ms per step", list(_lateness(account))),
        *_tables(account),
    ]


def _bars(account: dict[str, Any]) -> list[Bar]:
    bars, at_ms = [], 0.0
    for line in account["parts"]:
        label = f"{line['ms']:.3f} ({line['pct']:.1f} %)"
        bars.append(Bar(line["part"], at_ms, at_ms + line["ms"], label, _kind(line), line["meaning"]))
        at_ms += line["ms"]
    return [*bars, Bar("the step", 0.0, account["step_ms"], f"{account['step_ms']:.3f} (100 %)", "total")]


def _kind(line: Mapping[str, Any]) -> Kind:
    """Returns the kind of a part of the account, one of KINDS."""
    if line["is_limit"]:
        return "limit"
    return "unknown" if line["part"] in (*parts.NO_BOUND, parts.UNKNOWN) else "above"


def _next(account: dict[str, Any]) -> list[Block]:
    """Returns the ranking, then advice and the records that gained in such places."""
    shown = [line for line in account["next"] if line["gain_pct"] >= MIN_GAIN_PCT]
    small_ms = [line["most_ms"] for line in account["next"] if line["gain_pct"] < MIN_GAIN_PCT]
    bounded = [line for line in shown if line["part"] not in parts.NO_BOUND]
    others = [line for line in shown if line["part"] in parts.NO_BOUND]
    small = f"{text_table.counted(len(small_ms), 'line')}, {_ms(sum(small_ms))} ms together"
    more = f"Not shown: {small}, each less than {MIN_GAIN_PCT} % of the step."
    hints = dict.fromkeys(f"{line['part']}: {line['advice']}" for line in shown)
    records = ranking.legend(shown)
    again = ", counting what would hold up the step instead" if account.get("is_retimed") else ""
    about = Lines(["These records of models/ladder improved such places; the lines above name them."], True)
    return [
        _ranked("Largest possible savings:", f"upper bounds, in ms{again}", bounded, "above"),
        _ranked("Time without a known bound:", f"in ms{again}; how much can be saved is unknown", others, "unknown"),
        Lines([more] if small_ms else [], is_soft=True),
        Section("What may help", [Bullets(list(hints))] if hints else [], is_folded=True),
        Section("What record runs did about it", [about, Bullets(records)] if records else [], is_folded=True),
    ]


def _ranked(title: str, about: str, lines: Sequence[dict[str, Any]], kind: Kind) -> Waterfall:
    bars = []
    for line in lines:
        records = f" ({', '.join(line['ladder'])})" if line["ladder"] else ""
        gain, alone = f"{line['gain_ms']:.3f}", f"{line['most_ms']:.3f}"
        gain, count = (gain if gain == alone else f"{gain} of {alone}"), f"{line['count']:.1f} per step"
        why = ""
        if line["gain_ms"] > line["most_ms"] * (1 + 1e-9):
            why = "; up to {1:.3f} on rank {0}, for which the others wait".format(*line["of_rank"])
        gain = f"{gain} ({line['gain_pct']:.1f} %)"
        bars.append(Bar(evidence(line) + why + records, 0.0, line["gain_ms"], gain, kind, count))
    return Waterfall(title, about, bars, has_sentences=True)


def _lateness(account: dict[str, Any]) -> Iterator[Block]:
    """Yields, for each rank that delays the others, how long they wait and why."""
    for line in account["lateness"]:
        if line["wait_ms"] <= MIN_LATE_FRAC * account["step_ms"]:
            continue
        calls = ", ".join(f"{short(call['what'])} {call['ms']:.3f}" for call in line["collectives"][:2])
        waited = f"rank {line['rank']}: the others wait {line['wait_ms']:.3f} for it (median), in {calls}"
        yield Lines([f"{waited}; without that their step would be {line['without_ms']:.3f}"])
        excesses = ", ".join(f"{part} {ms:.3f}" for part, ms in list(line["more"].items())[:3])
        reasons = [f"{reason['ms']:.3f} more in {reason['part']}: {_place(reason)}" for reason in line["reasons"][:3]]
        have = f"longer than the median of the other ranks: {excesses or 'nothing that was recorded'}"
        yield Bullets([have, *reasons])


def _tables(account: dict[str, Any]) -> list[Block]:
    """Returns what each part holds and which ranks have least and most of it; a page also has a table of all ranks."""
    by_rank = {f"rank {number}": rank["parts"] for number, rank in account["ranks"].items()}
    ms_by_rank = {name: {line["part"]: line["ms"] for line in lines} for name, lines in by_rank.items()}
    rows, rank_rows = [], []
    for line in account["parts"]:
        ms = {name: part_ms.get(line["part"], 0.0) for name, part_ms in ms_by_rank.items()}
        ends = [f"{ms[name]:.3f} ({name})" for name in (min(ms, key=ms.__getitem__), max(ms, key=ms.__getitem__))]
        about = [*(ends if len(ms) > 1 else []), line["meaning"], line["source"]]
        rows.append([line["part"], _ms(line["ms"]), f"{line['pct']:.1f}", *about])
        rank_rows.append([line["part"], *map(_ms, ms.values())])
    heads = ["part", "ms", "%", *(["least", "most"] if len(by_rank) > 1 else []), "what it holds", "limit from"]
    held = Table(heads, rows, [head in ("ms", "%") for head in heads])
    tables: list[Block] = [Section("What each part holds", [held], is_folded=True)]
    if len(by_rank) > 1:
        table = Table(("part", *by_rank), rank_rows, [False] + [True] * len(by_rank))
        tables.append(Section("Each rank, ms per step", [table], is_folded=True, is_page_only=True))
    return tables


# ---- the difference of two


def _verdict_of_difference(title: str, difference: dict[str, Any]) -> Verdict:
    a_ms, b_ms, pct = difference["a"]["step_ms"], difference["b"]["step_ms"], difference["change_pct"]
    change = f"{difference['change_ms']:+.3f} ms" + ("" if pct is None else f", {pct:+.1f} %")
    notes = []
    if (race_ms := difference.get("race_step_ms")) and (race_ms[1] - race_ms[0]) * difference["change_ms"] < 0:
        measured = f"a step of {format_ms(race_ms[0])} in A and of {format_ms(race_ms[1])} in B"
        notes = [f"The means of the race differ the other way, {measured}, so the traces do not explain it."]
    steps = f"a step takes {format_ms(a_ms)} in A and {format_ms(b_ms)} in B: {change}"
    seen = {name: {line["what"] for line in difference["outside"][name]} for name in "ab"}
    for name, other in ("ba", "ab"):
        for line in difference["outside"][name][:1]:
            if line["part"] == parts.COMPILATION and line["what"] not in seen[other]:
                notes.append(f"only {name.upper()}, outside these steps: {_outside(line)}")
        usual_ms = max((line["wait_ms"] for line in difference[other].get("lateness", ())), default=0.0)
        notes += _late(difference[name], f"In {name.upper()} the", usual_ms)
    notes += [f"{line['change_ms']:+.3f} ms {evidence(line)}" for line in _largest(difference)[:NUM_CAUSES]]
    return Verdict(f"{plain(brief(title), MAX_TITLE_CHARS)}: {steps}", "", notes=notes)


def difference_blocks(difference: dict[str, Any]) -> list[Block]:
    """Returns a difference with "files" as blocks of another document, without its folded tables."""
    verdict = _verdict_of_difference(" against ".join(reversed(difference["files"])), difference)
    return [verdict, *(block for block in _difference(difference) if not isinstance(block, Section))]


def cause(difference: dict[str, Any]) -> str | None:
    """Returns a sentence about the largest change in the direction of the whole step's, None if there is none."""
    for line in _largest(difference)[:1]:
        subject = f"{place} ({line['part']})" if (place := _place(line)) else line["part"]
        change = f"{abs(line['change_ms']):.3f} ms {'more' if line['change_ms'] > 0 else 'less'}"
        return f"the largest change of a profiled step: {subject} takes {change}"
    return None


def _largest(difference: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines that changed in the direction of the whole step, the largest change first."""
    sign = 1 if difference["change_ms"] >= 0 else -1
    return [line for line in difference["lines"] if sign * line["change_ms"] > 0]


def _outside(line: Mapping[str, Any]) -> str:
    times, first, last = text_table.counted(line["count"], "time"), line["first_step"], line["last_step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{line['part']}: {plain(line['what'])}, {times}, {line['ms']:.1f} ms, {steps}"


def _difference(difference: dict[str, Any]) -> list[Block]:
    a, b, rows = difference["a"], difference["b"], difference["parts"]
    ends = ("step of A", a["step_ms"]), ("step of B", b["step_ms"])
    steps = [(row["part"], row["change_ms"], row["meaning"]) for row in rows]
    bars = []
    for line in difference["lines"]:
        change = f"{line['change_ms']:+.3f} ({line['a_ms']:.3f} to {line['b_ms']:.3f})"
        kind: Kind = "less" if line["change_ms"] < 0 else "more"
        bars.append(Bar(evidence(line), 0.0, line["change_ms"], change, kind))
    cells = [(row["part"], _ms(row["a_ms"]), _ms(row["b_ms"]), f"{row['change_ms']:+.3f}") for row in rows]
    table = Table(("part", "A, ms", "B, ms", "change, ms"), cells, (False, True, True, True))
    rest = f"all others together: {difference['rest_ms']:+.3f} ms"
    doubts = [f"{side.upper()}: {doubt}" for side in "ab" for doubt in difference[side]["doubts"]]
    return [
        Bullets(doubts),
        from_changes("From A's step to B's, ms:", f"measured {MEASURED_BY[a['of']]}", ends, steps),
        Waterfall("What changed most:", "in ms, from A to B", bars, CHANGES, has_sentences=True),
        Lines([rest] if bars else [], is_soft=True),
        Section("What each part took", [table], is_folded=True),
    ]


# ---- sentences


def evidence(line: dict[str, Any]) -> str:
    """Returns the part, rank, name and place of a line of the ranking or of a difference."""
    rank = "" if line.get("rank") is None else f" (rank {line['rank']})"
    return f"{line['part']}{rank}: {_place(line)}"


def _place(line: dict[str, Any]) -> str:
    what = short(line["what"], MAX_WHAT_CHARS) if line["what"] else ""
    where = COMPILED.sub("a compiled graph", plain(line["where"], MAX_TITLE_CHARS)) if line["where"] else ""
    if line["what"] == line["where"]:  # a function's own time
        return what
    return f"{what} at {plain(where)}" if what and where else what or where


def _ms(ms: float) -> str:
    return f"{ms:.3f}"
