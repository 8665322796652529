"""The page of a race: who the arms are, the verdict with its picture, every run in its order, curves, the plan.

Reads race.json (bench/plans/race/runner.py) and the records of its runs.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from bench.base import atomic
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged, of_record
from bench.base.text_table import counted
from bench.record import race_folder, run_folder
from bench.report import comparison_page as parts
from bench.report import curves, run_page
from bench.web import forest
from bench.web.chart import chart, series_of
from bench.web.page import REPORT_STYLES, Safe, details, figure, join, page, section, soft, table, tag

COLOUR = parts.COLOUR  # of a verdict


def html(folder: Path | str, at: Path | str | None = None) -> str:
    """A race's folder -> the page's html.  at: the folder that the page will lie in, None: the race's."""
    with of_record(folder):
        return _html(folder, at or folder)


def _html(folder, at):
    race = race_folder.read(folder)
    runs, against = _in_order(race, folder), race_folder.verdicts_of(race)
    names, baseline = list(race["arms"]), race.get("baseline") or next(iter(race["arms"]))
    charts, drawn = _points(runs, names, at), _curves(runs, names)
    title = f"Race: {baseline} against {parts.and_(name for name in names if name != baseline)}"
    plan = tag("pre", json.dumps(race.get("plan"), indent=1)), tag("p", "sha256 ", tag("code", race.get("plan_sha256")))
    body = [
        tag("h1", title),
        soft("; ".join(_facts(race)), "; ", tag("code", race.get("race_id")), staircase(folder, at, race)),
        tag("div", _arms(race, baseline, against), _verdict(race, against), class_="columns"),
        forest.plot(parts.panels(against, names)),
        parts.numbers(baseline, against),
        section("Runs, in their order", tag("div", *map(figure, charts), class_="columns"), _runs(runs, at)),
        section("Curves", tag("div", *map(figure, drawn), class_="columns")) if drawn else "",
        parts.excluded(against),
        parts.diagnosis(against),
        section("Plan", details("plan.json: fixed before the first run", *plan)),
    ]
    return page(f"{title}, track {race.get('track')}", *body, data={"charts": charts + drawn}, styles=REPORT_STYLES)


def staircase(folder: Path | str, at: Path | str, race: Mapping) -> Safe:
    """From a page in the folder at to the staircase of a race of the ladder; "" of any other race."""
    path = Path(folder) / race_folder.STAIRCASE  # written after the race's page
    is_one = bool((race.get("plan") or {}).get("ladder") and race.get("result"))
    return join(["; ", tag("a", "its staircase", href=quote(os.path.relpath(path, at)))]) if is_one else Safe("")


def write_run_pages(folder: Path | str) -> None:
    """report.html in the folder of each run of a race, for its page to link; a record that cannot be shown has none."""
    race = race_folder.read(folder)
    for run in _in_order(race, folder):
        with contextlib.suppress(Damaged, OSError):
            atomic.write_text(run["folder"] / run_page.NAME, run_page.html(run["folder"]), durable=False)


def block(folder: Path | str) -> str:
    """The verdict in Markdown, for a pull request."""
    path = Path(folder) / "race.md"
    if not path.exists():
        raise ValueError(f"--md {folder}: the race has no race.md yet: it is written when the race ends")
    return plain_file.text(path)


def charts_of(folder: Path | str) -> list[dict]:
    """Specs: train time and final loss in the order of the runs, and each arm's val_loss and step time."""
    race = race_folder.read(folder)
    runs, names = _in_order(race, folder), list(race["arms"])
    return _points(runs, names, folder) + _curves(runs, names)


def panels_of(folder: Path | str) -> list[forest.Panel]:
    """The panels of a race's forest plot; [] where there is no verdict."""
    race = race_folder.read(folder)
    return parts.panels(race_folder.verdicts_of(race), list(race["arms"]))


# ---- who raced, and how it ended


def _facts(race):
    status = str(race.get("status")).replace("_", " ")
    facts = [f"track {race.get('track')}", status, race.get("why"), race.get("started_at")]
    return [str(fact) for fact in facts if fact]


def _arms(race, baseline, against):
    """Each arm by what only it has; what all share is said once, and the whole difference lies folded below."""
    arms = race["arms"]
    given = [arm.get("overrides") or [] for arm in arms.values()]
    words = [word for word in given[0] if all(word in words for words in given)]
    codes = {_code(arm) for arm in arms.values()}
    shared = [tag("code", " ".join(words))] * bool(words) + [codes.copy().pop()] * (len(codes) == 1 and codes != {""})
    lines = [
        parts.arm(num, name, _arm(name == baseline, arm, words, len(codes) > 1))
        for num, (name, arm) in enumerate(arms.items())
    ]
    common = soft("All arms: ", join(shared, ", ")) if shared else ""
    differences = [parts.differences(baseline, name, one) for name, one in against.items()]
    return section("Arms", tag("dl", *lines, class_="arms"), common, *differences)


def _arm(is_baseline, arm, shared, with_code):
    own = " ".join(word for word in arm.get("overrides") or [] if word not in shared)
    words = [arm["name"]] if arm.get("name") else []
    words += [tag("code", own)] if own else []
    runs = arm.get("runs") or []
    facts = ["baseline" if is_baseline else "", _code(arm) if with_code else ""]
    facts += [f"config {arm['config_id']}" if arm.get("config_id") else "", counted(len(runs), "run")]
    return [*words, ", ".join(fact for fact in facts if fact)]


def _code(arm):
    """Which code an arm ran, in words; "" where the race does not know."""
    commit = f"commit {arm['commit'][:8]}{' with changes' if arm.get('dirty') else ''}" if arm.get("commit") else ""
    return ", ".join(word for word in (f"revision {arm['rev']}" if arm.get("rev") else "", commit) if word)


def _verdict(race, against):
    unknown = tag("p", f"There is no verdict: {race.get('why') or 'the race has not ended'}.", class_="verdict")
    return section("Verdict", *(parts.verdicts(against) or [unknown]), _looks(race))


def _looks(race):
    num = sum(not look.get("planned") for look in race.get("looks") or [])
    if not race.get("unplanned_look") or not num:
        return ""
    words = f"Interim looks that were not planned: {num}. The verdict is not evidence."
    return tag("p", words, class_="doubt")


# ---- its runs


def _in_order(race, folder):
    """[{arm, discarded, run: record, folder}] of the runs that are there and readable, as started."""
    folder, result = Path(folder).resolve(), []
    for arm, facts in race["arms"].items():
        for key in ("warm_up_runs", "runs"):
            paths = [race_folder.run_folder_of(folder, str(name)) for name in facts.get(key) or []]
            for path in filter(None, paths):
                with contextlib.suppress(ValueError):
                    run = run_folder.read(path)
                    result.append({"arm": arm, "discarded": key != "runs", "run": run, "folder": path})
    return sorted(result, key=lambda one: str(one["run"]["started_at"]))


def _points(runs, names, at):
    """Each run's numbers as points of its arm, which say the run's id and open its page."""
    runs, charts = [run for run in runs if not run["discarded"]], []
    caption = "each run in the order it was started; warm-up runs are not drawn"
    pages = [run_page.link(one["folder"], at) for one in runs]
    for id, title, key, unit in (
        ("train-time", "Train time", "train_s", "train time, s"),
        ("val-loss", "Final val_loss", "val_loss", "nats per token"),
    ):
        values = [(one["arm"], one["run"]["metrics"].get(key)) for one in runs]
        labels = [f"{one['run']['run_id']}\n{value}" for one, (_, value) in zip(runs, values, strict=True)]
        series = [
            series_of(name, [value if arm == name else None for arm, value in values], "points", labels, pages)
            for name in names
        ]
        if runs:
            charts.append(chart(id, title, caption, "run", unit, list(range(1, len(runs) + 1)), series))
    return charts


def _runs(runs, at):
    lines, number = [], 0
    for one in runs:
        number += not one["discarded"]
        run = one["run"]
        numbers = [run["metrics"].get(key) for key in ("train_s", "val_loss", "step_avg_ms")]
        numbers = [None if value is None else round(value, 4) for value in numbers]
        nth = "warm-up" if one["discarded"] else number
        nth = _link(one["folder"], nth, at)  # a narrow screen shows the first columns
        lines.append([nth, one["arm"], run["seed"], *numbers, _state(run), _link(one["folder"], run["run_id"], at)])
    if not lines:
        return soft("The records of its runs are not here.")
    head = ("run", "arm", "seed", "train time, s", "val_loss", "step_avg, ms", "status", "run id")
    return table(head, lines, class_="tight")


def _state(run):
    words = run["status"] if run["status"] != "complete" else run["validity"]
    colour = "bad" if run["status"] != "complete" else run_page.COLOUR.get(run["validity"])
    return tag("span", words, title="; ".join(run["validity_reasons"]) or None, class_=colour)


def _link(folder, name, at):
    target = run_page.link(folder, at)
    return tag("a", name, href=target) if target else tag("span", name)


# ---- curves


def _curves(runs, names):
    """val_loss by step and by time, and the step time, of each arm's complete runs without its warm-up."""
    counted = [one for one in runs if not one["discarded"] and one["run"]["status"] == "complete"]
    return curves.arm_charts({name: [one["folder"] for one in counted if one["arm"] == name] for name in names})
