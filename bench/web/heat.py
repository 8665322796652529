"""The pictures of a sweep: a heat map of two settings, parallel coordinates of more.  No script is needed.

A heat map is a table whose cells are coloured by their number.  Of parallel coordinates an axis is a setting, the last
the metric, a line a config.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.web.page import Safe, tag

MAX_SHADE_PCT = 60  # of the colour in a cell: text on it stays readable, dark and light
ROW_PX, HEAD_PX = 34, 90  # of a picture
AXIS, LEFT, TOP, DEEP, BELOW = 150, 70, 34, 220, 24  # units of the drawing: between axes, around them, their length
MAX_EVEN = 10  # values of an axis that are spread evenly, each with its word; more are spread by their numbers
NUM_TICKS = 5
LINES_PX = 480  # of a picture of lines, its height


@dataclass(frozen=True)
class Cell:
    """value: what colours it, None for no number; text: what is written, notes: below it and smaller."""

    value: float | None
    text: str
    notes: str = ""
    is_best: bool = False


def plot(
    title: str,
    about: str,
    names: tuple[str, str],
    heads: tuple[Sequence[str], Sequence[str]],
    cells: Sequence[Sequence[Cell | None]],
) -> Safe:
    """names: of the axis down and across; heads: the text of their values; cells: [down][across], Cell or None.

    The smallest number has the strongest colour where less is better: give values so that small is good.
    """
    values = [cell.value for line in cells for cell in line if cell and cell.value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    top = tag("tr", tag("th", f"{names[0]} \\ {names[1]}".strip(" \\")), *(tag("th", word) for word in heads[1]))
    lines = [
        tag("tr", tag("th", word, scope="row"), *(_cell(cell, low, high) for cell in line))
        for word, line in zip(heads[0], cells, strict=True)
    ]
    body = tag("table", tag("thead", top), tag("tbody", *lines), class_="heat")
    caption = tag("figcaption", tag("b", title), " ", tag("span", about))
    return tag("figure", caption, tag("div", body, class_="scroll", tabindex="0"))


def height_px(num_lines: int) -> int:
    """The height of a picture with so many lines."""
    return HEAD_PX + (num_lines + 1) * (ROW_PX + 18)


def _cell(cell: Cell | None, low: float, high: float) -> Safe:
    if cell is None or cell.value is None:
        return tag("td", cell.text if cell else "", class_="soft")
    share = 1.0 if high == low else (high - cell.value) / (high - low)
    colour = f"background: color-mix(in srgb, var(--series-0) {share * MAX_SHADE_PCT:.0f}%, var(--page))"
    notes = tag("div", cell.notes, class_="soft") if cell.notes else ""
    return tag("td", cell.text, notes, style=colour, class_="number best" if cell.is_best else "number")


@dataclass(frozen=True)
class Axis:
    """values: of each line, None where it has none; labels: what a value is called."""

    name: str
    values: Sequence[Any]
    labels: Sequence[str]


def plot_lines(title: str, about: str, axes: Sequence[Axis], best: int | None) -> Safe:
    """axes: at least two, the result last and all of it numbers, small is good.  best: number of the line to stress."""
    scales = [_scale(axis, is_result=axis is axes[-1]) for axis in axes]
    known = [value for value in axes[-1].values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    order = sorted(range(len(axes[-1].values)), key=lambda number: number == best)
    lines = [_line(number, axes, scales, low, high, number == best) for number in order]
    width = 2 * LEFT + AXIS * (len(axes) - 1)
    shapes = [
        *lines,
        *(shape for number, axis in enumerate(axes) for shape in _axis_shapes(number, axis, scales[number])),
    ]
    svg = tag(
        "svg", tag("title", f"{title}. {about}"), *shapes, viewBox=f"0 0 {width} {TOP + DEEP + BELOW}", role="img"
    )
    caption = tag("figcaption", tag("b", title), " ", tag("span", about))
    return tag("figure", caption, tag("div", svg, class_="scroll parallel", tabindex="0"), class_="wide")


def _scale(axis: Axis, is_result: bool) -> dict[Any, float]:
    """-> {value: place from the top}, of None the bottom."""
    known = {value: word for value, word in zip(axis.values, axis.labels, strict=True) if value is not None}
    is_numeric = all(isinstance(value, (int, float)) for value in known)
    ordered = sorted(known) if is_numeric else list(known)
    if is_result or (is_numeric and len(ordered) > MAX_EVEN):
        low, high = min(ordered, default=0.0), max(ordered, default=1.0)
        places = {value: (value - low) / ((high - low) or 1.0) for value in ordered}
    else:
        places = {value: number / max(1, len(ordered) - 1) for number, value in enumerate(ordered)}
    return {value: TOP + DEEP * (place if is_result else 1 - place) for value, place in places.items()}


def _line(
    number: int, axes: Sequence[Axis], scales: Sequence[dict[Any, float]], low: float, high: float, is_best: bool
) -> Safe:
    points = [
        f"{LEFT + AXIS * place},{scale[axis.values[number]]:.1f}"
        for place, (axis, scale) in enumerate(zip(axes, scales, strict=True))
        if axis.values[number] is not None
    ]
    value = axes[-1].values[number]
    share = 0.0 if value is None else 1.0 if high == low else (high - value) / (high - low)
    colour = (
        "var(--series-1)" if is_best else f"color-mix(in srgb, var(--series-0) {15 + 85 * share:.0f}%, var(--line))"
    )
    text = ", ".join(f"{axis.name} {axis.labels[number]}" for axis in axes)
    style = f"stroke: {colour}; stroke-width: {4 if is_best else 1.5}; fill: none"
    return tag("polyline", tag("title", text), points=" ".join(points), style=style)


def _axis_shapes(number: int, axis: Axis, scale: dict[Any, float]) -> Iterator[Safe]:
    x = LEFT + AXIS * number
    yield tag("line", x1=x, x2=x, y1=TOP, y2=TOP + DEEP, class_="axis")
    yield tag("text", axis.name, x=x, y=TOP - 16, text_anchor="middle", class_="name")
    labels = dict(zip(axis.values, axis.labels, strict=True))
    ordered = sorted(scale, key=lambda value: scale[value])
    step = 1 if len(ordered) <= MAX_EVEN else max(1, len(ordered) // NUM_TICKS)
    last = None
    for value in [*ordered[::step], *ordered[-1:]]:
        if last is not None and abs(scale[value] - last) < 13:
            continue
        last = scale[value]
        yield tag("text", labels[value], x=x + 6, y=round(scale[value] + 4, 1), class_="tick")
