"""An answer as one typed value, worded once, and its four renderers: terminal, Markdown, HTML, JSON.

    answer = Document("B against A", [Verdict("B is 2 % faster than A", "faster")], [Table(...), ...], data)
    print(answer.terminal())        .markdown(), .html(), .json() are the other three

Every form begins with the verdicts, Markdown and a page with the title above them.  A block knows how it reads as text
and how it looks on a page; what only one of them can show says so.  All text is foreign: escaped in each form.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from bench.base import escape, text_table
from bench.web.chart import Spec
from bench.web.page import REPORT_STYLES, Safe, details, figure, join, page, soft, table, tag
from bench.web.page import text as escaped

COLOURS = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad", "equivalent": "soft"}
COLOURS |= {"inconclusive": "doubt", "not_interleaved": "doubt", "not_comparable": "bad"}
NO_VERDICT = "no verdict: "  # what the sentence of an inconclusive comparison may begin with


class Block(Protocol):
    """A part of an answer, below its title."""

    def text(self, is_md: bool) -> str:
        """For a terminal, or Markdown; "" where only a page shows it."""

    def html(self) -> Safe: ...


# ---- text


def and_(names: Iterable[str]) -> str:
    """A, B and C."""
    *most, last = [*names] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


class Shown(str):
    """Text that a page shows as this markup, escaped where it is None; short: what a plain text shows instead."""

    markup: Safe
    short: str

    def __new__(cls, text: str, markup: Safe | None = None, short: str | None = None) -> Self:
        shown = super().__new__(cls, text)
        shown.markup, shown.short = escaped(text) if markup is None else markup, text if short is None else short
        return shown


def code(text: str) -> Shown:
    """Text shown as code."""
    return Shown(text, tag("code", text))


def coloured(word: str, colour: str = "soft", hint: str = "") -> Shown:
    """colour: good, bad, doubt or soft, or these after "badge "; hint: shown while the pointer rests on the word."""
    return Shown(word, tag("span", word, class_=colour, title=hint or None))


def badge(verdict: str) -> Shown:
    """faster, not_comparable and so on -> the word, framed, in its colour."""
    return coloured(verdict.replace("_", " "), f"badge {COLOURS.get(verdict, 'soft')}")


def named(name: str, about: str = "") -> Shown:
    """A name, which a page stresses and follows with what it is."""
    return Shown(name, tag("span", tag("b", name), f" {about}") if about else tag("b", name))


def link(text: str, href: str | None) -> Shown:
    """Text that links somewhere on a page; href None: there is nothing to link to."""
    return Shown(text, tag("a", text, href=href) if href else tag("span", text))


def marked_up(value: object) -> object:
    """The markup of a Shown, as page.tag() takes it; other values stay as they are."""
    return value.markup if isinstance(value, Shown) else value


# ---- blocks


@dataclass(frozen=True)
class Verdict:
    """word: faster, not_comparable, ..., "" for none; about: of whom, said where neither title nor sentence says it."""

    sentence: str
    word: str
    about: str = ""
    more: Sequence[str] = ()  # said below it
    badges: Sequence[Shown] = ()  # before a sentence without a word

    def text(self, is_md: bool) -> str:
        sentence = escape.escaped(self.sentence, is_md)
        if not self.word:
            whom = "" if is_md or not self.about else f"{escape.line(self.about)}: "
            state = f"{', '.join(self.badges)}: " if self.badges else ""
            return Lines([f"{whom}{state}{self.sentence}", *(f"  {line}" for line in self.more)]).text(is_md)
        word = escape.escaped(badge(self.word).upper(), is_md)
        whom = escape.escaped(self._whom(), is_md)
        if sentence.startswith(NO_VERDICT):
            word, sentence = "NO VERDICT", sentence.removeprefix(NO_VERDICT)
        first = f"verdict: {f'**{word}**' if is_md else text_table.coloured(word)}  {whom}{sentence}"
        return "\n".join([first, *(f"{' ' * len('verdict: ')}{escape.escaped(line, is_md)}" for line in self.more)])

    def html(self) -> Safe:
        if not self.word:
            return join(
                [tag("p", *map(marked_up, self.badges), self.sentence, class_="verdict"), *map(soft, self.more)]
            )
        whom, doubts = self._whom(), [tag("p", doubt, class_="doubt") for doubt in self.more]
        parts = [tag("b", whom) if whom else "", badge(self.word).markup, self._after_badge()]
        return join([tag("p", *parts, class_="verdict"), *doubts])

    def _after_badge(self) -> str:
        return self.sentence.removeprefix(f"{badge(self.word)}: ")  # the badge says it

    def _whom(self) -> str:
        return f"{self.about}: " if self.about and not self._after_badge().startswith(f"{self.about} ") else ""


@dataclass(frozen=True)
class Lines:
    """Sentences, each on a separate line of one paragraph; a sequence is the parts of one.  is_soft: less important."""

    lines: Sequence[str | Sequence[str]]
    is_soft: bool = False

    def text(self, is_md: bool) -> str:
        return ("  \n" if is_md else "\n").join(escape.escaped("".join(line), is_md) for line in self.lines)

    def html(self) -> Safe:
        lines = list(map(_whole, self.lines))
        return tag("p", join(lines, "<br>"), class_="soft" if self.is_soft else None) if lines else Safe("")


@dataclass(frozen=True)
class Bullets:
    """A list; an item is a sentence, or the parts of one."""

    items: Sequence[str | Sequence[str]]

    def text(self, is_md: bool) -> str:
        return "\n".join(f"{'-' if is_md else '  -'} {escape.escaped(''.join(item), is_md)}" for item in self.items)

    def html(self) -> Safe:
        return tag("ul", *(tag("li", _whole(item)) for item in self.items)) if self.items else Safe("")


def _whole(line: str | Sequence[str]) -> Safe:
    return join(map(marked_up, [line] if isinstance(line, str) else line))


@dataclass(frozen=True)
class Arms:
    """Who is compared: (name, what it is, counts) each, on a page in the colours of the charts' series."""

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
    """heads: () for none; rows: of text, None for nothing known; right: which columns are numbers, () for none.

    limit: rows of a text, more: where the others are.  style: of a page: tight, facts.
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
    """spec: of bench/web/chart.py."""

    spec: Spec

    def text(self, is_md: bool) -> str:
        return ""

    def html(self) -> Safe:
        return figure(self.spec)


@dataclass(frozen=True)
class Drawn:
    """A picture that a page shows, and --png takes."""

    id: str
    title: str
    markup: Safe
    height_px: int


@dataclass(frozen=True)
class Picture:
    """A drawing in its place, or markup that no text has."""

    drawing: Drawn | Safe

    def text(self, is_md: bool) -> str:
        return ""

    def html(self) -> Safe:
        return self.drawing if isinstance(self.drawing, Safe) else self.drawing.markup


@dataclass(frozen=True)
class Hint:
    """What to type next, on a terminal alone."""

    message: str

    def text(self, is_md: bool) -> str:
        return "" if is_md else escape.line(self.message)

    def html(self) -> Safe:
        return Safe("")


@dataclass(frozen=True)
class Verbatim:
    """Text as it stands, of a language, such as a diff."""

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
    """Blocks under a heading, nothing where none is shown.  is_folded: on a page, until a click on the title."""

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
    """Blocks beside each other, where a page has room."""

    blocks: Sequence[Block]

    def text(self, is_md: bool) -> str:
        return texts(self.blocks, is_md)

    def html(self) -> Safe:
        body = join(block.html() for block in self.blocks)
        return tag("div", body, class_="columns") if body else Safe("")


def texts(blocks: Sequence[Block], is_md: bool) -> str:
    """Blocks as text, an empty line between them."""
    return "\n\n".join(filter(None, (block.text(is_md) for block in blocks)))


# ---- the whole


@dataclass(frozen=True)
class Document:
    """An answer.  data: what programs read of it; page_title: of the window, where the title alone says too little."""

    title: str
    verdicts: Sequence[Verdict]
    blocks: Sequence[Block]
    data: Any = None
    page_title: str = ""
    about: Sequence[str] = ()  # small, below a page's title
    ways: Sequence[Sequence[str]] = ()  # links above a page's title, the parts of each

    def terminal(self) -> str:
        """Text for a terminal; no line break at its end."""
        return self._text("", "\n".join(verdict.text(False) for verdict in self.verdicts), False)

    def markdown(self) -> str:
        """For a pull request or a file; no line break at its end."""
        title = f"# {escape.markdown(self.title)}"
        return self._text(title, "\n\n".join(verdict.text(True) for verdict in self.verdicts), True)

    def _text(self, title: str, verdicts: str, is_md: bool) -> str:
        about = escape.escaped("; ".join(self.about), is_md)
        return "\n\n".join(filter(None, [title, verdicts, about, texts(self.blocks, is_md)]))

    def html(self, assets: str | None = None) -> str:
        """A page that opens from a file.  assets: see page()."""
        ways = [tag("p", join(map(_whole, self.ways), " · "))] if self.ways else []
        about = [soft(join(map(marked_up, self.about), "; "))] if self.about else []
        blocks = (block.html() for block in [*self.verdicts, *self.blocks])
        body = [*ways, tag("h1", self.title), *about, *blocks]
        return page(
            self.page_title or self.title, *body, data={"charts": self.charts}, assets=assets, styles=REPORT_STYLES
        )

    def json(self) -> str:
        """data, indented."""
        return json.dumps(self.data, indent=1)

    @property
    def charts(self) -> list[Spec]:
        """Specs of all charts, in their order."""
        return [block.spec for block in _walk(self.blocks) if isinstance(block, Chart)]

    @property
    def drawings(self) -> list[Drawn]:
        """What is drawn and no chart, in its order."""
        pictures = (block.drawing for block in _walk(self.blocks) if isinstance(block, Picture))
        return [drawing for drawing in pictures if not isinstance(drawing, Safe)]


def _walk(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        yield from _walk(getattr(block, "blocks", ()))
