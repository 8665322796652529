"""Renders tables as text for a terminal, a pipe or Markdown.

Standard output determines the width and whether colours are used.
"""

import itertools
import os
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

from bench.base import escape

GREEN, RED, YELLOW = 32, 31, 33  # codes of ANSI escape sequences
COLOURS = {  # the colour of a cell that consists of this word, in upper or lower case
    **dict.fromkeys(("faster", "better", "accepted"), GREEN),
    **dict.fromkeys(("slower", "worse", "fail", "failed", "refused", "missed", "invalid", "aborted"), RED),
    **dict.fromkeys(("stopped", "preempted", "inconclusive", "equivalent", "suspect", "warn"), YELLOW),
    **dict.fromkeys(("not comparable", "not interleaved", "no verdict"), YELLOW),
}
GAP = 2  # spaces between columns
MIN_WORDS_WIDTH = 12  # columns of text are not folded to fewer characters
MARK_WIDTH = 8  # the word before a line is padded to this width, as in progress lines

Rows = list[Sequence[str]]


def render(
    columns: Sequence[str], cells: Iterable[Iterable[str]], right: Sequence[bool] = (), form: str = "simple"
) -> str:
    """Renders a table.  Cells are escaped, as they may come from a foreign record (bench/base/escape.py).

    columns: their names; empty for a table without a header.  right: for each column, whether it is aligned right, as
    numbers are.  form: simple (texts are folded to fit the terminal's width), wide (not folded) or github.
    """
    is_md, limit = form == "github", screen_width() if form == "simple" else None
    rows: Rows = []
    for texts in map(tuple, (columns, *cells)):
        if texts:
            is_plain = not is_md and all(map(str.isprintable, texts))
            rows.append(texts if is_plain else [escape.escaped(text, is_md) for text in texts])
    widths = [max(map(_width, column)) for column in zip(*rows)]
    right = right or [False] * len(widths)
    if limit is not None and sum(widths) + GAP * (len(widths) - 1) > limit:
        widths = _folded_widths(rows, widths, right, limit)
    if is_md:
        widths = [max(width, 3) for width in widths]
    between, edges = (" | ", ("| ", " |")) if is_md else (" " * GAP, ("", ""))
    has_colours = form == "simple" and shows_colours()
    lines = []
    for row in rows:
        folded = [_folded(cell, width) for cell, width in zip(row, widths)]
        for line in itertools.zip_longest(*folded, fillvalue=""):
            padded = [
                " " * (width - _width(text)) * is_right
                + (_painted(text, cell) if has_colours else text)
                + " " * (width - _width(text)) * (not is_right)
                for text, cell, width, is_right in zip(line, row, widths, right)
            ]
            lines.append(between.join(padded).join(edges).rstrip())
        if columns and row is rows[0]:
            rule = between.join("-" * width for width in widths).join(edges)
            lines.append(rule.replace(" ", "-") if is_md else rule)
    return "\n".join(lines)


def _folded_widths(rows: Rows, widths: Sequence[int], right: Sequence[bool], limit: int) -> list[int]:
    """Reduces the widths of columns of text, the widest first, until a row fits; of numbers only the header folds."""
    longest = [max(map(_width, [*column[0].split(), *column[1:]]), default=0) for column in zip(*rows)]
    fitted = [least if is_right else width for least, width, is_right in zip(longest, widths, right)]
    while sum(fitted) + GAP * (len(fitted) - 1) > limit:
        texts = [number for number, width in enumerate(fitted) if not right[number] and width > MIN_WORDS_WIDTH]
        if not texts:
            break
        fitted[max(texts, key=fitted.__getitem__)] -= 1
    return fitted


def _folded(cell: str, width: int) -> list[str]:
    if _width(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width // (1 if _width(cell) <= len(cell) else 2), break_on_hyphens=False)


def _width(text: str) -> int:
    """Returns how many columns of a terminal a text takes: two for a wide character, such as a Chinese one."""
    if text.isascii():
        return len(text)
    return sum((not unicodedata.combining(char)) + (unicodedata.east_asian_width(char) in ("W", "F")) for char in text)


def marked(pairs: Iterable[tuple[str, str]]) -> str:
    """Renders (mark, sentence) pairs as lines such as "    FAIL  sentence"; a mark has up to MARK_WIDTH characters."""
    return render((), [(mark.rjust(MARK_WIDTH), sentence) for mark, sentence in pairs])


def two_digits(number: float) -> str:
    """Formats a number with two digits and without an exponent: 0.14259 -> "0.14", 5.04 -> "5", 612.3 -> "612"."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.2g}"


def counted(number: int, noun: str) -> str:
    """Formats a count: (1, "run") -> "1 run", (12_000, "run") -> "12,000 runs", (2, "process") -> "2 processes"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def some(texts: Sequence[str], num_shown: int = 3, separator: str = ", ") -> str:
    """Joins the first texts and says how many more there are: "a, b, c and 2 more"."""
    num_more = len(texts) - num_shown
    return separator.join(texts[:num_shown]) + f"{separator.rstrip().rstrip(',')} and {num_more} more" * (num_more > 0)


def middle(text: str, max_chars: int) -> str:
    """Cuts the middle out of a text longer than max_chars: often both ends are needed to identify it."""
    if len(text) <= max_chars:
        return text
    num_first = max_chars // 2
    return f"{text[:num_first]}…{text[len(text) - (max_chars - num_first - 1) :]}"


# ---- the terminal


def screen_width() -> int | None:
    """Characters per line: $COLUMNS, else the terminal's width.  None without either: lines have no limit."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):  # standard output is a pipe, not a file, or None
        return None


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return bool(getattr(sys.stdout, "isatty", bool)())  # it may be None, or a stand-in that only writes


def shows_colours() -> bool:
    """Whether standard output is a terminal whose user wants colours."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(verdict: str) -> str:
    """Returns a verdict in its colour; without escape sequences in a pipe, with NO_COLOR and with TERM=dumb."""
    return _painted(verdict, verdict) if shows_colours() else verdict


def _painted(text: str, verdict: str) -> str:
    colour = COLOURS.get(verdict.strip().lower())
    return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"
