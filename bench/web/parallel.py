"""Parallel coordinates: an axis a setting, the last the result, a line a config; an SVG without a script."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.web.page import Safe, tag

AXIS, LEFT, TOP, DEEP, BELOW = 150, 70, 34, 220, 24  # units of the drawing: between axes, around them, their length
MAX_EVEN = 10  # values of an axis that are spread evenly, each with its word; more are spread by their numbers
NUM_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """values: of each line, None where it has none; words: what a value is called."""

    name: str
    values: Sequence
    words: Sequence[str]


def plot(title: str, about: str, axes: Sequence[Axis], best: int | None) -> Safe:
    """axes: at least two, the result last and all of it numbers, small is good.  best: number of the line to stress."""
    scales = [_scale(axis, is_result=axis is axes[-1]) for axis in axes]
    result = [value for value in axes[-1].values if value is not None]
    low, high = min(result, default=0.0), max(result, default=0.0)
    order = sorted(range(len(axes[-1].values)), key=lambda number: number == best)
    lines = [_line(number, axes, scales, low, high, number == best) for number in order]
    width = 2 * LEFT + AXIS * (len(axes) - 1)
    shapes = [*lines, *(shape for number, axis in enumerate(axes) for shape in _axis(number, axis, scales[number]))]
    svg = tag(
        "svg", tag("title", f"{title}. {about}"), *shapes, viewBox=f"0 0 {width} {TOP + DEEP + BELOW}", role="img"
    )
    caption = tag("figcaption", tag("b", title), " ", tag("span", about))
    return tag("figure", caption, tag("div", svg, class_="scroll parallel", tabindex="0"), class_="wide")


def height_px() -> int:
    """Of a picture."""
    return 480


def _scale(axis, is_result):
    """-> {value: place from the top}, of None the bottom."""
    known = {value: word for value, word in zip(axis.values, axis.words, strict=True) if value is not None}
    is_numeric = all(isinstance(value, (int, float)) for value in known)
    ordered = sorted(known) if is_numeric else list(known)
    if is_result or (is_numeric and len(ordered) > MAX_EVEN):
        low, high = min(ordered, default=0.0), max(ordered, default=1.0)
        places = {value: (value - low) / ((high - low) or 1.0) for value in ordered}
    else:
        places = {value: number / max(1, len(ordered) - 1) for number, value in enumerate(ordered)}
    return {value: TOP + DEEP * (place if is_result else 1 - place) for value, place in places.items()}


def _line(number, axes, scales, low, high, is_best):
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
    words = ", ".join(f"{axis.name} {axis.words[number]}" for axis in axes)
    style = f"stroke: {colour}; stroke-width: {4 if is_best else 1.5}; fill: none"
    return tag("polyline", tag("title", words), points=" ".join(points), style=style)


def _axis(number, axis, scale):
    x = LEFT + AXIS * number
    yield tag("line", x1=x, x2=x, y1=TOP, y2=TOP + DEEP, class_="axis")
    yield tag("text", axis.name, x=x, y=TOP - 16, text_anchor="middle", class_="name")
    words = dict(zip(axis.values, axis.words, strict=True))
    ordered = sorted(scale, key=scale.get)
    step = 1 if len(ordered) <= MAX_EVEN else max(1, len(ordered) // NUM_TICKS)
    last = None
    for value in [*ordered[::step], *ordered[-1:]]:
        if last is not None and abs(scale[value] - last) < 13:
            continue
        last = scale[value]
        yield tag("text", words[value], x=x + 6, y=round(scale[value] + 4, 1), class_="tick")
