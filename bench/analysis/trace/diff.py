"""Two traces -> what changed: kernels and operators matched by name and shape, milliseconds a step gained or lost.

A step's time is what its lines take, less the time in which several of them ran at once, plus the time in which none
ran:

    step = sum of lines - overlap + idle

so the step's change is the lines' change and a rest, which is that of idle time less that of overlap: nothing is left
over.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.trace import device_time, events, load, operators, window
from bench.analysis.trace.columns import covered_ns, merged_intervals
from bench.analysis.trace.rank import Rank
from bench.analysis.trace.source import NoTrace

NS_PER_MS = 1_000_000
US_PER_MS = 1000
UNKNOWN = ("(launched by no recorded operator)",)
MAX_LINES = 10
Lines = dict[tuple[str, ...], tuple[float, int]]  # key: (microseconds, count)


def by_default(ranks: Iterable[Rank]) -> str:
    """What to match two traces by: kernels where both have some, else the operators of the CPU."""
    return "kernel" if all(len(rank.device_rows()) for rank in ranks) else "operator"


def profile(rank: Rank, by: str = "kernel") -> dict[str, Any]:
    """A Rank -> {"num_steps", "step_ms", "span_ms", "busy_ms", "lines": {key: {"ms", "count"}}, "categories": {name:
    ms}}, per step.

    key: (name,) of a kernel, or (operator, shapes).  Without ProfilerSteps the whole trace is one step, and step_ms is
    None.  An operator's time is that of the kernels it launched, or its own on the CPU where there are none.  span_ms:
    from the first of it to the last; busy_ms: the time in which any of it ran.
    """
    rows, counted = window.device_rows(rank), window.steps(rank)
    num_steps = max(1, len(counted))
    table = device_time.by_name(rank, rows, device_time.types(rank, rows))
    if by == "kernel":
        lines = _summed(((line["name"],), line["sum_us"], line["count"]) for line in table)
    else:
        lines = _operators(rank, rows)
    # what the lines are made of: each device has its own timeline; without device rows all the host's threads are one
    timed = rows if len(rows) else window.host_rows(rank, events.CPU_OP, window.until(rank))
    start, end = rank.ts[timed], rank.end[timed]
    timelines = list(window.devices(rank, rows).values()) or [np.ones(len(timed), bool)]
    busy_ns = sum(covered_ns(merged_intervals(start[mine], end[mine])) for mine in timelines)
    per_step = {key: {"ms": us / US_PER_MS / num_steps, "count": num / num_steps} for key, (us, num) in lines.items()}
    return {
        "num_steps": num_steps,
        "step_ms": sum(stop - begin for _, begin, stop in counted) / num_steps / NS_PER_MS if counted else None,
        "span_ms": int(end.max() - start.min()) / num_steps / NS_PER_MS if len(timed) else None,
        "busy_ms": busy_ns / num_steps / NS_PER_MS,
        "lines": per_step,
        "categories": {
            line["category"]: line["sum_us"] / US_PER_MS / num_steps for line in device_time.by_category(table)
        },
    }


def _operators(rank: Rank, rows: np.ndarray) -> Lines:
    """Includes a line for kernels that no recorded operator launched, so that every kernel is in some line."""
    time = "device_us" if len(rows) else "self_cpu_us"
    table = operators.table(rank, rows, window.until(rank))
    lines = _summed(
        ((line["name"], "" if line["shapes"] is None else str(line["shapes"])), line[time], line["count"])
        for line in table
    )
    rest_us = int(rank.dur[rows].sum()) / US_PER_MS - sum(line[time] for line in table)
    return lines | ({UNKNOWN: (rest_us, 0)} if rest_us > 1e-6 else {})


def _summed(parts: Iterable[tuple[tuple[str, ...], float, int]]) -> Lines:
    """(key, microseconds, count) -> {key: (microseconds, count)}"""
    lines: Lines = {}
    for key, us, count in parts:
        known_us, known_count = lines.get(key, (0.0, 0))
        lines[key] = (known_us + us, known_count + count)
    return lines


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two profiles -> {"of", of: [a, b], "num_steps", "change_ms", "explained_ms", "rest_ms", "idle_change_ms",
    "overlap_change_ms", "lines", "categories"}

    of: "step_ms", or "span_ms" where a trace has no steps.  lines, the largest change first: {"what", "status":
    "appeared" | "vanished" | "changed" | "same", "a_ms", "b_ms", "change_ms", "a_count", "b_count"}; explained_ms is
    their sum.  rest_ms = change_ms - explained_ms = idle_change_ms - overlap_change_ms.  categories: {"category",
    "a_ms", "b_ms", "change_ms"} of all kernels: names change with a library's version, what they do does not.
    """
    keys = a["lines"].keys() | b["lines"].keys()
    lines = [_line(key, a["lines"].get(key), b["lines"].get(key)) for key in keys]
    lines.sort(key=lambda line: (-abs(line["change_ms"]), line["what"]))
    categories = []
    for name in a["categories"].keys() | b["categories"].keys():
        old, new = (side["categories"].get(name, 0.0) for side in (a, b))
        categories.append({"category": name, "a_ms": old, "b_ms": new, "change_ms": new - old})
    categories.sort(key=lambda line: (-abs(line["change_ms"]), line["category"]))
    return _totals(a, b, lines) | {"lines": lines, "categories": categories}


def _line(key: tuple[str, ...], old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    """old, new: {"ms", "count"}, None where the trace does not have the line."""
    change_ms = (new["ms"] if new else 0.0) - (old["ms"] if old else 0.0)
    if old is None or new is None:
        status = "appeared" if old is None else "vanished"
    else:
        status = "changed" if change_ms or old["count"] != new["count"] else "same"
    return {
        "what": " ".join(part for part in key if part),
        "status": status,
        "a_ms": old and old["ms"],
        "b_ms": new and new["ms"],
        "change_ms": change_ms,
        "a_count": old and old["count"],
        "b_count": new and new["count"],
    }


def _totals(a: dict[str, Any], b: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    of = "step_ms" if a["step_ms"] is not None and b["step_ms"] is not None else "span_ms"
    totals = {"of": of, of: [a[of], b[of]], "num_steps": [a["num_steps"], b["num_steps"]]}
    explained_ms = sum(line["change_ms"] for line in lines)
    if a[of] is None or b[of] is None:
        unknown = dict.fromkeys(("rest_ms", "idle_change_ms", "overlap_change_ms"))
        return totals | {"change_ms": None, "explained_ms": explained_ms} | unknown
    sums_ms = [sum(line["ms"] for line in side["lines"].values()) for side in (a, b)]
    change_ms = b[of] - a[of]
    return totals | {
        "change_ms": change_ms,
        "explained_ms": explained_ms,
        "rest_ms": change_ms - explained_ms,
        "idle_change_ms": (b[of] - b["busy_ms"]) - (a[of] - a["busy_ms"]),
        "overlap_change_ms": (sums_ms[1] - b["busy_ms"]) - (sums_ms[0] - a["busy_ms"]),
    }


def diff_folders(a_folders: Iterable[Path | str], b_folders: Iterable[Path | str]) -> dict[str, Any] | None:
    """Run folders of A and of B -> {"a", "b": the files, "by", "step_ms" or "span_ms", "change_ms", "rest_ms", "lines"}

    The first run of each arm that has traces, the files of one name if there are some, else the first of each: the same
    window of the same rank.  Kernels are matched by name; without device rows, operators.  None without such traces.
    """
    a_files, b_files = _first_traces(a_folders), _first_traces(b_folders)
    if not a_files or not b_files:
        return None
    b_by_name = {path.name: path for path in b_files}
    same = [(path, b_by_name[path.name]) for path in a_files if path.name in b_by_name]
    a_file, b_file = same[0] if same else (a_files[0], b_files[0])
    try:
        ranks = [load.load(path) for path in (a_file, b_file)]
    except NoTrace:
        return None
    by = by_default(ranks)
    difference = compare(*(profile(rank, by) for rank in ranks))
    lines = [line for line in difference["lines"] if line["status"] != "same"]
    files = {"a": _short_name(a_file), "b": _short_name(b_file), "by": by}
    return files | difference | {"lines": lines[:MAX_LINES], "num_lines": len(lines)}


def _first_traces(folders: Iterable[Path | str]) -> list[Path]:
    for folder in folders:
        traces = os.path.join(folder, "traces")
        if os.path.isdir(traces):
            try:
                return load.find(traces)
            except NoTrace:
                continue
    return []


def _short_name(path: Path) -> str:
    """<run_id>/traces/<file>"""
    return "/".join(path.parts[-3:])
