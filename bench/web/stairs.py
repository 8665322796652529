"""Draws staircases: a measure of several rungs below each other, the lowest first, as SVG without a script.

A row is a rung: its text, and beside it a tread as long as its value, its interval, and a dot for each of its runs.
Risers connect the treads.  Text has a separate column, which no line crosses.  A second series (a record's own numbers)
is drawn as a separate line.  Colours come from the page's CSS.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.web import forest
from bench.web.forest import Place
from bench.web.page import Safe, tag

WIDTH = forest.WIDTH
RIGHT, TOP, ROW, TREAD, BELOW = 356, 8, 22, 10, 24
CHAR = 7.2  # the width of a character of 12 px in a wide font, estimated
GAP, MIN_DRAWN, LABEL_CHARS = 8, 140, 16
DECADE_TICKS = (1, 2, 5)


@dataclass(frozen=True)
class Row:
    """A rung.  value: None if it has none, and text says why; interval: None if unknown; other: the second series."""

    label: str
    text: str
    value: float | None
    interval: tuple[float, float] | None = None
    runs: Sequence[float] = ()
    other: float | None = None


@dataclass(frozen=True)
class Panel:
    """A measure.  names: the series, for a legend.

    axis: zero (begins at 0, with treads), fit (fits the values) or log (fits them, logarithmic).
    """

    title: str
    unit: str
    rows: Sequence[Row]
    axis: str = "zero"
    names: Sequence[str] = ()


def plot(panels: Sequence[Panel]) -> Safe:
    """Draws the panels that have a value; "" if none has."""
    shown = [panel for panel in panels if any(row.value is not None for row in panel.rows)]
    drawn = [_panel(panel, f"stairs-{number}") for number, panel in enumerate(shown)]
    return tag("div", *drawn, class_="forest stairs") if drawn else Safe("")


def _panel(panel: Panel, id: str) -> Safe:
    longest = max(  # among the rows that have something to draw
        len(_label(row)) + 1 + len(row.text) for row in panel.rows if (row.value, row.other) != (None, None)
    )
    left = round(min(CHAR * longest + GAP, RIGHT - MIN_DRAWN))  # the width of the text's column
    ticks, at = _axis_of(panel, left)
    bottom = TOP + ROW * len(panel.rows) + 4
    shapes = [tag("line", x1=left, x2=RIGHT, y1=bottom, y2=bottom, class_="axis")]
    for value in ticks:
        shapes.append(tag("line", x1=at(value), x2=at(value), y1=TOP, y2=bottom + 4, class_="axis"))
        shapes.append(tag("text", f"{value:,.6g}", x=at(value), y=bottom + 17, text_anchor="middle", class_="tick"))
    for number, key in enumerate(("value", "other")):
        shapes += _risers([getattr(row, key) for row in panel.rows], at, number)
    for number, row in enumerate(panel.rows):
        shapes += _row(row, panel, at, left, TOP + ROW * number)
    text = ". ".join(f"{row.label}: {row.text}" for row in panel.rows)
    names = tag("title", panel.title, id=f"{id}-title"), tag("desc", text, id=f"{id}-desc")
    size = f"0 0 {WIDTH} {bottom + BELOW}"
    svg = tag("svg", *names, *shapes, viewBox=size, role="img", aria_labelledby=f"{id}-title {id}-desc")
    legend = [
        tag("span", " ", tag("i", class_="swatch", style=f"background: var(--series-{number})"), name)
        for number, name in enumerate(panel.names)
    ]
    return tag("figure", tag("figcaption", tag("b", f"{panel.title}, {panel.unit}"), *legend), svg)


def _label(row: Row) -> str:
    return row.label if len(row.label) <= LABEL_CHARS else f"{row.label[: LABEL_CHARS - 1]}…"


def _axis_of(panel: Panel, left: float) -> tuple[list[float], Place]:
    """Returns the values of the ticks, and a function from values to x, which cuts intervals at the drawing's edge."""
    values = [value for row in panel.rows for value in (row.value, row.other, *row.runs) if value is not None]
    is_log = panel.axis == "log"
    values = [math.log(value) for value in values] if is_log else values
    pad = 0.06 * (max(values) - min(values)) or 1.0
    low, high = (0.0, 1.08 * max(values)) if panel.axis == "zero" else (min(values) - pad, max(values) + pad)
    ticks = [] if is_log else forest.ticks(low, high)
    if is_log:
        powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
        decades = [float(f"{digit}e{power}") for power in powers for digit in DECADE_TICKS]
        ticks = [value for value in decades if math.exp(low) <= value <= math.exp(high)]

    def at(value: float) -> float:
        place = math.log(value) if is_log else value
        return round(left + (RIGHT - left) * (min(max(place, low), high) - low) / (high - low), 1)

    return ticks, at


def _risers(values: Sequence[float | None], at: Place, series: int) -> Iterator[Safe]:
    """Draws the line along the ends of the treads, interrupted at rungs without a value."""
    path, is_open = "", False
    for number, value in enumerate(values):
        top = TOP + ROW * number
        if value is None:
            is_open = False
            continue
        path += f"{'H' if is_open else 'M'}{at(value)}{'' if is_open else f',{top}'}V{top + ROW}"
        is_open = True
    if path:
        yield tag("path", d=path, class_="riser", style=f"--own: var(--series-{series})")


def _row(row: Row, panel: Panel, at: Place, left: float, top: float) -> Iterator[Safe]:
    own, y = "--own: var(--series-0)", top + ROW / 2
    if row.value is not None and panel.axis == "zero":
        width = round(at(row.value) - left, 1)
        yield tag("rect", x=left, y=y - TREAD / 2, width=width, height=TREAD, class_="tread", style=own)
    if row.interval is not None:
        low, high = map(at, row.interval)
        yield tag("line", x1=low, x2=high, y1=y, y2=y, class_="interval", style=own)
    for value in row.runs:
        yield tag("circle", cx=at(value), cy=y, r=3, class_="point", style=own)
    yield tag("text", tag("tspan", _label(row), class_="name"), tag("tspan", row.text, dx=6), x=0, y=y + 4)
