"""Presents an analysis of traces as a Document: what it means, what to know of the files, tables."""

import functools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench.base import escape, text_table
from bench.base.paths import brief
from bench.base.units import MIB
from bench.web.document import Block, Bullets, Document, Lines, Section, Table, Verdict

MAX_NAME_CHARS = 60
MAX_DEPTH = 64  # levels of template arguments that are kept of any name
NUM_LINES = 10  # lines of a table in a text
MAX_LINES = 200  # lines of a table on a page
LATE_ABOVE_PCT = 5  # share of the span: a rank that the others wait for less is not called late
MAX_OPEN = 4  # sentences that are shown; more are folded
NOTHING_COUNTED = "no device rows are counted: all times below are the host's"
Line = dict[str, Any]  # a line of an answer
Column = tuple[str, str, Any]  # (header, key of a line, format of its value)
NUMBER = re.compile(r"([-+]?[\d.,]+)?")  # a number or nothing
BOILERPLATE = re.compile(
    r"^void |at::native::|at::cuda::|c10::|\(anonymous namespace\)::|(?<=[<, ])at::(?=\w)"
    r"|, (?:std|at::detail)::[aA]rray<char\*, \d+(?:ul)?>|(?<=>) (?=>)"
)
BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)[^>]*>")  # with the address of an object
SHAPES = re.compile(r"(\[[\d, ]*\])(?: \1)+")  # repeated shapes of an operator's arguments
GUARD = re.compile(r"(?:flash::enable_\w+|gpu_kernel_impl\w*)<(.*)>")  # what wraps a kernel, or its function
LAMBDA = re.compile(r"(?:\([^()]*\))?(?:::\{lambda\([^{}]*\)#\d+\}(?:::operator\(\)\([^()]*\))?(?: const)?)+")


def plain(value: object, limit: int = MAX_NAME_CHARS) -> str:
    """Returns foreign text without control characters, cut in its middle to limit characters."""
    text = escape.line("" if value is None else str(value))
    return text_table.middle(text, limit)


def short(name: object, limit: int = MAX_NAME_CHARS) -> str:
    """Returns a name without return type, namespaces, lambdas, arguments, addresses and repeated shapes.

    If it is still too long, the innermost template arguments become <…>, as many levels as it takes.
    """
    text = BUILT_IN.sub(r"\1 (built-in)", LAMBDA.sub("", BOILERPLATE.sub("", str(name))))
    text = SHAPES.sub(lambda same: f"{same[1]} x{same[0].count('[')}", text)
    head, bracket, _ = text.rpartition("(")
    is_call = text.endswith(")") and head and not head.endswith(" ")  # "Memcpy HtoD (Pinned -> Device)" is no call
    text = GUARD.sub(r"\1", head if bracket and is_call else text)
    depth = min(text.count("<"), MAX_DEPTH)
    while len(text) > limit and depth > 1:  # the outermost ones distinguish it
        text = _without_arguments(text, depth)
        depth -= 1
    return plain(text, limit)


def _without_arguments(text: str, most: int) -> str:
    """Replaces template arguments at this depth and below by <…>; text that is no template stays as it is."""
    kept, depth = [], 0
    for char in text:
        depth -= char == ">" and depth > 0
        if depth < most:
            kept.append(char)
        if char == "<":
            depth += 1
            kept += ["…"] * (depth == most)
    return "".join(kept) if depth == 0 else text


def decimals(num: int, per: float = 1.0) -> Callable[[float | None], str]:
    """Returns a format for cells: a number divided by per, with num decimals."""
    return lambda value: "" if value is None else f"{value / per:.{num}f}"


plain40, short40 = functools.partial(plain, limit=40), functools.partial(short, limit=40)
MS, MS2, MIB3, ONE, TWO = decimals(3, 1000), decimals(2, 1000), decimals(3, MIB), decimals(1), decimals(2)


def table(lines: Sequence[Line], columns: Sequence[Column], limit: int | None = None) -> Table:
    """Returns a table of lines.  columns: [(head, key, format of a cell)]; limit: lines in a text, None for all."""
    cells = [[format_cell(line[key]) for _, key, format_cell in columns] for line in lines]
    right = [all(map(NUMBER.fullmatch, column)) for column in zip(*cells)]
    return Table([head for head, _, _ in columns], cells, right, "", limit, "; --json has all")


def document(report: Line, title: str) -> Document:
    """Presents a report of analyze_files().  title: what was analysed.  bench/report/trace_page.py adds pictures."""
    about = plain(brief(title), 200)
    return Document(f"Trace analysis: {about}", [verdict(report, about)], [*remarks(report), *tables(report)], report)


def verdict(report: Line, about: str = "") -> Verdict:
    """Returns what stands out most in the first rank, and how many ranks there are."""
    first = next(iter(report["ranks"].values()))
    none = "nothing stands out" if first["temporal"]["span_us"] else NOTHING_COUNTED
    return Verdict(next(iter(first["advice"]), none) + _rank(report), "", about)


def _late(report: Line) -> Iterator[str]:
    """Yields a sentence on the rank that comes last to the most collectives, if the others wait for long."""
    waits = (report["overall"]["collectives"] or {}).get("waits", ())
    if len(waits) < 2:
        return
    last = max(waits, key=lambda line: line["num_last"])
    wait_us = statistics.median(line["wait_us"] for line in waits if line is not last)
    span_us = report["ranks"][str(last["rank"])]["temporal"]["span_us"]
    if wait_us > LATE_ABOVE_PCT / 100 * span_us:
        calls = text_table.counted(last["num_last"], "collective")
        yield (
            f"Rank {last['rank']} comes last to {calls}: the others waited "
            f"{wait_us / 1000:.2f} ms in theirs, {100 * wait_us / span_us:.1f} % of its time (over {LATE_ABOVE_PCT} %, "
            "median); ./run.sh explain says what it does longer."
        )


def remarks(report: Line, is_first_said: bool = True) -> list[Block]:
    """Returns what to know of the files, and the advice; is_first_said: without the sentence of verdict()."""
    overall, ranks = report["overall"], report["ranks"]
    missing = overall["missing_ranks"]
    notes = [f"{len(missing)} of {overall['world_size']} ranks are missing: {missing[:10]}"] if missing else []
    notes += overall["doubts"]
    notes += [sentence for rank, analysis in ranks.items() for sentence in caveats(rank, analysis)]
    advice = [*_late(report), *next(iter(ranks.values()))["advice"][int(is_first_said) :]]
    folded = [Section(f"{len(notes)} things to know of the files", [Bullets(notes)], is_folded=True)]
    return [
        *(folded if len(notes) > MAX_OPEN else [Bullets(notes)]),
        Section(f"What it means{_rank(report)}", [Bullets(advice)] if advice else []),
    ]


def _rank(report: Line) -> str:
    shown, *others = report["ranks"]
    return f" (rank {shown} of {1 + len(others)}; --json has all)" if others else ""


def tables(report: Line) -> list[Block]:
    """Returns the tables of the first rank, and of all ranks together; a page folds them."""
    ranks, suffix = report["ranks"], _rank(report)
    analysis = next(iter(ranks.values()))
    blocks: list[Block] = [_times(ranks)]
    for parts in (_kernels, _operators, _rates, _steps, _by_name, _waiting, _critical_path):
        for block in parts(analysis):
            blocks.append(replace(block, title=block.title + suffix) if isinstance(block, Section) else block)
    if matched := report["overall"]["collectives"]:
        title = f"Who waited for whom: {matched['num_matched']} collectives matched"
        columns = [("rank", "rank", str), ("waited ms", "wait_us", MS), ("came last", "num_last", str)]
        blocks.append(_part(title, matched["waits"], *columns))
        columns = [("collective", "name", short), ("call", "call", str), ("rank that came last", "late_rank", str)]
        columns.append(("longest wait ms", "longest_wait_us", MS))
        blocks.append(_part("The longest waits", matched["worst"], *columns, limit=5))
    return blocks


def _part(title: str, lines: Sequence[Line], *columns: Column, limit: int = NUM_LINES) -> Section:
    return Section(title, [table(lines[:MAX_LINES], columns, limit)] if lines else [], is_folded=True)


def _times(ranks: Line) -> Section:
    """Returns a table with a line for each rank that has device rows."""
    lines = []
    for rank, analysis in ranks.items():
        exposed_us = None if analysis["overlap_pct"] is None else analysis["exposed_comm_us"]
        if analysis["temporal"]["span_us"]:
            facts = {"rank": rank, "exposed_us": exposed_us, "num_steps": len(analysis["profiler_steps"])}
            lines.append(analysis | analysis["temporal"] | facts | {"busy_pct": 100 - analysis["temporal"]["idle_pct"]})
    names = ("busy", "compute", "non_compute", "idle", "overlap")
    shares = [(f"{name.replace('_', '-')} %", f"{name}_pct", TWO) for name in names]
    counts = [("steps", "num_steps", str), ("device rows", "num_device_rows", str)]
    columns = [("rank", "rank", str), ("span", "span_us", MS2), *shares, ("exposed comm.", "exposed_us", MS2), *counts]
    return _part("Time of the device, ms and % of the span", lines, *columns)


def is_empty(analysis: Line) -> bool:
    """Returns whether nothing in a rank's trace took time."""
    kinds = ("num_device_rows", "num_operators", "steps", "phases", "annotations", "gpu_annotations", "sources")
    return not any(analysis[kind] for kind in kinds) and not any(analysis["num_device_rows_excluded"].values())


def caveats(rank: str, analysis: Line) -> Iterator[str]:
    """Yields sentences that a reader must know of a rank's file before trusting its numbers."""
    yield from (f"rank {rank}: {doubt}" for doubt in analysis["doubts"])
    excluded = analysis["num_device_rows_excluded"]
    if not analysis["num_device_rows"] and not any(excluded.values()):
        nothing = "and no operators" + ": there is nothing to analyse" * is_empty(analysis)
        yield f"rank {rank} has no device rows, {'only operators' if analysis['num_operators'] else nothing}"
    if excluded["last_step"]:
        rows = f"{excluded['last_step']} device rows of the last step, {analysis['profiler_steps_excluded'][-1]}"
        yield f"rank {rank}: {rows}, are not counted: it may be cut off (--include-last-step counts them)"
    if excluded["not_launched"]:
        why = "their launch was not recorded, so their step is not known"
        yield f"rank {rank}: {excluded['not_launched']} device rows are not counted: {why}"


def _kernels(analysis: Line) -> Iterator[Block]:
    times = [("ms", "sum_us", MS), ("%", "pct", ONE)]
    yield _part("Kernels by type, % of the busy time", analysis["kernel_types"], ("type", "type", str.lower), *times)
    category = ("category", "category", str)
    columns = [category, *times, ("kernels", "count", str)]
    yield _part("Categories, % of all kernels' time", analysis["categories"], *columns)
    columns = [("kernel", "name", short), category, ("ms", "sum_us", MS), ("count", "count", str)]
    columns += [("mean us", "mean_us", TWO), ("min", "min_us", TWO), ("max", "max_us", TWO), ("std", "std_us", TWO)]
    yield _part("Kernels", analysis["kernels"], *columns)
    lines = [line for line in analysis["launchers"] if line["operator"] or line["annotation"] or line["source"]]
    by = [name for name in ("operator", "annotation", "module", "source") if any(line[name] for line in lines)]
    columns = [("kernel", "kernel", short40), *((name, name, plain40) for name in by)]
    counts = [("ms", "device_us", MS), ("count", "count", str)]
    yield _part("Who launched them", lines, *columns, *counts)


def _operators(analysis: Line) -> Iterator[Block]:
    times = [("device ms", "device_us", MS)] * bool(analysis["num_device_rows"]) + [("self CPU ms", "self_cpu_us", MS)]
    memory = [("MiB", "allocated_bytes", MIB3), ("net MiB", "net_bytes", MIB3)]
    for title, key, extra in (
        ("device time", "device_us", []),
        ("self CPU time", "self_cpu_us", []),
        ("memory requested", "allocated_bytes", memory),
    ):
        leading = sorted((line for line in analysis["operators"] if line[key]), key=lambda line: -line[key])
        columns = [("operator", "name", plain), ("shapes", "shapes", plain40), *times, *extra, ("count", "count", str)]
        yield _part(f"Operators by {title}", leading, *columns)


def _rates(analysis: Line) -> Iterator[Block]:
    whole, lines = analysis["achieved_whole"], analysis["achieved"]
    if whole["known_frac"] is None or not lines:
        return
    on_device = whole["of"] == "device"
    unit, per, base = ("TFLOP/s", 1, "device time") if on_device else ("GFLOP/s", 1e3, "CPU operator time")
    rate, share = f"{whole['tflop_per_s'] * per:.1f}", f"{100 * whole['known_frac']:.0f} % of {base}"
    title = f"{unit} of matrix products and attention: {rate}, over the {share} whose shapes are known"

    def rate_text(rate: float) -> str:
        return f"{rate * per:.3g}" if abs(rate * per) < 100 else f"{rate * per:.0f}"

    columns = [("operator", "name", plain), ("shapes", "shapes", plain40), ("ms", "time_us", MS)]
    columns += [(unit, "tflop_per_s", rate_text), ("FLOP/byte", "flop_per_byte", ONE)]
    if any(line["pct_of_peak"] is not None for line in lines):
        columns += [("% of peak", "pct_of_peak", ONE), ("of", "precision", plain), ("bound by", "bound", plain)]
    yield _part(title, lines, *columns)


def _steps(analysis: Line) -> Iterator[Block]:
    names = ("step_us", "host_us", "busy_us", "compute_us", "comm_us", "exposed_comm_us")
    heads = ("step ms", "host ms", "device busy ms", "compute ms", "comm. ms", "exposed comm. ms")
    columns = [*((head, name, MS) for head, name in zip(heads, names)), ("kernels", "num_kernels", str)]
    phase_columns = [("host ms", "host_us", MS), ("device ms", "device_us", MS), ("kernels", "num_kernels", str)]
    if not analysis["num_device_rows"]:
        columns = phase_columns = [("ms", "host_us", MS)]
    yield _part("Steps", analysis["steps"], ("step", "step", str), *columns)
    yield _part("Phases", analysis["phases"], ("phase", "phase", str), *phase_columns)


def _by_name(analysis: Line) -> Iterator[Block]:
    """Yields the tables of annotations, modules and lines of Python."""
    times = [("ms", "sum_us", MS), ("count", "count", str), ("mean us", "mean_us", TWO), ("std us", "std_us", TWO)]
    for where, key in (("host", "annotations"), ("GPU", "gpu_annotations")):
        lines = [line for line in analysis[key] if not line["name"].startswith("ProfilerStep")]
        yield _part(f"Annotations of the {where}", lines, ("annotation", "name", plain), *times)
    columns = [("self CPU ms", "cpu_us", MS), ("calls", "num_calls", str)]
    if analysis["num_device_rows"]:
        columns = [("device ms", "device_us", MS), ("kernels", "num_kernels", str)]
    yield _part("By nn.Module", analysis["modules"], ("module", "module", plain), *columns)
    yield _part("By source line", analysis["sources"], ("source", "source", plain), *columns)


def _waiting(analysis: Line) -> Iterator[Block]:
    """Yields why streams were idle, how the host launched, and what was queued and copied."""
    stream = [("device", "device", str), ("stream", "stream", str)]
    waits = [(name.replace("_", " "), f"{name}_us", MS) for name in ("host_wait", "kernel_wait", "other")]
    yield _part("Idle time by stream, ms", analysis["idle"], *stream, *waits)
    calls = analysis["launches"]
    if calls["num_launches"]:
        delays = (
            f"{calls['num_launches']} launches: a call takes {calls['call_us_mean']:.1f} us (mean; 95 % are under "
            f"{calls['call_us_p95']:.1f}), the kernel starts {calls['delay_us_p50']:.1f} us after it (median; 95 % "
            f"under {calls['delay_us_p95']:.1f}).  {calls['num_short_kernels']} kernels run shorter than their call, "
            f"{calls['num_slow_calls']} calls take over 50 us, {calls['num_long_delays']} delays are over 100 us."
        )
        yield Lines([delays])
    if calls["num_graph_rows"]:
        yield Lines([f"{calls['num_graph_rows']} kernels were launched by {calls['num_graph_launches']} graphs."])
    queued = [("most", "max", str), ("mean", "mean", ONE), ("% of the time none", "empty_pct", ONE)]
    yield _part("Queued launches", analysis["queues"], *stream, *queued)
    columns = [("copy", "name", plain), ("count", "count", str), ("MiB", "gib", decimals(3, 1 / 1024))]
    columns += [("ms", "sum_us", MS), ("GiB/s", "gib_per_s", TWO)]
    yield _part("Copies and their bandwidth", analysis["copies"], *columns)
    columns = [("call", "name", plain), ("count", "count", str), ("ms", "sum_us", MS)]
    yield _part("The host waited for the device in", analysis["synchronisations"], *columns, limit=5)


def _critical_path(analysis: Line) -> Iterator[Block]:
    """Yields the critical paths of the span and a mean step, whose shares say what bounds it, then the longest gaps."""
    names = ("compute", "communication", "memory", "launch", "host", "wait")
    paths = analysis["critical_path_of_steps"]
    sums = {key: sum(path[key] for path in paths) for key in (*(f"{name}_us" for name in names), "span_us")}
    mean_path = (f"Critical path of a step, mean of {len(paths)}", sums, len(paths))
    for title, path, num in [("Critical path", analysis["critical_path"], 1)] + [mean_path] * bool(paths):
        if path["span_us"]:
            shares = ", ".join(f"{name} {100 * path[f'{name}_us'] / path['span_us']:.1f} %" for name in names)
            yield Lines([f"{title}: {path['span_us'] / num / 1000:.2f} ms: {shares}"])
    columns: list[Column] = [("at ms", "start_us", MS), ("us", "us", ONE)]
    columns += [("the host was in", "host", lambda name: plain(name or "nothing recorded"))]
    columns.append(("next kernel", "after", short40))
    yield _part("Largest gaps of the device", analysis["gaps"], *columns, limit=5)
