"""The page of a race: its verdict, the numbers behind it, every run in the order it was started, and the plan.

Reads race.json (bench/race/runner.py) and the records of its runs.
"""

import json
from pathlib import Path

from bench.diagnosis import text as diagnosis_text
from bench.record import race_folder, run_folder, step_files
from bench.web.chart import chart, series_of
from bench.web.page import Safe, details, figure, page, section, soft, table, tag

COLOUR = {"faster": "good", "slower": "bad", "equivalent": "soft", "inconclusive": "doubt", "not_comparable": "bad"}
WITHIN_RUN = "within-run: for diagnosis, not for the verdict"


def html(folder: Path | str) -> str:
    """A race's folder -> the page's html."""
    race, charts = race_folder.read(folder), charts_of(folder)
    against = (race.get("result") or {}).get("against") or {}
    unknown = tag("p", f"There is no verdict: {race.get('why') or 'the race has not ended'}.", class_="verdict")
    facts = [race.get("status"), f"track {race.get('track')}", race.get("why")]
    title = f"Race {race.get('race_id')}"
    digest = tag("p", "sha256 ", tag("code", race.get("plan_sha256")))
    body = [
        tag("h1", title),
        soft("; ".join(str(fact) for fact in facts if fact)),
        section("Verdict", *([_verdict(name, one) for name, one in against.items()] or [unknown]), _looks(race)),
        *(figure(chart) for chart in charts),
        *(_numbers(name, one) for name, one in against.items()),
        _arms(race),
        _runs(race, folder),
        section("Plan", tag("pre", json.dumps(race.get("plan"), indent=1)), digest),
    ]
    return page(title, *body, data={"charts": charts})


def block(folder: Path | str) -> str:
    """The verdict in Markdown, for a pull request."""
    path = Path(folder) / "race.md"
    if not path.exists():
        raise ValueError(f"--md {folder}: the race has no race.md yet: it is written when the race ends")
    return path.read_text()


def charts_of(folder: Path | str) -> list[dict]:
    """Specs: train time and final loss in the order of the runs, and the mean step of each arm over the race."""
    race = race_folder.read(folder)
    runs, names = _in_order(race, folder), list(race["arms"])
    if not runs:
        return []
    caption = "each run in the order it was started; warm-up runs are not drawn"
    charts = []
    for id, title, key, unit in (
        ("train-time", "Train time", "train_s", "s"),
        ("val-loss", "Final val_loss", "val_loss", "nats per token"),
    ):
        values = [(arm, run["metrics"].get(key)) for arm, run, _ in runs]
        series = [
            series_of(name, [value if arm == name else None for arm, value in values], "points") for name in names
        ]
        charts.append(chart(id, title, caption, "run", unit, list(range(1, len(runs) + 1)), series))
    return charts + _step_curves(runs, names)


def _step_curves(runs, names):
    """Mean milliseconds of each step over the runs of an arm: where in training the arms differ."""
    by_arm = {name: [] for name in names}
    for arm, _, path in runs:
        rows = [row for row in step_files.read(path) if row.get("step_ms") is not None and not row.get("flags")]
        by_arm[arm].append({row["step"]: row["step_ms"] for row in rows})
    steps = sorted({step for of_arm in by_arm.values() for of_run in of_arm for step in of_run})
    if not steps:
        return []
    series = []
    for name, of_arm in by_arm.items():
        found_ms = [[of_run[step] for of_run in of_arm if step in of_run] for step in steps]
        series.append(series_of(name, [sum(ms) / len(ms) if ms else None for ms in found_ms], "line"))
    caption = f"mean over the runs of an arm ({WITHIN_RUN})"
    return [chart("step-ms", "Step time", caption, "step", "ms", steps, series)]


def _in_order(race, folder):
    """(arm, record, folder) of the counted runs that can be read, as started.  The race is RESULTS/races/RACE."""
    results, runs = Path(folder).resolve().parent.parent, []
    for arm, facts in race["arms"].items():
        for name in facts.get("runs") or []:
            path = results / str(name)
            try:
                runs.append((arm, run_folder.read(path), path))
            except ValueError:
                continue
    return sorted(runs, key=lambda one: str(one[1]["started_at"]))


def _verdict(name, one):
    badge = tag("span", one.get("verdict"), class_=f"badge {COLOUR.get(one.get('verdict'), 'soft')}")
    flags = tag("p", "Flags: " + ", ".join(one["flags"]), class_="doubt") if one.get("flags") else Safe("")
    return tag("div", tag("p", tag("b", f"{name}: "), badge, one.get("words"), class_="verdict"), flags)


def _numbers(name, one):
    """The numbers of one candidate against the baseline."""
    by_holm = (one.get("time") or {}).get("p_holm") is not None
    lines = [_line("train time", one.get("time") or {}, by_holm)]
    for key in ("energy", "memory", "compile"):
        if (one.get(key) or {}).get("change_pct") is not None:
            lines.append(_line(key, one[key], by_holm))
    p = "p after Holm" if by_holm else "p"
    parts = [table(("", "change", "95 % interval", p, "n", "CV, %", "MDE (80 % power)"), lines)]
    loss = one.get("val_loss") or {}
    if loss.get("n"):
        facts = [[key, json.dumps(value)] for key, value in loss.items() if value is not None]
        parts.append(details("val_loss", table((), facts)))
    if one.get("differences"):
        lines = [
            [d.get("kind"), d.get("what"), json.dumps(d.get("a")), json.dumps(d.get("b"))] for d in one["differences"]
        ]
        parts.append(details("what differs", table(("kind", "what", "A", name), lines)))
    parts.append(_source(one.get("code_change")))
    if where := diagnosis_text.text(one.get("diagnosis") or {}):
        parts.append(details(f"where the time went ({WITHIN_RUN})", tag("pre", where)))
    if one.get("left_out"):
        lines = [[run.get("arm"), run.get("run_id"), "; ".join(run.get("reasons") or [])] for run in one["left_out"]]
        parts.append(table(("arm", "excluded run", "by which rule"), lines))
    return section(f"{name} against the baseline", *parts)


def _line(what, numbers, by_holm):
    p, interval = numbers.get("p_holm" if by_holm else "p"), numbers.get("ci95_pct")
    return [
        what,
        _pct(numbers.get("change_pct")),
        None if not interval else f"{interval[0]:+.2f} to {interval[1]:+.2f} %",
        None if p is None else f"{p:.2g}",
        _pair(numbers.get("n")),
        _pair(numbers.get("cv_pct")),
        _pct(numbers.get("mde_pct")),
    ]


def _pct(value):
    return None if value is None else f"{value:+.2f} %"


def _pair(values):
    return None if not values else ", ".join("–" if value is None else f"{value:.3g}" for value in values)


def _source(change):
    """The change of the source, in full as far as the record has it."""
    if not change:
        return ""
    if change["unknown"]:
        return soft(f"What changed in the source is unknown: {change['unknown']}")
    lines = [[one["path"], one["added"], one["removed"]] for one in change["files"]]
    files = table(("file", "lines added", "removed"), lines)
    end = soft("The change is longer than what is recorded.") if change["is_cut"] else ""
    return details(f"source: {len(lines)} files differ", files, tag("pre", change["patch"]), end)


def _looks(race):
    num = sum(not look.get("planned") for look in race.get("looks") or [])
    if not race.get("peeked") or not num:
        return ""
    words = f"Interim looks that were not planned: {num}. The verdict is not evidence."
    return tag("p", words, class_="doubt")


def _arms(race):
    lines = []
    for name, arm in race["arms"].items():
        overrides = " ".join(arm.get("overrides") or []) or "as configured"
        lines.append([name, overrides, arm.get("rev") or "this code", arm.get("commit"), arm.get("config_id")])
    return section("Arms", table(("arm", "overrides", "revision", "commit", "config_id"), lines))


def _runs(race, folder):
    lines = []
    for arm, run, _ in _in_order(race, folder):
        train_s, val_loss = (run["metrics"].get(key) for key in ("train_s", "val_loss"))
        numbers = [None if value is None else round(value, 4) for value in (train_s, val_loss)]
        lines.append([arm, run["run_id"], run["status"], run["validity"], *numbers])
    return section("Runs", table(("arm", "run", "status", "validity", "train time, s", "val_loss"), lines))
