"""Two traces -> what changed: kernels and operators matched by name and shape, milliseconds a step gained or lost.

A step's time is what its lines take, less the time in which several of them ran at once, plus the time in which none ran:

    step = sum of lines - overlap + idle

so the step's change is the lines' change and a rest, which is that of idle time less that of overlap: nothing is left over.
"""

import numpy as np

from bench.trace import events, intervals, kernels, operators, window

NS_PER_MS = 1_000_000
US_PER_MS = 1000


def by_default(ranks):
    """What to match two traces by: kernels where both have some, else the operators of the CPU."""
    return "kernel" if all(len(rank.device_rows()) for rank in ranks) else "operator"


def profile(rank, by="kernel"):
    """A Rank -> {"num_steps", "step_ms", "span_ms", "busy_ms", "lines": {key: {"ms", "count"}}, "categories": {name: ms}}, per step.

    key: (name,) of a kernel, or (operator, shapes).  Without ProfilerSteps the whole trace is one step, and step_ms is None.
    An operator's time is that of the kernels it launched, or its own on the CPU where there are none.  span_ms: from the
    first of it to the last; busy_ms: the time in which any of it ran.
    """
    rows, counted = window.device_rows(rank), window.steps(rank)
    num_steps = max(1, len(counted))
    lines = _kernels(rank, rows) if by == "kernel" else _operators(rank, rows)
    start, end = _ranges(rank, rows)
    busy_ns = sum(
        intervals.length(intervals.union(start[mine], end[mine])) for mine in _timelines(rank, rows, len(start))
    )
    return {
        "num_steps": num_steps,
        "step_ms": sum(stop - begin for _, begin, stop in counted) / num_steps / NS_PER_MS if counted else None,
        "span_ms": int(end.max() - start.min()) / num_steps / NS_PER_MS if len(start) else None,
        "busy_ms": busy_ns / num_steps / NS_PER_MS,
        "lines": {
            key: {"ms": us / US_PER_MS / num_steps, "count": count / num_steps} for key, (us, count) in lines.items()
        },
        "categories": {line["category"]: line["sum_us"] / US_PER_MS / num_steps for line in _categories(rank, rows)},
    }


def _ranges(rank, rows):
    """(starts, ends) of what the lines are made of: device rows, or without any the operators."""
    if not len(rows):
        rows = window.host_rows(rank, events.CPU_OP, window.until(rank))
    return rank.ts[rows], rank.end[rows]


def _timelines(rank, rows, size):
    """Masks of what cannot share a timeline: each device has its own; all the host's threads are one."""
    return list(window.devices(rank, rows).values()) or [np.ones(size, bool)]


def _kernels(rank, rows):
    lines = {}
    for line in kernels.by_name(rank, rows, kernels.types(rank, rows)):
        us, count = lines.get((line["name"],), (0.0, 0))
        lines[(line["name"],)] = (us + line["sum_us"], count + line["count"])
    return lines


def _categories(rank, rows):
    return kernels.by_category(kernels.by_name(rank, rows, kernels.types(rank, rows)))


def _operators(rank, rows):
    """With a line for kernels that no recorded operator launched, so that all of them are in some line."""
    lines, known_us = {}, 0.0
    for line in operators.table(rank, rows, window.until(rank)):
        key = (line["name"], "" if line["shapes"] is None else str(line["shapes"]))
        us, count = lines.get(key, (0.0, 0))
        time_us = line["device_us"] if len(rows) else line["self_cpu_us"]
        lines[key], known_us = (us + time_us, count + line["count"]), known_us + time_us
    rest_us = int(rank.dur[rows].sum()) / US_PER_MS - known_us
    if rest_us > 1e-6:
        lines["(launched by no recorded operator)",] = (rest_us, 0)
    return lines


def compare(a, b):
    """Two profiles -> {"of", of: [a, b], "num_steps", "change_ms", "explained_ms", "rest_ms", "idle_change_ms", "overlap_change_ms", "lines", "categories"}

    of: "step_ms", or "span_ms" where a trace has no steps.  lines, the largest change first: {"what", "status": "appeared" |
    "vanished" | "changed" | "same", "a_ms", "b_ms", "change_ms", "a_count", "b_count"}; explained_ms is their sum.
    rest_ms = change_ms - explained_ms = idle_change_ms - overlap_change_ms.  categories: {"category", "a_ms", "b_ms",
    "change_ms"} of all kernels: names change with a library's version, what they do does not.
    """
    lines = []
    for key in a["lines"].keys() | b["lines"].keys():
        old, new = a["lines"].get(key), b["lines"].get(key)
        change_ms = (new["ms"] if new else 0.0) - (old["ms"] if old else 0.0)
        status = (
            "appeared"
            if old is None
            else "vanished"
            if new is None
            else "changed"
            if change_ms or old["count"] != new["count"]
            else "same"
        )
        lines.append(
            {
                "what": " ".join(part for part in key if part),
                "status": status,
                "a_ms": old and old["ms"],
                "b_ms": new and new["ms"],
                "change_ms": change_ms,
                "a_count": old and old["count"],
                "b_count": new and new["count"],
            }
        )
    lines.sort(key=lambda line: (-abs(line["change_ms"]), line["what"]))
    of = "step_ms" if a["step_ms"] is not None and b["step_ms"] is not None else "span_ms"
    found = {
        "of": of,
        of: [a[of], b[of]],
        "num_steps": [a["num_steps"], b["num_steps"]],
        "change_ms": None,
        "explained_ms": sum(line["change_ms"] for line in lines),
    }
    found |= dict.fromkeys(("rest_ms", "idle_change_ms", "overlap_change_ms"))
    if a[of] is not None and b[of] is not None:
        sums_ms = [sum(line["ms"] for line in one["lines"].values()) for one in (a, b)]
        found["change_ms"] = b[of] - a[of]
        found["rest_ms"] = found["change_ms"] - found["explained_ms"]
        found["idle_change_ms"] = (b[of] - b["busy_ms"]) - (a[of] - a["busy_ms"])
        found["overlap_change_ms"] = (sums_ms[1] - b["busy_ms"]) - (sums_ms[0] - a["busy_ms"])
    names = a["categories"].keys() | b["categories"].keys()
    pairs = {name: (a["categories"].get(name, 0.0), b["categories"].get(name, 0.0)) for name in names}
    categories = [
        {"category": name, "a_ms": old, "b_ms": new, "change_ms": new - old} for name, (old, new) in pairs.items()
    ]
    return found | {
        "lines": lines,
        "categories": sorted(categories, key=lambda one: (-abs(one["change_ms"]), one["category"])),
    }
