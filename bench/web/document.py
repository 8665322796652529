"""The Document, an answer with four renderers: terminal, Markdown, HTML and JSON.

    answer = Document("B against A", [Verdict("B is 2 % faster than A", "faster")], [Table(...), ...], data)
    print(answer.terminal())        .markdown(), .html(), .json() are the other three

Text begins with the verdicts; Markdown and pages have the title above them.  A block renders itself as text and as
HTML; some appear in only one of the two.  All text is escaped in each format, as it may come from foreign records.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from bench.base import escape, text_table
from bench.web.chart import Spec
from bench.web.page import LONG_CHARS, REPORT_STYLES, Safe, details, figure, join, page, soft, table, tag
from bench.web.page import text as escaped

COLOURS = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad", "equivalent": "soft"}
COLOURS |= {"inconclusive": "doubt", "not_interleaved": "doubt", "not_comparable": "bad"}
NO_VERDICT = "no verdict: "  # the sentence of an inconclusive comparison may begin with this


class Block(Protocol):
    """A part of a Document, below its title and verdicts."""

    def text(self, is_md: bool) -> str:
        """Renders the block as Markdown, or for a terminal; "" if only a page shows it."""

    def html(self) -> Safe: ...


# ---- text


def and_(names: Iterable[str]) -> str:
    """Joins names to "A, B and C"; "nothing" for none."""
    *most, last = [*names] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


class Shown(str):
    """Text with markup for pages (None: the escaped text) and a short form for text tables' cells (None: the text)."""

    markup: Safe
    short: str

    def __new__(cls, text: str, markup: Safe | None = None, short: str | None = None) -> Self:
        shown = super().__new__(cls, text)
        shown.markup, shown.short = escaped(text) if markup is None else markup, text if short is None else short
        return shown


def code(text: str) -> Shown:
    """Returns text that a page shows as code."""
    return Shown(text, tag("code", text, class_="long" if len(text) > 2 * LONG_CHARS else None))


def coloured(text: str, colour: str = "soft", hint: str = "") -> Shown:
    """Returns a text that a page shows in colour.

    colour: good, bad, doubt or soft, or one of these after "badge "; hint: shown while the pointer is over the text.
    """
    return Shown(text, tag("span", text, class_=colour, title=hint or None))


def badge(verdict: str) -> Shown:
    """Returns a verdict such as faster or not_comparable as a word that a page shows framed, in its colour."""
    return coloured(verdict.replace("_", " "), f"badge {COLOURS.get(verdict, 'soft')}")


def named(name: str, about: str = "") -> Shown:
    """Returns a name, which a page shows in bold, followed by about."""
    return Shown(name, tag("span", tag("b", name), f" {about}") if about else tag("b", name))


def link(text: str, href: str | None) -> Shown:
    """Returns text that is a link on a page; without an href it is plain text."""
    return Shown(text, tag("a", text, href=href) if href else tag("span", text))


def marked_up(value: object) -> object:
    """Returns the markup of a Shown, for page.tag(), and other values unchanged."""
    return value.markup if isinstance(value, Shown) else value


# ---- blocks


@dataclass(frozen=True)
class Verdict:
    """The verdict of an answer, which every format shows first."""

    sentence: str
    word: str  # faster, not_comparable, ...; "" for none
    about: str = ""  # what the verdict is about, shown before a sentence that does not begin with it
    notes: Sequence[str] = ()  # lines below the verdict
    badges: Sequence[Shown] = ()  # shown before the sentence if word is ""

    def text(self, is_md: bool) -> str:
        sentence = escape.escaped(self.sentence, is_md)
        if not self.word:
            whom = "" if is_md or not self.about else f"{escape.line(self.about)}: "
            state = f"{', '.join(self.badges)}: " if self.badges else ""
            indent = "" if is_md else "  "  # Markdown may take an indented line for code
            return Lines([f"{whom}{state}{self.sentence}", *(f"{indent}{line}" for line in self.notes)]).text(is_md)
        label = escape.escaped(badge(self.word).upper(), is_md)
        whom = escape.escaped(self._whom(), is_md)
        if sentence.startswith(NO_VERDICT):
            label, sentence = "NO VERDICT", sentence.removeprefix(NO_VERDICT)
        first = f"verdict: {f'**{label}**' if is_md else text_table.coloured(label)}  {whom}{sentence}"
        between = "  \n" if is_md else f"\n{' ' * len('verdict: ')}"
        return between.join([first, *(escape.escaped(line, is_md) for line in self.notes)])

    def html(self) -> Safe:
        if not self.word:
            return join(
                [tag("p", *map(marked_up, self.badges), self.sentence, class_="verdict"), *map(soft, self.notes)]
            )
        whom, doubts = self._whom(), [tag("p", doubt, class_="doubt") for doubt in self.notes]
        parts = [tag("b", whom) if whom else "", badge(self.word).markup, self._after_badge()]
        return join([tag("p", *parts, class_="verdict"), *doubts])

    def _after_badge(self) -> str:
        return self.sentence.removeprefix(f"{badge(self.word)}: ")  # the badge shows the word already

    def _whom(self) -> str:
        return f"{self.about}: " if self.about and not self._after_badge().startswith(f"{self.about} ") else ""


@dataclass(frozen=True)
class Lines:
    """A paragraph with a line per sentence; a sequence is the parts of one.  is_soft: shown as less important."""

    lines: Sequence[str | Sequence[str]]
    is_soft: bool = False

    def text(self, is_md: bool) -> str:
        return ("  \n" if is_md else "\n").join(escape.escaped("".join(line), is_md) for line in self.lines)

    def html(self) -> Safe:
        lines = list(map(_whole, self.lines))
        return tag("p", join(lines, "<br>"), class_="soft" if self.is_soft else None) if lines else Safe("")


@dataclass(frozen=True)
class Bullets:
    """A bulleted list; an item is a sentence, or a sequence of the parts of one."""

    items: Sequence[str | Sequence[str]]

    def text(self, is_md: bool) -> str:
        return "\n".join(f"{'-' if is_md else '  -'} {escape.escaped(''.join(item), is_md)}" for item in self.items)

    def html(self) -> Safe:
        return tag("ul", *(tag("li", _whole(item)) for item in self.items)) if self.items else Safe("")


def _whole(line: str | Sequence[str]) -> Safe:
    return join(map(marked_up, [line] if isinstance(line, str) else line))


@dataclass(frozen=True)
class Arms:
    """The arms of a comparison, (name, facts, counts), on a page in the colours of the charts' series."""

    arms: Sequence[tuple[str, Sequence[str], str]]

    def text(self, is_md: bool) -> str:
        return Lines([f"{name}: {', '.join(facts)} ({counts})" for name, facts, counts in self.arms]).text(is_md)

    def html(self) -> Safe:
        rows = []
        for number, (name, facts, counts) in enumerate(self.arms):
            cells = [*(tag("dd", marked_up(fact)) for fact in facts), tag("dd", counts, class_="soft")]
            rows.append(tag("div", tag("dt", name), *cells, style=f"--own: var(--series-{number % 8})"))
        return tag("dl", *rows, class_="arms")


@dataclass(frozen=True)
class Table:
    """A table.

    heads: the header, () for none; rows: cells as text, None for an empty one; right: for each column, whether it is
    aligned right as numbers are.  limit: the most rows that text shows; more: text that says where the others are.
    style: a class of the page's style, tight or facts.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[bool] = ()
    caption: str = ""
    limit: int | None = None
    more: str = ""
    style: str | None = None

    def text(self, is_md: bool) -> str:
        shown = self.rows[: self.limit]
        cells = [["" if cell is None else str(getattr(cell, "short", cell)) for cell in row] for row in shown]
        drawn = text_table.render(self.heads, cells, self.right, "github" if is_md else "simple")
        num_more = len(self.rows) - len(cells)
        lines = [f"{escape.escaped(self.caption, is_md)}:\n"] * bool(self.caption) + [drawn]
        return "\n".join(lines + [f"and {num_more:,} more{escape.escaped(self.more, is_md)}"] * (num_more > 0))

    def html(self) -> Safe:
        rows = [[marked_up(cell) for cell in row] for row in self.rows]
        return table(self.heads, rows, self.style, self.caption or None, self.right)


@dataclass(frozen=True)
class Chart:
    """A chart, on a page only.  spec: see bench/web/chart.py."""

    spec: Spec

    def text(self, is_md: bool) -> str:
        return ""

    def html(self) -> Safe:
        return figure(self.spec)


@dataclass(frozen=True)
class Drawn:
    """A drawing that a page shows and --png exports."""

    id: str
    title: str
    markup: Safe
    height_px: int


@dataclass(frozen=True)
class Picture:
    """A drawing or markup, on a page only."""

    drawing: Drawn | Safe

    def text(self, is_md: bool) -> str:
        return ""

    def html(self) -> Safe:
        return self.drawing if isinstance(self.drawing, Safe) else self.drawing.markup


@dataclass(frozen=True)
class Hint:
    """What to type next, on a terminal only."""

    message: str

    def text(self, is_md: bool) -> str:
        return "" if is_md else escape.line(self.message)

    def html(self) -> Safe:
        return Safe("")


@dataclass(frozen=True)
class Verbatim:
    """Preformatted text in a language, such as diff."""

    content: str
    language: str = ""

    def text(self, is_md: bool) -> str:
        printable = "\n".join(escape.line(line.replace("\t", "    ")) for line in self.content.split("\n"))
        end = "" if printable.endswith("\n") else "\n"
        return f"````{self.language}\n{printable.replace('````', '')}{end}````" if is_md else printable

    def html(self) -> Safe:
        return tag("pre", self.content, tabindex="0")  # a long one scrolls


@dataclass(frozen=True)
class Section:
    """Blocks under a heading, which is omitted if they are empty.  is_folded: a page hides them until a click on it."""

    title: str
    blocks: Sequence[Block]
    is_folded: bool = False
    is_page_only: bool = False

    def text(self, is_md: bool) -> str:
        body = "" if self.is_page_only else texts(self.blocks, is_md)
        return f"{'## ' if is_md else ''}{escape.escaped(self.title, is_md)}\n\n{body}" if body else ""

    def html(self) -> Safe:
        return self._html("h2")

    def _html(self, heading: str) -> Safe:
        body = join(block._html("h3") if isinstance(block, Section) else block.html() for block in self.blocks)
        if not body:
            return Safe("")
        return details(self.title, body) if self.is_folded else tag("section", tag(heading, self.title), body)


@dataclass(frozen=True)
class Columns:
    """Blocks that a page shows side by side if it is wide enough."""

    blocks: Sequence[Block]

    def text(self, is_md: bool) -> str:
        return texts(self.blocks, is_md)

    def html(self) -> Safe:
        body = join(block.html() for block in self.blocks)
        return tag("div", body, class_="columns") if body else Safe("")


def texts(blocks: Sequence[Block], is_md: bool) -> str:
    """Renders blocks as text, separated by empty lines."""
    return "\n\n".join(filter(None, (block.text(is_md) for block in blocks)))


# ---- the document


@dataclass(frozen=True)
class Document:
    """An answer, to be rendered in one of four formats."""

    title: str
    verdicts: Sequence[Verdict]
    blocks: Sequence[Block]
    data: Any = None  # what json() returns
    page_title: str = ""  # the title of the window; "" for title
    about: Sequence[str] = ()  # shown in small print below the title
    ways: Sequence[Sequence[str]] = ()  # links above a page's title, each as a sequence of parts

    def terminal(self) -> str:
        """Renders text for a terminal, without a line break at its end."""
        return self._text("", "\n".join(verdict.text(False) for verdict in self.verdicts), False)

    def markdown(self) -> str:
        """Renders Markdown for a pull request or a file, without a line break at its end."""
        title = f"# {escape.markdown(self.title)}"
        return self._text(title, "\n\n".join(verdict.text(True) for verdict in self.verdicts), True)

    def _text(self, title: str, verdicts: str, is_md: bool) -> str:
        about = escape.escaped("; ".join(self.about), is_md)
        return "\n\n".join(filter(None, [title, verdicts, about, texts(self.blocks, is_md)]))

    def html(self, assets: str | None = None) -> str:
        """Renders a page that opens from a file.  assets: see page()."""
        ways = [tag("p", join(map(_whole, self.ways), " · "))] if self.ways else []
        about = [soft(join(map(marked_up, self.about), "; "))] if self.about else []
        blocks = (block.html() for block in [*self.verdicts, *self.blocks])
        body = [*ways, tag("h1", self.title), *about, *blocks]
        return page(
            self.page_title or self.title, *body, data={"charts": self.charts}, assets=assets, styles=REPORT_STYLES
        )

    def json(self) -> str:
        """Renders data as indented JSON."""
        return json.dumps(self.data, indent=1)

    @property
    def charts(self) -> list[Spec]:
        """The specs of all charts, in order."""
        return [block.spec for block in _walk(self.blocks) if isinstance(block, Chart)]

    @property
    def drawings(self) -> list[Drawn]:
        """All drawings other than charts, in order."""
        pictures = (block.drawing for block in _walk(self.blocks) if isinstance(block, Picture))
        return [drawing for drawing in pictures if not isinstance(drawing, Safe)]


def _walk(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        yield from _walk(getattr(block, "blocks", ()))
