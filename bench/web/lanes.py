"""Draws lanes of bars on a common axis, such as shares of a time or a timeline.  No script is needed.

Text is HTML and wraps; bars are an SVG that is stretched to the width of the page along the axis, so that a drawing is
readable at any width.  Colours come from the page's CSS; captions, rows and hints say what a bar is, too.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.web import forest
from bench.web.document import Block, Columns, Drawn, Picture
from bench.web.page import Safe, tag

WIDTH = 1000  # units of a lane, which is stretched to the width of the page
ROW_PX, GAP_PX = 14, 2
LANE_PX, HEAD_PX, AXIS_PX = 27, 80, 30  # approximate heights in a picture
HINT_FROM = 0.004  # share of the axis: wider bars have hints, thinner ones are merged into a path per colour


@dataclass(frozen=True)
class Bar:
    """A bar from start to end.  colour: the name of a variable in the page's style; row: 0 is the uppermost one."""

    start: float
    end: float
    colour: str
    hint: str = ""
    row: int = 0


@dataclass(frozen=True)
class Lane:
    """Bars, with a label and a caption above them."""

    label: str
    caption: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Panel:
    """A drawing of lanes."""

    id: str  # the name of its picture's file
    title: str
    about: str
    unit: str
    lanes: Sequence[Lane]
    names: Sequence[tuple[str, str]] = ()  # [(colour, text)] for the legend
    end: float | None = None  # of the axis; None: the end of the last bar
    num_rows: int = 1  # per lane
    is_wide: bool = False  # whether it takes the whole width of a page


def plot(panel: Panel) -> Drawn:
    """Draws a panel."""
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
    ticks = [value for value in forest.ticks(0.0, high) if value / high < 0.9]  # the unit is at the end
    marks = [tag("span", f"{value:,.6g}", style=f"left: {100 * value / high:.2f}%") for value in ticks]
    return tag("div", *marks, tag("span", unit, class_="unit"), class_="lane-axis", aria_hidden="true")


def stacked(parts: Sequence[tuple[float, str, str]]) -> list[Bar]:
    """Returns bars one after the other, from 0 on, for [(size, colour, hint)]; parts without a size are omitted."""
    bars, at = [], 0.0
    for size, colour, hint in parts:
        if size > 0 and math.isfinite(size):
            bars.append(Bar(at, at + size, colour, hint))
            at += size
    return bars


def side_by_side(panels: Sequence[Panel]) -> Iterator[Block]:
    """Yields drawings as blocks of a document, in two columns if the page is wide enough; wide ones are alone."""
    for is_wide, group in itertools.groupby(panels, key=lambda panel: panel.is_wide):
        pictures = [Picture(plot(panel)) for panel in group]
        yield from pictures if is_wide else [Columns(pictures)]
