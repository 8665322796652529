"""Cells as a table of text: for a terminal, a pipe, or Markdown.

Standard output decides the width and whether colours are used.  On a terminal rich draws tables with colours, or that
have to be folded to fit; all others are joined here, 10,000 rows in a tenth of a second, where rich would take seconds.
"""

import itertools
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from bench.base import escape

COLOURS = {  # of a cell that consists of this word, in any case
    "faster": "green",
    "better": "green",
    "accepted": "green",
    "slower": "red",
    "worse": "red",
    "fail": "red",
    "failed": "red",
    "refused": "red",
    "missed": "red",
    "invalid": "red",
    "aborted": "red",
    "stopped": "yellow",
    "preempted": "yellow",
    "inconclusive": "yellow",
    "equivalent": "yellow",
    "not comparable": "yellow",
    "not interleaved": "yellow",
    "no verdict": "yellow",
    "suspect": "yellow",
    "warn": "yellow",
}
MAX_DRAWN_ROWS = 500  # by rich, 0.7 ms each
GAP = 2  # spaces between columns
MIN_WORDS_WIDTH = 12  # of a column that is folded
MARK_WIDTH = 8  # of the word before a line, as in progress lines

Rows = list[Sequence[str]]


def render(
    columns: Sequence[str], cells: Iterable[Iterable[str]], right: Sequence[bool] = (), form: str = "simple"
) -> str:
    """columns: names, none for rows without a header; cells: rows of strings; right: columns of numbers, aligned right.

    form: simple, which fits into the terminal's width; wide, which does not; or github.
    No rows: just the header.  Cells may be texts of a foreign record: see bench/base/escape.py.
    """
    is_md = form == "github"
    rows: Rows = []
    for row in map(tuple, (columns, *cells)):
        if row:
            is_plain = not is_md and all(map(str.isprintable, row))
            rows.append(row if is_plain else [escape.escaped(cell, is_md) for cell in row])
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = right or [False] * len(widths)
    if form != "simple" or len(rows) > MAX_DRAWN_ROWS or not (_is_too_wide(widths) or _has_colours(rows)):
        return _joined(rows, widths, right, is_md, bool(columns))
    return _drawn(rows, widths, right, bool(columns))


def marked(pairs: Iterable[tuple[str, str]]) -> str:
    """(mark, sentence) each -> lines such as "    FAIL  sentence"; a mark is a word of up to 8 characters."""
    return render((), [(mark.rjust(MARK_WIDTH), sentence) for mark, sentence in pairs])


def _is_too_wide(widths: Sequence[int]) -> bool:
    limit = screen_width()
    return limit is not None and sum(widths) + GAP * (len(widths) - 1) > limit


def _has_colours(rows: Rows) -> bool:
    return is_terminal() and any(map(colour, itertools.chain.from_iterable(rows)))


def _joined(rows: Rows, widths: Sequence[int], right: Sequence[bool], is_md: bool, has_header: bool) -> str:
    widths = [max(width, 3) for width in widths] if is_md else widths
    signs = [">" if is_right else "<" for is_right in right]
    between, edges = (" | ", ("| ", " |")) if is_md else (" " * GAP, ("", ""))
    form_row = between.join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths)).join(edges).format
    lines = [form_row(*row).rstrip() for row in rows]
    if has_header:
        rule = between.join("-" * width for width in widths).join(edges)
        lines.insert(1, rule.replace(" ", "-") if is_md else rule)
    return "\n".join(lines)


def _drawn(rows: Rows, widths: Sequence[int], right: Sequence[bool], has_header: bool) -> str:
    """With rich: text is folded until the table fits; numbers never are, so it may exceed a very narrow terminal."""
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    limit = screen_width() or sum(widths) + GAP * len(widths)
    if has_header and _is_too_wide(widths):
        rows[0] = [_folded_header(column, is_right) for column, is_right in zip(zip(*rows), right)]
    least = [
        max(len(part) for cell in column for part in cell.split("\n")) if is_right else min(width, MIN_WORDS_WIDTH)
        for column, width, is_right in zip(zip(*rows), widths, right)
    ]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    for is_right in right:
        table.add_column(justify="right" if is_right else "left", no_wrap=is_right, overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell, colour(cell)) for cell in row))
        if has_header and number == 0:
            table.add_row(*(Rule(characters="-", style="") for _ in row))
    return drawn(table, max(limit, sum(least) + GAP * (len(least) - 1)))


def _folded_header(column: Sequence[str], is_right: bool) -> str:
    """The name of a column of numbers, on several lines rather than wider than its numbers."""
    name, *cells = column
    widest = max(map(len, [*cells, *name.split()]), default=1)
    return textwrap.fill(name, widest, break_long_words=False, break_on_hyphens=False) if is_right and name else name


def two_digits(number: float) -> str:
    """0.14259 -> "0.14", 5.04 -> "5", 612.3 -> "612": never an exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.2g}"


def counted(number: int, word: str) -> str:
    """(1, "run") -> "1 run", (12_000, "run") -> "12,000 runs", (2, "process") -> "2 processes"."""
    return f"{number:,} {word}{'' if number == 1 else 'es' if word.endswith('s') else 's'}"


def some(texts: Sequence[str], num_shown: int = 3, separator: str = ", ") -> str:
    """The first texts, and how many more there are: "a, b, c and 2 more"."""
    more = len(texts) - num_shown
    return separator.join(texts[:num_shown]) + f"{separator.rstrip().rstrip(',')} and {more} more" * (more > 0)


def middle(text: str, max_chars: int) -> str:
    """The beginning and the end of a longer text: often both are needed to identify it."""
    if len(text) <= max_chars:
        return text
    num_first = max_chars // 2
    return f"{text[:num_first]}…{text[len(text) - (max_chars - num_first - 1) :]}"


# ---- the terminal


def screen_width() -> int | None:
    """Characters per line: $COLUMNS, else the terminal's width.  None for neither: nothing needs to be cut."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # a pipe, or no file at all
        return None


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def colour(word: str) -> str:
    """Style of a word by rich's names; "" for the plain ones."""
    return COLOURS.get(word.strip().lower(), "")


def coloured(word: str) -> str:
    """A verdict with the escape sequences of its colour; without them in a pipe, with NO_COLOR, and if TERM=dumb."""
    if not is_terminal():
        return word
    from rich.text import Text

    return drawn(Text(word, colour(word)), len(word))


def drawn(what: Any, line_width: int) -> str:
    """A renderable of rich as text, in lines of this width, without trailing spaces or markup."""
    from rich.console import Console

    console = Console(width=max(line_width, 1), markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(what)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
