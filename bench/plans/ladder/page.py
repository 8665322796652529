"""Shows a ladder: the staircase, each change against the rung below, numbers, curves, what the size changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from bench.base import metric as metrics
from bench.base import text_table
from bench.base.metric import Metric
from bench.compare import wording
from bench.plans.ladder import request
from bench.plans.ladder.staircase import Level, Rung, Staircase, Step
from bench.record import race_folder
from bench.report import curves
from bench.web import forest, stairs
from bench.web.document import (
    Block,
    Bullets,
    Chart,
    Columns,
    Document,
    Lines,
    Picture,
    Section,
    Table,
    Verdict,
    badge,
    link,
    named,
)

NAME = race_folder.STAIRCASE
PANELS = (  # key of a rung, title, unit, format of the text, axis of bench/web/stairs.py
    ("to_target_s", "Time to the target", "s", ",.2f", "zero"),
    ("steps_to_target", "Steps to the target", "steps", ",.4g", "zero"),
    ("step_ms", "A step", "ms", ",.1f", "zero"),
    ("val_loss", "{} at the end", "", ".4f", "fit"),  # the goal's metric, in its unit
)
FOREST = (  # key of a step, title, unit, suffix of its keys, names of changes below and above zero
    ("to_target", "Time to the target", "%", "_pct", ("faster", "slower")),
    ("steps", "Steps to the target", "%", "_pct", ("fewer", "more")),
    ("step_ms", "A step", "%", "_pct", ("faster", "slower")),
    ("val_loss", "{} at the end", "", "", ("better", "worse")),
)
LEVELS = ("rung", "steps to the target", "time to it, s", "{}", "ms per step", "8x H100, min")
CHANGED = ("rung", "time to the target", "verdict", "steps to it", "{}", "ms per step", "8x H100")
CHANGES = {  # {column of a level: (key of the Step, suffix of the keys of its change)}
    "steps_to_target": ("steps", "_pct"),
    "to_target_s": ("to_target", "_pct"),
    "val_loss": ("val_loss", ""),
    "step_ms": ("step_ms", "_pct"),
}
ABOUT = (
    "Means of times and steps are geometric, and intervals are 95 % intervals. The verdict is on the time to the "
    "target, with p adjusted for all comparisons of the ladder (Holm). 8x H100: the record's own time, from its yaml."
)
RECORD = ("minutes", "num_steps", "step_ms", "val_loss")  # columns of a rung's record on 8x H100


def document(folder: Path | str, staircase: Staircase) -> Document:
    """Returns the document of a race's staircase. Its page belongs in the race's folder."""
    race, rungs = race_folder.read(folder), staircase["rungs"]
    names = [rung["rung"]["name"] for rung in rungs]
    title = f"Ladder: {names[0]} to {names[-1]}"
    about = [f"size {staircase['size']}: {staircase['about']}", f"track {staircase['track']}"]
    about += [race["status"].replace("_", " "), race["started_at"], link(staircase["race_id"], "race.html")]
    verdicts = Counter(rung["step"]["verdict"].replace("_", " ") for rung in rungs if rung["step"])
    counts = ", ".join(f"{num} {verdict}" for verdict, num in verdicts.items())
    changes = text_table.counted(len(rungs) - 1, "change")
    folders = {}
    for rung in rungs:
        paths = (race_folder.run_folder_of(Path(folder), run) for run in race["arms"][rung["arm"]]["runs"] or ())
        folders[rung["rung"]["name"]] = [path for path in paths if path]
    changed = request.change_rows({rung["rung"]["name"]: rung["rung"]["changed"] for rung in rungs})
    folded = Section("Each change", [Table(request.CHANGE_COLUMNS, changed)], is_folded=True)
    blocks: list[Block] = [
        Bullets(sentences(staircase)),
        Section("Staircase", [Picture(stairs.plot(_panels(staircase)))], is_page_only=True),
        Section("Each against the rung below", [Picture(forest.plot(_changes(staircase, names))), *_why(rungs)]),
        Section("Numbers", _tables(staircase)),
        Section("Curves", [Columns([Chart(spec) for spec in curves.arm_charts(folders)])]),
        Section("What this size changes", [Lines([request.KEPT]), folded], is_page_only=True),
    ]
    verdict = Verdict(f"{changes} against the rung below, by time to the target: {counts}", "")
    return Document(title, [verdict], blocks, staircase, f"{title}, {staircase['size']}", about)


def metric_of(staircase: Staircase) -> Metric:
    """Returns the metric that val_loss and the target of a staircase are in."""
    return metrics.named(*staircase["metric"])


def sentences(staircase: Staircase) -> list[str]:
    """Returns sentences about the target, the resolution of the way to it, doubts, and excluded rungs."""
    metric = metric_of(staircase)
    goal = "none" if staircase["target_val_loss"] is None else f"{staircase['target_val_loss']:.4f}"
    every = " or ".join(map(str, staircase["val_every_steps"]))
    return [
        f"target {metric.name} {goal}: {staircase['target_words']}",
        f"reached at the first validation at or {metric.better} it, of which there is one every {every} steps; "
        "times are of training only",
        *staircase["notes"],
        *(
            f"{name} is excluded, because it cannot run at this size: {why}"
            for name, why in staircase["excluded"].items()
        ),
    ]


# ---- the staircase


def _panels(staircase: Staircase) -> list[stairs.Panel]:
    metric = metric_of(staircase)
    panels = [
        stairs.Panel(
            title.format(metric.name),
            unit or metric.unit_in_full,
            [_row(rung, key, form) for rung in staircase["rungs"]],
            axis,
        )
        for key, title, unit, form, axis in PANELS
    ]
    return [*panels[:2], _beside_the_records(staircase["rungs"]), *panels[2:]]


def _row(rung: Mapping[str, Any], key: str, form: str) -> stairs.Row:
    level, name = rung["levels"][key], rung["rung"]["name"]
    if level["mean"] is None:
        return stairs.Row(name, _reached(rung), None)
    is_timed = key in ("to_target_s", "step_ms")
    runs = [run[key] for run in rung["runs"] if run[key] is not None and (run["is_timed"] or not is_timed)]
    interval = (level["ci95"][0], level["ci95"][1]) if level["ci95"] else None
    return stairs.Row(name, f"{level['mean']:{form}}", level["mean"], interval, runs)


def _reached(rung: Mapping[str, Any]) -> str:
    return f"{rung['num_reached']} of {len(rung['runs'])} runs reach it"


def _beside_the_records(rungs: Sequence[Rung]) -> stairs.Panel:
    """Returns time to the target here and of the records on 8x H100, each relative to the lowest rung's."""
    rows, lowest = [], rungs[0]
    base_s, base_minutes = lowest["levels"]["to_target_s"]["mean"], lowest["rung"]["minutes"]
    for rung in rungs:
        to_target_s, minutes = rung["levels"]["to_target_s"]["mean"], rung["rung"]["minutes"]
        ratio = None if to_target_s is None or base_s is None else to_target_s / base_s
        record = None if None in (minutes, base_minutes) else minutes / base_minutes
        texts = [f"{ratio:.3f}" if ratio is not None else "missed"] + ([] if record is None else [f"{record:.3f}"])
        rows.append(
            stairs.Row(rung["rung"]["name"], ", ".join(texts), ratio, None, () if ratio is None else (ratio,), record)
        )
    names = ("here", "the records on 8x H100")
    return stairs.Panel("Time to the target", f"relative to {lowest['rung']['name']}", rows, "log", names)


# ---- each rung against the rung below


def _changes(staircase: Staircase, names: Sequence[str]) -> list[forest.Panel]:
    panels, rungs, metric = [], staircase["rungs"], metric_of(staircase)
    for key, title, unit, end, ways in FOREST:
        rows = []
        for number, rung in enumerate(rungs):
            step: Mapping[str, Any] = rung["step"] or {}
            numbers = step.get(key, {})
            if numbers.get(f"change{end}") is not None:
                low, high = numbers[f"ci95{end}"] or (None, None)
                rows.append(forest.Row(names[number], numbers[f"change{end}"], low, high, number))
        title, unit = title.format(metric.name), unit or metric.unit_in_full
        ways = ways if end or metric.sign > 0 else (ways[1], ways[0])
        panels.append(forest.Panel(title, unit, rows, directions=ways, decimals=4 if not end else 1))
    return panels


def _why(rungs: Sequence[Rung]) -> list[Block]:
    reasons = [
        f"{rung['rung']['name']}: {'; '.join(rung['step']['why'])}"
        for rung in rungs
        if rung["step"] and rung["step"]["why"]
    ]
    return [Lines(["Rungs whose way to the target has no change:"], is_soft=True), Bullets(reasons)] if reasons else []


# ---- numbers


def _tables(staircase: Staircase) -> list[Block]:
    right, rungs, name = (False, True, False, *(True,) * 4), staircase["rungs"], metric_of(staircase).name
    return [
        Table([head.format(name) for head in LEVELS], [_levels(rung) for rung in rungs], (False, *(True,) * 5)),
        Table(
            [head.format(name) for head in CHANGED],
            [_changed(rung, rung["step"]) for rung in rungs if rung["step"]],
            right,
            caption="Each against the rung below",
            style="tight",
        ),
        Lines([ABOUT], is_soft=True),
    ]


def _levels(rung: Rung) -> list[str | None]:
    """Returns the cells of LEVELS: means with 95 % intervals; if not all runs reach the target, how many do."""
    levels, minutes = rung["levels"], rung["rung"]["minutes"]
    return [
        named(rung["rung"]["name"], rung["rung"]["what"]),
        _level(levels["steps_to_target"], ",.4g") or _reached(rung),
        _level(levels["to_target_s"], ",.2f"),
        _level(levels["val_loss"], ".4f"),
        _level(levels["step_ms"], ",.1f"),
        None if minutes is None else f"{minutes:g}",
    ]


def _level(level: Level, form: str) -> str | None:
    if level["mean"] is None:
        return None
    edges = level["ci95"]
    return f"{level['mean']:{form}}" + (f" [{edges[0]:{form}}, {edges[1]:{form}}]" if edges else "")


def _changed(rung: Rung, step: Step) -> list[str | None]:
    """Returns the cells of CHANGED."""
    return [
        named(rung["rung"]["name"]),
        _change(step["to_target"], "_pct"),
        badge(step["verdict"]),
        _change(step["steps"], "_pct"),
        _change(step["val_loss"], ""),
        _change(step["step_ms"], "_pct"),
        None if step["record_pct"] is None else f"{step['record_pct']:+.1f} %",
    ]


def _change(numbers: Mapping[str, Any], end: str) -> str | None:
    """Formats a Change, Time or Loss: "-25.0 % [-30.1, -19.6]"; None if unknown. end: the suffix of its keys."""
    size, edges = numbers[f"change{end}"], numbers[f"ci95{end}"]
    if size is None:
        return None
    _, unit, _ = wording.unit_of("time" if end else "val_loss")
    digits = 4 if not end else 1
    interval = "" if edges is None else f" [{edges[0]:+.{digits}f}, {edges[1]:+.{digits}f}]"
    return f"{size:+.{digits}f}{unit}{interval}"


# ---- csv


def csv_rows(staircase: Staircase) -> list[dict[str, Any]]:
    """Returns a row per rung, unrounded; changes against the rung below: per cent (_pct), or the metric's unit."""
    rows, metric = [], metric_of(staircase)
    for rung in staircase["rungs"]:
        facts, step = rung["rung"], cast(Mapping[str, Any] | None, rung["step"])
        row = {"rung": facts["name"], "what": facts["what"], "num_runs": len(rung["runs"])}
        row |= {"num_reached": rung["num_reached"], "verdict": step and step["verdict"]}
        row["why"] = "; ".join(step["why"]) if step else ""
        for key, (step_key, end) in CHANGES.items():
            level, numbers = rung["levels"][key], step[step_key] if step else {}
            low, high = level["ci95"] or (None, None)
            change_low, change_high = numbers.get(f"ci95{end}") or (None, None)
            key = key if end else metric.name
            row |= {key: level["mean"], f"{key}_low": low, f"{key}_high": high}
            row |= {f"{key}_change{end}": numbers.get(f"change{end}")}
            row |= {f"{key}_change_low": change_low, f"{key}_change_high": change_high}
        row["to_target_p_holm"] = step["to_target"]["p_holm"] if step else None
        row[f"target_{metric.name}"] = staircase["target_val_loss"]
        row |= {f"record_{key}": facts[key] for key in RECORD}
        rows.append(row | {"record_change_pct": step and step["record_pct"]})
    return rows
