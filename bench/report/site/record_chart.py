"""How a track's record came down, by date: an SVG that needs no script."""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from bench.base import utc
from bench.web import forest
from bench.web.page import Safe, tag

Scale = Callable[[float], float]  # a value -> its place in the drawing

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 260, 70, 20, 16, 40
HOUR_S, DAY_S = 3600, 86400
TIME_STEPS_S = [60, 300, 900, HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S]
TIME_STEPS_S += [days * DAY_S for days in (1, 2, 7, 14, 30, 60, 90, 180, 365, 730)]


class Record(NamedTuple):
    number: int
    name: str | None
    since: str  # UTC
    score: float  # seconds, or steps where they are judged
    href: str  # to its first run


def stepped(records: Sequence[Record], judged: str = "time") -> Safe:
    """Train time, or steps where they are judged, by date: a step at each record, each a link to its first run."""
    dates_s, scores = [utc.seconds(record.since) for record in records], [record.score for record in records]
    what, unit, form = ("steps", "steps", ",") if judged == "steps" else ("train time", "s", ",.3f")
    across = _scale(*_padded(dates_s, HOUR_S), LEFT, WIDTH - RIGHT)
    up = _scale(*_padded(scores, 1e-3), HEIGHT - BOTTOM, TOP)
    points = [(across(date_s), up(score)) for date_s, score in zip(dates_s, scores, strict=True)]
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:]) + f"H{WIDTH - RIGHT}"
    axis = what if what == unit else f"{what}, {unit}"
    shapes = [*_grid(dates_s, scores, across, up, axis), tag("path", d=path, class_="step")]
    shapes += [
        _dot(record, f"{score:{form}} {unit}", *point)
        for record, score, point in zip(records, scores, points, strict=True)
    ]
    low_high = f"from {scores[0]:{form}} to {scores[-1]:{form}} {unit}"
    label = f"Record {what} by date: {low_high} in {len(records)} records"
    svg = tag("svg", *shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="group", aria_label=label)
    return tag("figure", svg, class_="history")


def _dot(record: Record, score: str, x: float, y: float) -> Safe:
    """Its label shows while the pointer or the focus is on it, on the side where there is room."""
    label = f"#{record.number}  {score}  {record.name}  {record.since[:10]}"
    side = "end" if x > WIDTH / 2 else "start"
    text = tag("text", label, x=f"{x:.1f}", y=f"{y - 12 if y > TOP + 20 else y + 24:.1f}", text_anchor=side)
    circle = tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=6)
    return tag("a", tag("title", label), circle, text, href=record.href, aria_label=label)


def _grid(dates_s: Sequence[float], scores: Sequence[float], across: Scale, up: Scale, axis: str) -> Iterator[Safe]:
    for score in forest.ticks(*_padded(scores, 1e-3)):
        y = f"{up(score):.1f}"
        yield tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        yield tag("text", f"{score:,.6g}", x=LEFT - 8, y=y, dy="0.35em", text_anchor="end")
    low_s, high_s = _padded(dates_s, HOUR_S)
    for date_s, label in time_ticks(low_s, high_s):
        yield tag("text", label, x=f"{across(date_s):.1f}", y=HEIGHT - BOTTOM + 20, text_anchor="middle")
    middle = HEIGHT / 2
    style = {"class_": "axis", "text_anchor": "middle"}
    yield tag("text", axis, x=14, y=middle, transform=f"rotate(-90 14 {middle})", **style)
    yield tag("text", "date (UTC)", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 4, **style)


def _padded(values: Sequence[float], least: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.06 * max(high - low, least)
    return low - margin, high + margin


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def time_ticks(low_s: float, high_s: float) -> list[tuple[float, str]]:
    """[(seconds since 1970, its label)]: times of day within a day, else dates."""
    step_s = next(
        (step_s for step_s in TIME_STEPS_S if (high_s - low_s) / step_s <= forest.NUM_TICKS), TIME_STEPS_S[-1]
    )
    form = "%m-%d %H:%M" if step_s < DAY_S else "%Y-%m-%d"
    numbers = range(math.ceil(low_s / step_s), math.floor(high_s / step_s) + 1)
    return [(number * step_s, datetime.fromtimestamp(number * step_s, UTC).strftime(form)) for number in numbers]
