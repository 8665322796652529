"""The page of a race: its verdict, the numbers behind it, every run in the order it was started, and the plan.

Reads race.json (bench/race/runner.py) and the records of its runs.
"""

import json
from pathlib import Path

from bench.diagnosis import text as diagnosis_text
from bench.record import race_folder, run_folder, step_files
from bench.web.chart import chart, series_of
from bench.web.page import Safe, figure, page, section, table, tag

COLOUR = {"faster": "good", "slower": "bad", "equivalent": "soft", "inconclusive": "doubt", "not_comparable": "bad"}


def of_race(folder):
    """A race's folder -> the page's html."""
    race, root = race_folder.read(folder), results_of(folder)
    charts = charts_of(folder)
    against = (race.get("result") or {}).get("against") or {}
    parts = [_verdict(name, one) for name, one in against.items()] or [
        tag("p", f"There is no verdict: {race.get('why') or 'the race is not over'}.", class_="verdict")
    ]
    body = [
        tag("h1", f"Race {race.get('race_id')}"),
        tag(
            "p",
            "; ".join(
                str(word) for word in (race.get("status"), f"track {race.get('track')}", race.get("why")) if word
            ),
            class_="soft",
        ),
        section("Verdict", *parts, _peeks(race)),
        *(figure(chart) for chart in charts),
        *(_details(name, one) for name, one in against.items()),
        _arms(race),
        _runs(race, root),
        section(
            "Plan",
            tag("pre", json.dumps(race.get("plan"), indent=1)),
            tag("p", "sha256 ", tag("code", race.get("plan_sha256"))),
        ),
    ]
    return page(f"Race {race.get('race_id')}", *body, data={"charts": charts})


def charts_of(folder):
    """Specs: train time in the order of the runs, and the median step of each arm's runs over the race."""
    race = race_folder.read(folder)
    found = _in_order(race, results_of(folder))
    if not found:
        return []
    places = list(range(1, len(found) + 1))
    names = list(race["arms"])

    def series(value_of):
        values = [(arm, value_of(run, path)) for arm, run, path in found]
        return [series_of(name, [value if arm == name else None for arm, value in values], "points") for name in names]

    caption = "each run in the order it was started; warm-up runs are not drawn"
    times = chart(
        "train-time", "Train time", caption, "run", "s", places, series(lambda run, path: run["metrics"].get("train_s"))
    )
    losses = chart(
        "val-loss",
        "Final val_loss",
        caption,
        "run",
        "nats per token",
        places,
        series(lambda run, path: run["metrics"].get("val_loss")),
    )
    return [times, losses, *_curves(found, names)]


def _curves(found, names):
    """Mean milliseconds of a step over an arm's runs, by step: where along the race the arms differ."""
    by_arm = {name: [] for name in names}
    for arm, _, path in found:
        by_arm[arm].append(
            {
                row["step"]: row["step_ms"]
                for row in step_files.read(path)
                if row.get("step_ms") is not None and not row.get("flags")
            }
        )
    places = sorted({step for runs in by_arm.values() for run in runs for step in run})
    if not places:
        return
    series = []
    for name, runs in by_arm.items():
        means = [[run[step] for run in runs if step in run] for step in places]
        series.append(series_of(name, [sum(ms) / len(ms) if ms else None for ms in means], "line"))
    yield chart(
        "step-ms",
        "Step time over the race",
        "mean over the runs of an arm (within-run: for diagnosis, not for the verdict)",
        "step",
        "ms",
        places,
        series,
    )


def results_of(folder):
    """The results folder that a race's runs lie in: the race is RESULTS/races/RACE."""
    return Path(folder).resolve().parent.parent


def _in_order(race, root):
    """(arm, record, folder) of the counted runs that can be read, as started."""
    found = []
    for arm, facts in race["arms"].items():
        for name in facts.get("runs") or []:
            path = root / str(name)
            try:
                found.append((arm, run_folder.read(path), path))
            except ValueError:
                continue
    return sorted(found, key=lambda one: str(one[1]["started_at"]))


def _verdict(name, one):
    badge = tag("span", one.get("verdict"), class_=f"badge {COLOUR.get(one.get('verdict'), 'soft')}")
    flags = tag("p", "Flags: " + ", ".join(one["flags"]), class_="doubt") if one.get("flags") else Safe("")
    return tag("div", tag("p", tag("b", f"{name}: "), badge, one.get("words"), class_="verdict"), flags)


def _details(name, one):
    """The numbers of one candidate against the baseline."""
    time = one.get("time") or {}
    lines = [
        [
            "train time",
            _pct(time.get("change_pct")),
            _interval(time.get("ci95_pct")),
            _p(time.get("p_holm") or time.get("p")),
            _pair(time.get("n")),
            _pair(time.get("cv_pct")),
            _pct(time.get("mde_pct")),
        ]
    ]
    for key in ("energy", "memory", "compile"):
        found = one.get(key) or {}
        if found.get("change_pct") is not None:
            lines.append(
                [
                    key,
                    _pct(found["change_pct"]),
                    _interval(found.get("ci95_pct")),
                    _p(found.get("p_holm") if time.get("p_holm") is not None else found.get("p")),
                    _pair(found.get("n")),
                    _pair(found.get("cv_pct")),
                    _pct(found.get("mde_pct")),
                ]
            )
    parts = [
        table(
            (
                "",
                "change",
                "95 % interval",
                "p after Holm" if time.get("p_holm") is not None else "p",
                "n",
                "CV, %",
                "smallest detectable",
            ),
            lines,
        )
    ]
    loss = one.get("val_loss") or {}
    if loss.get("n"):
        facts = [[key, json.dumps(value)] for key, value in loss.items() if value is not None]
        parts.append(tag("details", tag("summary", "val_loss"), table((), facts)))
    if one.get("differences"):
        lines = [
            [found.get("kind"), found.get("what"), json.dumps(found.get("a")), json.dumps(found.get("b"))]
            for found in one["differences"]
        ]
        parts.append(tag("details", tag("summary", "what differs"), table(("kind", "what", "A", name), lines)))
    parts += _source(one.get("code_change"))
    if where := diagnosis_text.text(one.get("diagnosis") or {}, False):
        parts.append(
            tag(
                "details",
                tag("summary", "where the time went (within-run: for diagnosis, not for the verdict)"),
                tag("pre", where),
            )
        )
    if one.get("left_out"):
        lines = [
            [left.get("arm"), left.get("run_id"), "; ".join(left.get("reasons") or [])] for left in one["left_out"]
        ]
        parts.append(table(("arm", "run left out", "by which rule"), lines))
    return section(f"{name} against the baseline", *parts)


def _source(change):
    """The change of the source, in full as far as the record has it."""
    if not change:
        return
    if change["unknown"]:
        yield tag("p", f"What changed in the source is unknown: {change['unknown']}", class_="soft")
        return
    lines = [[one["path"], one["added"], one["removed"]] for one in change["files"]]
    end = tag("p", "It is longer; the rest is left out.", class_="soft") if change["is_cut"] else ""
    yield tag(
        "details",
        tag("summary", f"source: {len(lines)} files differ"),
        table(("file", "lines added", "removed"), lines),
        tag("pre", change["patch"]),
        end,
    )


def _peeks(race):
    num = sum(not look.get("planned") for look in race.get("looks") or [])
    if not race.get("peeked") or not num:
        return ""
    return tag(
        "p",
        f"Somebody looked at the interim state {num} time{'s' * (num != 1)} when the plan had no look: the verdict is no evidence.",
        class_="doubt",
    )


def _arms(race):
    lines = [
        [
            name,
            " ".join(arm.get("overrides") or []) or "as configured",
            arm.get("rev") or "this code",
            arm.get("commit"),
            arm.get("config_id"),
        ]
        for name, arm in race["arms"].items()
    ]
    return section("Arms", table(("arm", "overrides", "revision", "commit", "config_id"), lines))


def _runs(race, root):
    lines = [
        [
            arm,
            run["run_id"],
            run["status"],
            run["validity"],
            *(_plain(run["metrics"].get(key)) for key in ("train_s", "val_loss")),
        ]
        for arm, run, _ in _in_order(race, root)
    ]
    return section("Runs", table(("arm", "run", "status", "validity", "train time, s", "val_loss"), lines))


def _plain(value):
    return None if value is None else round(value, 4)


def _pct(value):
    return None if value is None else f"{value:+.2f} %"


def _interval(pair):
    return None if not pair else f"{pair[0]:+.2f} to {pair[1]:+.2f} %"


def _p(value):
    return None if value is None else f"{value:.2g}"


def _pair(values):
    return None if not values else ", ".join("–" if value is None else f"{value:.3g}" for value in values)


def block(folder):
    """The verdict in Markdown, to paste into a pull request."""
    path = Path(folder) / "race.md"
    if not path.exists():
        raise ValueError(f"--md {folder}: the race has no race.md yet: it is written when the race is over")
    return path.read_text()
