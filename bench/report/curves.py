"""Curves of many runs in one chart: loss by step, time and tokens, and step time, with a band over an arm's runs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.base.reading.damage import Damaged
from bench.compare.selection import Arm
from bench.record.rows import Row
from bench.report import curve_data, run_page
from bench.web.chart import of_arms
from bench.web.page import CHART_SCRIPTS, figure, page, soft, tag

X_LABELS = {"step": "step", "train_s": "train time, s", "tokens": "tokens"}
Y_LABELS = {"val_loss": "val_loss, nats per token", "train_loss": "train_loss, nats per token", "step_ms": "step, ms"}
PART = {"val_loss": "val", "train_loss": "train", "step_ms": "train"}  # of curve_data.of_run()
ARM_CHARTS = (  # title, y, x
    ("val_loss by step", "val_loss", "step"),
    ("val_loss by time", "val_loss", "train_s"),
    ("Step time", "step_ms", "step"),
)


def arm_charts(arms: Mapping[str, Sequence[Path | str]]) -> list[dict]:
    """{arm: its run folders} -> specs for page.figure(): val_loss by step, val_loss by time, step time by step.

    One line an arm in the order of the mapping, the mean of its runs, with a band from their smallest to their largest.
    The caller names the runs that count (no warm-up runs).  A chart for which no run has values is not there.
    """
    return charts_of({name: list(filter(None, map(_of_run, folders))) for name, folders in arms.items()})


def _of_run(folder):
    """None of a run whose steps are damaged: the others are drawn, and ./run.sh verify says what is wrong."""
    try:
        return curve_data.of_run(folder)
    except Damaged:
        return None


def charts_of(arms: Mapping[str, Sequence[dict]]) -> list[dict]:
    """{arm: curve_data.of_run() of its runs} -> the specs of arm_charts()."""
    charts = []
    for title, y, x in ARM_CHARTS:
        drawn = [{"name": name, "runs": [_points(run, x, y) for run in runs]} for name, runs in arms.items()]
        drawn = [arm | {"runs": [run for run in arm["runs"] if run["x"]]} for arm in drawn]
        if any(arm["runs"] for arm in drawn):
            charts.append(of_arms(f"arms-{y}-{x}", title, _caption(arms, y), X_LABELS[x], Y_LABELS[y], drawn))
    return charts


def _points(run, x, y):
    part = run[PART[y]]
    pairs = [pair for pair in zip(part[x] or (), part[y] or ()) if None not in pair]
    return {"x": [one for one, _ in pairs], "y": [one for _, one in pairs]}


def _caption(arms, y):
    words = []
    if any(len(runs) > 1 for runs in arms.values()):
        words.append("mean of an arm's runs, band from the smallest to the largest")
    every = max((run["every"] for runs in arms.values() for run in runs), default=1)
    if every > 1 and PART[y] == "train":
        words.append(f"a point is the mean of up to {every} steps")
    if y == "step_ms":
        words.append("within-run: for diagnosis, not for the verdict")
    return "; ".join(words)


# ---- the page of the overlay: assets/curves.js draws it

COLUMNS = (
    "run_id", "name", "seed", "track", "config_id", "arm", "status", "val_loss", "train_s", "page", "file",
)  # fmt: skip
CONTROLS = (  # id, label, [(value in the address, what the reader sees)], the default first
    ("y", "y", (("val_loss", "val_loss"), ("train_loss", "train_loss"), ("step_ms", "step time"))),
    ("x", "by", (("step", "step"), ("time", "train time"), ("tokens", "tokens"))),
    ("group", "one line per", (("run", "run"), ("config", "config"), ("name", "name"), ("arm", "arm"))),
    ("band", "band", (("range", "smallest to largest"), ("sd", "mean ± sd"), ("none", "none"))),
    ("from", "show", (("all", "all"), ("half", "last half of each"), ("tenth", "last tenth of each"))),
    ("yscale", "y axis", (("linear", "linear"), ("log", "log"))),
    ("xscale", "x axis", (("linear", "linear"), ("log", "log"))),
    ("smooth", "smoothing", (("0", "none"), *((str(num), f"centred mean of {num} points") for num in (5, 21, 101)))),
)
MAX_BYTES = 5_000_000  # of the curves of a site, about
BYTES_PER_POINT = 12  # train_loss, step_ms and train_s in a site's files, as measured


def points_of(num_runs: int) -> int:
    """How many points a curve may have where so many runs are shown: 32 to 512, a power of two."""
    wanted = MAX_BYTES // (BYTES_PER_POINT * max(1, num_runs))
    return 1 << max(5, min(9, wanted.bit_length() - 1))


def line_of(row: Row, arm: str | None = None, page: str | None = None, file: int | None = None) -> list:
    """A row -> its cells by COLUMNS.  arm: None for RACE:ARM of its race, "" for none; page: link to its page."""
    if arm is None and row["race_id"]:
        arm = f"{row['race_id']}:{row['arm']}"
    status = "warm-up" if row["discarded"] and row["status"] == "complete" else row["status"]
    page = page and page.replace(row["run_id"], "{}")
    facts = row | {"arm": arm, "page": page, "file": file, "status": status}
    return [facts[name] for name in COLUMNS]


def page_of(index: dict, back: str | None = None, assets: str | None = None) -> str:
    """The html of the overlay.

    index: {"columns", "rows": newest first} and either {"files"}, of a site, or {"curves", "arms"}: names in the
    order of their lines, all of them drawn at first.
    """
    labels = [
        tag(
            "label",
            f"{label} ",
            tag("select", *(tag("option", words, value=value) for value, words in options), id=key),
        )
        for key, label, options in CONTROLS
    ]
    heads = ("run", "val_loss", "train, s", "", "line", "status")
    table = tag(
        "table", tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))), tag("tbody", id="chosen")
    )
    search = tag("label", "Search ", tag("input", type="search", id="search", placeholder="part of an id, name, race"))
    add, clear = (tag("button", words, type="button", id=key) for words, key in (("Add", "add"), ("Clear", "clear")))
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
    """Arms (compare/selection.of_each) -> a page that holds all it needs.  path: where it will lie, for links."""
    arms = _shortly_named(arms)
    max_points = points_of(sum(len(arm.rows) for arm in arms))
    lines, result = [], {}
    for arm in arms:
        label = _label(arm)
        for number, row in enumerate(arm.rows):
            result[row["run_id"]] = curve_data.packed(_curves(arm, number, max_points))
            lines.append(line_of(row, label, run_page.link(arm.folders[number], path.parent)))
    lines.sort(key=lambda line: line[0], reverse=True)
    return page_of({"columns": COLUMNS, "rows": lines, "curves": result, "arms": [arm.name for arm in arms]})


def charts_of_arms(arms: Iterable[Arm]) -> list[dict]:
    """Arms -> the specs of arm_charts()."""
    arms = _shortly_named(arms)
    return charts_of({arm.name: [_curves(arm, number, 500) for number in range(len(arm.rows))] for arm in arms})


def _shortly_named(arms):
    """A path by its last part, where no other ends so; the arms of one race by their own names."""
    arms = list(arms)
    is_one_race = all(arm.race for arm in arms) and len({arm.race for arm in arms}) == 1
    lasts = [re.split("[/:]" if is_one_race else "/", arm.name.rstrip("/"))[-1] for arm in arms]
    return [replace(arm, name=last if lasts.count(last) == 1 else arm.name) for arm, last in zip(arms, lasts)]


def _label(arm):
    """What its runs are one line as: its name, "" of a run that stands for itself, None where configs differ."""
    if arm.race or (len(arm.rows) > 1 and len({row["config_id"] or row["name"] for row in arm.rows}) == 1):
        return arm.name
    return "" if len(arm.rows) == 1 else None


def _curves(arm, number, max_points):
    folder = arm.folders[number]
    if folder is None:  # a log
        return curve_data.of_rows(arm.record_of(number).get("steps") or [], max_points)
    try:
        return curve_data.of_run(folder, max_points)
    except Damaged as error:
        arm.damaged[arm.rows[number]["run_id"]] = str(error)
        return curve_data.of_rows([], max_points)
