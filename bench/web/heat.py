"""Draws heat maps: tables whose cells are coloured by their value.  No script is needed."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.web.page import Safe, tag

MAX_SHADE_PCT = 50  # the strongest share of colour in a cell: text stays readable in both themes
ROW_PX, HEAD_PX = 34, 90  # heights in a picture


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map."""

    value: float | None  # determines the colour; None: no colour
    text: str
    notes: str = ""  # small print below the text
    is_best: bool = False


def plot(
    title: str,
    about: str,
    names: tuple[str, str],
    heads: tuple[Sequence[str], Sequence[str]],
    cells: Sequence[Sequence[Cell | None]],
) -> Safe:
    """Draws a heat map.  The smallest value, which is taken to be the best, has the strongest colour.

    names: of the axes down and across; heads: the texts of their values; cells: [down][across], a Cell or None.
    """
    values = [cell.value for line in cells for cell in line if cell and cell.value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    top = tag("tr", tag("th", f"{names[0]} \\ {names[1]}".strip(" \\")), *(tag("th", label) for label in heads[1]))
    lines = [
        tag("tr", tag("th", label, scope="row"), *(_cell(cell, low, high) for cell in line))
        for label, line in zip(heads[0], cells, strict=True)
    ]
    body = tag("table", tag("thead", top), tag("tbody", *lines), class_="heat")
    caption = tag("figcaption", tag("b", title), " ", tag("span", about))
    return tag("figure", caption, tag("div", body, class_="scroll", tabindex="0"))


def height_px(num_lines: int) -> int:
    """Returns the height of a picture with this number of lines."""
    return HEAD_PX + (num_lines + 1) * (ROW_PX + 18)


def _cell(cell: Cell | None, low: float, high: float) -> Safe:
    if cell is None or cell.value is None:
        return tag("td", cell.text if cell else "", class_="soft")
    share = 1.0 if high == low else (high - cell.value) / (high - low)
    colour = f"background: color-mix(in srgb, var(--series-0) {share * MAX_SHADE_PCT:.0f}%, var(--page))"
    notes = tag("div", cell.notes, class_="soft") if cell.notes else ""
    return tag("td", cell.text, notes, style=colour, class_="number best" if cell.is_best else "number")
