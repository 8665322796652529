"""The charts of a run, as specs of bench/web/chart.py; None if the record lacks what a chart needs."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis.diagnosis import stalls
from bench.base import stats
from bench.base.metric import VAL_LOSS, Metric, from_goal
from bench.base.reading import json_file, plain_file
from bench.base.units import NS_PER_S, number_from, s_from_ms
from bench.record.shape import Record
from bench.record.step_files import StepRow
from bench.report.run_facts import details
from bench.web.chart import Spec, chart, mark_of, series_of, short

Rows = Sequence[StepRow]  # rows of steps.csv
Events = Sequence[Mapping[str, Any]]  # lines of events.jsonl

REGIONS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
NUM_BINS = 60
SECONDS = "seconds since the start"
TELEMETRY = (
    ("power_w", "power, W"),
    ("sm_clock_mhz", "SM clock, MHz"),
    ("temp_c", "temperature, °C"),
    ("util_pct", "utilisation, %"),
    ("mem_gib", "memory, GiB"),
    ("cpu_util_pct", "CPU utilisation, %"),
    ("cpu_freq_mhz", "CPU frequency, MHz"),
    ("rss_gib", "Resident set, GiB"),
)


def specs_of(folder: Path, run: Record, rows: Rows, events: Events) -> list[Spec]:
    """Returns all charts of a run: the goal's metric, loss and step time first."""
    ends_s, stages = end_s(rows, events), run["measured"].get("stages") or ()
    marked = [{"step": event["step"], "label": details(event)} for event in events if event["event"] == "stall"]
    if not events:  # an imported log, whose stalls are found from its steps
        marked = [
            {"step": stall["step"], "label": f"stall of {stall['ms']:.4g} ms"} for stall in stalls.find(list(rows))
        ]
    charts = [
        score(rows, from_goal(run.get("goal"))),
        losses(rows),
        step_time(rows, ends_s, marked, stages),
        regions(rows, ends_s),
        distribution(rows),
    ]
    start_ns = next((event["t_ns"] for event in events if event["event"] == "run_start"), None)
    if start_ns is not None and (folder / "telemetry.csv").exists():
        charts += telemetry(_columns(folder / "telemetry.csv"), start_ns, TELEMETRY)
    return [spec for spec in charts if spec]


def _columns(path: Path) -> dict[str, list[Any]]:
    """Reads the displayed columns of telemetry.csv as {column: values}; a truncated or invalid cell is None."""
    with plain_file.lines(path) as lines:
        reader = csv.DictReader(lines, restval="")
        rows = [row for row in reader if row.get("device") and _is_stamp(row.get("t_ns", ""))]
    shown = [name for name, _ in TELEMETRY if name in (reader.fieldnames or ())]
    columns: dict[str, list[Any]] = {name: [number_from(row[name]) for row in rows] for name in shown}
    return columns | {"t_ns": [int(row["t_ns"]) for row in rows], "device": [row["device"] for row in rows]}


def _is_stamp(cell: str) -> bool:
    return cell.isdecimal() and len(cell) <= json_file.MAX_DIGITS


def end_s(rows: Rows, events: Events) -> dict[int, float]:
    """Returns {step: s from the run's start to the end of the step}, validations included, as in telemetry charts.

    Step times are added up from the time stamp of the last validation's event, or from 0 without events.
    """
    validations = [event for event in events if event["event"] == "eval_stop" and event.get("step") is not None]
    stamps = {event["step"]: event["t_ns"] for event in validations}
    start_ns = next((event["t_ns"] for event in events if event["event"] == "run_start"), None)
    now_s, ends_s = 0.0, {}
    for row in rows:
        step = row["step"]
        if row.get("step_ms") is not None:
            now_s += s_from_ms(row["step_ms"])
        ends_s[step] = now_s
        if step in stamps and start_ns is not None:
            now_s = max(now_s, (stamps[step] - start_ns) / NS_PER_S)
    return ends_s


def _timed(rows: Rows) -> tuple[list[StepRow], list[StepRow]]:
    """Returns (rows of timed steps, those that no instrument disturbed)."""
    timed = [row for row in rows if row.get("step_ms") is not None]
    return timed, [row for row in timed if not row.get("flags")]


def step_time(rows: Rows, ends_s: Mapping[int, float], stalled: Events = (), stages: Events = ()) -> Spec | None:
    """Draws every step's time in ms, with disturbed steps as a separate series.  stalled: [{"step", "label"}]."""
    timed, plain = _timed(rows)
    if not timed:
        return None
    series = [series_of("step", [None if row.get("flags") else row["step_ms"] for row in timed], "points")]
    if len(plain) < len(timed):
        disturbed_ms = [row["step_ms"] if row.get("flags") else None for row in timed]
        series.append(series_of("disturbed by an instrument", disturbed_ms, "points"))
    caption, plain_ms = "", [row["step_ms"] for row in plain]
    if plain_ms:
        median_ms, high_ms = (stats.percentile(plain_ms, pct) for pct in (50, 95))
        caption = f"median {median_ms:.2f} ms, 95th percentile {high_ms:.2f} ms"
    validated = [row["step"] for row in rows if row.get("val_loss") is not None]
    marks = [mark_of(ends_s[step], f"validation after step {step}", "validation") for step in validated]
    marks += [mark_of(ends_s[stall["step"]], stall["label"], "stall") for stall in stalled if stall["step"] in ends_s]
    for stage in stages[1:]:
        before = stage["first_step"] - 1
        if before in ends_s:
            label = f"from step {before + 1}: {stage['batch_tokens']} tokens a step, {stage['seq_len']} a sequence"
            label += f", window {stage['window_tokens']}" if stage.get("window_tokens") else ""
            marks.append(mark_of(ends_s[before], label, "stage"))
    x = [ends_s[row["step"]] for row in timed]
    return chart("step-time", "Step time", caption, SECONDS, "ms", x, series, marks, "time")


def regions(rows: Rows, ends_s: Mapping[int, float]) -> Spec | None:
    """Draws the ms of each step's regions, stacked."""
    timed, plain = _timed(rows)
    names = [name for name in REGIONS if any(row.get(name) is not None for row in rows)]
    if not names or not timed:
        return None
    series, means = [], []
    for name in names:
        label = name.removesuffix("_ms")
        series.append(series_of(label, [row.get(name) for row in timed], "area"))
        known_ms = [row[name] for row in plain or timed if row.get(name) is not None]
        means.append(f"{label} {stats.mean(known_ms or [0.0]):.2f} ms")
    x = [ends_s[row["step"]] for row in timed]
    return chart("regions", "Regions of a step", "mean " + ", ".join(means), SECONDS, "ms", x, series, (), "time")


def score(rows: Rows, goal: Metric) -> Spec | None:
    """Draws the goal's metric by step, unless it is val_loss, which losses() draws."""
    scored = [] if goal == VAL_LOSS else [row for row in rows if row.get(goal.name) is not None]
    if not scored:
        return None
    values: list[Any] = [row.get(goal.name) for row in scored]
    series = [series_of(goal.name, values, "points")]
    steps = [row["step"] for row in scored]
    return chart(
        "score", f"{goal.name} by step", f"last {values[-1]:.5g}", "step", goal.unit or goal.name, steps, series
    )


def losses(rows: Rows) -> Spec | None:
    """Draws training and validation loss by step."""
    trained = [row for row in rows if row.get("train_loss") is not None or row.get("val_loss") is not None]
    if not trained:
        return None
    val_losses = [row["val_loss"] for row in trained if row.get("val_loss") is not None]
    caption = f"last val_loss {val_losses[-1]:.4f}" if val_losses else "never validated"
    kinds = {"train_loss": "line", "val_loss": "points"}
    columns = {name: [row.get(name) for row in trained] for name in kinds}
    series = [
        series_of(name, values, kinds[name]) for name, values in columns.items() if values.count(None) < len(values)
    ]
    return chart("loss", "Loss", caption, "step", "nats per token", [row["step"] for row in trained], series)


def distribution(rows: Rows) -> Spec | None:
    """Draws a histogram of the times of undisturbed steps, with the longest 1 % in the last bar."""
    step_ms = [row["step_ms"] for row in _timed(rows)[1]]
    if len(step_ms) < 2:
        return None
    low_ms, high_ms = min(step_ms), stats.percentile(step_ms, 99)
    width_ms = (high_ms - low_ms) / NUM_BINS or 1.0
    counts = [0] * (NUM_BINS + 1)
    for ms in step_ms:
        counts[min(NUM_BINS, int((ms - low_ms) / width_ms))] += 1
    middles_ms = [low_ms + (num + 0.5) * width_ms for num in range(NUM_BINS + 1)]
    caption = f"{len(step_ms)} steps, {low_ms:.2f} to {max(step_ms):.2f} ms; the last bar holds all above {high_ms:.2f}"
    series = [series_of("steps", counts, "bars")]
    return chart("distribution", "Distribution of step times", caption, "ms", "steps", middles_ms, series)


def telemetry(columns: Mapping[str, Sequence[Any]], run_start_ns: int, shown: Sequence[tuple[str, str]]) -> list[Spec]:
    """Draws a chart with a series per device for each (name, label) in shown.  columns: {name: values}."""
    charts = []
    devices = sorted(set(columns.get("device", ())))
    stamps_ns = sorted(set(columns.get("t_ns", ())))
    x_s = short((t_ns - run_start_ns) / NS_PER_S for t_ns in stamps_ns)
    for name, label in shown:
        if all(value is None for value in columns.get(name, ())):
            continue
        by_device: dict[str, dict[int, Any]] = {device: {} for device in devices}
        for t_ns, device, value in zip(columns["t_ns"], columns["device"], columns[name]):
            by_device[device][t_ns] = value
        series = [
            series_of(str(device), [values.get(t_ns) for t_ns in stamps_ns], "line")
            for device, values in by_device.items()
        ]
        charts.append(chart(f"telemetry-{name}", label, "", SECONDS, label, x_s, series, (), "time"))
    return charts
