"""The pages of foreign traces and of a difference of two, and the same sections for the page of a run."""

from collections.abc import Mapping
from pathlib import Path

from bench.analysis.trace.text import caveats, plain, short
from bench.base import atomic
from bench.report import trace_panels
from bench.web import lanes, waterfall
from bench.web.page import REPORT_STYLES, Safe, bullets, details, figure, join, page, section, soft, table, tag, tiles

NUM_LINES = 20  # of a table
MAX_OPEN = 4  # sentences; more are folded
MAX_KERNELS = 200
NUM_CHANGES = 14  # of a waterfall; the rest is one step
NOT_OURS = (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError)  # an older answer, or damaged
RUN_PREFIX = "trace-"  # of the drawings' ids on a run's page


def html(answers: Mapping[str, dict]) -> str:
    """{what was analysed: analysis} -> the page."""
    charts, body = [], []
    for number, (title, answer) in enumerate(answers.items()):
        drawn, parts = _sections(answer, _id(number))
        charts += drawn
        body += [tag("h1", f"Trace analysis: {plain(title, 200)}"), *parts]
    return page("Trace analysis", *body, data={"charts": charts}, styles=REPORT_STYLES)


def pictures(answers: Mapping[str, dict]) -> tuple[list[dict], list[lanes.Panel]]:
    """(chart specs, drawings) of html(), for bench/report/png.py."""
    charts, panels = [], []
    for number, answer in enumerate(answers.values()):
        some, more = trace_panels.of_answer(answer, _id(number))
        panels += some
        charts += more
    return charts, panels


def of_run(folder: Path) -> tuple[list[dict], Safe]:
    """Run folder -> (chart specs, html of its sections) of its analysis.json; ([], "") without one that fits."""
    answer = atomic.read_json(folder / "analysis.json", {})
    try:
        charts, parts = _sections(answer, RUN_PREFIX)
    except NOT_OURS:
        again = soft("analysis.json is not of this version: ./run.sh analyze RUN makes it again.")
        return [], section("Trace", again) if answer else Safe("")
    return charts, section("Trace", *parts)


def panels_of_run(folder: Path) -> list[lanes.Panel]:
    """Run folder -> the drawings of of_run()."""
    try:
        return trace_panels.of_answer(atomic.read_json(folder / "analysis.json", {}), RUN_PREFIX)[0]
    except NOT_OURS:
        return []


def _id(number):
    return f"{number}-" if number else ""


def _sections(answer, id):
    """(chart specs, parts of a page)."""
    panels, charts = trace_panels.of_answer(answer, id)
    ranks, overall = answer["ranks"], answer["overall"]
    number, one = next(iter(ranks.items()))
    missing = overall["missing_ranks"]
    said = [f"{len(missing)} of {overall['world_size']} ranks are missing: {missing[:10]}"] if missing else []
    said += [sentence for rank, each in ranks.items() for sentence in caveats(rank, each)]
    meaning = bullets(one["advice"])
    of_rank = f" (rank {number})" if len(ranks) > 1 else ""
    parts = [
        tiles(_facts(one, overall)),
        details(f"{len(said)} things to know of the files", bullets(said)) if len(said) > MAX_OPEN else bullets(said),
        tag("h3", f"What it means{of_rank}") + meaning if meaning else "",
        lanes.several(panels),
        *map(figure, charts),
        *_tables(one, overall),
    ]
    return charts, [Safe(part) for part in parts if part]


def _facts(one, overall):
    times = one["temporal"]
    facts = {"ranks": overall["num_ranks"], "device": plain(one["device"] or "none, or not named", 40)}
    facts["steps counted"] = len(one["profiler_steps"])
    if times["span_us"]:
        facts |= {"device busy, %": f"{100 - times['idle_pct']:.1f}", "span, ms": f"{times['span_us'] / 1000:.2f}"}
    if one["overlap_pct"] is not None:
        facts |= {"exposed communication, ms": f"{one['exposed_comm_us'] / 1000:.2f}"}
    facts["events read"] = f"{one['num_events']:,}"
    return facts.items()


def _tables(one, overall):
    """What a person looks up rather than looks at."""
    if matched := overall["collectives"]:
        lines = [[line["rank"], _ms(line["wait_us"]), line["num_last"]] for line in matched["waits"]]
        caption = f"Who waited for whom: {matched['num_matched']} collectives matched"
        yield table(("rank", "waited for others, ms", "came last"), lines, caption=caption)
        lines = [
            [short(line["name"]), line["call"], line["late_rank"], _ms(line["longest_wait_us"])]
            for line in matched["worst"]
        ]
        head = ("collective", "call", "rank that came last", "longest wait, ms")
        yield table(head, lines, caption="The longest waits")
    kernels = [
        [short(k["name"]), k["category"], k["count"], _ms(k["sum_us"]), *(round(k[f"{of}_us"], 2) for of in _OF)]
        for k in one["kernels"][:MAX_KERNELS]
    ]
    head = ("kernel", "category", "count", "ms", *(f"{of}, us" for of in _OF))
    operators = [
        [plain(o["name"]), plain(o["shapes"] or "", 60), o["count"], _ms(o["device_us"]), _ms(o["self_cpu_us"])]
        for o in one["operators"][:NUM_LINES]
    ]
    rates = [
        [
            plain(r["name"]),
            plain(r["shapes"], 60),
            _ms(r["time_us"]),
            _three(r["tflop_per_s"]),
            _three(r["pct_of_peak"]),
        ]
        for r in one["achieved"][:NUM_LINES]
    ]
    time = "device_us" if one["num_device_rows"] else "cpu_us"
    sources = [[plain(s["source"], 90), _ms(s[time])] for s in one["sources"][:NUM_LINES]]
    for title, columns, lines in (
        (f"{len(one['kernels'])} kernels", head, kernels),
        ("Operators", ("operator", "shapes", "count", "device, ms", "own CPU, ms"), operators),
        ("Rates, from recorded shapes", ("operator", "shapes", "ms", "TFLOP/s", "% of peak"), rates),
        ("Source lines", ("line", "ms"), sources),
    ):
        if lines:
            yield details(title, table(columns, lines))


_OF = ("mean", "min", "max", "std")


def _ms(us):
    return round(us / 1000, 3)


# ---- the difference of two traces


def of_difference(difference: dict, a: str, b: str) -> waterfall.Waterfall | None:
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
    ends = [(plain(name, 60), total) for name, total in zip((a, b), difference[of])]
    about = f"{difference['change_ms']:+.3f} ms, by {difference['by']}s; the steps add up to it"
    return waterfall.of_changes(f"What changed in {what}, ms:", about, tuple(ends), steps, "difference")


def diff_html(difference: dict, a: str, b: str) -> str:
    """diff.compare() with "by", and the names of the two traces -> the page."""
    drawn = of_difference(difference, a, b)
    head = ("what", "", "change, ms a step", "A, ms", "B, ms", "A count", "B count")
    lines = [
        [short(line["what"], 90), line["status"], *(_three(line[key]) for key in _NUMBERS)]
        for line in difference["lines"]
        if line["status"] != "same"
    ]
    categories = [
        [line["category"], *(_three(line[key]) for key in ("change_ms", "a_ms", "b_ms"))]
        for line in difference["categories"]
    ]
    body = [
        tag("h1", f"{plain(a, 80)} against {plain(b, 80)}"),
        drawn.markup if drawn else soft("There is no time to compare: one of the two has no steps and no rows."),
        table(("kernels by what they do", "change, ms", "A, ms", "B, ms"), categories) if categories else "",
        table(head, lines[:MAX_KERNELS], caption=f"{len(lines)} lines changed, the largest first"),
    ]
    return page("Difference of two traces", join(body), styles=REPORT_STYLES)


_NUMBERS = ("change_ms", "a_ms", "b_ms", "a_count", "b_count")


def _three(value):
    return None if value is None else round(value, 3)
