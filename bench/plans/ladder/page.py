"""The page of a ladder: the staircase, each change against the rung below, tables, curves, what the size changed."""

from pathlib import Path

from bench.plans.ladder import forecast, text
from bench.plans.ladder.staircase import Staircase
from bench.record import race_folder
from bench.report import curves
from bench.web import forest, stairs
from bench.web.document import badge_of, marked_up
from bench.web.page import REPORT_STYLES, details, figure, page, section, soft, table, tag

NAME = race_folder.STAIRCASE
LEVELS = (  # of a rung, title, unit, form of the words, axis of bench/web/stairs.py
    ("to_target_s", "Time to the target", "s", ",.2f", "zero"),
    ("steps_to_target", "Steps to the target", "steps", ",.4g", "zero"),
    ("step_ms", "A step", "ms", ",.1f", "zero"),
    ("val_loss", "val_loss at the end", "nats per token", ".4f", "fit"),
)
CHANGES = (  # of a step, title, unit, end of its keys, of its change below and above zero
    ("to_target", "Time to the target", "%", "pct", ("faster", "slower")),
    ("steps", "Steps to the target", "%", "pct", ("fewer", "more")),
    ("step_ms", "A step", "%", "pct", ("faster", "slower")),
    ("val_loss", "val_loss at the end", "nats per token", "nats", ("better", "worse")),
)


def html(folder: Path | str, result: Staircase) -> str:
    """A race's folder and its staircase -> the page's html, to lie in that folder."""
    race, names = race_folder.read(folder), [rung["rung"]["name"] for rung in result["rungs"]]
    title = f"Ladder: {names[0]} to {names[-1]}"
    drawn = _curves(folder, race, result)
    facts = [f"size {result['size']}: {result['about']}", f"track {result['track']}", race["status"].replace("_", " ")]
    link = tag("a", result["race_id"], href="race.html")
    body = [
        tag("h1", title),
        soft("; ".join([*facts, race["started_at"]]), "; the race: ", link),
        tag("ul", *(tag("li", words) for words in text.sentences(result))),
        section("Staircase", stairs.plot(_panels(result))),
        section("Each against the rung below", forest.plot(_changes(result, names)), _why(result)),
        section("Numbers", *_tables(result)),
        section("Curves", tag("div", *map(figure, drawn), class_="columns")) if drawn else "",
        _size(result),
    ]
    return page(f"{title}, {result['size']}", *body, data={"charts": drawn}, styles=REPORT_STYLES)


# ---- the staircase


def _panels(result):
    panels = [
        stairs.Panel(title, unit, [_row(rung, key, form) for rung in result["rungs"]], axis)
        for key, title, unit, form, axis in LEVELS
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
    for key, title, unit, end, ways in CHANGES:
        rows = []
        for rung in result["rungs"][1:]:
            numbers, name = rung["step"][key], rung["rung"]["name"]
            if numbers[f"change_{end}"] is not None:
                edges = numbers[f"ci95_{end}"] or (None, None)
                rows.append(forest.Row(name, numbers[f"change_{end}"], *edges, names.index(name)))
        panels.append(forest.Panel(title, unit, rows, directions=ways, decimals=4 if end == "nats" else 1))
    return panels


def _why(result):
    lines = [
        tag("li", f"{rung['rung']['name']}: {'; '.join(rung['step']['why'])}")
        for rung in result["rungs"]
        if rung["step"] and rung["step"]["why"]
    ]
    return tag("div", soft("No change of the way to the target:"), tag("ul", *lines)) if lines else ""


# ---- numbers


def _tables(result):
    lines = [
        (tag("span", tag("b", cells[0]), f" {rung['rung']['what']}"), *(cell or None for cell in cells[1:]))
        for rung in result["rungs"]
        for cells in [text.levels(rung)]
    ]
    yield table(text.LEVELS, lines)
    lines = []
    for rung in result["rungs"][1:]:
        name, time, _, *rest = text.changes(rung)
        lines.append([tag("b", name), time or None, _badge(rung["step"]["verdict"]), *(cell or None for cell in rest)])
    yield tag("h3", "Each against the rung below")
    yield table(text.CHANGED, lines, class_="tight")
    yield soft(
        "Means of times and steps are geometric; intervals are of 95 %; the verdict is of the time to the target, its "
        "p adjusted for all steps of the ladder (Holm); 8x H100 is what the records' own yamls say of their runs."
    )


def _badge(word):
    return marked_up(badge_of(word))


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
    return section(
        "What this size changes", tag("p", forecast.KEPT), details("Each change", table(forecast.COLUMNS, rows))
    )
