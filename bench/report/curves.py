"""The curves of runs: read from steps.csv, thinned to what a chart can show, overlaid for many runs.

The charts show loss by step, time and tokens, and step time, with a band over an arm's runs.
"""

import contextlib
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.base.metric import VAL_LOSS, Metric, from_goal
from bench.base.reading.damage import Damaged
from bench.base.units import s_from_ms
from bench.compare.selection import Arm
from bench.record import rows, run_folder, step_files
from bench.record.rows import Row
from bench.report import run_page
from bench.web.chart import Spec, chart_of_arms
from bench.web.page import CHART_SCRIPTS, figure, page, soft, tag

Curves = dict[str, Any]  # curves of a run as curves_of_columns() returns them

STEP_COLUMNS = (
    "step", "flags", "tokens", "train_loss", "val_loss", "step_ms", "train_time_ms", "train_time_at_val_ms",
)  # fmt: skip
DIGITS = {"train_s": 5, "train_loss": 5, "step_ms": 4, "val_loss": 6}
X_LABELS = {"step": "step", "train_s": "train time, s", "tokens": "tokens"}
Y_LABELS = {"val_loss": VAL_LOSS.label, "train_loss": "train_loss, nats per token", "step_ms": "step, ms"}
TRAINED = ("train_loss", "step_ms")  # values of every step; all others are of validations
# ---- the page of the overlay, which assets/curves.js draws

COLUMNS = (
    "run_id", "name", "seed", "track", "config_id", "arm", "status", "metric", "score", "train_s", "page", "file",
)  # fmt: skip
CONTROLS: tuple[
    tuple[str, str, tuple[tuple[str, str], ...]], ...
] = (  # (id, label, ((value in the address, displayed text), ...)), the default first
    ("y", "y", (("val_loss", "val_loss"), ("train_loss", "train_loss"), ("step_ms", "step time"))),
    ("x", "by", (("step", "step"), ("time", "train time"), ("tokens", "tokens"))),
    ("group", "one line per", (("run", "run"), ("config", "config"), ("name", "name"), ("arm", "arm"))),
    ("band", "band", (("range", "smallest to largest"), ("sd", "mean ± sd"), ("none", "none"))),
    ("from", "show", (("all", "all"), ("half", "last half of each"), ("tenth", "last tenth of each"))),
    ("yscale", "y axis", (("linear", "linear"), ("log", "log"))),
    ("xscale", "x axis", (("linear", "linear"), ("log", "log"))),
    ("smooth", "smoothing", (("0", "none"), *((str(num), f"centred mean of {num} points") for num in (5, 21, 101)))),
)
MAX_BYTES = 5_000_000  # approximate size of all curves of a site
BYTES_PER_POINT = 12  # train_loss, step_ms and train_s in a site's files, as measured


def curves_of_run(folder: Path | str, max_points: int = 500, score: str = VAL_LOSS.name) -> Curves:
    """Returns curves_of_columns() of a run folder; a run without steps has empty curves."""
    return curves_of_columns(step_files.read_columns(folder, (*STEP_COLUMNS, score)), max_points, score)


def curves_of_rows(rows: Sequence[Mapping[str, Any]], max_points: int = 500, score: str = VAL_LOSS.name) -> Curves:
    """Returns curves_of_columns() of step rows as record/step_files.read() returns them."""
    columns = {name: [row.get(name) for row in rows] for name in (*STEP_COLUMNS, score)}
    return curves_of_columns(columns, max_points, score)


def curves_of_columns(columns: Mapping[str, Sequence[Any]], max_points: int, score: str = VAL_LOSS.name) -> Curves:
    """Returns {"every": k, "train": {...}, "val": {...}} with lists of equal length; None is unknown.

    train has step, train_s, tokens, train_loss and step_ms; val has step, train_s, tokens, val_loss and the column
    score.  With more than max_points steps, a point of train is the mean of k steps, at the last of them, and every
    j-th validation from the end is kept.  train_s is the time so far: the printed one of a log, else the sum of
    step_ms, or None if a log prints the times of some steps only.  Steps with a flag are excluded from step_ms.
    """
    steps, train_s = columns["step"], _train_s_of(columns)
    loss_and_ms = zip(columns["train_loss"], columns["step_ms"], strict=True)
    trained = [number for number, (loss, ms) in enumerate(loss_and_ms) if loss is not None or ms is not None]
    validated = [
        number for number, pair in enumerate(zip(columns[VAL_LOSS.name], columns[score])) if pair != (None, None)
    ]
    every = max(1, -(-len(trained) // max_points))
    plain_ms = [None if flag else ms for flag, ms in zip(columns["flags"], columns["step_ms"], strict=True)]
    ends = [trained[min(start + every, len(trained)) - 1] for start in range(0, len(trained), every)]
    kept = validated[:: -max(1, -(-len(validated) // max_points))][::-1]
    means = {"train_loss": columns["train_loss"], "step_ms": plain_ms}
    train = {name: _means([values[number] for number in trained], every) for name, values in means.items()}
    val = {name: [columns[name][number] for number in kept] for name in (VAL_LOSS.name, score)}
    at_val_s = _at_val_s(columns, train_s)
    return {
        "every": every,
        "train": _shared(steps, train_s, columns["tokens"], ends) | _rounded(train),
        "val": _shared(steps, at_val_s, columns["tokens"], kept) | _rounded(val),
    }


def validations(folder: Path | str, metric: Metric) -> list[step_files.Validation]:
    """Returns all validations of a run folder that have a value of the metric, unrounded."""
    columns = step_files.read_columns(folder, (*STEP_COLUMNS, metric.name))
    at_val_s = _at_val_s(columns, _train_s_of(columns))
    return [line for line in zip(columns["step"], at_val_s, columns[metric.name], strict=True) if line[2] is not None]


def _at_val_s(columns: Mapping[str, Sequence[Any]], train_s: Sequence[float | None]) -> list[float | None]:
    """Returns the s so far at each step, preferring those that a log prints with its validation."""
    at_val_ms = columns["train_time_at_val_ms"]
    return [so_far_s if ms is None else s_from_ms(ms) for so_far_s, ms in zip(train_s, at_val_ms, strict=True)]


def _train_s_of(columns: Mapping[str, Sequence[Any]]) -> list[float | None]:
    """Returns the s of training up to the end of each step, from the columns; all None if a step's time is missing."""
    if columns["train_time_ms"].count(None) < len(columns["step"]):
        return _printed_s(columns["train_time_ms"])
    steps, step_ms = columns["step"], columns["step_ms"]
    if any("untimed" in (flags or "") for flags in set(columns["flags"])):
        is_untimed = ["untimed" in (flags or "") for flags in columns["flags"]]
        step_ms = [0.0 if untimed else ms for untimed, ms in zip(is_untimed, step_ms, strict=True)]
    is_whole = all(map(operator.le, steps[1:], map((1).__add__, steps)))
    if None in step_ms:
        is_whole &= all(ms is not None or loss is None for ms, loss in zip(step_ms, columns["train_loss"]))
        step_ms = [ms or 0.0 for ms in step_ms]
    if not is_whole or not any(step_ms):  # not whole: a log that prints some steps only
        return [None] * len(steps)
    return [s_from_ms(ms) for ms in itertools.accumulate(step_ms)]


def _printed_s(train_time_ms: Sequence[float | None]) -> list[float | None]:
    """Returns the printed s so far of a log, without time that its clock subtracted after the warm-up."""
    least_s, so_far_s = math.inf, []
    for ms in reversed(train_time_ms):
        least_s = least_s if ms is None else min(least_s, s_from_ms(ms))
        so_far_s.append(None if ms is None else least_s)
    return so_far_s[::-1]


def _means(values: list[Any], every: int) -> list[Any]:
    """Returns the means of consecutive groups of values, ignoring None.  every: size of a group."""
    parts = [values[start : start + every] for start in range(0, len(values), every)]
    if every == 1:
        return values
    if None in values:
        parts = [[value for value in part if value is not None] for part in parts]
    return [sum(part) / len(part) if part else None for part in parts]


def _shared(
    steps: Sequence[int], train_s: Sequence[float | None], tokens: Sequence[int | None], numbers: Sequence[int]
) -> Curves:
    tokens = [tokens[number] for number in numbers]
    shared = {"step": [steps[number] for number in numbers], "tokens": None if None in tokens else tokens}
    return shared | _rounded({"train_s": [train_s[number] for number in numbers]})


def _rounded(columns: Mapping[str, list[Any]]) -> Curves:
    rounded = {}
    for name, values in columns.items():
        form = f"%.{DIGITS.get(name, DIGITS[VAL_LOSS.name])}g"
        is_unknown = values.count(None) == len(values)
        finite = [None if value is None or not math.isfinite(value) else float(form % value) for value in values]
        rounded[name] = None if is_unknown else finite
    return rounded


def arm_charts(
    arms: Mapping[str, Sequence[Path | str]], wanted: Sequence[tuple[str, str, str]] | None = None
) -> list[Spec]:
    """Returns specs for page.figure(): the goal's metric by step and by time, and step time by step.

    arms: {arm: folders of the runs that count}.  wanted: (title, y, x) of other charts instead.  A line is the mean of
    an arm's runs, with a band from their smallest to their largest value.  Charts without values are omitted.
    """
    goal = metric_of(_goal_of(folder) for folders in arms.values() for folder in folders)
    runs_by_arm: dict[str, list[Curves]] = {name: [] for name in arms}
    for name, folders in arms.items():
        for folder in folders:
            with contextlib.suppress(Damaged):  # not drawn; ./run.sh verify reports what is wrong
                runs_by_arm[name].append(curves_of_run(folder, score=goal.name))
    return charts_of(runs_by_arm, wanted, goal)


def metric_of(goals: Iterable[Mapping[str, Any] | None]) -> Metric:
    """Returns the metric that all goals (run.json["goal"]) share, else val_loss."""
    metrics = {from_goal(goal) for goal in goals}
    return metrics.pop() if len(metrics) == 1 else VAL_LOSS


def _goal_of(folder: Path | str) -> Mapping[str, Any] | None:
    try:
        return run_folder.read(folder).get("goal")
    except ValueError:  # damaged: its curve is not drawn either
        return None


def charts_of(
    arms: Mapping[str, Sequence[Curves]], wanted: Sequence[tuple[str, str, str]] | None = None, goal: Metric = VAL_LOSS
) -> list[Spec]:
    """Returns the specs of arm_charts() from {arm: curves of its runs}.  goal: the metric that the curves have."""
    charts, name = [], goal.name
    usual = ((f"{name} by step", name, "step"), (f"{name} by time", name, "train_s"), ("Step time", "step_ms", "step"))
    labels = {name: goal.label} | Y_LABELS
    for title, y, x in usual if wanted is None else wanted:
        drawn: list[Spec] = [{"name": name, "runs": []} for name in arms]
        for arm, runs in zip(drawn, arms.values()):
            for run in runs:
                part = run["train" if y in TRAINED else "val"]
                pairs = [pair for pair in zip(part[x] or (), part[y] or ()) if None not in pair]
                if pairs:
                    arm["runs"].append({"x": [at for at, _ in pairs], "y": [value for _, value in pairs]})
        if any(arm["runs"] for arm in drawn):
            charts.append(chart_of_arms(f"arms-{y}-{x}", title, _caption(arms, y), X_LABELS[x], labels[y], drawn))
    return charts


def _caption(arms: Mapping[str, Sequence[Curves]], y: str) -> str:
    remarks = []
    if any(len(runs) > 1 for runs in arms.values()):
        remarks.append("mean of the runs; band: minimum to maximum")
    every = max((run["every"] for runs in arms.values() for run in runs), default=1)
    if every > 1 and y in TRAINED:
        remarks.append(f"a point is the mean of up to {every} steps")
    if y == "step_ms":
        remarks.append("within-run times, for diagnosis only")
    return "; ".join(remarks)


def points_of(num_runs: int) -> int:
    """Returns the most points per curve for this number of runs: a power of two from 32 to 512."""
    wanted = MAX_BYTES // (BYTES_PER_POINT * max(1, num_runs))
    return 1 << max(5, min(9, wanted.bit_length() - 1))


def line_of(row: Row, arm: str | None = None, page: str | None = None, file: int | None = None) -> list[Any]:
    """Returns the cells of a row for COLUMNS.  arm: None for RACE:ARM of its race, "" for none; page: its link."""
    if arm is None and row["race_id"]:
        arm = f"{row['race_id']}:{row['arm']}"
    status = "warm-up" if row["discarded"] and row["status"] == "complete" else row["status"]
    page = page and page.replace(row["run_id"], "{}")
    facts = row | {"arm": arm, "page": page, "file": file, "status": status}
    return [facts[name] for name in COLUMNS]


def page_of(
    index: Mapping[str, Any], back: str | None = None, assets: str | None = None, goals: Sequence[Metric] = ()
) -> str:
    """Returns the HTML of the overlay.

    index: {"columns", "rows": newest first} with either {"files"} of a site, or {"curves", "arms": names in the order
    of their lines}, all of which are drawn at first.  goals: metrics of the runs' goals; if there is only one, it is
    selected first.
    """
    others = {goal.name: goal.label for goal in goals if goal != VAL_LOSS}
    index, (key, label, options) = {**index, "goals": others}, CONTROLS[0]
    named = tuple((name, name) for name in others)
    options = (*named, *options) if len(goals) == 1 else (options[0], *named, *options[1:])
    controls = ((key, label, options), *CONTROLS[1:])
    labels = [
        tag("label", f"{label} ", tag("select", *(tag("option", text, value=value) for value, text in options), id=key))
        for key, label, options in controls
    ]
    score = "score" if len(goals) > 1 else goals[0].name if goals else VAL_LOSS.name
    heads = ("run", score, "train, s", "", "line", "status")
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") if head else tag("td") for head in heads))),
        tag("tbody", id="chosen"),
    )
    search = tag("label", "Search ", tag("input", type="search", id="search", placeholder="id, name or race"))
    add, clear = (tag("button", text, type="button", id=key) for text, key in (("Add", "add"), ("Clear", "clear")))
    body = [
        tag("p", tag("a", "All runs", href=back)) if back else "",
        tag("h1", "Curves"),
        tag("div", *labels, class_="controls"),
        figure({"id": "overlay", "title": "Curves", "caption": ""}),
        soft(
            "Drag over the chart to zoom, double-click to see all; click a name below it to hide a line; the arrow "
            "keys move the cursor. The address holds what you see."
        ),
        tag("div", table, class_="scroll chosen", tabindex="0"),
        tag("h2", "Runs"),
        tag("div", search, add, clear, tag("span", "", id="number", role="status"), class_="controls"),
        tag("ul", id="found", class_="picker"),
    ]
    return page("Curves", *body, data={"curves": index}, scripts=(*CHART_SCRIPTS, "curves.js"), assets=assets)


def html(arms: Iterable[Arm], path: Path) -> str:
    """Returns a self-contained page of arms (compare/selection.arm_from_each()).  path: its path, for links."""
    arms = _shortly_named(arms)
    max_points = points_of(sum(len(arm.rows) for arm in arms))
    lines: list[list[Any]] = []
    by_run = {}
    for arm in arms:
        label = "" if len(arm.rows) == 1 else None  # the name of the runs' common line; "" for a line per run
        if arm.race or (len(arm.rows) > 1 and len({row["config_id"] or row["name"] for row in arm.rows}) == 1):
            label = arm.name
        for number, row in enumerate(arm.rows):
            by_run[row["run_id"]] = _curves(arm, number, max_points, row["metric"])
            lines.append(line_of(row, label, run_page.link_to(arm.folders[number], path.parent)))
    lines.sort(key=lambda line: line[0], reverse=True)
    index = {"columns": COLUMNS, "rows": lines, "curves": by_run, "arms": [arm.name for arm in arms]}
    return page_of(index, goals=goals_of(row for arm in arms for row in arm.rows))


def goals_of(runs: Iterable[Row]) -> list[Metric]:
    """Returns the distinct metrics of these runs' goals, by name."""
    return sorted({rows.metric_of([row]) for row in runs})


def charts_of_arms(arms: Iterable[Arm]) -> list[Spec]:
    """Returns the specs of arm_charts() for arms."""
    arms = _shortly_named(arms)
    goals = goals_of(row for arm in arms for row in arm.rows)
    goal = goals[0] if len(goals) == 1 else VAL_LOSS
    drawn = {arm.name: [_curves(arm, number, 500, goal.name) for number in range(len(arm.rows))] for arm in arms}
    return charts_of(drawn, goal=goal)


def _shortly_named(arms: Iterable[Arm]) -> list[Arm]:
    """Names arms by the last part of their paths if that is unique, and arms of one race by their own names."""
    arms = list(arms)
    is_one_race = all(arm.race for arm in arms) and len({arm.race for arm in arms}) == 1
    lasts = [re.split("[/:]" if is_one_race else "/", arm.name.rstrip("/"))[-1] for arm in arms]
    return [replace(arm, name=last if lasts.count(last) == 1 else arm.name) for arm, last in zip(arms, lasts)]


def _curves(arm: Arm, number: int, max_points: int, score: str = VAL_LOSS.name) -> Curves:
    folder = arm.folders[number]
    if folder is None:  # a log
        return curves_of_rows(arm.record_of(number).get("steps") or [], max_points, score)
    try:
        return curves_of_run(folder, max_points, score)
    except Damaged as error:
        arm.damaged[arm.rows[number]["run_id"]] = str(error)
        return curves_of_rows([], max_points, score)
