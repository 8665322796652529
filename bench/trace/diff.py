"""Two traces -> what changed: kernels and operators matched by name and shape, milliseconds a step gained or lost.

The lines add up to the change of all device time; device time that overlaps counts in each line, so the change of the
step itself is shown beside it and the difference between the two is called overlap and idle.
"""

from bench.trace import kernels, operators, window

US_PER_MS = 1000


def profile(rank, by="kernel"):
    """A Rank -> {"num_steps", "step_ms", "span_ms", "lines": {key: {"ms", "count"}}}, everything per step.

    key: (name,) of a kernel, or (operator, shapes).  Without ProfilerSteps the whole trace is one step.
    """
    rows = window.device_rows(rank)
    steps = rank.steps()
    counted = steps[:-1] if len(steps) >= 2 else steps
    num_steps = max(1, len(counted))
    step_ms = sum(end - start for _, start, end in counted) / num_steps / 1e6 if counted else None
    span_ms = (int(rank.end[rows].max()) - int(rank.ts[rows].min())) / num_steps / 1e6 if len(rows) else None
    lines = {}
    if by == "kernel":
        for line in kernels.by_name(rank, rows, kernels.types(rank, rows)):
            lines[(line["name"],)] = {"ms": line["sum_us"] / US_PER_MS / num_steps, "count": line["count"] / num_steps}
    else:
        for line in operators.table(rank, rows, window.until(rank)):
            time_us = line["device_us"] if len(rows) else line["self_cpu_us"]
            key = (line["name"], _words(line["shapes"]))
            one = lines.setdefault(key, {"ms": 0.0, "count": 0.0})
            one["ms"] += time_us / US_PER_MS / num_steps
            one["count"] += line["count"] / num_steps
    return {"num_steps": num_steps, "step_ms": step_ms, "span_ms": span_ms, "lines": lines}


def compare(a, b):
    """Two profiles -> {"step_ms": [a, b], "change_ms", "explained_ms", "rest_ms", "lines": [...]}, the largest change first.

    A line: {"what", "status": "appeared" | "vanished" | "changed" | "same", "a_ms", "b_ms", "change_ms", "a_count",
    "b_count"}.  rest_ms = change_ms - explained_ms: idle time and overlap.
    """
    lines = []
    for key in a["lines"].keys() | b["lines"].keys():
        old, new = a["lines"].get(key), b["lines"].get(key)
        change_ms = (new["ms"] if new else 0.0) - (old["ms"] if old else 0.0)
        status = "appeared" if old is None else "vanished" if new is None else "changed" if change_ms or old["count"] != new["count"] else "same"
        lines.append({
            "what": " ".join(part for part in key if part), "status": status, "a_ms": old and old["ms"], "b_ms": new and new["ms"], "change_ms": change_ms,
            "a_count": old and old["count"], "b_count": new and new["count"],
        })  # fmt: skip
    lines.sort(key=lambda line: (-abs(line["change_ms"]), line["what"]))
    pair = "step_ms" if a["step_ms"] is not None and b["step_ms"] is not None else "span_ms"
    explained_ms = sum(line["change_ms"] for line in lines)
    change_ms = b[pair] - a[pair] if a[pair] is not None and b[pair] is not None else None
    rest_ms = None if change_ms is None else change_ms - explained_ms
    return {"of": pair, pair: [a[pair], b[pair]], "num_steps": [a["num_steps"], b["num_steps"]], "change_ms": change_ms, "explained_ms": explained_ms, "rest_ms": rest_ms, "lines": lines}


def _words(shapes):
    return "" if shapes is None else str(shapes)
