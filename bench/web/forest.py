"""Draws forest plots: changes with their intervals against zero, a margin and a noise floor, as SVG without a script.

A panel is a measure with its own scale, and a row is a candidate.  Colours come from the page's CSS.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.web.page import Safe, tag

Place = Callable[[float], float]  # converts a value to x in the drawing

WIDTH = 380  # units of the drawing; columns are at least as many pixels wide, so that text of 12 units is readable
LEFT, RIGHT, TOP, ROW, BELOW = 12, 368, 8, 40, 46
MAX_REACH = 3  # an interval is cut, with an arrow, at this many times the largest change, margin or floor
NUM_TICKS = 5
WORDS_BELOW, EDGE = 26, 12  # the end of the first row's text; the distance from the edge at which tick labels shift
CAPTION_PX = 40
PAGE_PX = 960  # the width of a picture
MAX_LABEL = 20  # letters of a name that are drawn; the sentences contain the whole name


@dataclass(frozen=True)
class Row:
    """A candidate's change with its interval, in the panel's unit; colour: N of --series-N in the page's style."""

    label: str
    change: float
    low: float | None = None  # low and high are None if there is no interval, as for a single run
    high: float | None = None
    colour: int = 0


@dataclass(frozen=True)
class Panel:
    """The changes in one measure."""

    title: str
    unit: str  # of the changes
    rows: Sequence[Row]
    margin: tuple[float, float] | None = None  # (low, high) of the changes that count as equal; None: no margin
    floor: float | None = None  # the noise floor, on either side of zero; None: unknown
    directions: tuple[str, str] = ("less", "more")  # what changes below and above zero mean
    decimals: int = 2


def plot(panels: Sequence[Panel]) -> Safe:
    """Draws the panels that have rows; "" if none has."""
    drawn = [_panel(panel, f"forest-{num}") for num, panel in enumerate(panels) if panel.rows]
    return tag("div", *drawn, class_="forest") if drawn else Safe("")


def height_px(panels: Sequence[Panel]) -> int:
    """Returns the height of plot() on a page of PAGE_PX, with two panels side by side."""
    heights = [_height(panel) * (PAGE_PX / 2 / WIDTH) + CAPTION_PX for panel in panels]
    return math.ceil(sum(max(heights[num : num + 2]) for num in range(0, len(heights), 2)))


def sentences(panel: Panel) -> list[str]:
    """Describes the drawing for those who cannot see it: a sentence per row, and one about the bands."""
    bands = ", ".join(text for _, text in _named_bands(panel))
    return [f"{row.label}: {_numbers(row, panel.unit, panel.decimals)}" for row in panel.rows] + [bands] * bool(bands)


def _panel(panel: Panel, id: str) -> Safe:
    low, high = _domain(panel)
    bottom = _height(panel) - BELOW

    def at(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (min(max(value, low), high) - low) / (high - low), 1)

    shapes = [
        *_bands(panel, at, bottom),
        *_axis(panel, at, low, high, bottom),
        *(shape for num, row in enumerate(panel.rows) for shape in _row(row, panel, at, (low, high), TOP + ROW * num)),
    ]
    names = tag("title", panel.title, id=f"{id}-title"), tag("desc", ". ".join(sentences(panel)), id=f"{id}-desc")
    labelled = f"{id}-title {id}-desc"
    svg = tag("svg", *names, *shapes, viewBox=f"0 0 {WIDTH} {_height(panel)}", role="img", aria_labelledby=labelled)
    legend = [tag("span", " ", tag("i", class_=f"swatch {which}"), text) for which, text in _named_bands(panel)]
    return tag("figure", tag("figcaption", tag("b", f"{panel.title}, {panel.unit}"), *legend), svg)


def _height(panel: Panel) -> int:
    return TOP + ROW * len(panel.rows) + 4 + BELOW


def _domain(panel: Panel) -> tuple[float, float]:
    """Returns the ends of the scale, which covers zero, the bands and the intervals, the latter up to MAX_REACH."""
    bands = [0.0, *(panel.margin or ()), *((-panel.floor, panel.floor) if panel.floor else ())]
    sizes = [abs(value) for value in (*bands, *(row.change for row in panel.rows))]
    reach = MAX_REACH * max(sizes) or 1.0
    edges = [edge for row in panel.rows for edge in (row.low, row.high, row.change) if edge is not None]
    values = [*bands, *(min(max(edge, -reach), reach) for edge in edges)]
    pad = 0.06 * (max(values) - min(values)) or 1.0
    return min(values) - pad, max(values) + pad


def _bands(panel: Panel, at: Place, bottom: float) -> Iterator[Safe]:
    bands = [("floor", (-panel.floor, panel.floor))] if panel.floor else []
    bands += [("margin", panel.margin)] if panel.margin else []
    for name, (low, high) in bands:
        width = round(max(1.0, at(high) - at(low)), 1)
        yield tag("rect", x=at(low), y=TOP - 6, width=width, height=bottom - TOP + 6, class_=f"band {name}")


def _axis(panel: Panel, at: Place, low: float, high: float, bottom: float) -> Iterator[Safe]:
    yield tag("line", x1=LEFT, x2=RIGHT, y1=bottom, y2=bottom, class_="axis")
    # the gaps between the dashes keep the line out of the text
    dashes = f"stroke-dasharray: 3 3 3 3 3 {ROW - 15}; stroke-dashoffset: {TOP - 6 - WORDS_BELOW}"
    yield tag("line", x1=at(0), x2=at(0), y1=TOP - 6, y2=bottom, class_="zero", style=dashes)
    for value in ticks(low, high):
        yield tag("line", x1=at(value), x2=at(value), y1=bottom, y2=bottom + 4, class_="axis")
        anchor = "start" if at(value) < LEFT + EDGE else "end" if at(value) > RIGHT - EDGE else "middle"
        yield _text(f"{value:+.6g}" if value else "0", at(value), bottom + 17, anchor, "tick")
    below, above = panel.directions
    yield _text(f"← {below}", LEFT, bottom + 36, "start", "tick")
    yield _text(f"{above} →", RIGHT, bottom + 36, "end", "tick")


def ticks(low: float, high: float) -> list[float]:
    """Returns about NUM_TICKS round numbers between low and high, including zero if it lies between them."""
    rough = (high - low) / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
    return [float(f"{num * step:.9g}") for num in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _row(row: Row, panel: Panel, at: Place, domain: tuple[float, float], top: float) -> Iterator[Safe]:
    """Draws a row: its label and numbers, and below them its interval."""
    colour, y = f"--own: var(--series-{row.colour % 8})", top + 27
    label = row.label if len(row.label) <= MAX_LABEL else f"{row.label[: MAX_LABEL - 1]}…"
    numbers = _numbers(row, "%" if panel.unit == "%" else "", panel.decimals)
    yield tag("text", tag("tspan", label, class_="name"), tag("tspan", numbers, dx=8), x=LEFT, y=top + 12)
    if row.low is not None and row.high is not None:
        yield tag("line", x1=at(row.low), x2=at(row.high), y1=y, y2=y, class_="interval", style=colour)
        for edge, beyond, way in ((row.low, row.low < domain[0], -1), (row.high, row.high > domain[1], 1)):
            x = at(edge)
            ends = (x - 6 * way, x, x - 6 * way) if beyond else (x, x, x)  # an arrow if the interval goes on
            points = " ".join(f"{round(end, 1)},{y + dy}" for end, dy in zip(ends, (-5, 0, 5), strict=True))
            yield tag("polyline", points=points, class_="interval", style=colour)
    yield tag("circle", cx=at(row.change), cy=y, r=5, class_="point", style=colour)


def _text(value: str, x: float, y: float, anchor: str, class_: str) -> Safe:
    return tag("text", value, x=x, y=y, text_anchor=anchor, class_=class_)


def _numbers(row: Row, unit: str, decimals: int) -> str:
    change = f"{row.change:+.{decimals}f} {unit}".rstrip()
    if row.low is None:
        return f"{change}, no interval"
    return f"{change} [{row.low:+.{decimals}f}, {row.high:+.{decimals}f}]"


def _named_bands(panel: Panel) -> list[tuple[str, str]]:
    """Returns [(name, text for the legend)] of the shaded bands."""
    bands = []
    if panel.margin:
        low, high = panel.margin
        bands.append(("margin", f"margin {f'±{high:.4g}' if low == -high else f'{high:+.4g}'}"))
    return bands + ([("floor", f"noise floor ±{panel.floor:.3g}")] if panel.floor else [])
