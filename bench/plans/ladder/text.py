"""The staircase as a table for a terminal, and as CSV, a rung a line."""

import csv
import io

from bench.base import text_table
from bench.compare import wording
from bench.plans.ladder.staircase import Rung, Staircase

LEVELS = ("rung", "steps to the target", "time to it, s", "val_loss", "ms a step", "8x H100, min")
CHANGED = ("rung", "time to the target", "verdict", "steps to it", "val_loss", "ms a step", "8x H100")
COLUMNS = ("rung", "what", "num_runs", "num_reached", "verdict", "why")
CHANGES = {  # column of a level: (key of the Step, end of the keys of its change)
    "steps_to_target": ("steps", "pct"),
    "to_target_s": ("to_target", "pct"),
    "val_loss": ("val_loss", "nats"),
    "step_ms": ("step_ms", "pct"),
}
RECORD = ("minutes", "num_steps", "step_ms", "val_loss")  # of a rung, on 8x H100


def terminal(result: Staircase) -> str:
    """What was raced and to which target, the table, and what a reader must know beside it."""
    why = [f"{rung['rung']['name']}: {'; '.join(rung['step']['why'])}" for rung in _with_reasons(result)]
    about = f"ladder {result['race_id']}: {result['about']}, track {result['track']}"
    lines = [
        *map(text_table.printable, (about, *sentences(result))),
        "",
        text_table.render(LEVELS, [levels(rung) for rung in result["rungs"]], (False, *(True,) * 5)),
        "",
        "Each against the rung below:",
        text_table.render(CHANGED, [changes(rung) for rung in result["rungs"][1:]], (False, True, False, *(True,) * 4)),
        *([""] if why else []),
        *map(text_table.printable, why),
    ]
    return "\n".join(lines)


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


def _with_reasons(result):
    return [rung for rung in result["rungs"] if rung["step"] and rung["step"]["why"]]


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
        rung["rung"]["name"],
        change(step["to_target"], "pct"),
        step["verdict"].replace("_", " "),
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
