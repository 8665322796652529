"""Analyses of traces, and a difference of two, with their pictures: for pages of their own and the page of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.analysis.trace import text
from bench.analysis.trace.text import plain, short
from bench.base import atomic
from bench.report import trace_panels
from bench.web import lanes, waterfall
from bench.web.document import Block, Chart, Document, Lines, Picture, Section
from bench.web.page import tiles

Answer = dict[str, Any]  # of bench/analysis/trace/analysis.py, or a part of it

NUM_CHANGES = 14  # of a waterfall; the rest is one step
NOT_OURS = (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError)  # an older answer, or damaged
RUN_PREFIX = "trace-"  # of the drawings' ids on a run's page


def document(answers: Mapping[str, dict[str, Any]]) -> Document:
    """{what was analysed: analysis} -> the answer of ./run.sh analyze, with its pictures."""
    (first, *others), blocks = answers, list[Block]()
    for number, (title, answer) in enumerate(answers.items()):
        parts = _blocks(answer, f"{number}-" if number else "")
        blocks += [Section(plain(title, 200), parts)] if others else parts
    if not others:
        return Document(f"Trace analysis: {plain(first, 200)}", [text.verdict(answers[first])], blocks)
    verdicts = [text.verdict(answer, plain(title, 200)) for title, answer in answers.items()]
    return Document("Trace analysis", verdicts, blocks)


def of_run(folder: Path) -> Section:
    """Run folder -> the section of its page, of its analysis.json; nothing without one."""
    answer = atomic.read_json(folder / "analysis.json", {})
    try:
        return Section("Trace", _blocks(answer, RUN_PREFIX, is_first_said=False))
    except NOT_OURS:
        again = "analysis.json is not of this version: ./run.sh analyze RUN makes it again."
        return Section("Trace", [Lines([again], is_soft=True)] if answer else [])


def _blocks(answer: Answer, id: str, is_first_said: bool = True) -> list[Block]:
    panels, charts = trace_panels.of_answer(answer, id)
    first = next(iter(answer["ranks"].values()))
    return [
        Picture(tiles(_facts(first, answer["overall"]))),
        *text.remarks(answer, is_first_said),
        lanes.Several(panels),
        *map(Chart, charts),
        *text.tables(answer),
    ]


def _facts(one: Answer, overall: Answer) -> Iterable[tuple[str, object]]:
    times = one["temporal"]
    facts = {"ranks": overall["num_ranks"], "device": plain(one["device"] or "none, or not named", 40)}
    facts["steps counted"] = len(one["profiler_steps"])
    if times["span_us"]:
        facts |= {"device busy, %": f"{100 - times['idle_pct']:.1f}", "span, ms": f"{times['span_us'] / 1000:.2f}"}
    if one["overlap_pct"] is not None:
        facts |= {"exposed communication, ms": f"{one['exposed_comm_us'] / 1000:.2f}"}
    facts["events read"] = f"{one['num_events']:,}"
    return facts.items()


# ---- the difference of two traces


def of_difference(difference: Answer, a: str, b: str) -> waterfall.Waterfall | None:
    """From A's step to B's: the changes that are largest, the rest of them, idle time, overlap.  None without times."""
    if difference["change_ms"] is None:
        return None
    changed = [line for line in difference["lines"] if line["change_ms"]]
    steps = [(short(line["what"], 80), line["change_ms"], line["status"]) for line in changed[:NUM_CHANGES]]
    if others := changed[NUM_CHANGES:]:
        steps.append((f"{len(others)} other {difference['by']}s", sum(line["change_ms"] for line in others), ""))
    steps += [("nothing of it running", difference["idle_change_ms"], "")]
    steps += [("several at once", -difference["overlap_change_ms"], "")]
    of = difference["of"]
    what = "a step" if of == "step_ms" else "the span"
    of_a, of_b = difference[of]
    ends = (plain(a, 60), of_a), (plain(b, 60), of_b)
    about = f"{difference['change_ms']:+.3f} ms, by {difference['by']}s; the steps add up to it"
    return waterfall.of_changes(f"What changed in {what}, ms:", about, ends, steps, "difference")


def difference_document(difference: dict[str, Any], a: str, b: str) -> Document:
    """diff.compare() with "by", and the names of the two traces -> the answer of ./run.sh analyze diff."""
    answer, drawn = text.difference(difference, a, b), of_difference(difference, a, b)
    return replace(answer, blocks=[*([Picture(drawn)] if drawn else []), *answer.blocks])
