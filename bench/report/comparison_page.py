"""The page of a comparison of any runs or logs: who A and B are, the verdict with its picture, their curves and runs.

A race has a page of its own (race_page.py), with the order of its runs and its plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.base.terminal.text_table import counted
from bench.compare.selection import Arm
from bench.compare.verdict import Comparison
from bench.report import comparison_parts as parts
from bench.report import curves, run_page
from bench.web import forest
from bench.web.page import REPORT_STYLES, details, figure, page, section, table, tag


def html(arms: Sequence[Arm], results: Sequence[Comparison], at: Path | str) -> str:
    """Arms, the baseline first, and the comparison of each other one with it -> the page.

    at: the folder that the page will lie in.
    """
    first = results[0]
    names = [first["arms"][0], *(one["arms"][1] for one in results)]
    about = [first["about"][0], *(one["about"][1] for one in results)]
    against = dict(zip(names[1:], results, strict=True))
    named = [replace(arm, name=name) for arm, name in zip(arms, names, strict=True)]
    charts = curves.charts_of_arms(named)
    lines = [
        parts.arm(num, name, [_shortly(words), counted(len(arm.rows), "run")])
        for num, (name, words, arm) in enumerate(zip(names, about, arms))
    ]
    differences = [parts.differences(names[0], name, one) for name, one in against.items()]
    title = f"{names[0]} against {parts.and_(names[1:])}"
    who = section("Arms", tag("dl", *lines, class_="arms"), *differences)
    body = [
        tag("h1", title),
        tag("div", who, section("Verdict", *parts.verdicts(against)), class_="columns"),
        forest.plot(parts.panels(against, names)),
        parts.numbers(names[0], against),
        section("Curves", tag("div", *map(figure, charts), class_="columns")) if charts else "",
        parts.excluded(against),
        section("Runs", *(_runs(arm, at) for arm in named)),
        parts.diagnosis(against),
    ]
    return page(f"Comparison: {title}", *body, data={"charts": charts}, styles=REPORT_STYLES)


def _shortly(words):
    """Paths by their last two parts: the page is made to be sent."""
    return ", ".join("/".join(Path(one).parts[-2:]) if one.startswith("/") else one for one in words.split(", "))


def _runs(arm, at):
    lines = []
    for row, folder in zip(arm.rows, arm.folders, strict=True):
        target = run_page.link(folder, at)
        name = tag("a", row["run_id"], href=target) if target else row["run_id"]
        numbers = [None if row[key] is None else round(row[key], 4) for key in ("train_s", "val_loss", "step_avg_ms")]
        lines.append([name, row["seed"], *numbers, row["status"], row["device"]])
    head = ("run", "seed", "train time, s", "val_loss", "step_avg, ms", "status", "device")
    return details(f"{arm.name}: {counted(len(arm.rows), 'run')}", table(head, lines, class_="tight"))
