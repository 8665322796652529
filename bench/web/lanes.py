"""Bars on one axis, each lane below its caption: shares of a time, a timeline.  No script is needed.

Words are HTML and wrap, bars are an SVG as wide as the page that is stretched along the axis alone, so that a drawing
reads at any width.  Colours come from the page's CSS; what a bar is also stands in its caption, its row or its hint.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.web import forest
from bench.web.document import Block, Columns, Drawn, Picture
from bench.web.page import Safe, tag

WIDTH = 1000  # of a track in its own units, stretched to the page
ROW_PX, GAP_PX = 14, 2
LANE_PX, HEAD_PX, AXIS_PX = 27, 80, 30  # of a picture, about
HINT_FROM = 0.004  # of the axis: wider bars each have a hint, thinner ones are one path a colour


@dataclass(frozen=True)
class Bar:
    """From start to end on the axis.  colour: the name of a variable of the page's style; row: 0 is the highest."""

    start: float
    end: float
    colour: str
    hint: str = ""
    row: int = 0


@dataclass(frozen=True)
class Lane:
    """label and caption stand above the bars."""

    label: str
    caption: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Panel:
    """id: of its picture's file.  names: [(colour, text)] of the legend; end: of the axis, None: where the last bar
    ends; num_rows: of a lane; is_wide: over the whole width of a page.
    """

    id: str
    title: str
    about: str
    unit: str
    lanes: Sequence[Lane]
    names: Sequence[tuple[str, str]] = ()
    end: float | None = None
    num_rows: int = 1
    is_wide: bool = False


def plot(panel: Panel) -> Drawn:
    """Panel -> its picture."""
    high = (
        panel.end if panel.end is not None else max((bar.end for lane in panel.lanes for bar in lane.bars), default=0)
    )
    span = high or 1.0
    legend = [
        tag("span", " ", tag("i", class_="swatch", style=f"background: var(--{colour})"), text)
        for colour, text in panel.names
    ]
    caption = tag("figcaption", tag("b", panel.title), " ", tag("span", panel.about), tag("div", *legend))
    drawn = [_lane(lane, panel, span) for lane in panel.lanes]
    height_px = HEAD_PX + AXIS_PX + len(drawn) * (LANE_PX + panel.num_rows * (ROW_PX + GAP_PX))
    markup = tag("figure", caption, *drawn, _axis(high, panel.unit), class_="lanes")
    return Drawn(panel.id, panel.title, markup, height_px)


def _lane(lane: Lane, panel: Panel, span: float) -> Safe:
    heading = tag("div", tag("b", lane.label), " ", tag("span", lane.caption))
    size = panel.num_rows * (ROW_PX + GAP_PX)
    shapes: list[Safe] = []
    paths: dict[str, list[str]] = {}
    for bar in lane.bars:
        x, width = WIDTH * bar.start / span, max(0.4, WIDTH * (bar.end - bar.start) / span)
        y = bar.row * (ROW_PX + GAP_PX)
        if width >= HINT_FROM * WIDTH and bar.hint:
            place = {"x": f"{x:.6g}", "y": y, "width": f"{width:.4g}", "height": ROW_PX}
            shapes.append(tag("rect", tag("title", bar.hint), **place, style=f"fill: var(--{bar.colour})"))
        else:
            path = paths.setdefault(bar.colour, [])
            path.append(f"M{x:.5g} {y}h{width:.3g}v{ROW_PX}h-{width:.3g}z")
    thin = [tag("path", d="".join(path), style=f"fill: var(--{colour})") for colour, path in paths.items()]
    box = {"viewBox": f"0 0 {WIDTH} {size}", "preserveAspectRatio": "none", "style": f"height: {size}px"}
    track = tag("svg", *thin, *shapes, **box, role="img", aria_label=f"{lane.label}: {lane.caption}")
    return tag("div", heading, track, class_="lane")


def _axis(high: float, unit: str) -> Safe:
    if not high > 0:
        return Safe("")
    ticks = [value for value in forest.ticks(0.0, high) if value / high < 0.9]  # the unit has the end
    marks = [tag("span", f"{value:,.6g}", style=f"left: {100 * value / high:.2f}%") for value in ticks]
    return tag("div", *marks, tag("span", unit, class_="unit"), class_="lane-axis", aria_hidden="true")


def stacked(parts: Sequence[tuple[float, str, str]]) -> list[Bar]:
    """[(size, colour, hint)] -> bars one behind the other from 0 on; those without a size are not drawn."""
    bars, at = [], 0.0
    for size, colour, hint in parts:
        if size > 0 and math.isfinite(size):
            bars.append(Bar(at, at + size, colour, hint))
            at += size
    return bars


def side_by_side(panels: Sequence[Panel]) -> Iterator[Block]:
    """Drawings as blocks of a document: in two columns where a page has room, and those that are wide alone."""
    for is_wide, group in itertools.groupby(panels, key=lambda panel: panel.is_wide):
        pictures = [Picture(plot(panel)) for panel in group]
        yield from pictures if is_wide else [Columns(pictures)]
