"""The answer of a ladder: the staircase, each change against the rung below, numbers, curves, what the size changed."""

import csv
import io
from collections import Counter
from pathlib import Path

from bench.base import text_table
from bench.compare import wording
from bench.plans.ladder import forecast
from bench.plans.ladder.staircase import Rung, Staircase
from bench.record import race_folder
from bench.report import curves
from bench.web import forest, stairs
from bench.web.document import (
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
PANELS = (  # of a rung, title, unit, form of the words, axis of bench/web/stairs.py
    ("to_target_s", "Time to the target", "s", ",.2f", "zero"),
    ("steps_to_target", "Steps to the target", "steps", ",.4g", "zero"),
    ("step_ms", "A step", "ms", ",.1f", "zero"),
    ("val_loss", "val_loss at the end", "nats per token", ".4f", "fit"),
)
FOREST = (  # of a step, title, unit, end of its keys, of its change below and above zero
    ("to_target", "Time to the target", "%", "pct", ("faster", "slower")),
    ("steps", "Steps to the target", "%", "pct", ("fewer", "more")),
    ("step_ms", "A step", "%", "pct", ("faster", "slower")),
    ("val_loss", "val_loss at the end", "nats per token", "nats", ("better", "worse")),
)
LEVELS = ("rung", "steps to the target", "time to it, s", "val_loss", "ms a step", "8x H100, min")
CHANGED = ("rung", "time to the target", "verdict", "steps to it", "val_loss", "ms a step", "8x H100")
COLUMNS = ("rung", "what", "num_runs", "num_reached", "verdict", "why")
CHANGES = {  # column of a level: (key of the Step, end of the keys of its change)
    "steps_to_target": ("steps", "pct"),
    "to_target_s": ("to_target", "pct"),
    "val_loss": ("val_loss", "nats"),
    "step_ms": ("step_ms", "pct"),
}
ABOUT = (
    "Means of times and steps are geometric; intervals are of 95 %; the verdict is of the time to the target, its p "
    "adjusted for all steps of the ladder (Holm); 8x H100 is what the records' own yamls say of their runs."
)
RECORD = ("minutes", "num_steps", "step_ms", "val_loss")  # of a rung, on 8x H100


def document(folder: Path | str, result: Staircase) -> Document:
    """A race's folder and its staircase -> the answer, whose page is to lie in that folder."""
    race, names = race_folder.read(folder), [rung["rung"]["name"] for rung in result["rungs"]]
    title = f"Ladder: {names[0]} to {names[-1]}"
    about = [f"size {result['size']}: {result['about']}", f"track {result['track']}", race["status"].replace("_", " ")]
    about += [race["started_at"], link(result["race_id"], "race.html")]
    charts = [Chart(spec) for spec in _curves(folder, race, result)]
    blocks = [
        Bullets(sentences(result)),
        Section("Staircase", [Picture(stairs.plot(_panels(result)))], is_page_only=True),
        Section("Each against the rung below", [Picture(forest.plot(_changes(result, names))), *_why(result)]),
        Section("Numbers", _tables(result)),
        Section("Curves", [Columns(charts)]),
        _size(result),
    ]
    return Document(title, [_verdict(result)], blocks, result, f"{title}, {result['size']}", about)


def _verdict(result):
    """How many of the changes are what, each against the rung below."""
    steps = [rung["step"]["verdict"].replace("_", " ") for rung in result["rungs"] if rung["step"]]
    of_each = ", ".join(f"{num} {verdict}" for verdict, num in Counter(steps).items())
    changes = text_table.counted(len(steps), "change")
    return Verdict(f"{changes} against the rung below, by time to the target: {of_each}", "")


def sentences(result: Staircase) -> list[str]:
    """Target, how fine the way to it is known, doubts, excluded rungs: a sentence each."""
    goal = "none" if result["target_val_loss"] is None else f"{result['target_val_loss']:.4f}"
    every = " or ".join(map(str, result["val_every_steps"]))
    point = "interpolated between validations" if result["interpolated"] else "the first validation at or below it"
    lines = [
        f"target val_loss {goal}: {result['target_words']}",
        f"reached: {point}, which come every {every} steps; time is of training alone",
        *result["notes"],
    ]
    return lines + [
        f"{name} is not here, it cannot run at this size: {why}" for name, why in result["excluded"].items()
    ]


# ---- the staircase


def _panels(result):
    panels = [
        stairs.Panel(title, unit, [_row(rung, key, form) for rung in result["rungs"]], axis)
        for key, title, unit, form, axis in PANELS
    ]
    return [*panels[:2], _beside_the_records(result), *panels[2:]]


def _row(rung, key, form):
    of, name = rung["levels"][key], rung["rung"]["name"]
    if of["mean"] is None:
        return stairs.Row(name, _missed(rung), None)
    edges = of["ci95"]
    is_timed = key in ("to_target_s", "step_ms")
    runs = [run[key] for run in rung["runs"] if run[key] is not None and (run["is_timed"] or not is_timed)]
    return stairs.Row(name, f"{of['mean']:{form}}", of["mean"], edges and tuple(edges), runs)


def _missed(rung):
    return f"{rung['num_reached']} of {len(rung['runs'])} runs reach it"


def _beside_the_records(result):
    """Time to the target here and on 8x H100 by the records, each as a part of the lowest rung's."""
    first, rows = result["rungs"][0], []
    base_s, base_minutes = first["levels"]["to_target_s"]["mean"], first["rung"]["minutes"]
    for rung in result["rungs"]:
        here, minutes = rung["levels"]["to_target_s"]["mean"], rung["rung"]["minutes"]
        own = None if None in (here, base_s) else here / base_s
        other = None if None in (minutes, base_minutes) else minutes / base_minutes
        said = [f"{own:.3f}" if own is not None else "missed"] + ([] if other is None else [f"{other:.3f}"])
        rows.append(stairs.Row(rung["rung"]["name"], ", ".join(said), own, None, () if own is None else (own,), other))
    names = ("here", "the records on 8x H100")
    return stairs.Panel("Time to the target", f"part of {first['rung']['name']}'s", rows, "log", names)


# ---- each against the one below


def _changes(result, names):
    panels = []
    for key, title, unit, end, ways in FOREST:
        rows = []
        for rung in result["rungs"][1:]:
            numbers, name = rung["step"][key], rung["rung"]["name"]
            if numbers[f"change_{end}"] is not None:
                edges = numbers[f"ci95_{end}"] or (None, None)
                rows.append(forest.Row(name, numbers[f"change_{end}"], *edges, names.index(name)))
        panels.append(forest.Panel(title, unit, rows, directions=ways, decimals=4 if end == "nats" else 1))
    return panels


def _why(result):
    reasons = [
        f"{rung['rung']['name']}: {'; '.join(rung['step']['why'])}"
        for rung in result["rungs"]
        if rung["step"] and rung["step"]["why"]
    ]
    return [Lines(["No change of the way to the target:"], is_soft=True), Bullets(reasons)] if reasons else []


# ---- numbers


def _tables(result):
    rows = [(named(name, rung["rung"]["what"]), *known) for rung in result["rungs"] for name, *known in [levels(rung)]]
    steps = [changes(rung) for rung in result["rungs"][1:]]
    right = (False, True, False, *(True,) * 4)
    return [
        Table(LEVELS, _known(rows), (False, *(True,) * 5)),
        Table(CHANGED, _known(steps), right, caption="Each against the rung below", style="tight"),
        Lines([ABOUT], is_soft=True),
    ]


def _known(rows):
    return [[cell or None for cell in row] for row in rows]


def levels(rung: Rung) -> tuple[str, ...]:
    """Cells of LEVELS: means with their 95 % intervals; where not all runs reach the target, how many do."""
    of, minutes = rung["levels"], rung["rung"]["minutes"]
    steps = _level(of["steps_to_target"], ",.4g")
    return (
        rung["rung"]["name"],
        steps or f"{rung['num_reached']} of {len(rung['runs'])} runs reach it",
        _level(of["to_target_s"], ",.2f"),
        _level(of["val_loss"], ".4f"),
        _level(of["step_ms"], ",.1f"),
        "" if minutes is None else f"{minutes:g}",
    )


def changes(rung: Rung) -> tuple[str, ...]:
    """Cells of CHANGED, of a rung that has one below."""
    step = rung["step"]
    return (
        named(rung["rung"]["name"]),
        change(step["to_target"], "pct"),
        badge(step["verdict"]),
        change(step["steps"], "pct"),
        change(step["val_loss"], "nats"),
        change(step["step_ms"], "pct"),
        "" if step["record_pct"] is None else f"{step['record_pct']:+.1f} %",
    )


def _level(of, form):
    if of["mean"] is None:
        return ""
    edges = of["ci95"]
    return f"{of['mean']:{form}}" + (f" [{edges[0]:{form}}, {edges[1]:{form}}]" if edges else "")


def change(numbers: dict, end: str) -> str:
    """A Change, Time or Loss -> "-25.0 % [-30.1, -19.6]"; end: pct or nats; "" where nothing is known."""
    size, edges = numbers[f"change_{end}"], numbers[f"ci95_{end}"]
    if size is None:
        return ""
    _, unit, _ = wording.unit_of("val_loss" if end == "nats" else "time")
    digits = 4 if end == "nats" else 1
    words = f"{size:+.{digits}f}{unit}"
    return words if edges is None else f"{words} [{edges[0]:+.{digits}f}, {edges[1]:+.{digits}f}]"


def _curves(folder, race, result):
    runs = {
        rung["rung"]["name"]: [
            race_folder.run_folder_of(Path(folder), name) for name in race["arms"][rung["arm"]]["runs"]
        ]
        for rung in result["rungs"]
    }
    return curves.arm_charts(runs)


def _size(result):
    rows = forecast.rows({rung["rung"]["name"]: rung["rung"]["changed"] for rung in result["rungs"]})
    folded = Section("Each change", [Table(forecast.COLUMNS, rows)], is_folded=True)
    return Section("What this size changes", [Lines([forecast.KEPT]), folded], is_page_only=True)


# ---- csv


def csv_text(result: Staircase) -> str:
    """A head line and a line a rung, unrounded; changes against the rung below: per cent, of val_loss nats."""
    head = [*COLUMNS]
    for key, (_, end) in CHANGES.items():
        head += [key, f"{key}_low", f"{key}_high", f"{key}_change_{end}", f"{key}_change_low", f"{key}_change_high"]
    head += ["to_target_p_holm", "target_val_loss", *(f"record_{key}" for key in RECORD), "record_change_pct"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for rung in result["rungs"]:
        writer.writerow(_csv_line(rung, result["target_val_loss"]))
    return out.getvalue()


def _csv_line(rung, goal):
    known, step = rung["rung"], rung["step"]
    why = "; ".join(step["why"]) if step else ""
    line = [known["name"], known["what"], len(rung["runs"]), rung["num_reached"], step and step["verdict"], why]
    for key, (of_step, end) in CHANGES.items():
        level, numbers = rung["levels"][key], step[of_step] if step else {}
        line += [level["mean"], *(level["ci95"] or ("", ""))]
        line += [numbers.get(f"change_{end}"), *(numbers.get(f"ci95_{end}") or ("", ""))]
    p_holm = step["to_target"]["p_holm"] if step else None
    return [*line, p_holm, goal, *(known[key] for key in RECORD), step and step["record_pct"]]
