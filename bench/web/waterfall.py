"""A waterfall: bars below each other, each beginning where the one before ended, with their numbers beside them.

Plain markup without a script: it folds to the width of the page.  Colours come from the page's CSS, by kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.web.page import Safe, tag

MIN_PCT = 0.3  # of the width: what is smaller is still seen
Kind = Literal["limit", "above", "unknown", "total", "less", "more"]


@dataclass(frozen=True)
class Bar:
    """From begin to end of one scale; words: the number as it is read; about: shown while the pointer rests on it."""

    label: str
    begin: float
    end: float
    words: str
    kind: Kind
    about: str = ""


def plot(
    title: str, about: str, bars: Sequence[Bar], names: Sequence[tuple[Kind, str]] = (), has_sentences: bool = False
) -> Safe:
    """The scale goes from 0, or the least begin, to the largest end.  names: a legend, (kind, what it stands for).

    has_sentences: labels are long, and get most of the width.
    """
    low = min([0.0, *(min(bar.begin, bar.end) for bar in bars)])
    span = max(max(bar.begin, bar.end) for bar in bars) - low or 1.0
    rows = [_row(bar, low, span) for bar in bars]
    keys = [tag("span", tag("i", class_=kind), words) for kind, words in names]
    legend = tag("p", *keys, class_="keys") if keys else ""
    caption = tag("figcaption", tag("b", title), " ", tag("span", about))
    return tag(
        "figure",
        caption,
        legend,
        tag("div", *rows, class_="bars", role="list"),
        class_=f"waterfall{' sentences' if has_sentences else ''}",
    )


def _row(bar, low, span):
    left, right = sorted((100 * (bar.begin - low) / span, 100 * (bar.end - low) / span))
    width = max(right - left, MIN_PCT) if bar.end != bar.begin else 0
    style = f"margin-left:{min(left, 100 - width):.2f}%;width:{width:.2f}%"
    return tag(
        "div",
        tag("span", bar.label, class_="label"),
        tag("span", bar.words, class_="value"),
        tag("span", tag("i", class_=bar.kind, style=style), class_="track"),
        class_="row",
        role="listitem",
        title=bar.about or None,
    )
