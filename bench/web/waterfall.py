"""Draws waterfalls: bars below each other, each beginning where the previous one ended, with numbers beside them.

A Waterfall is a block of a document, and empty without bars.  On a page it is markup without a script, which adapts to
the width of the page; its colours come from the page's CSS, by kind.  In text a bar is a line of dots and # signs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.base import escape, text_table
from bench.web.page import Safe, tag

MIN_PCT = 0.3  # the least width of a bar, so that it is visible
BAR_CHARS = 30  # the width of the scale in text
Kind = Literal["limit", "above", "unknown", "total", "less", "more"]
CHANGES: tuple[tuple[Kind, str], ...] = (("less", "less than in A"), ("more", "more than in A"))


@dataclass(frozen=True)
class Bar:
    """A bar from begin to end.  number: the number as text; about: shown while the pointer is over the bar."""

    label: str
    begin: float
    end: float
    number: str
    kind: Kind
    about: str = ""


@dataclass(frozen=True)
class Waterfall:
    """A block of bars on a scale from low, or the least value of a bar, to the largest.

    names: the legend, [(kind, what it means)].  has_sentences: labels are long, and get most of the width.
    """

    title: str
    about: str
    bars: Sequence[Bar]
    names: Sequence[tuple[Kind, str]] = ()
    has_sentences: bool = False
    low: float = 0.0

    def text(self, is_md: bool) -> str:
        if not self.bars:
            return ""
        scale = self._scale()
        cells = [(bar.label, bar.number, _signs(bar, *scale)) for bar in self.bars]
        if self.has_sentences:
            cells = [(number, signs, label) for label, number, signs in cells]
        right = [self.has_sentences, not self.has_sentences, False]
        drawn = text_table.render(("",) * 3 * is_md, cells, right, "github" if is_md else "simple")
        return f"{escape.escaped(f'{self.title} {self.about}'.strip(), is_md)}\n\n{drawn}"

    def html(self) -> Safe:
        if not self.bars:
            return Safe("")
        rows = [_row(bar, *self._scale()) for bar in self.bars]
        keys = [tag("span", tag("i", class_=kind), text) for kind, text in self.names]
        legend = tag("p", *keys, class_="keys") if keys else ""
        caption = tag("figcaption", tag("b", self.title), " ", tag("span", self.about))
        bars = tag("div", *rows, class_="bars", role="list")
        return tag("figure", caption, legend, bars, class_=f"waterfall{' sentences' if self.has_sentences else ''}")

    def _scale(self) -> tuple[float, float]:
        """Returns the least value of the scale, and its width."""
        low = min(self.low, *(min(bar.begin, bar.end) for bar in self.bars))
        return low, max(max(bar.begin, bar.end) for bar in self.bars) - low or 1.0


def from_changes(
    title: str, about: str, ends: tuple[tuple[str, float], tuple[str, float]], steps: Sequence[tuple[str, float, str]]
) -> Waterfall:
    """Returns the waterfall of the changes from one total to another, in milliseconds.

    ends: (label, total) of both; steps: [(label, change, about)] in between.  The scale begins near the smallest
    intermediate total, so that small changes of a large total are visible.
    """
    (first, start), (last, end) = ends
    totals = [start]
    for _, change, _ in steps:
        totals.append(totals[-1] + change)
    least, most = min(*totals, end), max(*totals, end)
    low = max(0.0, 2 * least - most) if least >= 0 else least
    bars = [Bar(first, low, start, f"{start:,.3f}", "total")]
    for (label, change, about_it), before, after in zip(steps, totals, totals[1:]):
        bars.append(Bar(label, before, after, f"{change:+,.3f}", "less" if change < 0 else "more", about_it))
    bars.append(Bar(last, low, end, f"{end:,.3f}", "total"))
    return Waterfall(title, about, bars, CHANGES, low=low)


def _signs(bar: Bar, low: float, span: float) -> str:
    """Returns a bar as text, "...###"; one that is not empty has at least one #."""
    begin, end = sorted(round(BAR_CHARS * (value - low) / span) for value in (bar.begin, bar.end))
    begin = min(begin, BAR_CHARS - 1)
    return "." * begin + "#" * max(end - begin, int(bar.end != bar.begin))


def _row(bar: Bar, low: float, span: float) -> Safe:
    left, right = sorted((100 * (bar.begin - low) / span, 100 * (bar.end - low) / span))
    width = max(right - left, MIN_PCT) if bar.end != bar.begin else 0
    style = f"margin-left:{min(left, 100 - width):.2f}%;width:{width:.2f}%"
    return tag(
        "div",
        tag("span", bar.label, class_="label"),
        tag("span", bar.number, class_="value"),
        tag("span", tag("i", class_=bar.kind, style=style), class_="track"),
        class_="row",
        role="listitem",
        title=bar.about or None,
    )
